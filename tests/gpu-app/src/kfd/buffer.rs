// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that GPUs can access. As in ROCm's library, a buffer has one address for the CPU and all GPUs. A
//! range of this process's addresses is reserved first, and the buffer's CPU mapping, if any, is placed
//! there.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rewake_amdgpu_uapi::abi::memory::{Access, Mapping, PAGE};
use rewake_amdgpu_uapi::abi::{call, *};
use rewake_amdgpu_uapi::{Error, FailedCall};

use super::Device;

/// The kind of mmap offset for doorbells (kfd_priv.h). They are mapped from /dev/kfd at an offset made of
/// this and the GPU's id. The offset that ALLOC_MEMORY_OF_GPU returns for them is one of the render node,
/// where they cannot be mapped.
const DOORBELLS_OFFSET: u64 = 3 << 62;
const GPU_OFFSET_SHIFT: u32 = 46;

/// The place of a buffer's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// The GPU's own memory.
    Vram,
    /// Host memory that the driver allocates.
    Gtt,
    /// The page of doorbells of this process on this GPU.
    Doorbell,
    /// The page of remapped registers.
    MmioRemap,
}

impl MemoryKind {
    fn flags(self) -> u32 {
        KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE
            | match self {
                Self::Vram => KFD_IOC_ALLOC_MEM_FLAGS_VRAM,
                Self::Gtt => KFD_IOC_ALLOC_MEM_FLAGS_GTT | KFD_IOC_ALLOC_MEM_FLAGS_COHERENT,
                Self::Doorbell => KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL | KFD_IOC_ALLOC_MEM_FLAGS_COHERENT,
                Self::MmioRemap => KFD_IOC_ALLOC_MEM_FLAGS_MMIO_REMAP | KFD_IOC_ALLOC_MEM_FLAGS_COHERENT,
            }
    }
}

/// The properties of an allocation.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    /// The size in bytes, rounded up to pages.
    pub size: u64,
    /// The place.
    pub kind: MemoryKind,
    /// More `KFD_IOC_ALLOC_MEM_FLAGS_*`.
    pub flags: u32,
}

impl Spec {
    /// Describes VRAM, which the CPU can access where the BAR is large.
    #[must_use]
    pub fn vram(size: u64) -> Self {
        Self { size, kind: MemoryKind::Vram, flags: KFD_IOC_ALLOC_MEM_FLAGS_PUBLIC }
    }

    /// Describes host memory.
    #[must_use]
    pub fn gtt(size: u64) -> Self {
        Self { size, kind: MemoryKind::Gtt, flags: 0 }
    }

    /// Makes the memory executable.
    #[must_use]
    pub fn executable(mut self) -> Self {
        self.flags |= KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE;
        self
    }
}

/// A buffer, freed on drop.
#[derive(Debug)]
pub struct Buffer {
    object: BufferObject,
    offset: u64,
    kind: MemoryKind,
    place: Mapping,
}

impl Buffer {
    /// Reserves addresses and allocates, without a mapping.
    ///
    /// # Errors
    /// No addresses are free, or ALLOC_MEMORY_OF_GPU failed: ENOMEM if memory is exhausted.
    pub fn alloc(device: &Arc<Device>, spec: Spec) -> Result<Self, Error> {
        let size = spec.size.max(1).next_multiple_of(PAGE);
        let place = reserve(device, size)?;
        let mut argument = kfd_ioctl_alloc_memory_of_gpu_args {
            va_addr: place.address(),
            size,
            handle: 0,
            mmap_offset: 0,
            gpu_id: device.gpu_id(),
            flags: spec.kind.flags() | spec.flags,
        };
        let act = FailedCall::named("ALLOC_MEMORY_OF_GPU").on(device.gpu_id()).at(argument.va_addr, size);
        call::alloc_memory(device.kfd().as_fd(), &mut argument).map_err(act.failed())?;
        let object = BufferObject::new(device, argument.handle, argument.va_addr, size);
        let offset = match spec.kind {
            MemoryKind::Doorbell => DOORBELLS_OFFSET | u64::from(device.gpu_id()) << GPU_OFFSET_SHIFT,
            _ => argument.mmap_offset,
        };
        Ok(Self { object, offset, kind: spec.kind, place })
    }

