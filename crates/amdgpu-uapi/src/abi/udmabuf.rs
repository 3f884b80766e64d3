// SPDX-License-Identifier: MIT OR Apache-2.0
//! `/dev/udmabuf`: a dma-buf of ordinary shared memory that GPUs import (`include/uapi/linux/udmabuf.h`).

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use super::call::raw;

const UDMABUF_CREATE: u32 = 0x4018_7542;
const UDMABUF_FLAGS_CLOEXEC: u32 = 1;

#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

// The size in the number is the struct's.
const _: () = assert!(size_of::<Create>() == ((UDMABUF_CREATE >> 16) & 0x3fff) as usize);

/// Creates a dma-buf of `size` bytes of a memfd from `offset`, both in whole pages. The memfd must be sealed
/// against shrinking, and not against writing. Its pages are pinned until the dma-buf is closed.
///
/// # Errors
/// The kernel's errno: EINVAL for another memfd, or for more than the module's `size_limit_mb` (64).
pub fn create(device: BorrowedFd<'_>, memfd: BorrowedFd<'_>, offset: u64, size: u64) -> io::Result<OwnedFd> {
    let memfd = memfd.as_raw_fd().unsigned_abs();
    let mut argument = Create { memfd, flags: UDMABUF_FLAGS_CLOEXEC, offset, size };
    // SAFETY: this number takes this struct, and no field is an address.
    let fd = unsafe { raw(device, UDMABUF_CREATE, std::ptr::from_mut(&mut argument).cast()) }?;
    // SAFETY: the kernel has just installed it for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
