// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores buffers that processes share: one process allocates each, others import it, and open dma-bufs
//! refer to it.
//!
//! A task makes its own state, shares the dma-bufs of its buffers with all tasks, and only then waits for the
//! dma-bufs of other tasks, so that two tasks that need buffers of each other both get them.

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
use crate::image::FOLDER;

/// The buffer's number in a driver's handle; the upper half is the GPU's id (`kfd_priv.h`, MAKE_HANDLE).
const HANDLE_NUMBER: u64 = 0xffff_ffff;

/// A buffer of a process, by indices in [`crate::image::Images::kfd`] and in that image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessBuffer {
    pub(super) process: usize,
    pub(super) buffer: usize,
}

/// What processes share.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    /// Buffers that a process allocates for others, or for an open dma-buf.
    pub(super) exports: Vec<ProcessBuffer>,
    imports: Vec<Import>,
    /// Open dma-bufs: indices in `exports`, by file id.
    dmabufs: BTreeMap<u32, usize>,
    /// Second `/dev/kfd`s: file id, and the process's index.
    pub(super) second_files: Vec<(u32, usize)>,
}

#[derive(Debug, Clone, Copy)]
struct Import {
    to: ProcessBuffer,
    /// Index in `exports`.
    from: usize,
}

/// The file of shared buffers and the images of processes are not of one dump.
#[derive(Debug, thiserror::Error)]
pub(super) enum OtherDump {
    #[error(
        "{SHARED_NAME} is of another dump: it names file {0:#x}, and there is no amdgpu-kfd-{0}.img; remove \
         it"
    )]
    NoProcess(u32),
    #[error(
        "{SHARED_NAME} is of another dump: it says that {0} are one buffer, and their images differ; remove \
         it"
    )]
    NotOne(String),
}

/// A buffer that cannot be shared again.
#[derive(Debug, thiserror::Error)]
enum Unshared {
    #[error(
        "the dma-buf of file {0:#x} was open, and the image does not name the process that has its buffer: \
         dump both processes together, with this plugin"
    )]
    NoBuffer(u32),
    #[error(
        "the shared buffer at {address:#x} had number {wanted} in its process, and the driver gives it \
         {found}: the image has another buffer of that number"
    )]
    Taken { address: u64, wanted: u32, found: u64 },
    #[error("the shared buffer at {address:#x} has number {wanted}, expected less than {MAX_BUFFERS}")]
    TooMany { address: u64, wanted: u32 },
}

/// Reads `rewake-shared.img`.
pub(super) fn read(host: &Host) -> Answer<SharedImage> {
    let folder = ImageDir::of(host.image_dir()?.try_clone_to_owned()?, Path::new(FOLDER))?;
    Ok(folder.shared()?.unwrap_or_default())
}

impl Sharing {
    /// Returns the buffers of a process that other processes, render nodes or open dma-bufs also have.
    pub(super) fn exports_of(&self, process: usize) -> BTreeSet<usize> {
        self.exports.iter().filter(|export| export.process == process).map(|export| export.buffer).collect()
    }

