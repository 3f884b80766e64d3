// SPDX-License-Identifier: MIT OR Apache-2.0
//! One safe function for each ioctl of `/dev/kfd` that Rewake uses. Errors are the kernel's errno.
//!
//! A call that a signal interrupts is repeated, at most `MAX_RETRIES` times. CRIU operations are never
//! repeated, because some do harm then.
//! them do harm when repeated.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use super::generated::*;
use super::memory::Mapping;

/// The most repetitions of an interrupted call before its EINTR is reported.
const MAX_RETRIES: u32 = 64;

/// A struct that the kernel fills.
///
/// # Safety
/// `repr(C)`, integers only: every bit pattern is valid, and reading one leaks nothing.
pub unsafe trait Argument: Copy {
    /// Returns the struct with all bytes zero.
    #[must_use]
    fn zeroed() -> Self {
        // SAFETY: the trait guarantees that every bit pattern is valid.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! arguments {
    ($($name:ident),* $(,)?) => { $(
        // SAFETY: bindgen's rendering of a kernel struct or union of integers.
        unsafe impl Argument for $name {}
    )* };
}
arguments! {
    kfd_ioctl_get_version_args, kfd_ioctl_create_queue_args, kfd_ioctl_destroy_queue_args,
    kfd_ioctl_update_queue_args, kfd_ioctl_create_event_args, kfd_ioctl_destroy_event_args,
    kfd_ioctl_set_event_args, kfd_ioctl_reset_event_args, kfd_ioctl_wait_events_args, kfd_event_data,
    kfd_ioctl_get_process_apertures_new_args, kfd_process_device_apertures, kfd_ioctl_acquire_vm_args,
    kfd_ioctl_alloc_memory_of_gpu_args, kfd_ioctl_free_memory_of_gpu_args, kfd_ioctl_map_memory_to_gpu_args,
    kfd_ioctl_unmap_memory_from_gpu_args, kfd_ioctl_get_dmabuf_info_args, kfd_ioctl_import_dmabuf_args,
    kfd_ioctl_export_dmabuf_args, kfd_ioctl_smi_events_args, kfd_ioctl_set_xnack_mode_args,
    kfd_ioctl_criu_args, kfd_criu_device_bucket, kfd_criu_bo_bucket, kfd_ioctl_get_available_memory_args,
    kfd_ioctl_runtime_enable_args, kfd_ioctl_svm_attribute, drm_amdgpu_gem_create, drm_amdgpu_gem_mmap,
    drm_amdgpu_gem_metadata, drm_amdgpu_gem_userptr, drm_amdgpu_gem_va, drm_amdgpu_ctx, drm_amdgpu_bo_list,
    drm_amdgpu_cs, drm_amdgpu_wait_cs, drm_amdgpu_info, drm_amdgpu_gem_op, drm_amdgpu_cs_chunk_ib,
    drm_amdgpu_info_hw_ip, drm_amdgpu_info_device, drm_amdgpu_memory_info, drm_amdgpu_gem_list_handles,
    drm_amdgpu_gem_list_handles_entry, drm_amdgpu_gem_vm_entry, drm_amdgpu_gem_create_in,
}

/// Makes any ioctl on any descriptor, once.
///
/// # Errors
/// The kernel's errno.
///
/// # Safety
/// `argument`, and every address in it, must be valid for what ioctl `number` of that descriptor reads and
/// writes there. Only tests that misuse the drivers need this.
pub unsafe fn raw(fd: BorrowedFd<'_>, number: u32, argument: *mut c_void) -> io::Result<i32> {
    // SAFETY: the caller guarantees it.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::c_ulong::from(number), argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// # Safety
/// `number` must take an `A`, and addresses inside `argument` must be valid for what the kernel does with
/// them.
unsafe fn once<A: Argument>(fd: BorrowedFd<'_>, number: u32, argument: &mut A) -> io::Result<()> {
    // SAFETY: the caller guarantees the number; `argument` is a live exclusive reference to bytes of any
    // value.
    unsafe { raw(fd, number, std::ptr::from_mut(argument).cast()) }.map(drop)
}

/// # Safety
/// As [`once`].
pub(super) unsafe fn retry<A: Argument>(fd: BorrowedFd<'_>, number: u32, argument: &mut A) -> io::Result<()> {
    let mut left = MAX_RETRIES;
    loop {
        // SAFETY: the caller guarantees it.
        match unsafe { once(fd, number, argument) } {
            Err(error) if error.kind() == io::ErrorKind::Interrupted && left > 0 => left -= 1,
            done => return done,
        }
    }
}

macro_rules! plain {
    ($($(#[$doc:meta])* $name:ident($number:ident, $argument:ty);)*) => { $(
        $(#[$doc])*
        ///
        /// # Errors
        /// The kernel's errno.
        pub fn $name(fd: BorrowedFd<'_>, argument: &mut $argument) -> io::Result<()> {
            // SAFETY: this number takes this struct, and no field of it is an address that the kernel uses in
            // this process: GPU addresses go through the GPU's page table.
            unsafe { retry(fd, $number, argument) }
        }
    )* };
}
plain! {
    /// Returns the interface version.
    get_version(IOC_GET_VERSION, kfd_ioctl_get_version_args);
    /// Makes a render node's address space the process's compute address space on that GPU.
    acquire_vm(IOC_ACQUIRE_VM, kfd_ioctl_acquire_vm_args);
    /// Frees a buffer.
    free_memory(IOC_FREE_MEMORY_OF_GPU, kfd_ioctl_free_memory_of_gpu_args);
    /// Returns the free VRAM.
    available_memory(IOC_AVAILABLE_MEMORY, kfd_ioctl_get_available_memory_args);
    /// Imports a buffer from a dma-buf.
    import_dmabuf(IOC_IMPORT_DMABUF, kfd_ioctl_import_dmabuf_args);
    /// Creates a queue; its addresses are the GPU's.
    create_queue(IOC_CREATE_QUEUE, kfd_ioctl_create_queue_args);
    /// Changes a queue's ring or share of time.
    update_queue(IOC_UPDATE_QUEUE, kfd_ioctl_update_queue_args);
    /// Destroys a queue.
    destroy_queue(IOC_DESTROY_QUEUE, kfd_ioctl_destroy_queue_args);
    /// Creates an event.
    create_event(IOC_CREATE_EVENT, kfd_ioctl_create_event_args);
    /// Destroys an event.
    destroy_event(IOC_DESTROY_EVENT, kfd_ioctl_destroy_event_args);
    /// Signals an event from the CPU.
    set_event(IOC_SET_EVENT, kfd_ioctl_set_event_args);
    /// Resets an event.
    reset_event(IOC_RESET_EVENT, kfd_ioctl_reset_event_args);
    /// Sets (0, 1) or returns (-1) the retry of GPU page faults.
    set_xnack_mode(IOC_SET_XNACK_MODE, kfd_ioctl_set_xnack_mode_args);
}

/// Allocates a buffer that is no userptr.
///
/// # Errors
/// The kernel's errno; EINVAL without a call if the flags request a userptr.
pub fn alloc_memory(fd: BorrowedFd<'_>, argument: &mut kfd_ioctl_alloc_memory_of_gpu_args) -> io::Result<()> {
    if argument.flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR != 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: without USERPTR no field is an address of this process.
    unsafe { retry(fd, IOC_ALLOC_MEMORY_OF_GPU, argument) }
}

/// Allocates a userptr buffer on `memory`, whose address replaces the mmap offset of other buffers.
///
/// # Errors
/// The kernel's errno.
pub fn alloc_userptr(
    fd: BorrowedFd<'_>,
    memory: &Mapping,
    argument: &mut kfd_ioctl_alloc_memory_of_gpu_args,
) -> io::Result<()> {
    argument.flags |= KFD_IOC_ALLOC_MEM_FLAGS_USERPTR;
    argument.mmap_offset = memory.address();
    argument.size = memory.len();
    // SAFETY: a `Mapping` is memory that others may write at any time; the kernel notices when it is
    // unmapped.
    unsafe { retry(fd, IOC_ALLOC_MEMORY_OF_GPU, argument) }
}

/// Maps a buffer into the page tables of GPUs. Returns the number of GPUs that the kernel mapped, also on
/// failure.
///
/// # Errors
/// The kernel's errno.
pub fn map_memory(fd: BorrowedFd<'_>, handle: u64, gpus: &[u32]) -> (u32, io::Result<()>) {
    let mut argument = kfd_ioctl_map_memory_to_gpu_args {
        handle,
        device_ids_array_ptr: gpus.as_ptr() as u64,
        n_devices: u32::try_from(gpus.len()).unwrap_or(u32::MAX),
        n_success: 0,
    };
    // SAFETY: the array is live and has that many entries; the kernel only reads it.
    let result = unsafe { retry(fd, IOC_MAP_MEMORY_TO_GPU, &mut argument) };
    (argument.n_success, result)
}

/// Unmaps a buffer from the page tables of GPUs. Returns the number of GPUs that the kernel unmapped, also on
/// failure.
///
/// # Errors
/// The kernel's errno.
pub fn unmap_memory(fd: BorrowedFd<'_>, handle: u64, gpus: &[u32]) -> (u32, io::Result<()>) {
    let mut argument = kfd_ioctl_unmap_memory_from_gpu_args {
        handle,
        device_ids_array_ptr: gpus.as_ptr() as u64,
        n_devices: u32::try_from(gpus.len()).unwrap_or(u32::MAX),
        n_success: 0,
    };
    // SAFETY: as `map_memory`.
    let result = unsafe { retry(fd, IOC_UNMAP_MEMORY_FROM_GPU, &mut argument) };
    (argument.n_success, result)
}

/// Returns the address ranges of every GPU of this process.
///
/// # Errors
/// The kernel's errno.
pub fn apertures(fd: BorrowedFd<'_>) -> io::Result<Vec<kfd_process_device_apertures>> {
    let mut argument = kfd_ioctl_get_process_apertures_new_args::zeroed();
    // With a count of 0, the kernel returns the number of entries. It refuses more entries than nodes.
    // SAFETY: it writes no entries.
    unsafe { retry(fd, IOC_GET_PROCESS_APERTURES_NEW, &mut argument) }?;
    let mut all = vec![kfd_process_device_apertures::zeroed(); argument.num_of_nodes as usize];
    argument.kfd_process_device_apertures_ptr = all.as_mut_ptr() as u64;
    // SAFETY: it writes at most that many entries of integers.
    unsafe { retry(fd, IOC_GET_PROCESS_APERTURES_NEW, &mut argument) }?;
    all.truncate(argument.num_of_nodes as usize);
    Ok(all)
}

/// Waits for one or all of `events`, for at most `milliseconds`. Returns `KFD_IOC_WAIT_RESULT_*`.
///
/// # Errors
/// The kernel's errno.
pub fn wait_events(
    fd: BorrowedFd<'_>,
    events: &mut [kfd_event_data],
    all: bool,
    milliseconds: u32,
) -> io::Result<u32> {
    let mut argument = kfd_ioctl_wait_events_args::zeroed();
    argument.events_ptr = events.as_mut_ptr() as u64;
    argument.num_events = u32::try_from(events.len()).unwrap_or(u32::MAX);
    argument.wait_for_all = u32::from(all);
    argument.timeout = milliseconds;
    // SAFETY: the kernel reads and writes that many live entries of integers.
    unsafe { retry(fd, IOC_WAIT_EVENTS, &mut argument) }?;
    Ok(argument.wait_result)
}

/// Returns size, flags and GPU of a dma-buf.
///
/// # Errors
/// The kernel's errno.
pub fn dmabuf_info(fd: BorrowedFd<'_>, dmabuf: BorrowedFd<'_>) -> io::Result<kfd_ioctl_get_dmabuf_info_args> {
    let mut argument = kfd_ioctl_get_dmabuf_info_args::zeroed();
    argument.dmabuf_fd = number(dmabuf);
    // SAFETY: no metadata buffer is given.
    unsafe { retry(fd, IOC_GET_DMABUF_INFO, &mut argument) }?;
    Ok(argument)
}

/// Sets (`KFD_IOCTL_SVM_OP_SET_ATTR`) or gets attributes of a range of this process's memory.
///
/// # Errors
/// The kernel's errno.
pub fn svm(
    fd: BorrowedFd<'_>,
    start: u64,
    size: u64,
    op: kfd_ioctl_svm_op,
    attributes: &mut [kfd_ioctl_svm_attribute],
) -> io::Result<()> {
    /// `struct kfd_ioctl_svm_args`: 24 bytes before its array.
    const HEADER: usize = 3;
    let count = u32::try_from(attributes.len()).unwrap_or(u32::MAX);
    let mut words = vec![start, size, u64::from(op) | u64::from(count) << 32];
    words.extend(attributes.iter().map(|a| u64::from(a.type_) | u64::from(a.value) << 32));
    // The size field of the number, 14 bits at bit 16, includes the array.
    let bytes = u32::try_from(attributes.len() * 8).ok().filter(|bytes| *bytes < (1 << 14) - 24);
    let bytes = bytes.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: the kernel reads and writes `words` by the size in the number, which is theirs. The range is an
    // address and not a borrow: its pages stay this process's, and the program requests the GPU's writes to
    // them.
    unsafe { raw(fd, IOC_SVM + (bytes << 16), words.as_mut_ptr().cast()) }?;
    for (attribute, word) in attributes.iter_mut().zip(&words[HEADER..]) {
        let (low, high) = (word & 0xffff_ffff, word >> 32);
        *attribute = kfd_ioctl_svm_attribute {
            type_: u32::try_from(low).unwrap_or_default(),
            value: u32::try_from(high).unwrap_or_default(),
        };
    }
    Ok(())
}

/// Exports a dma-buf of a buffer, with flags such as `libc::O_RDWR`.
///
/// # Errors
/// The kernel's errno.
pub fn export_dmabuf(fd: BorrowedFd<'_>, handle: u64, flags: u32) -> io::Result<OwnedFd> {
    let mut argument = kfd_ioctl_export_dmabuf_args { handle, flags, dmabuf_fd: KFD_INVALID_FD };
    // SAFETY: no field is an address.
    unsafe { retry(fd, IOC_EXPORT_DMABUF, &mut argument) }?;
    // SAFETY: the kernel has just installed it for this call.
    unsafe { adopt(argument.dmabuf_fd) }
}

/// Opens a stream of a GPU's system management events.
///
/// # Errors
/// The kernel's errno.
pub fn smi_events(fd: BorrowedFd<'_>, gpu: u32) -> io::Result<OwnedFd> {
    let mut argument = kfd_ioctl_smi_events_args { gpuid: gpu, anon_fd: KFD_INVALID_FD };
    // SAFETY: no field is an address.
    unsafe { retry(fd, IOC_SMI_EVENTS, &mut argument) }?;
    // SAFETY: the kernel has just installed it for this call.
    unsafe { adopt(argument.anon_fd) }
}

/// Makes a checkpoint operation with its arrays, once. Returns the dma-buf of each buffer that the kernel
/// exported.
///
/// # Errors
/// The kernel's errno; counts in `argument` are those that the kernel left. EINVAL without a call if a count
/// in `argument` exceeds its array.
pub fn criu(
    fd: BorrowedFd<'_>,
    argument: &mut kfd_ioctl_criu_args,
    devices: &mut [kfd_criu_device_bucket],
    bos: &mut [kfd_criu_bo_bucket],
    private: &mut [u8],
) -> io::Result<Vec<Option<OwnedFd>>> {
    let fits = argument.num_devices as usize <= devices.len()
        && argument.num_bos as usize <= bos.len()
        && argument.priv_data_size <= private.len() as u64;
    if !fits {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    argument.devices = devices.as_mut_ptr() as u64;
    argument.bos = bos.as_mut_ptr() as u64;
    argument.priv_data = private.as_mut_ptr() as u64;
    let exports = [KFD_CRIU_OP_CHECKPOINT, KFD_CRIU_OP_RESTORE].contains(&argument.op);
    // SAFETY: the three addresses are of live exclusive slices of integers, no shorter than the counts say.
    unsafe { once(fd, IOC_CRIU_OP, argument) }?;
    let exported = bos.iter().take(if exports { argument.num_bos as usize } else { 0 });
    let adopt = |bo: &kfd_criu_bo_bucket| match bo.dmabuf_fd {
        KFD_INVALID_FD => Ok(None),
        // SAFETY: these two operations install a descriptor for this call in every other entry.
        fd => unsafe { adopt(fd) }.map(Some),
    };
    // All descriptors are owned before an error of one returns.
    let adopted: Vec<_> = exported.map(adopt).collect();
    adopted.into_iter().collect()
}

/// Returns the fields of a memory exception event, or zeros for other kinds.
#[must_use]
pub fn memory_exception(event: &kfd_event_data) -> kfd_hsa_memory_exception_data {
    // SAFETY: all members of the union are integers, and this one is the largest.
    unsafe { event.__bindgen_anon_1.memory_exception_data }
}

/// Returns a descriptor as the kernel's structs contain it.
#[must_use]
pub fn number(fd: BorrowedFd<'_>) -> u32 {
    // A descriptor is never negative.
    fd.as_raw_fd().unsigned_abs()
}

/// Takes ownership of a descriptor that the kernel has installed and named in a struct, and sets
/// close-on-exec. Checkpoint operations install dma-bufs without it.
///
/// # Errors
/// `number` is not an open descriptor of this process.
///
/// # Safety
/// The kernel has installed `number` in the call just made, and nothing owns it yet.
unsafe fn adopt(number: u32) -> io::Result<OwnedFd> {
    let fd = i32::try_from(number).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    // SAFETY: a descriptor number refers to no memory.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and the caller guarantees that nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
