// SPDX-License-Identifier: MIT OR Apache-2.0
//! One safe function for each ioctl of a render node that Rewake uses. Errors are the kernel's errno.

use std::io;
use std::os::fd::BorrowedFd;

use super::call::{Argument, retry};
use super::generated::*;
use super::memory::Mapping;

/// Creates, frees or queries a submission context.
///
/// # Errors
/// The kernel's errno.
pub fn ctx(fd: BorrowedFd<'_>, argument: &mut drm_amdgpu_ctx) -> io::Result<()> {
    // SAFETY: no field is an address.
    unsafe { retry(fd, DRM_AMD_CTX, argument) }
}

/// Returns an answer of the INFO ioctl. The kernel writes at most the struct's size, older ones less.
///
/// # Errors
/// The kernel's errno.
pub fn info<A: Argument>(fd: BorrowedFd<'_>, query: u32, hardware: u32) -> io::Result<A> {
    let mut answer = A::zeroed();
    let mut argument = drm_amdgpu_info::zeroed();
    argument.return_pointer = std::ptr::from_mut(&mut answer) as u64;
    argument.return_size = u32::try_from(size_of::<A>()).unwrap_or(0);
    argument.query = query;
    argument.__bindgen_anon_1.query_hw_ip.type_ = hardware;
    // SAFETY: `answer` is live, of that size, and takes any bytes.
    unsafe { retry(fd, DRM_AMD_INFO, &mut argument) }?;
    Ok(answer)
}

/// Creates a submission context, and returns its number.
///
/// # Errors
/// The kernel's errno.
pub fn ctx_alloc(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut argument = drm_amdgpu_ctx::zeroed();
    argument.in_.op = AMDGPU_CTX_OP_ALLOC_CTX;
    ctx(fd, &mut argument)?;
    // SAFETY: integers, and the kernel has written this side of the union.
    Ok(unsafe { argument.out.alloc.ctx_id })
}

/// Returns the events of a context since its creation: `AMDGPU_CTX_QUERY2_FLAGS_*`.
///
/// # Errors
/// The kernel's errno.
pub fn ctx_state(fd: BorrowedFd<'_>, context: u32) -> io::Result<u64> {
    let mut argument = drm_amdgpu_ctx::zeroed();
    argument.in_.op = AMDGPU_CTX_OP_QUERY_STATE2;
    argument.in_.ctx_id = context;
    ctx(fd, &mut argument)?;
    // SAFETY: integers, and the kernel has written this side of the union.
    Ok(unsafe { argument.out.state.flags })
}

/// Returns the stable power state of a context's GPU: `AMDGPU_CTX_STABLE_PSTATE_*`.
///
/// # Errors
/// The kernel's errno.
pub fn ctx_stable_pstate(fd: BorrowedFd<'_>, context: u32) -> io::Result<u32> {
    let mut argument = drm_amdgpu_ctx::zeroed();
    argument.in_.op = AMDGPU_CTX_OP_GET_STABLE_PSTATE;
    argument.in_.ctx_id = context;
    ctx(fd, &mut argument)?;
    // SAFETY: integers, and the kernel has written this side of the union.
    Ok(unsafe { argument.out.pstate.flags })
}

/// Reads or writes (`AMDGPU_GEM_METADATA_OP_*`) what a GEM buffer's users say of its layout.
///
/// # Errors
/// The kernel's errno.
pub fn gem_metadata(fd: BorrowedFd<'_>, argument: &mut drm_amdgpu_gem_metadata) -> io::Result<()> {
    // SAFETY: no field is an address.
    unsafe { retry(fd, DRM_AMD_GEM_METADATA, argument) }
}

/// Creates a GEM buffer of a render node, and returns its handle.
///
/// # Errors
/// The kernel's errno.
pub fn gem_alloc(fd: BorrowedFd<'_>, size: u64, domains: u64, flags: u64) -> io::Result<u32> {
    gem_create(fd, drm_amdgpu_gem_create_in { bo_size: size, alignment: 4096, domains, domain_flags: flags })
}

