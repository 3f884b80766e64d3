// SPDX-License-Identifier: MIT OR Apache-2.0
//! A render node: submissions to copy engines through the graphics driver. The `drm` crate has the calls of
//! every DRM driver (version, PRIME, syncobjs, closing of handles). This module has amdgpu's own calls.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use drm::control::Device as _;

use crate::abi::call::Argument as _;
use crate::abi::drm::{self as gem, SubmissionChunk};
use crate::abi::memory::{Mapping, PAGE};
use crate::abi::{
    AMDGPU_CTX_OP_FREE_CTX, AMDGPU_GEM_USERPTR_ANONONLY, AMDGPU_GEM_USERPTR_REGISTER,
    AMDGPU_GEM_USERPTR_VALIDATE, AMDGPU_HW_IP_DMA, AMDGPU_INFO_DEV_INFO, AMDGPU_INFO_HW_IP_INFO,
    AMDGPU_INFO_MEMORY, AMDGPU_VA_OP_MAP, AMDGPU_VA_OP_UNMAP, AMDGPU_VM_PAGE_EXECUTABLE,
    AMDGPU_VM_PAGE_READABLE, AMDGPU_VM_PAGE_WRITEABLE, drm_amdgpu_bo_list_entry, drm_amdgpu_cs_chunk_ib,
    drm_amdgpu_ctx, drm_amdgpu_gem_create_in, drm_amdgpu_gem_list_handles_entry, drm_amdgpu_gem_va,
    drm_amdgpu_gem_vm_entry, drm_amdgpu_info_device, drm_amdgpu_info_hw_ip, drm_amdgpu_memory_info,
    drm_amdgpu_wait_cs_in,
};
use crate::{Error, FailedCall};

/// The sign bit of a GPU address, which all higher bits repeat (`AMDGPU_GMC_HOLE_START`).
const SIGN: u64 = 1 << 47;

/// An open render node: one GPU address space, one table of GEM handles.
#[derive(Debug)]
pub struct Render {
    file: File,
    minor: u32,
}

impl AsFd for Render {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl drm::Device for Render {}
impl drm::control::Device for Render {}

/// The place and the number of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submission {
    /// The context.
    pub context: u32,
    /// The ring.
    pub ring: u32,
    /// Its number.
    pub number: u64,
}

/// A ring of an engine, as a context has it: its submissions have numbers of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContextRing {
    /// The context.
    pub context: u32,
    /// `AMDGPU_HW_IP_*`.
    pub engine: u32,
    /// The ring.
    pub ring: u32,
}

