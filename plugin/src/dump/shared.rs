// SPDX-License-Identifier: MIT OR Apache-2.0
//! Collects what processes share, and writes it to `rewake-shared.img`: buffers that one process passed to
//! another as a dma-buf, open dma-bufs, and two `/dev/kfd`s of one process. The file also lists each
//! process's mappings of freed buffers. No hook announces CRIU's last file, so the image is written again
//! after each file that adds something.
//!
//! A buffer has one dma-buf in all processes, so the dma-buf's inode identifies the buffer. The driver keeps
//! a dma-buf as long as its buffer (`kfd_mem_export_dmabuf`), and the processes are stopped. So the inode
//! stays valid until the end of the dump, without an open descriptor.

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

/// Flags of every imported buffer, besides its domain (`import_obj_create` in `amdgpu_amdkfd_gpuvm.c`).
const IMPORT_FLAGS: u32 = KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE | KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE;
const DOMAINS: u32 = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_GTT;

/// What the processes dumped so far share.
#[derive(Debug, Default)]
pub(super) struct DumpSharing {
    buffers: Vec<DmabufUsers>,
    /// Indices in `buffers`, by the dma-buf's inode.
    inodes: BTreeMap<u64, usize>,
    second_files: Vec<SecondFile>,
    render_files: Vec<RenderFile>,
    /// By the id of the `/dev/kfd`.
    freed_mappings: BTreeMap<u32, BTreeSet<FreedMapping>>,
}

/// The users of a buffer that has a dma-buf.
#[derive(Debug, Default)]
struct DmabufUsers {
    users: Vec<(BufferUser, OwnerRank)>,
    /// The file id of the open dma-buf.
    file: Option<u32>,
}

/// Ranks the users of a buffer. A restore allocates the buffer in the process with the least rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct OwnerRank {
    /// The buffer is an import, which has fewer access flags than the exported buffer.
    import: bool,
    /// The buffer is not in VRAM: VRAM that another GPU imported is host memory there.
    elsewhere: bool,
}

impl OwnerRank {
    fn of(buffer: &KfdBuffer) -> Self {
        Self {
            import: buffer.alloc_flags & !DOMAINS == IMPORT_FLAGS,
            elsewhere: buffer.alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_VRAM == 0,
        }
    }
}

impl DumpSharing {
    /// Returns the number of the buffer with this dma-buf: the same in all images of a dump, and never 0.
    fn handle(&mut self, inode: u64) -> u32 {
        let next = self.buffers.len();
        let index = *self.inodes.entry(inode).or_insert(next);
        if index == next {
            self.buffers.push(DmabufUsers::default());
        }
        u32::try_from(index + 1).unwrap_or(u32::MAX)
    }

    fn entry(&mut self, inode: u64) -> (u32, &mut DmabufUsers) {
        let handle = self.handle(inode);
        (handle, &mut self.buffers[handle as usize - 1])
    }

    /// Adds a process's buffers and numbers them; `inodes` has the inode of each buffer's dma-buf.
    pub(super) fn add_process(&mut self, kfd: u32, buffers: &mut [KfdBuffer], inodes: &[Option<u64>]) {
        for (index, (buffer, inode)) in (0..).zip(buffers.iter_mut().zip(inodes)) {
            let mut number = 0;
            if let Some(inode) = inode {
                let known;
                (number, known) = self.entry(*inode);
                known.users.push((BufferUser { kfd, buffer: index }, OwnerRank::of(buffer)));
            }
            buffer.handle = Some(number);
        }
    }

    /// Adds an open dma-buf and returns the number of its buffer.
    pub(super) fn add_dmabuf(&mut self, id: u32, inode: u64) -> u32 {
        let (number, known) = self.entry(inode);
        known.file = Some(id);
        number
    }

    /// Adds a second `/dev/kfd` of the process whose image has the id `kfd`.
    pub(super) fn add_second_file(&mut self, id: u32, kfd: u32) {
        self.second_files.push(SecondFile { id, kfd });
    }

    /// Adds a render node.
    pub(super) fn add_render_file(&mut self, file: RenderFile) {
        self.render_files.push(file);
    }

    /// Adds a process's mappings that have no buffer of the process.
    pub(super) fn add_freed_mappings(&mut self, kfd: u32, mappings: BTreeSet<FreedMapping>) {
        self.freed_mappings.insert(kfd, mappings);
    }

    /// Removes mappings of a render node's own buffers from the lists of freed mappings.
    pub(super) fn remove_mappings_of(&mut self, node: &RenderContents) {
        let has_buffer = |mapping: &FreedMapping| {
            let mut offsets = node.buffers.iter().map(|of| of.offset..of.offset.saturating_add(of.size));
            mapping.minor == node.minor && offsets.any(|offsets| offsets.contains(&mapping.offset))
        };
        self.freed_mappings.values_mut().for_each(|mappings| mappings.retain(|mapping| !has_buffer(mapping)));
    }

    /// Returns which of the processes that compute with this buffer allocates it in a restore.
    pub(super) fn owner(&self, inode: u64) -> Option<BufferUser> {
        self.best_user(inode).map(|(user, _)| *user)
    }

    /// Returns whether every process that computes with this buffer imported it.
    pub(super) fn is_import(&self, inode: u64) -> bool {
        self.best_user(inode).is_some_and(|(_, claim)| claim.import)
    }

    fn best_user(&self, inode: u64) -> Option<&(BufferUser, OwnerRank)> {
        self.buffers[*self.inodes.get(&inode)?].users.iter().min_by_key(|(_, claim)| *claim)
    }