/// Creates a GEM buffer of a render node with all parameters, and returns its handle.
///
/// # Errors
/// The kernel's errno.
pub fn gem_create(fd: BorrowedFd<'_>, wanted: drm_amdgpu_gem_create_in) -> io::Result<u32> {
    let mut argument = drm_amdgpu_gem_create::zeroed();
    argument.in_ = wanted;
    // SAFETY: no field is an address.
    unsafe { retry(fd, DRM_AMD_GEM_CREATE, &mut argument) }?;
    // SAFETY: integers, and the kernel has written this side of the union.
    Ok(unsafe { argument.out.handle })
}

/// Returns the `mmap` offset of a GEM buffer.
///
/// # Errors
/// The kernel's errno.
pub fn gem_offset(fd: BorrowedFd<'_>, handle: u32) -> io::Result<u64> {
    let mut argument = drm_amdgpu_gem_mmap::zeroed();
    argument.in_.handle = handle;
    // SAFETY: no field is an address.
    unsafe { retry(fd, DRM_AMD_GEM_MMAP, &mut argument) }?;
    // SAFETY: integers, and the kernel has written this side of the union.
    Ok(unsafe { argument.out.addr_ptr })
}

/// Waits for a submission, and returns whether it is done.
///
/// # Errors
/// The kernel's errno.
pub fn wait_submission(fd: BorrowedFd<'_>, wanted: drm_amdgpu_wait_cs_in) -> io::Result<bool> {
    let mut argument = drm_amdgpu_wait_cs::zeroed();
    argument.in_ = wanted;
    // SAFETY: no field is an address.
    unsafe { retry(fd, DRM_AMD_WAIT_CS, &mut argument) }?;
    // SAFETY: integers, and the kernel has written this side of the union.
    Ok(unsafe { argument.out.status } == 0)
}

/// Changes the GPU page table of a render node. It uses the 6.12 part of the struct, without timelines of
/// syncobjs.
///
/// # Errors
/// The kernel's errno.
pub fn gem_va(fd: BorrowedFd<'_>, argument: &mut drm_amdgpu_gem_va) -> io::Result<()> {
    argument.num_syncobj_handles = 0;
    argument.input_fence_syncobj_handles = 0;
    // SAFETY: the one field that is an address of this process has just been cleared.
    unsafe { retry(fd, DRM_AMD_GEM_VA, argument) }
}

/// Returns the parameters of a GEM buffer, with `alignment` in bytes.
///
/// # Errors
/// The kernel's errno; ENOENT if the handle does not exist.
pub fn gem_create_info(fd: BorrowedFd<'_>, handle: u32) -> io::Result<drm_amdgpu_gem_create_in> {
    let mut info = drm_amdgpu_gem_create_in::zeroed();
    let mut argument = drm_amdgpu_gem_op {
        handle,
        op: AMDGPU_GEM_OP_GET_GEM_CREATE_INFO,
        value: std::ptr::from_mut(&mut info) as u64,
        ..drm_amdgpu_gem_op::zeroed()
    };
    // SAFETY: `info` is live, of the size that this operation writes, and takes any bytes.
    unsafe { retry(fd, DRM_AMD_GEM_OP, &mut argument) }?;
    Ok(info)
}

/// Returns all GEM buffers with a handle in a render node's file. Linux 7.0 and newer.
///
/// # Errors
/// The kernel's errno; EINVAL if the kernel has no such call.
pub fn gem_list(fd: BorrowedFd<'_>) -> io::Result<Vec<drm_amdgpu_gem_list_handles_entry>> {
    let empty = drm_amdgpu_gem_list_handles_entry::zeroed();
    grow_list(empty, |entries| {
        let mut argument = drm_amdgpu_gem_list_handles::zeroed();
        argument.entries = entries.as_mut_ptr() as u64;
        argument.num_entries = u32::try_from(entries.len()).unwrap_or(u32::MAX);
        // SAFETY: as many entries as it says are live, and take any bytes.
        unsafe { retry(fd, DRM_AMD_GEM_LIST_HANDLES, &mut argument) }?;
        Ok(argument.num_entries)
    })
}