impl Render {
    /// Opens `/dev/dri/renderD<minor>`.
    ///
    /// # Errors
    /// It does not exist, or may not be opened.
    pub fn open(minor: u32) -> Result<Self, Error> {
        let path = PathBuf::from(format!("/dev/dri/renderD{minor}"));
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => Ok(Self { file, minor }),
            Err(source) => Err(Error::Open { path, source }),
        }
    }

    /// Uses an open file of a render node.
    #[must_use]
    pub fn of(file: OwnedFd, minor: u32) -> Self {
        Self { file: file.into(), minor }
    }

    /// Returns its number in `/dev/dri`.
    #[must_use]
    pub fn minor(&self) -> u32 {
        self.minor
    }

    /// Returns the device's properties.
    ///
    /// # Errors
    /// INFO failed.
    pub fn device_info(&self) -> Result<drm_amdgpu_info_device, Error> {
        let act = FailedCall::named("AMDGPU_INFO DEV_INFO");
        gem::info(self.as_fd(), AMDGPU_INFO_DEV_INFO, 0).map_err(act.failed())
    }

    /// Returns an engine's version, alignments and rings (`AMDGPU_HW_IP_*`).
    ///
    /// # Errors
    /// INFO failed.
    pub fn engine_info(&self, engine: u32) -> Result<drm_amdgpu_info_hw_ip, Error> {
        let act = FailedCall::named("AMDGPU_INFO HW_IP_INFO");
        gem::info(self.as_fd(), AMDGPU_INFO_HW_IP_INFO, engine).map_err(act.failed())
    }

    /// Returns sizes and use of memory.
    ///
    /// # Errors
    /// INFO failed.
    pub fn memory_info(&self) -> Result<drm_amdgpu_memory_info, Error> {
        let act = FailedCall::named("AMDGPU_INFO MEMORY");
        gem::info(self.as_fd(), AMDGPU_INFO_MEMORY, 0).map_err(act.failed())
    }

    /// Creates a submission context.
    ///
    /// # Errors
    /// CTX failed.
    pub fn context(&self) -> Result<u32, Error> {
        gem::ctx_alloc(self.as_fd()).map_err(FailedCall::named("AMDGPU_CTX ALLOC").failed())
    }

    /// Frees a submission context.
    ///
    /// # Errors
    /// CTX failed.
    pub fn free_context(&self, context: u32) -> Result<(), Error> {
        let mut argument = drm_amdgpu_ctx::zeroed();
        argument.in_.op = AMDGPU_CTX_OP_FREE_CTX;
        argument.in_.ctx_id = context;
        gem::ctx(self.as_fd(), &mut argument).map_err(FailedCall::named("AMDGPU_CTX FREE").failed())
    }

    /// Returns the events of a context since its creation: `AMDGPU_CTX_QUERY2_FLAGS_*`.
    ///
    /// # Errors
    /// CTX failed.
    pub fn context_state(&self, context: u32) -> Result<u64, Error> {
        gem::ctx_state(self.as_fd(), context).map_err(FailedCall::named("AMDGPU_CTX QUERY_STATE2").failed())
    }

    /// Creates a GEM buffer of `AMDGPU_GEM_DOMAIN_*`, and returns its handle.
    ///
    /// # Errors
    /// GEM_CREATE failed.
    pub fn create(&self, size: u64, domain: u32, flags: u64) -> Result<u32, Error> {
        let act = FailedCall::named("AMDGPU_GEM_CREATE").at(0, size);
        gem::gem_alloc(self.as_fd(), size, u64::from(domain), flags).map_err(act.failed())
    }

    /// Creates a GEM buffer on host memory, and returns its handle.
    ///
    /// # Errors
    /// GEM_USERPTR failed.
    pub fn userptr(&self, memory: &Mapping) -> Result<u32, Error> {
        let flags = AMDGPU_GEM_USERPTR_ANONONLY | AMDGPU_GEM_USERPTR_REGISTER | AMDGPU_GEM_USERPTR_VALIDATE;
        let act = FailedCall::named("AMDGPU_GEM_USERPTR").at(memory.address(), memory.len());
        gem::gem_userptr(self.as_fd(), memory, flags).map_err(act.failed())
    }

    /// Creates a GEM buffer with all parameters, and returns its handle.
    ///
    /// # Errors
    /// GEM_CREATE failed.
    pub fn create_as(&self, wanted: drm_amdgpu_gem_create_in) -> Result<u32, Error> {
        let act = FailedCall::named("AMDGPU_GEM_CREATE").at(0, wanted.bo_size);
        gem::gem_create(self.as_fd(), wanted).map_err(act.failed())
    }

    /// Returns the parameters of a GEM buffer, or `None` if the handle does not exist.
    ///
    /// # Errors
    /// GEM_OP failed.
    pub fn created_as(&self, handle: u32) -> Result<Option<drm_amdgpu_gem_create_in>, Error> {
        let act = FailedCall::named("AMDGPU_GEM_OP GET_GEM_CREATE_INFO");
        unless(gem::gem_create_info(self.as_fd(), handle), libc::ENOENT).map_err(act.failed())
    }

    /// Returns all GEM buffers of this file, or `None` if the kernel cannot list them.
    ///
    /// # Errors
    /// GEM_LIST_HANDLES failed.
    pub fn handles(&self) -> Result<Option<Vec<drm_amdgpu_gem_list_handles_entry>>, Error> {
        let act = FailedCall::named("AMDGPU_GEM_LIST_HANDLES");
        unless(gem::gem_list(self.as_fd()), libc::EINVAL).map_err(act.failed())
    }

    /// Returns the mappings of a GEM buffer in this file's address space.
    ///
    /// # Errors
    /// GEM_OP failed.
    pub fn mappings(&self, handle: u32) -> Result<Vec<drm_amdgpu_gem_vm_entry>, Error> {
        let act = FailedCall::named("AMDGPU_GEM_OP GET_MAPPING_INFO");
        gem::gem_mappings(self.as_fd(), handle).map_err(act.failed())
    }

    /// Returns the `mmap` offset of a GEM buffer, or `None` if the CPU has no access to it.
    ///
    /// # Errors
    /// GEM_MMAP failed.
    pub fn offset(&self, handle: u32) -> Result<Option<u64>, Error> {
        unless(gem::gem_offset(self.as_fd(), handle), libc::EPERM)
            .map_err(FailedCall::named("AMDGPU_GEM_MMAP").failed())
    }

    /// Returns whether the driver lets this file map the buffer at an offset. Only a file that has the buffer
    /// may: by a handle, or because its address space is the compute address space that has it
    /// (`drm_vma_node_is_allowed`).
    ///
    /// # Errors
    /// No buffer has this offset.
    pub fn may_map(&self, offset: u64) -> Result<bool, Error> {
        match Mapping::inaccessible(self.as_fd(), offset, PAGE) {
            Ok(_) => Ok(true),
            // The driver permits the mapping, but the CPU has no access to the buffer.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => Ok(false),
            Err(error) => Err(FailedCall::named("mmap of a GEM buffer").at(offset, PAGE).failed()(error)),
        }
    }

    /// Exports a dma-buf of a GEM buffer. Returns `None` if it may not leave the file: host memory, or bound
    /// to the address space.
    ///
    /// # Errors
    /// PRIME_HANDLE_TO_FD failed.
    pub fn export(&self, handle: u32) -> Result<Option<OwnedFd>, Error> {
        let act = FailedCall::named("PRIME_HANDLE_TO_FD");
        let flags = (libc::O_CLOEXEC | libc::O_RDWR).cast_unsigned();
        let dmabuf = name(handle).and_then(|name| self.buffer_to_prime_fd(name, flags));
        unless(dmabuf, libc::EPERM).map_err(act.failed())
    }

    /// Imports a GEM buffer from a dma-buf, and returns its handle.
    ///
    /// # Errors
    /// PRIME_FD_TO_HANDLE failed.
    pub fn import(&self, dmabuf: BorrowedFd<'_>) -> Result<u32, Error> {
        let handle =
            self.prime_fd_to_buffer(dmabuf).map_err(FailedCall::named("PRIME_FD_TO_HANDLE").failed())?;
        Ok(handle.into())
    }

    /// Closes a GEM buffer's handle.
    ///
    /// # Errors
    /// GEM_CLOSE failed.
    pub fn close(&self, handle: u32) -> Result<(), Error> {
        name(handle).and_then(|name| self.close_buffer(name)).map_err(FailedCall::named("GEM_CLOSE").failed())
    }

    /// Returns whether a submission context of that number exists.
    ///
    /// # Errors
    /// CTX failed.
    pub fn has_context(&self, context: u32) -> Result<bool, Error> {
        let state = unless(gem::ctx_state(self.as_fd(), context), libc::EINVAL);
        Ok(state.map_err(FailedCall::named("AMDGPU_CTX QUERY_STATE2").failed())?.is_some())
    }

    /// Maps a GEM buffer for the CPU.
    ///
    /// # Errors
    /// GEM_MMAP or `mmap` failed.
    pub fn map(&self, handle: u32, size: u64) -> Result<Mapping, Error> {
        let offset = gem::gem_offset(self.as_fd(), handle);
        let offset = offset.map_err(FailedCall::named("AMDGPU_GEM_MMAP").failed())?;
        Mapping::shared(self.as_fd(), offset, size)
            .map_err(FailedCall::named("mmap of a GEM buffer").at(offset, size).failed())
    }

    /// Maps a GEM buffer at a GPU address for reads, writes and execution.
    ///
    /// # Errors
    /// GEM_VA failed.
    pub fn map_gpu(&self, handle: u32, address: u64, size: u64) -> Result<(), Error> {
        let flags = AMDGPU_VM_PAGE_READABLE | AMDGPU_VM_PAGE_WRITEABLE | AMDGPU_VM_PAGE_EXECUTABLE;
        self.page_table(handle, AMDGPU_VA_OP_MAP, flags, address, size)
    }

    /// Unmaps a GEM buffer from a GPU address.
    ///
    /// # Errors
    /// GEM_VA failed.
    pub fn unmap_gpu(&self, handle: u32, address: u64, size: u64) -> Result<(), Error> {
        self.page_table(handle, AMDGPU_VA_OP_UNMAP, 0, address, size)
    }

    /// Restores a mapping that [`Render::mappings`] returned. The driver takes addresses of the upper half
    /// with their sign, and returns them without.
    ///
    /// # Errors
    /// GEM_VA failed.
    pub fn map_again(&self, handle: u32, mapping: &drm_amdgpu_gem_vm_entry) -> Result<(), Error> {
        let act = FailedCall::named("AMDGPU_GEM_VA").at(mapping.addr, mapping.size);
        let flags = u32::try_from(mapping.flags);
        let flags = flags.map_err(|_| io::Error::from_raw_os_error(libc::EINVAL));
        let flags = flags.map_err(act.clone().failed())?;
        let mut argument = drm_amdgpu_gem_va {
            handle,
            operation: AMDGPU_VA_OP_MAP,
            flags,
            va_address: if mapping.addr & SIGN == 0 { mapping.addr } else { mapping.addr | !(SIGN - 1) },
            offset_in_bo: mapping.offset,
            map_size: mapping.size,
            ..drm_amdgpu_gem_va::zeroed()
        };
        gem::gem_va(self.as_fd(), &mut argument).map_err(act.failed())
    }

    fn page_table(
        &self,
        handle: u32,
        operation: u32,
        flags: u32,
        address: u64,
        size: u64,
    ) -> Result<(), Error> {
        let mut argument = drm_amdgpu_gem_va {
            handle,
            operation,
            flags,
            va_address: address,
            map_size: size,
            ..drm_amdgpu_gem_va::zeroed()
        };
        let act = FailedCall::named("AMDGPU_GEM_VA").at(address, size);
        gem::gem_va(self.as_fd(), &mut argument).map_err(act.failed())
    }

    /// Runs `bytes` of copy engine packets at a GPU address, using `buffers` by handle, on a ring of a
    /// context.
    ///
    /// # Errors
    /// CS failed.
    pub fn copy_engine(
        &self,
        context: u32,
        ring: u32,
        commands: (u64, u32),
        buffers: &[u32],
        more: &[SubmissionChunk<'_>],
    ) -> Result<Submission, Error> {
        let buffers: Vec<_> = buffers.iter().copied().map(bo_list_entry).collect();
        let mut chunks = vec![SubmissionChunk::Buffers(&buffers)];
        chunks.extend(more);
        self.submit(context, ring, commands, &chunks)
    }

    /// Runs `bytes` of copy engine packets at a GPU address on a ring of a context, with the submission's
    /// other parts. It allocates nothing.
    ///
    /// # Errors
    /// CS failed.
    pub fn submit(
        &self,
        context: u32,
        ring: u32,
        commands: (u64, u32),
        more: &[SubmissionChunk<'_>],
    ) -> Result<Submission, Error> {
        let number =
            self.submit_to(ContextRing { context, engine: AMDGPU_HW_IP_DMA, ring }, commands, more)?;
        Ok(Submission { context, ring, number })
    }

    /// Runs `bytes` of an engine's packets at a GPU address, and returns the submission's number. It
    /// allocates nothing.
    ///
    /// # Errors
    /// CS failed.
    pub fn submit_to(
        &self,
        ring: ContextRing,
        (commands, bytes): (u64, u32),
        more: &[SubmissionChunk<'_>],
    ) -> Result<u64, Error> {
        let commands = drm_amdgpu_cs_chunk_ib {
            va_start: commands,
            ib_bytes: bytes,
            ip_type: ring.engine,
            ring: ring.ring,
            ..drm_amdgpu_cs_chunk_ib::zeroed()
        };
        let act = FailedCall::named("AMDGPU_CS").at(commands.va_start, u64::from(bytes));
        let mut chunks = [SubmissionChunk::Commands(&commands); gem::CHUNKS];
        let chunks = if let Some(rest) = chunks.get_mut(1..=more.len()) {
            rest.copy_from_slice(more);
            &chunks[..=more.len()]
        } else {
            more // too many: submit reports it
        };
        gem::submit(self.as_fd(), ring.context, 0, chunks).map_err(act.failed())
    }

    /// Waits for a copy engine's submission until the monotonic clock shows `deadline` ns. Returns whether it
    /// is done.
    ///
    /// The deadline is one of the first time namespace's clock, because the kernel compares it with that
    /// clock. CRIU restores a program into a time namespace of its own, in which this clock shows the time of
    /// the dump: a caller there asks [`Self::has_ended`] again and again instead.
    ///
    /// # Errors
    /// WAIT_CS failed, or the submission did (ECANCELED after a reset of the GPU).
    pub fn wait(&self, submission: Submission, deadline: u64) -> Result<bool, Error> {
        let Submission { context, ring, number } = submission;
        let at = ContextRing { context, engine: AMDGPU_HW_IP_DMA, ring };
        self.wait_on(at, number, deadline).map_err(FailedCall::named("AMDGPU_WAIT_CS").failed())
    }

    pub(crate) fn wait_on(&self, ring: ContextRing, number: u64, deadline: u64) -> io::Result<bool> {
        let wanted = drm_amdgpu_wait_cs_in {
            handle: number,
            timeout: deadline,
            ip_type: ring.engine,
            ip_instance: 0,
            ring: ring.ring,
            ctx_id: ring.context,
        };
        gem::wait_submission(self.as_fd(), wanted)
    }
}

/// Turns one errno into None.
pub(crate) fn unless<T>(answer: io::Result<T>, errno: i32) -> io::Result<Option<T>> {
    match answer {
        Err(error) if error.raw_os_error() == Some(errno) => Ok(None),
        other => other.map(Some),
    }
}

/// Converts a handle for the `drm` crate; 0 is not one.
fn name(handle: u32) -> io::Result<drm::buffer::Handle> {
    drm::control::from_u32(handle).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}

/// Returns a GEM buffer's entry in a submission's list.
#[must_use]
pub fn bo_list_entry(handle: u32) -> drm_amdgpu_bo_list_entry {
    drm_amdgpu_bo_list_entry { bo_handle: handle, bo_priority: 0 }
}
