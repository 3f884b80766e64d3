// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buffers that processes have in common: who makes each of them anew, who imports it, and which open dma-buf is whose.
//!
//! A task makes its own state, shows everybody the dma-bufs of what it made, and only then waits for those of others:
//! two tasks that need buffers of each other both get them.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rewake_amdgpu_uapi::FailedCall;
use rewake_amdgpu_uapi::abi::call;
use rewake_amdgpu_uapi::abi::{kfd_ioctl_free_memory_of_gpu_args, kfd_ioctl_import_dmabuf_args};
use rewake_amdgpu_uapi::criu::blob::Private;
use rewake_criu_images::ImageDir;
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, MAX_BUFFERS};
use rewake_criu_images::rewake::{BufferUser, SHARED_NAME, SharedBuffer, SharedImage};
use rewake_criu_plugin::{Answer, Host};

use super::Restore;
use super::gpu_assignment::gpus;
use super::shared_state::MmapOffset;

/// For messages: a plugin is given a descriptor, not a path.
const FOLDER: &str = "the image directory";
/// A driver's handle: the GPU's name in its upper half, the buffer's number in its lower one (`kfd_priv.h`, MAKE_HANDLE).
const NUMBER: u64 = 0xffff_ffff;

/// A buffer of a process, by indices in [`crate::image::Images::kfd`] and in that image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whose {
    pub(super) process: usize,
    pub(super) buffer: usize,
}

/// All of it.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    /// Buffers that a process makes for others, or for an open dma-buf.
    pub(super) exports: Vec<Whose>,
    imports: Vec<Import>,
    /// Open dma-bufs: id, and index in `exports`.
    dmabufs: BTreeMap<u32, usize>,
    /// Further files of `/dev/kfd`: id, and the process.
    pub(super) second_files: Vec<(u32, usize)>,
}

#[derive(Debug, Clone, Copy)]
struct Import {
    to: Whose,
    /// Index in `exports`.
    from: usize,
}

/// The file of shared buffers and the images of processes are not of one dump.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfit {
    #[error(
        "{SHARED_NAME} is of another dump: it names file {0:#x}, and there is no amdgpu-kfd-{0}.img; remove it"
    )]
    NoProcess(u32),
    #[error(
        "{SHARED_NAME} is of another dump: it says that {0} are one buffer, and their images do not; remove it"
    )]
    NotOne(String),
}

/// What cannot be made one again.
#[derive(Debug, thiserror::Error)]
enum Unshared {
    #[error(
        "the dma-buf of file {0:#x} was open, and the image does not tell whose buffer it is: dump it together with the \
         process that has the buffer, with this plugin"
    )]
    NoBuffer(u32),
    #[error(
        "the shared buffer at {address:#x} had number {wanted} in its process, and gets {found}: the image has another \
         buffer of that number"
    )]
    Taken { address: u64, wanted: u32, found: u64 },
    #[error("the shared buffer at {address:#x} has number {wanted}, expected less than {MAX_BUFFERS}")]
    TooMany { address: u64, wanted: u32 },
}

/// Reads what is shared.
pub(super) fn read(host: &Host) -> Answer<SharedImage> {
    let folder = ImageDir::of(host.image_dir()?.try_clone_to_owned()?, Path::new(FOLDER))?;
    Ok(folder.shared()?.unwrap_or_default())
}

impl Sharing {
    /// Which buffers of a process are other processes', a render node's or an open dma-buf's, too.
    pub(super) fn exports_of(&self, process: usize) -> BTreeSet<usize> {
        self.exports.iter().filter(|export| export.process == process).map(|export| export.buffer).collect()
    }

    /// Checks what is shared against the images of the processes.
    pub(super) fn of(shared: &SharedImage, images: &[(u32, KfdImage)]) -> Result<Self, Unfit> {
        let process = |id: u32| images.iter().position(|(kfd, _)| *kfd == id).ok_or(Unfit::NoProcess(id));
        let mut sharing = Self::default();
        let mut numbers = BTreeSet::new();
        for buffer in &shared.buffers {
            let whose =
                |user: &BufferUser| Ok(Whose { process: process(user.kfd)?, buffer: user.buffer as usize });
            let users = buffer.users.iter().map(whose).collect::<Result<Vec<_>, _>>()?;
            let number = one(&users, images).filter(|number| numbers.insert(*number));
            number.ok_or_else(|| Unfit::NotOne(named(buffer)))?;
            let from = sharing.exports.len();
            sharing.exports.extend(users.first());
            sharing.imports.extend(users.iter().skip(1).map(|to| Import { to: *to, from }));
            sharing.dmabufs.extend(buffer.dmabuf.map(|id| (id, from)));
        }
        for file in &shared.second_files {
            sharing.second_files.push((file.id, process(file.kfd)?));
        }
        Ok(sharing)
    }

