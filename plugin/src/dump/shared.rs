// SPDX-License-Identifier: MIT OR Apache-2.0
//! What processes have in common: buffers that went from one to another as dma-bufs, dma-bufs that are still open, and
//! two `/dev/kfd`s of one process; and which mappings of a process show no buffer. `rewake-shared.img` has it; it is written anew whenever a file adds something, as no
//! hook tells the last one.
//!
//! A buffer has one dma-buf, the same in all processes, so that the dma-buf's inode is the buffer's name. The driver
//! keeps a dma-buf as long as the buffer (`kfd_mem_export_dmabuf`), and the processes stand still: a name stays good
//! until the end of the dump without a descriptor to hold it.

use std::collections::{BTreeMap, BTreeSet};

use rewake_amdgpu_uapi::abi::{
    KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE, KFD_IOC_ALLOC_MEM_FLAGS_GTT, KFD_IOC_ALLOC_MEM_FLAGS_VRAM,
    KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE,
};
use rewake_bo_contents::folder;
use rewake_criu_images::amdgpu::{KfdBuffer, RenderContents};
use rewake_criu_images::rewake::{
    BufferUser, FreedMapping, FreedMappings, RenderFile, SHARED_NAME, SecondFile, SharedBuffer, SharedImage,
};
use rewake_criu_plugin::{Answer, Host};

/// What an import is allowed, and nothing else (`import_obj_create` in `amdgpu_amdkfd_gpuvm.c`).
const OF_IMPORTS: u32 = KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE | KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE;
const PLACES: u32 = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_GTT;

/// What is known of all processes so far.
#[derive(Debug, Default)]
pub(super) struct Shared {
    buffers: Vec<Known>,
    /// Index in `buffers` by the inode of the dma-buf.
    inodes: BTreeMap<u64, usize>,
    second_files: Vec<SecondFile>,
    render_files: Vec<RenderFile>,
    /// By the id of the `/dev/kfd`.
    bare: BTreeMap<u32, BTreeSet<FreedMapping>>,
}

/// A buffer with a dma-buf.
#[derive(Debug, Default)]
struct Known {
    users: Vec<(BufferUser, Claim)>,
    /// Id of the open dma-buf.
    file: Option<u32>,
}

/// How good a process's buffer is to be the one that is made anew: the least is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    /// An import is allowed less than what it was exported from.
    import: bool,
    /// VRAM that another GPU imported is host memory there.
    elsewhere: bool,
}

impl Claim {
    fn of(buffer: &KfdBuffer) -> Self {
        Self {
            import: buffer.alloc_flags & !PLACES == OF_IMPORTS,
            elsewhere: buffer.alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM == 0,
        }
    }
}

impl Shared {
    /// The number of the buffer with this dma-buf, the same in all images of a dump; never 0.
    fn handle(&mut self, inode: u64) -> u32 {
        let next = self.buffers.len();
        let index = *self.inodes.entry(inode).or_insert(next);
        if index == next {
            self.buffers.push(Known::default());
        }
        u32::try_from(index + 1).unwrap_or(u32::MAX)
    }

    fn known(&mut self, inode: u64) -> (u32, &mut Known) {
        let handle = self.handle(inode);
        (handle, &mut self.buffers[handle as usize - 1])
    }

    /// Takes a process's buffers, each with the inode of its dma-buf if it has one, and numbers them.
    pub(super) fn process(&mut self, kfd: u32, buffers: &mut [KfdBuffer], inodes: &[Option<u64>]) {
        for (index, (buffer, inode)) in (0..).zip(buffers.iter_mut().zip(inodes)) {
            let mut number = 0;
            if let Some(inode) = inode {
                let known;
                (number, known) = self.known(*inode);
                known.users.push((BufferUser { kfd, buffer: index }, Claim::of(buffer)));
            }
            buffer.handle = Some(number);
        }
    }

    /// Takes an open dma-buf; gives its buffer's number.
    pub(super) fn dmabuf(&mut self, id: u32, inode: u64) -> u32 {
        let (number, known) = self.known(inode);
        known.file = Some(id);
        number
    }

    /// Takes a `/dev/kfd` of a process whose image has the id `kfd`.
    pub(super) fn second_file(&mut self, id: u32, kfd: u32) {
        self.second_files.push(SecondFile { id, kfd });
    }

    /// Takes a render node.
    pub(super) fn render_file(&mut self, file: RenderFile) {
        self.render_files.push(file);
    }

    /// Takes a process's mappings that show no buffer of its own.
    pub(super) fn bare(&mut self, kfd: u32, mappings: BTreeSet<FreedMapping>) {
        self.bare.insert(kfd, mappings);
    }

    /// Those that show one of a render node's own are none.
    pub(super) fn shown(&mut self, node: &RenderContents) {
        let shows = |mapping: &FreedMapping| {
            let mut offsets = node.buffers.iter().map(|of| of.offset..of.offset.saturating_add(of.size));
            mapping.minor == node.minor && offsets.any(|offsets| offsets.contains(&mapping.offset))
        };
        self.bare.values_mut().for_each(|mappings| mappings.retain(|mapping| !shows(mapping)));
    }

    /// Who makes the buffer with this dma-buf anew, of all processes that compute with it.
    pub(super) fn owner(&self, inode: u64) -> Option<BufferUser> {
        self.best(inode).map(|(user, _)| *user)
    }

    /// Whether all processes that compute with it imported it.
    pub(super) fn is_import(&self, inode: u64) -> bool {
        self.best(inode).is_some_and(|(_, claim)| claim.import)
    }

    fn best(&self, inode: u64) -> Option<&(BufferUser, Claim)> {
        self.buffers[*self.inodes.get(&inode)?].users.iter().min_by_key(|(_, claim)| *claim)
    }