    /// Allocates a buffer, and maps it to the device's GPU and to the CPU.
    ///
    /// # Errors
    /// As [`Buffer::alloc`], [`Buffer::map`] and [`Buffer::map_cpu`].
    pub fn mapped(device: &Arc<Device>, spec: Spec) -> Result<Self, Error> {
        let mut buffer = Self::alloc(device, spec)?;
        buffer.map(&[device.gpu_id()])?;
        buffer.map_cpu()?;
        Ok(buffer)
    }

    /// Imports a buffer that another process, or another buffer, exported. The CPU cannot access it.
    ///
    /// # Errors
    /// GET_DMABUF_INFO or IMPORT_DMABUF failed: EINVAL if it is not a buffer of such a GPU.
    pub fn import(device: &Arc<Device>, dmabuf: BorrowedFd<'_>) -> Result<Self, Error> {
        let kfd = device.kfd().as_fd();
        let act = FailedCall::named("GET_DMABUF_INFO").on(device.gpu_id());
        let size = call::dmabuf_info(kfd, dmabuf).map_err(act.failed())?.size;
        let place = reserve(device, size)?;
        let mut argument = kfd_ioctl_import_dmabuf_args {
            va_addr: place.address(),
            handle: 0,
            gpu_id: device.gpu_id(),
            dmabuf_fd: call::number(dmabuf),
        };
        let act = FailedCall::named("IMPORT_DMABUF").on(device.gpu_id()).at(argument.va_addr, size);
        call::import_dmabuf(kfd, &mut argument).map_err(act.failed())?;
        let object = BufferObject::new(device, argument.handle, argument.va_addr, size);
        Ok(Self { object, offset: 0, kind: MemoryKind::Vram, place })
    }

    /// Maps it into the page tables of these GPUs.
    ///
    /// # Errors
    /// MAP_MEMORY_TO_GPU failed.
    pub fn map(&mut self, gpus: &[u32]) -> Result<(), Error> {
        self.object.map(gpus)
    }

    /// Unmaps it from the page tables of these GPUs.
    ///
    /// # Errors
    /// UNMAP_MEMORY_FROM_GPU failed.
    pub fn unmap(&mut self, gpus: &[u32]) -> Result<(), Error> {
        self.object.unmap(gpus)
    }

    /// Maps it for the CPU, at the address that GPUs use.
    ///
    /// # Errors
    /// `mmap` failed: EPERM or EINVAL if the CPU cannot access this memory.
    pub fn map_cpu(&mut self) -> Result<(), Error> {
        self.place_mapping(Access::ReadWrite)
    }

    /// Maps it at its address without access for the CPU, as ROCm's library does for debuggers.
    ///
    /// # Errors
    /// As [`Buffer::map_cpu`].
    pub fn map_cpu_without_access(&mut self) -> Result<(), Error> {
        self.place_mapping(Access::None)
    }

    fn place_mapping(&mut self, access: Access) -> Result<(), Error> {
        let device = &self.object.device;
        let fd = match self.kind {
            MemoryKind::Doorbell | MemoryKind::MmioRemap => device.kfd().as_fd(),
            MemoryKind::Vram | MemoryKind::Gtt => device.render().as_fd(),
        };
        let act = FailedCall::named("mmap").on(device.gpu_id()).at(self.object.address, self.object.size);
        self.place.replace(fd, self.offset, access).map_err(act.failed())
    }

    /// Exports a dma-buf for another process or driver.
    ///
    /// # Errors
    /// EXPORT_DMABUF failed.
    pub fn export(&self) -> Result<OwnedFd, Error> {
        let device = &self.object.device;
        let flags = (nix::libc::O_RDWR | nix::libc::O_CLOEXEC).cast_unsigned();
        let act =
            FailedCall::named("EXPORT_DMABUF").on(device.gpu_id()).at(self.object.address, self.object.size);
        call::export_dmabuf(device.kfd().as_fd(), self.object.handle, flags).map_err(act.failed())
    }

    /// Returns the CPU mapping.
    #[must_use]
    pub fn cpu(&self) -> &Mapping {
        &self.place
    }