    /// Index in `exports` of a buffer, which becomes one if it was none.
    pub(super) fn export_of(&mut self, whose: Whose) -> usize {
        if let Some(import) = self.imports.iter().find(|import| import.to == whose) {
            return import.from;
        }
        let known = self.exports.iter().position(|export| *export == whose);
        known.unwrap_or_else(|| {
            self.exports.push(whose);
            self.exports.len() - 1
        })
    }

    /// Which buffers a process imports.
    pub(super) fn imports_of(&self, process: usize) -> BTreeSet<usize> {
        self.imports
            .iter()
            .filter(|import| import.to.process == process)
            .map(|import| import.to.buffer)
            .collect()
    }

    /// Index in `exports` of an open dma-buf; none if the file is something else.
    pub(super) fn dmabuf(&self, host: &Host, id: u32) -> Answer<Option<usize>> {
        if let Some(export) = self.dmabufs.get(&id) {
            return Ok(Some(*export));
        }
        let folder = ImageDir::of(host.image_dir()?.try_clone_to_owned()?, Path::new(FOLDER))?;
        match folder.dmabuf(id)? {
            Some(_) => Err(Unshared::NoBuffer(id).into()),
            None => Ok(None),
        }
    }
}

/// The number that a dump gave the buffer, if these are one: with memory of its own, of one size.
fn one(users: &[Whose], images: &[(u32, KfdImage)]) -> Option<u32> {
    let buffer = |whose: &Whose| images[whose.process].1.buffers.get(whose.buffer);
    let first = buffer(users.first()?)?;
    let alike =
        |other: &KfdBuffer| other.has_contents() && (other.size, other.handle) == (first.size, first.handle);
    let all = users.iter().all(|whose| buffer(whose).is_some_and(alike));
    first.handle.filter(|number| all && *number != 0)
}

fn named(buffer: &SharedBuffer) -> String {
    let names = buffer.users.iter().map(|user| format!("{} of file {:#x}", user.buffer, user.kfd));
    names.collect::<Vec<_>>().join(", ")
}

impl Restore {
    /// Shows other tasks the buffers that this one has made for them. `dmabufs`: of all buffers of the process.
    pub(super) fn show(&self, host: &Host, process: usize, dmabufs: &[Option<OwnedFd>]) -> Answer {
        for (export, whose) in self.sharing.exports.iter().enumerate() {
            if let Some(dmabuf) = dmabufs.get(whose.buffer).filter(|_| whose.process == process) {
                let dmabuf = dmabuf.as_ref().ok_or("the driver gave no dma-buf of a shared buffer")?;
                self.board.put_export(export, host.store_fd(dmabuf.as_fd())?);
            }
        }
        Ok(())
    }

    /// A dma-buf that the task which has the buffer shows, now or later.
    pub(super) fn shown(&self, host: &Host, export: usize) -> Answer<OwnedFd> {
        let owner = self.sharing.exports[export].process;
        Ok(host.stored_fd(self.board.export(export, owner, self.images.kfd[owner].1.pid)?)?)
    }

    /// Imports what others make for the process, with the numbers, addresses and GPUs that it had.
    pub(super) fn import(&self, host: &Host, process: usize, kfd: BorrowedFd<'_>) -> Answer {
        let image = &self.images.kfd[process].1;
        let (gpus, buffers) = (gpus(image).count(), image.buffers.len());
        let private = Private::read(&image.private, gpus, buffers, image.objects as usize)?;
        let number = |import: &&Import| private.bos()[import.to.buffer].idr_handle;
        let mut imports: Vec<&Import> =
            self.sharing.imports.iter().filter(|import| import.to.process == process).collect();
        // The kernel gives the lowest free number of a GPU, so that a number can be had when those below it are taken.
        imports.sort_by_key(number);
        let mut spare = Vec::new();
        for import in imports {
            let dmabuf = self.shown(host, import.from)?;
            let (buffer, bo) = (&image.buffers[import.to.buffer], &private.bos()[import.to.buffer]);
            let handle = numbered(kfd, dmabuf.as_fd(), buffer, bo.idr_handle, &mut spare)?;
            let mapped = bo.mapped();
            if !mapped.is_empty() {
                let act =
                    FailedCall::named("MAP_MEMORY_TO_GPU").on(buffer.gpu_id).at(buffer.address, buffer.size);
                call::map_memory(kfd, handle, &mapped).1.map_err(act.failed())?;
            }
            self.board.put_buffer(process, import.to.buffer, self.place_of(import));
        }
        for handle in spare {
            let mut argument = kfd_ioctl_free_memory_of_gpu_args { handle };
            call::free_memory(kfd, &mut argument)
                .map_err(FailedCall::named("FREE_MEMORY_OF_GPU").failed())?;
        }
        Ok(())
    }

    /// Where an import is mapped from: on its own GPU it is the very buffer that was exported.
    fn place_of(&self, import: &Import) -> MmapOffset {
        let from = self.sharing.exports[import.from];
        let node = |whose: Whose| {
            let image = &self.images.kfd[whose.process].1;
            let name = image.buffers[whose.buffer].gpu_id;
            image.nodes.iter().find(|node| node.properties.gpu_id == name).map(|node| node.properties.node_id)
        };
        if node(from) == node(import.to) {
            self.board.buffer(from.process, from.buffer)
        } else {
            MmapOffset::Nowhere
        }
    }
}