    /// Checks the shared image against the images of the processes.
    pub(super) fn of(shared: &SharedImage, images: &[(u32, KfdImage)]) -> Result<Self, OtherDump> {
        let process = |id: u32| images.iter().position(|(kfd, _)| *kfd == id).ok_or(OtherDump::NoProcess(id));
        let mut sharing = Self::default();
        let mut numbers = BTreeSet::new();
        for buffer in &shared.buffers {
            let buffer_of = |user: &BufferUser| {
                Ok(ProcessBuffer { process: process(user.kfd)?, buffer: user.buffer as usize })
            };
            let users = buffer.users.iter().map(buffer_of).collect::<Result<Vec<_>, _>>()?;
            let number = common_number(&users, images).filter(|number| numbers.insert(*number));
            number.ok_or_else(|| OtherDump::NotOne(describe(buffer)))?;
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

    /// Returns the index in `exports` of a buffer, which becomes an export if it was none.
    pub(super) fn export_of(&mut self, user: ProcessBuffer) -> usize {
        if let Some(import) = self.imports.iter().find(|import| import.to == user) {
            return import.from;
        }
        let known = self.exports.iter().position(|export| *export == user);
        known.unwrap_or_else(|| {
            self.exports.push(user);
            self.exports.len() - 1
        })
    }

    /// Returns the buffers that a process imports.
    pub(super) fn imports_of(&self, process: usize) -> BTreeSet<usize> {
        self.imports
            .iter()
            .filter(|import| import.to.process == process)
            .map(|import| import.to.buffer)
            .collect()
    }

    /// Returns the index in `exports` of an open dma-buf, or `None` if the file is no dma-buf.
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

/// Returns the number that a dump gave a buffer, if all these are that buffer: with contents and of one size.
fn common_number(users: &[ProcessBuffer], images: &[(u32, KfdImage)]) -> Option<u32> {
    let buffer = |user: &ProcessBuffer| images[user.process].1.buffers.get(user.buffer);
    let first = buffer(users.first()?)?;
    let alike =
        |other: &KfdBuffer| other.has_contents() && (other.size, other.handle) == (first.size, first.handle);
    let all = users.iter().all(|user| buffer(user).is_some_and(alike));
    first.handle.filter(|number| all && *number != 0)
}

fn describe(buffer: &SharedBuffer) -> String {
    let names = buffer.users.iter().map(|user| format!("{} of file {:#x}", user.buffer, user.kfd));
    names.collect::<Vec<_>>().join(", ")
}

impl Restore {
    /// Shares the buffers that this task has made for others. `dmabufs` has the dma-bufs of all buffers of
    /// the process.
    pub(super) fn share_exports(&self, host: &Host, process: usize, dmabufs: &[Option<OwnedFd>]) -> Answer {
        for (export, user) in self.sharing.exports.iter().enumerate() {
            if let Some(dmabuf) = dmabufs.get(user.buffer).filter(|_| user.process == process) {
                let dmabuf = dmabuf.as_ref().ok_or("the driver gave no dma-buf of a shared buffer")?;
                self.shared_state.put_export(export, host.store_fd(dmabuf.as_fd())?);
            }
        }
        Ok(())
    }

    /// Waits for the dma-buf of a buffer that another task makes.
    pub(super) fn exported(&self, host: &Host, export: usize) -> Answer<OwnedFd> {
        let owner = self.sharing.exports[export].process;
        Ok(host.stored_fd(self.shared_state.export(export, owner, self.images.kfd[owner].1.pid)?)?)
    }

    /// Imports the buffers that other tasks make, with the numbers, addresses and GPUs that the process had.
    pub(super) fn import(&self, host: &Host, process: usize, kfd: BorrowedFd<'_>) -> Answer {
        let image = &self.images.kfd[process].1;
        let (gpus, buffers) = (gpus(image).count(), image.buffers.len());
        let private = Private::read(&image.private, gpus, buffers, image.objects as usize)?;
        let number = |import: &&Import| private.bos()[import.to.buffer].idr_handle;
        let mut imports: Vec<&Import> =
            self.sharing.imports.iter().filter(|import| import.to.process == process).collect();
        // The kernel gives the lowest free number of a GPU: a number is next when all below it are in use.
        imports.sort_by_key(number);
        let mut spare = Vec::new();
        for import in imports {
            let dmabuf = self.exported(host, import.from)?;
            let (buffer, bo) = (&image.buffers[import.to.buffer], &private.bos()[import.to.buffer]);
            let handle = import_with_number(kfd, dmabuf.as_fd(), buffer, bo.idr_handle, &mut spare)?;
            let mapped = bo.mapped();
            if !mapped.is_empty() {
                let act =
                    FailedCall::named("MAP_MEMORY_TO_GPU").on(buffer.gpu_id).at(buffer.address, buffer.size);
                call::map_memory(kfd, handle, &mapped).1.map_err(act.failed())?;
            }
            self.shared_state.put_buffer(process, import.to.buffer, self.mmap_offset(import));
        }
        for handle in spare {
            let mut argument = kfd_ioctl_free_memory_of_gpu_args { handle };
            call::free_memory(kfd, &mut argument)
                .map_err(FailedCall::named("FREE_MEMORY_OF_GPU").failed())?;
        }
        Ok(())
    }

    /// Returns the mmap offset of an import. On its own GPU an import is the exported buffer itself.
    fn mmap_offset(&self, import: &Import) -> MmapOffset {
        let from = self.sharing.exports[import.from];
        let node = |user: ProcessBuffer| {
            let image = &self.images.kfd[user.process].1;
            let name = image.buffers[user.buffer].gpu_id;
            image.nodes.iter().find(|node| node.properties.gpu_id == name).map(|node| node.properties.node_id)
        };
        if node(from) == node(import.to) {
            self.shared_state.buffer(from.process, from.buffer)
        } else {
            MmapOffset::Nowhere
        }
    }
}

/// Imports a dma-buf until it gets the number `wanted`. The handles before that go to `spare`; they take no
/// memory.
fn import_with_number(
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
        match (argument.handle & HANDLE_NUMBER).cmp(&u64::from(wanted)) {
            std::cmp::Ordering::Less => spare.push(argument.handle),
            std::cmp::Ordering::Equal => return Ok(argument.handle),
            std::cmp::Ordering::Greater => {
                return Err(
                    Unshared::Taken { address, wanted, found: argument.handle & HANDLE_NUMBER }.into()
                );
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
    fn the_first_user_allocates_a_buffer_and_the_others_import_it() {
        let images = [image(6, &[(1, 1), (2, 2)]), image(9, &[(2, 2), (1, 1)])];
        let buffers = vec![shared(&[(6, 0), (9, 1)], None), shared(&[(9, 0), (6, 1)], Some(12))];
        let second_files = vec![SecondFile { id: 14, kfd: 9 }];
        let sharing =
            Sharing::of(&SharedImage { buffers, second_files, ..SharedImage::default() }, &images).unwrap();
        let user = |process, buffer| ProcessBuffer { process, buffer };
        assert_eq!(sharing.exports, [user(0, 0), user(1, 0)]);
        let exports = [0, 1, 2].map(|process| sharing.exports_of(process).into_iter().collect::<Vec<_>>());
        assert_eq!(exports, [vec![0], vec![0], vec![]]);
        assert_eq!(sharing.imports_of(0), BTreeSet::from([1]));
        assert_eq!(sharing.imports_of(1), BTreeSet::from([1]));
        assert_eq!(sharing.dmabufs, BTreeMap::from([(12, 1)]));
        assert_eq!(sharing.second_files, [(14, 1)]);
    }

    #[test]
    fn an_image_of_another_dump_is_refused() {
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