    /// Ids of open dma-bufs whose buffer no process so far has.
    pub(super) fn ownerless(&self) -> Vec<u32> {
        self.buffers.iter().filter(|known| known.users.is_empty()).filter_map(|known| known.file).collect()
    }

    fn image(&self) -> SharedImage {
        let told = |known: &&Known| known.users.len() > usize::from(known.file.is_none());
        let buffer = |known: &Known| {
            let mut users = known.users.clone();
            users.sort_by_key(|(_, claim)| *claim);
            SharedBuffer { users: users.into_iter().map(|(user, _)| user).collect(), dmabuf: known.file }
        };
        let buffers = self.buffers.iter().filter(told).map(buffer).collect();
        let bare = |(kfd, mappings): (&u32, &BTreeSet<FreedMapping>)| FreedMappings {
            kfd: *kfd,
            mappings: mappings.clone(),
        };
        SharedImage {
            buffers,
            second_files: self.second_files.clone(),
            render_files: self.render_files.clone(),
            freed_mappings: self.bare.iter().map(bare).collect(),
        }
    }

    /// Writes what is known so far. A file of an earlier dump does not stay.
    pub(super) fn write(&self, host: &Host) -> Answer {
        let (folder, image) = (host.image_dir()?, self.image());
        if !image.is_empty() || folder::open(folder, SHARED_NAME).is_ok() {
            folder::write(folder, SHARED_NAME, &image.to_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rewake_amdgpu_uapi::abi::KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC;
    use rewake_criu_images::amdgpu::RenderBuffer;

    use super::*;

    const EXPORT: u32 = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | OF_IMPORTS | KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC;
    const IMPORT: u32 = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | OF_IMPORTS;
    const PEER: u32 = KFD_IOC_ALLOC_MEM_FLAGS_GTT | OF_IMPORTS;

    fn process(shared: &mut Shared, kfd: u32, buffers: &[(u32, Option<u64>)]) -> Vec<Option<u32>> {
        let buffer = |(flags, _): &(u32, _)| KfdBuffer { alloc_flags: *flags, ..KfdBuffer::default() };
        let mut images: Vec<KfdBuffer> = buffers.iter().map(buffer).collect();
        let inodes: Vec<Option<u64>> = buffers.iter().map(|(_, inode)| *inode).collect();
        shared.process(kfd, &mut images, &inodes);
        images.iter().map(|buffer| buffer.handle).collect()
    }

    fn users(image: &SharedImage, index: usize) -> Vec<(u32, u32)> {
        image.buffers[index].users.iter().map(|user| (user.kfd, user.buffer)).collect()
    }

    #[test]
    fn one_dma_buf_is_one_buffer_with_one_number() {
        let mut shared = Shared::default();
        let first = process(&mut shared, 6, &[(EXPORT, Some(100)), (0, None), (EXPORT, Some(101))]);
        let second = process(&mut shared, 9, &[(EXPORT, Some(102)), (IMPORT, Some(100))]);
        assert_eq!((first, second), (vec![Some(1), Some(0), Some(2)], vec![Some(3), Some(1)]));
        let image = shared.image();
        assert_eq!(image.buffers.len(), 1, "what one process has alone is not shared");
        assert_eq!(users(&image, 0), [(6, 0), (9, 1)]);
    }

    #[test]
    fn who_exported_makes_it_anew_whoever_is_dumped_first() {
        let mut shared = Shared::default();
        process(&mut shared, 6, &[(PEER, Some(100)), (IMPORT, Some(101))]);
        process(&mut shared, 7, &[(IMPORT, Some(100)), (IMPORT, Some(101))]);
        process(&mut shared, 9, &[(EXPORT, Some(100))]);
        let image = shared.image();
        assert_eq!(users(&image, 0), [(9, 0), (7, 0), (6, 0)]);
        assert_eq!(users(&image, 1), [(6, 1), (7, 1)], "the exporter has gone: the first of its heirs");
    }

    #[test]
    fn an_open_dma_buf_belongs_to_the_buffer_that_comes_before_or_after_it() {
        let mut shared = Shared::default();
        assert_eq!(shared.dmabuf(4, 100), 1);
        assert_eq!((shared.ownerless(), shared.image().is_empty()), (vec![4], true));
        process(&mut shared, 6, &[(EXPORT, Some(100)), (EXPORT, Some(101))]);
        assert_eq!(shared.dmabuf(8, 101), 2);
        let image = shared.image();
        let files: Vec<_> = image.buffers.iter().map(|buffer| buffer.dmabuf).collect();
        assert_eq!(files, [Some(4), Some(8)]);
        assert_eq!((users(&image, 0), users(&image, 1)), (vec![(6, 0)], vec![(6, 1)]));
        assert!(shared.ownerless().is_empty());
    }

    #[test]
    fn a_mapping_that_shows_a_buffer_of_a_render_node_is_not_bare() {
        let mut shared = Shared::default();
        let at = |minor, offset| FreedMapping { minor, address: 0x1000, offset };
        shared.bare(6, [at(128, 100), at(128, 199), at(128, 200), at(129, 150)].into());
        shared.bare(9, BTreeSet::new());
        let buffers = vec![RenderBuffer { offset: 100, size: 100, ..RenderBuffer::default() }];
        shared.shown(&RenderContents { id: 12, minor: 128, buffers });
        let bare = |kfd, mappings: &[FreedMapping]| FreedMappings {
            kfd,
            mappings: mappings.iter().copied().collect(),
        };
        let image = shared.image();
        assert_eq!(image.freed_mappings, [bare(6, &[at(128, 200), at(129, 150)]), bare(9, &[])]);
        assert!(!image.is_empty(), "none is said, too");
    }
}