/// Imports a dma-buf until it gets the number that is wanted; what came before goes to `spare`. It costs no memory.
fn numbered(
    kfd: BorrowedFd<'_>,
    dmabuf: BorrowedFd<'_>,
    buffer: &KfdBuffer,
    wanted: u32,
    spare: &mut Vec<u64>,
) -> Answer<u64> {
    let address = buffer.address;
    if wanted as usize >= MAX_BUFFERS {
        return Err(Unshared::TooMany { address, wanted }.into());
    }
    loop {
        let mut argument = kfd_ioctl_import_dmabuf_args {
            va_addr: address,
            handle: 0,
            gpu_id: buffer.gpu_id,
            dmabuf_fd: call::number(dmabuf),
        };
        let act = FailedCall::named("IMPORT_DMABUF").on(buffer.gpu_id).at(address, buffer.size);
        call::import_dmabuf(kfd, &mut argument).map_err(act.failed())?;
        match (argument.handle & NUMBER).cmp(&u64::from(wanted)) {
            std::cmp::Ordering::Less => spare.push(argument.handle),
            std::cmp::Ordering::Equal => return Ok(argument.handle),
            std::cmp::Ordering::Greater => {
                return Err(Unshared::Taken { address, wanted, found: argument.handle & NUMBER }.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rewake_criu_images::rewake::SecondFile;

    use super::*;

    /// A process with buffers of these sizes and numbers.
    fn image(id: u32, buffers: &[(u64, u32)]) -> (u32, KfdImage) {
        let buffer = |(size, handle): &(u64, u32)| KfdBuffer {
            size: *size,
            handle: Some(*handle),
            alloc_flags: rewake_amdgpu_uapi::abi::KFD_IOC_ALLOC_MEM_FLAGS_VRAM,
            ..KfdBuffer::default()
        };
        (id, KfdImage { buffers: buffers.iter().map(buffer).collect(), ..KfdImage::default() })
    }

    fn shared(users: &[(u32, u32)], dmabuf: Option<u32>) -> SharedBuffer {
        let users = users.iter().map(|(kfd, buffer)| BufferUser { kfd: *kfd, buffer: *buffer }).collect();
        SharedBuffer { users, dmabuf }
    }

    fn refused(buffers: Vec<SharedBuffer>, images: &[(u32, KfdImage)]) -> String {
        Sharing::of(&SharedImage { buffers, ..SharedImage::default() }, images).unwrap_err().to_string()
    }

    #[test]
    fn the_first_user_makes_a_buffer_and_the_others_import_it() {
        let images = [image(6, &[(1, 1), (2, 2)]), image(9, &[(2, 2), (1, 1)])];
        let buffers = vec![shared(&[(6, 0), (9, 1)], None), shared(&[(9, 0), (6, 1)], Some(12))];
        let second_files = vec![SecondFile { id: 14, kfd: 9 }];
        let sharing =
            Sharing::of(&SharedImage { buffers, second_files, ..SharedImage::default() }, &images).unwrap();
        let whose = |process, buffer| Whose { process, buffer };
        assert_eq!(sharing.exports, [whose(0, 0), whose(1, 0)]);
        let exports = [0, 1, 2].map(|process| sharing.exports_of(process).into_iter().collect::<Vec<_>>());
        assert_eq!(exports, [vec![0], vec![0], vec![]]);
        assert_eq!(sharing.imports_of(0), BTreeSet::from([1]));
        assert_eq!(sharing.imports_of(1), BTreeSet::from([1]));
        assert_eq!(sharing.dmabufs, BTreeMap::from([(12, 1)]));
        assert_eq!(sharing.second_files, [(14, 1)]);
    }

    #[test]
    fn what_is_of_another_dump_is_refused() {
        let images = [image(6, &[(1, 1), (2, 2), (1, 0)]), image(9, &[(2, 1), (1, 3), (1, 0)])];
        for (users, why) in [
            ([(6, 0), (7, 0)], "no amdgpu-kfd-7.img"),
            ([(6, 0), (9, 0)], "0 of file 0x6, 0 of file 0x9 are one buffer"),
            ([(6, 0), (9, 1)], "0 of file 0x6, 1 of file 0x9 are one buffer"),
            ([(6, 2), (9, 2)], "2 of file 0x6, 2 of file 0x9 are one buffer"),
            ([(6, 0), (9, 4)], "0 of file 0x6, 4 of file 0x9 are one buffer"),
        ] {
            let error = refused(vec![shared(&users, None)], &images);
            assert!(error.contains(why) && error.contains("remove it"), "{users:?}: {error}");
        }
        let mut stock = images.clone();
        stock.iter_mut().flat_map(|(_, image)| &mut image.buffers).for_each(|buffer| buffer.handle = None);
        assert!(refused(vec![shared(&[(6, 0)], Some(1))], &stock).contains("are one buffer"));
    }
}