    /// Returns its address, for CPU and GPUs.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.object.address
    }

    /// Returns its size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.object.size
    }

    /// Returns the driver's handle.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.object.handle
    }

    /// Returns its `mmap` offset, which changes in a restore.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

/// Host memory of the program that GPUs can access, unregistered on drop.
#[derive(Debug)]
pub struct Userptr {
    // Fields drop in order: the kernel releases the memory before it is unmapped.
    object: BufferObject,
    memory: Mapping,
}

impl Userptr {
    /// Registers `memory` with the device's GPU, at the same address.
    ///
    /// # Errors
    /// ALLOC_MEMORY_OF_GPU failed (EFAULT if a page is missing), or MAP_MEMORY_TO_GPU.
    pub fn register(device: &Arc<Device>, memory: Mapping) -> Result<Self, Error> {
        let mut argument = kfd_ioctl_alloc_memory_of_gpu_args {
            va_addr: memory.address(),
            size: memory.len(),
            handle: 0,
            mmap_offset: memory.address(),
            gpu_id: device.gpu_id(),
            flags: KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE | KFD_IOC_ALLOC_MEM_FLAGS_COHERENT,
        };
        let act =
            FailedCall::named("ALLOC_MEMORY_OF_GPU").on(device.gpu_id()).at(memory.address(), memory.len());
        call::alloc_userptr(device.kfd().as_fd(), &memory, &mut argument).map_err(act.failed())?;
        let mut object = BufferObject::new(device, argument.handle, memory.address(), memory.len());
        object.map(&[device.gpu_id()])?;
        Ok(Self { object, memory })
    }

    /// Maps it into the page tables of more GPUs.
    ///
    /// # Errors
    /// MAP_MEMORY_TO_GPU failed.
    pub fn map(&mut self, gpus: &[u32]) -> Result<(), Error> {
        self.object.map(gpus)
    }

    /// Returns the memory.
    #[must_use]
    pub fn cpu(&self) -> &Mapping {
        &self.memory
    }

    /// Returns its address, for CPU and GPUs.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.object.address
    }
}

/// The driver's object for a buffer.
#[derive(Debug)]
struct BufferObject {
    device: Arc<Device>,
    handle: u64,
    address: u64,
    size: u64,
    gpus: Vec<u32>,
}

impl BufferObject {
    fn new(device: &Arc<Device>, handle: u64, address: u64, size: u64) -> Self {
        Self { device: Arc::clone(device), handle, address, size, gpus: Vec::new() }
    }

    fn map(&mut self, gpus: &[u32]) -> Result<(), Error> {
        let (done, result) = call::map_memory(self.device.kfd().as_fd(), self.handle, gpus);
        let done = gpus.iter().take(done as usize).copied();
        let new: Vec<u32> = done.filter(|gpu| !self.gpus.contains(gpu)).collect();
        self.gpus.extend(new);
        result.map_err(self.act("MAP_MEMORY_TO_GPU").failed())
    }

    fn unmap(&mut self, gpus: &[u32]) -> Result<(), Error> {
        let (done, result) = call::unmap_memory(self.device.kfd().as_fd(), self.handle, gpus);
        let gone = &gpus[..gpus.len().min(done as usize)];
        self.gpus.retain(|gpu| !gone.contains(gpu));
        result.map_err(self.act("UNMAP_MEMORY_FROM_GPU").failed())
    }

    fn act(&self, call: &'static str) -> FailedCall {
        FailedCall::named(call).on(self.device.gpu_id()).at(self.address, self.size)
    }
}

impl Drop for BufferObject {
    fn drop(&mut self) {
        let gpus = std::mem::take(&mut self.gpus);
        // The driver frees a buffer only after it is unmapped. A failure here has no remedy, and the driver
        // frees everything when the process ends.
        let _ = self.unmap(&gpus);
        let mut argument = kfd_ioctl_free_memory_of_gpu_args { handle: self.handle };
        let _ = call::free_memory(self.device.kfd().as_fd(), &mut argument);
    }
}

fn reserve(device: &Device, size: u64) -> Result<Mapping, Error> {
    Mapping::reserve(size)
        .map_err(FailedCall::named("mmap of addresses").on(device.gpu_id()).at(0, size).failed())
}
