// SPDX-License-Identifier: MIT OR Apache-2.0
//! A render node: submissions to copy engines through the graphics driver's side. What every DRM driver has (version,
//! PRIME, syncobjs, closing of handles) comes from the `drm` crate; amdgpu's own calls are here.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use crate::abi::call::Argument as _;
use crate::abi::drm::{self as gem, Chunk};
use crate::abi::memory::Mapping;
use crate::abi::{
    AMDGPU_CTX_OP_FREE_CTX, AMDGPU_GEM_USERPTR_ANONONLY, AMDGPU_GEM_USERPTR_REGISTER,
    AMDGPU_GEM_USERPTR_VALIDATE, AMDGPU_HW_IP_DMA, AMDGPU_INFO_DEV_INFO, AMDGPU_INFO_HW_IP_INFO,
    AMDGPU_INFO_MEMORY, AMDGPU_VA_OP_MAP, AMDGPU_VA_OP_UNMAP, AMDGPU_VM_PAGE_EXECUTABLE,
    AMDGPU_VM_PAGE_READABLE, AMDGPU_VM_PAGE_WRITEABLE, drm_amdgpu_bo_list_entry, drm_amdgpu_cs_chunk_ib,
    drm_amdgpu_ctx, drm_amdgpu_gem_va, drm_amdgpu_info_device, drm_amdgpu_info_hw_ip, drm_amdgpu_memory_info,
    drm_amdgpu_wait_cs_in,
};
use crate::{Act, Error};

/// An open render node: one GPU address space, one table of GEM handles.
#[derive(Debug)]
pub struct Render {
    file: File,
}

impl AsFd for Render {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl drm::Device for Render {}
impl drm::control::Device for Render {}

/// A submission: where it went and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submission {
    /// The context.
    pub context: u32,
    /// The ring.
    pub ring: u32,
    /// Its number.
    pub number: u64,
}