    /// Returns the file ids of open dma-bufs whose buffer no process dumped so far has.
    pub(super) fn ownerless(&self) -> Vec<u32> {
        self.buffers.iter().filter(|known| known.users.is_empty()).filter_map(|known| known.file).collect()
    }

    fn image(&self) -> SharedImage {
        let is_recorded = |known: &&DmabufUsers| known.users.len() > usize::from(known.file.is_none());
        let buffer = |known: &DmabufUsers| {
            let mut users = known.users.clone();
            users.sort_by_key(|(_, claim)| *claim);
            SharedBuffer { users: users.into_iter().map(|(user, _)| user).collect(), dmabuf: known.file }
        };
        let buffers = self.buffers.iter().filter(is_recorded).map(buffer).collect();
        let freed = |(kfd, mappings): (&u32, &BTreeSet<FreedMapping>)| FreedMappings {
            kfd: *kfd,
            mappings: mappings.clone(),
        };
        SharedImage {
            buffers,
            second_files: self.second_files.clone(),
            render_files: self.render_files.clone(),
            freed_mappings: self.freed_mappings.iter().map(freed).collect(),
        }
    }

    /// Writes what was collected so far, also over the file of an earlier dump.
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

    const EXPORT: u32 = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | IMPORT_FLAGS | KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC;
    const IMPORT: u32 = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | IMPORT_FLAGS;
    const PEER: u32 = KFD_IOC_ALLOC_MEM_FLAGS_GTT | IMPORT_FLAGS;

    fn process(shared: &mut DumpSharing, kfd: u32, buffers: &[(u32, Option<u64>)]) -> Vec<Option<u32>> {
        let buffer = |(flags, _): &(u32, _)| KfdBuffer { alloc_flags: *flags, ..KfdBuffer::default() };
        let mut images: Vec<KfdBuffer> = buffers.iter().map(buffer).collect();
        let inodes: Vec<Option<u64>> = buffers.iter().map(|(_, inode)| *inode).collect();
        shared.add_process(kfd, &mut images, &inodes);
        images.iter().map(|buffer| buffer.handle).collect()
    }

    fn users(image: &SharedImage, index: usize) -> Vec<(u32, u32)> {
        image.buffers[index].users.iter().map(|user| (user.kfd, user.buffer)).collect()
    }

    #[test]
    fn one_dma_buf_is_one_buffer_with_one_number() {
        let mut shared = DumpSharing::default();
        let first = process(&mut shared, 6, &[(EXPORT, Some(100)), (0, None), (EXPORT, Some(101))]);
        let second = process(&mut shared, 9, &[(EXPORT, Some(102)), (IMPORT, Some(100))]);
        assert_eq!((first, second), (vec![Some(1), Some(0), Some(2)], vec![Some(3), Some(1)]));
        let image = shared.image();
        assert_eq!(image.buffers.len(), 1, "what one process has alone is not shared");
        assert_eq!(users(&image, 0), [(6, 0), (9, 1)]);
    }

    #[test]
    fn the_exporter_allocates_a_buffer_in_any_order_of_the_dump() {
        let mut shared = DumpSharing::default();
        process(&mut shared, 6, &[(PEER, Some(100)), (IMPORT, Some(101))]);
        process(&mut shared, 7, &[(IMPORT, Some(100)), (IMPORT, Some(101))]);
        process(&mut shared, 9, &[(EXPORT, Some(100))]);
        let image = shared.image();
        assert_eq!(users(&image, 0), [(9, 0), (7, 0), (6, 0)]);
        assert_eq!(users(&image, 1), [(6, 1), (7, 1)], "the exporter has ended: the first import");
    }

    #[test]
    fn an_open_dma_buf_belongs_to_the_buffer_that_comes_before_or_after_it() {
        let mut shared = DumpSharing::default();
        assert_eq!(shared.add_dmabuf(4, 100), 1);
        assert_eq!((shared.ownerless(), shared.image().is_empty()), (vec![4], true));
        process(&mut shared, 6, &[(EXPORT, Some(100)), (EXPORT, Some(101))]);
        assert_eq!(shared.add_dmabuf(8, 101), 2);
        let image = shared.image();
        let files: Vec<_> = image.buffers.iter().map(|buffer| buffer.dmabuf).collect();
        assert_eq!(files, [Some(4), Some(8)]);
        assert_eq!((users(&image, 0), users(&image, 1)), (vec![(6, 0)], vec![(6, 1)]));
        assert!(shared.ownerless().is_empty());
    }

    #[test]
    fn a_mapping_of_a_render_node_s_buffer_is_not_freed() {
        let mut shared = DumpSharing::default();
        let at = |minor, offset| FreedMapping { minor, address: 0x1000, offset };
        shared.add_freed_mappings(6, [at(128, 100), at(128, 199), at(128, 200), at(129, 150)].into());
        shared.add_freed_mappings(9, BTreeSet::new());
        let buffers = vec![RenderBuffer { offset: 100, size: 100, ..RenderBuffer::default() }];
        shared.remove_mappings_of(&RenderContents { id: 12, minor: 128, buffers });
        let freed = |kfd, mappings: &[FreedMapping]| FreedMappings {
            kfd,
            mappings: mappings.iter().copied().collect(),
        };
        let image = shared.image();
        assert_eq!(image.freed_mappings, [freed(6, &[at(128, 200), at(129, 150)]), freed(9, &[])]);
        assert!(!image.is_empty(), "an empty list is written, too");
    }
}