/// Returns the mappings of a GEM buffer in the render node's address space. Linux 7.0 and newer.
///
/// # Errors
/// The kernel's errno; EINVAL if the kernel has no such call.
pub fn gem_mappings(fd: BorrowedFd<'_>, handle: u32) -> io::Result<Vec<drm_amdgpu_gem_vm_entry>> {
    grow_list(drm_amdgpu_gem_vm_entry::zeroed(), |entries| {
        let mut argument = drm_amdgpu_gem_op {
            handle,
            op: AMDGPU_GEM_OP_GET_MAPPING_INFO,
            value: entries.as_mut_ptr() as u64,
            num_entries: u32::try_from(entries.len()).unwrap_or(u32::MAX),
            ..drm_amdgpu_gem_op::zeroed()
        };
        // SAFETY: as many entries as it says are live, and take any bytes.
        unsafe { retry(fd, DRM_AMD_GEM_OP, &mut argument) }?;
        Ok(argument.num_entries)
    })
}

/// Calls `fill`, which returns the number of entries, with a longer list until it is long enough.
fn grow_list<A: Argument>(empty: A, fill: impl Fn(&mut [A]) -> io::Result<u32>) -> io::Result<Vec<A>> {
    let mut entries = vec![empty; 8];
    loop {
        let count = fill(&mut entries)? as usize;
        if count <= entries.len() {
            entries.truncate(count);
            return Ok(entries);
        }
        entries = vec![empty; count];
    }
}

/// Creates a GEM buffer on `memory` (`AMDGPU_GEM_USERPTR_*` flags), and returns its handle.
///
/// # Errors
/// The kernel's errno.
pub fn gem_userptr(fd: BorrowedFd<'_>, memory: &Mapping, flags: u32) -> io::Result<u32> {
    let mut argument =
        drm_amdgpu_gem_userptr { addr: memory.address(), size: memory.len(), flags, handle: 0 };
    // SAFETY: as `alloc_userptr`.
    unsafe { retry(fd, DRM_AMD_GEM_USERPTR, &mut argument) }?;
    Ok(argument.handle)
}

/// Creates a list of GEM buffers for submissions, and returns its handle.
///
/// # Errors
/// The kernel's errno.
pub fn bo_list_create(fd: BorrowedFd<'_>, buffers: &[drm_amdgpu_bo_list_entry]) -> io::Result<u32> {
    let mut argument = drm_amdgpu_bo_list::zeroed();
    argument.in_ = bo_list(buffers);
    // SAFETY: the entries are live, as many and as large as the struct says, and only read.
    unsafe { retry(fd, DRM_AMD_BO_LIST, &mut argument) }?;
    // SAFETY: integers, and the kernel has written this side of the union.
    Ok(unsafe { argument.out.list_handle })
}

/// Destroys a list of GEM buffers.
///
/// # Errors
/// The kernel's errno.
pub fn bo_list_destroy(fd: BorrowedFd<'_>, list: u32) -> io::Result<()> {
    let mut argument = drm_amdgpu_bo_list::zeroed();
    argument.in_.operation = AMDGPU_BO_LIST_OP_DESTROY;
    argument.in_.list_handle = list;
    // SAFETY: no entries are given.
    unsafe { retry(fd, DRM_AMD_BO_LIST, &mut argument) }
}

fn bo_list(buffers: &[drm_amdgpu_bo_list_entry]) -> drm_amdgpu_bo_list_in {
    drm_amdgpu_bo_list_in {
        operation: AMDGPU_BO_LIST_OP_CREATE,
        list_handle: 0,
        bo_number: u32::try_from(buffers.len()).unwrap_or(u32::MAX),
        bo_info_size: 8,
        bo_info_ptr: buffers.as_ptr() as u64,
    }
}