impl Render {
    /// Opens `/dev/dri/renderD<minor>`.
    ///
    /// # Errors
    /// There is none, or it may not be opened.
    pub fn open(minor: u32) -> Result<Self, Error> {
        let path = PathBuf::from(format!("/dev/dri/renderD{minor}"));
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => Ok(Self { file }),
            Err(source) => Err(Error::Open { path, source }),
        }
    }

    /// The device's shape.
    ///
    /// # Errors
    /// INFO failed.
    pub fn device_info(&self) -> Result<drm_amdgpu_info_device, Error> {
        let act = Act::named("AMDGPU_INFO DEV_INFO");
        gem::info(self.as_fd(), AMDGPU_INFO_DEV_INFO, 0).map_err(act.failed())
    }

    /// An engine's version, alignments and rings (`AMDGPU_HW_IP_*`).
    ///
    /// # Errors
    /// INFO failed.
    pub fn engine_info(&self, engine: u32) -> Result<drm_amdgpu_info_hw_ip, Error> {
        let act = Act::named("AMDGPU_INFO HW_IP_INFO");
        gem::info(self.as_fd(), AMDGPU_INFO_HW_IP_INFO, engine).map_err(act.failed())
    }

    /// Sizes and use of memory.
    ///
    /// # Errors
    /// INFO failed.
    pub fn memory_info(&self) -> Result<drm_amdgpu_memory_info, Error> {
        let act = Act::named("AMDGPU_INFO MEMORY");
        gem::info(self.as_fd(), AMDGPU_INFO_MEMORY, 0).map_err(act.failed())
    }

    /// A submission context.
    ///
    /// # Errors
    /// CTX failed.
    pub fn context(&self) -> Result<u32, Error> {
        gem::ctx_alloc(self.as_fd()).map_err(Act::named("AMDGPU_CTX ALLOC").failed())
    }

    /// Ends a submission context.
    ///
    /// # Errors
    /// CTX failed.
    pub fn free_context(&self, context: u32) -> Result<(), Error> {
        let mut argument = drm_amdgpu_ctx::zeroed();
        argument.in_.op = AMDGPU_CTX_OP_FREE_CTX;
        argument.in_.ctx_id = context;
        gem::ctx(self.as_fd(), &mut argument).map_err(Act::named("AMDGPU_CTX FREE").failed())
    }

    /// A GEM buffer of `AMDGPU_GEM_DOMAIN_*`; gives its handle.
    ///
    /// # Errors
    /// GEM_CREATE failed.
    pub fn create(&self, size: u64, domain: u32, flags: u64) -> Result<u32, Error> {
        let act = Act::named("AMDGPU_GEM_CREATE").at(0, size);
        gem::gem_alloc(self.as_fd(), size, u64::from(domain), flags).map_err(act.failed())
    }

    /// A GEM buffer on host memory; gives its handle.
    ///
    /// # Errors
    /// GEM_USERPTR failed.
    pub fn userptr(&self, memory: &Mapping) -> Result<u32, Error> {
        let flags = AMDGPU_GEM_USERPTR_ANONONLY | AMDGPU_GEM_USERPTR_REGISTER | AMDGPU_GEM_USERPTR_VALIDATE;
        let act = Act::named("AMDGPU_GEM_USERPTR").at(memory.address(), memory.len());
        gem::gem_userptr(self.as_fd(), memory, flags).map_err(act.failed())
    }

    /// The CPU's view of a GEM buffer.
    ///
    /// # Errors
    /// GEM_MMAP or `mmap` failed.
    pub fn map(&self, handle: u32, size: u64) -> Result<Mapping, Error> {
        let offset = gem::gem_offset(self.as_fd(), handle);
        let offset = offset.map_err(Act::named("AMDGPU_GEM_MMAP").failed())?;
        Mapping::shared(self.as_fd(), offset, size)
            .map_err(Act::named("mmap of a GEM buffer").at(offset, size).failed())
    }

    /// Maps a GEM buffer at a GPU address for reading, writing and running.
    ///
    /// # Errors
    /// GEM_VA failed.
    pub fn map_gpu(&self, handle: u32, address: u64, size: u64) -> Result<(), Error> {
        let flags = AMDGPU_VM_PAGE_READABLE | AMDGPU_VM_PAGE_WRITEABLE | AMDGPU_VM_PAGE_EXECUTABLE;
        self.page_table(handle, AMDGPU_VA_OP_MAP, flags, address, size)
    }

    /// Takes a GEM buffer away from a GPU address.
    ///
    /// # Errors
    /// GEM_VA failed.
    pub fn unmap_gpu(&self, handle: u32, address: u64, size: u64) -> Result<(), Error> {
        self.page_table(handle, AMDGPU_VA_OP_UNMAP, 0, address, size)
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
        let act = Act::named("AMDGPU_GEM_VA").at(address, size);
        gem::gem_va(self.as_fd(), &mut argument).map_err(act.failed())
    }

    /// Runs `bytes` of copy engine packets at a GPU address, using `buffers` by handle, on a ring of a context.
    ///
    /// # Errors
    /// CS failed.
    pub fn copy_engine(
        &self,
        context: u32,
        ring: u32,
        (commands, bytes): (u64, u32),
        buffers: &[u32],
        more: &[Chunk<'_>],
    ) -> Result<Submission, Error> {
        let commands = drm_amdgpu_cs_chunk_ib {
            va_start: commands,
            ib_bytes: bytes,
            ip_type: AMDGPU_HW_IP_DMA,
            ring,
            ..drm_amdgpu_cs_chunk_ib::zeroed()
        };
        let buffers: Vec<drm_amdgpu_bo_list_entry> = buffers
            .iter()
            .map(|handle| drm_amdgpu_bo_list_entry { bo_handle: *handle, bo_priority: 0 })
            .collect();
        let mut chunks = vec![Chunk::Commands(&commands), Chunk::Buffers(&buffers)];
        chunks.extend(more);
        let act = Act::named("AMDGPU_CS").at(commands.va_start, u64::from(bytes));
        let number = gem::submit(self.as_fd(), context, 0, &chunks).map_err(act.failed())?;
        Ok(Submission { context, ring, number })
    }

    /// Waits for a copy engine's submission until the monotonic clock shows `deadline` ns; whether it is done.
    ///
    /// # Errors
    /// WAIT_CS failed, or the submission did (ECANCELED after a GPU's reset).
    pub fn wait(&self, submission: Submission, deadline: u64) -> Result<bool, Error> {
        let wanted = drm_amdgpu_wait_cs_in {
            handle: submission.number,
            timeout: deadline,
            ip_type: AMDGPU_HW_IP_DMA,
            ip_instance: 0,
            ring: submission.ring,
            ctx_id: submission.context,
        };
        gem::wait_submission(self.as_fd(), wanted).map_err(Act::named("AMDGPU_WAIT_CS").failed())
    }
}