/// A part of a command submission.
#[derive(Debug, Clone, Copy)]
pub enum SubmissionChunk<'a> {
    /// Commands to run.
    Commands(&'a drm_amdgpu_cs_chunk_ib),
    /// A 64-bit word that the GPU writes the submission's number to.
    Fence(&'a drm_amdgpu_cs_chunk_fence),
    /// Submissions to wait for.
    Dependencies(&'a [drm_amdgpu_cs_chunk_dep]),
    /// Buffers that the submission uses, instead of a list.
    Buffers(&'a [drm_amdgpu_bo_list_entry]),
    /// Points to wait for.
    TimelineWait(&'a [drm_amdgpu_cs_chunk_syncobj]),
    /// Points to signal.
    TimelineSignal(&'a [drm_amdgpu_cs_chunk_syncobj]),
    /// Binary syncobjs to wait for, by handle.
    SyncobjIn(&'a [u32]),
    /// Binary syncobjs to signal, by handle.
    SyncobjOut(&'a [u32]),
}

/// The most parts of a submission: one of each kind.
pub const CHUNKS: usize = 8;

/// Submits commands, and returns the submission's number in its context and ring. It allocates nothing.
///
/// # Errors
/// The kernel's errno; E2BIG without a call for more than [`CHUNKS`] parts.
pub fn submit(
    fd: BorrowedFd<'_>,
    context: u32,
    list: u32,
    chunks: &[SubmissionChunk<'_>],
) -> io::Result<u64> {
    if chunks.len() > CHUNKS {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    }
    let mut lists =
        [drm_amdgpu_bo_list_in { operation: u32::MAX, list_handle: u32::MAX, ..bo_list(&[]) }; CHUNKS];
    let mut headers = [drm_amdgpu_cs_chunk { chunk_id: 0, length_dw: 0, chunk_data: 0 }; CHUNKS];
    let mut addresses = [0_u64; CHUNKS];
    for (index, chunk) in chunks.iter().enumerate() {
        if let SubmissionChunk::Buffers(buffers) = chunk {
            lists[index] =
                drm_amdgpu_bo_list_in { operation: u32::MAX, list_handle: u32::MAX, ..bo_list(buffers) };
        }
        headers[index] = header(chunk, &lists[index]);
        addresses[index] = std::ptr::from_ref(&headers[index]) as u64;
    }
    let mut argument = drm_amdgpu_cs::zeroed();
    argument.in_ = drm_amdgpu_cs_in {
        ctx_id: context,
        bo_list_handle: list,
        num_chunks: u32::try_from(chunks.len()).unwrap_or(u32::MAX),
        flags: 0,
        chunks: addresses.as_ptr() as u64,
    };
    // SAFETY: every address is of something live in this function or its arguments, as long as its count
    // says, and
    // only read.
    unsafe { retry(fd, DRM_AMD_CS, &mut argument) }?;
    // SAFETY: integers, and the kernel has written this side of the union.
    Ok(unsafe { argument.out.handle })
}

fn header(chunk: &SubmissionChunk<'_>, list: &drm_amdgpu_bo_list_in) -> drm_amdgpu_cs_chunk {
    fn of<T>(chunk_id: u32, entries: &[T]) -> drm_amdgpu_cs_chunk {
        let length_dw = u32::try_from(size_of_val(entries) / 4).unwrap_or(u32::MAX);
        drm_amdgpu_cs_chunk { chunk_id, length_dw, chunk_data: entries.as_ptr() as u64 }
    }
    match chunk {
        SubmissionChunk::Commands(commands) => of(AMDGPU_CHUNK_ID_IB, std::slice::from_ref(*commands)),
        SubmissionChunk::Fence(fence) => of(AMDGPU_CHUNK_ID_FENCE, std::slice::from_ref(*fence)),
        SubmissionChunk::Dependencies(others) => of(AMDGPU_CHUNK_ID_DEPENDENCIES, others),
        SubmissionChunk::Buffers(_) => of(AMDGPU_CHUNK_ID_BO_HANDLES, std::slice::from_ref(list)),
        SubmissionChunk::TimelineWait(points) => of(AMDGPU_CHUNK_ID_SYNCOBJ_TIMELINE_WAIT, points),
        SubmissionChunk::TimelineSignal(points) => of(AMDGPU_CHUNK_ID_SYNCOBJ_TIMELINE_SIGNAL, points),
        SubmissionChunk::SyncobjIn(handles) => of(AMDGPU_CHUNK_ID_SYNCOBJ_IN, handles),
        SubmissionChunk::SyncobjOut(handles) => of(AMDGPU_CHUNK_ID_SYNCOBJ_OUT, handles),
    }
}
