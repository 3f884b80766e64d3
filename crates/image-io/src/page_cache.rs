// SPDX-License-Identifier: MIT OR Apache-2.0
//! The page cache: which pages of a file it has (cachestat(2), Linux 6.5), and reads of them alone
//! (RWF_NOWAIT).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use crate::units::PAGE;

/// System call number; the same on every architecture but alpha.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of `linux/mman.h`.
#[repr(C)]
struct CachestatRange {
    off: u64,
    len: u64,
}

/// `struct cachestat` of `linux/mman.h`. All fields count pages.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Cachestat {
    pub(crate) cached: u64,
    pub(crate) dirty: u64,
    pub(crate) writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

const _: () = assert!(size_of::<CachestatRange>() == 16 && size_of::<Cachestat>() == 40);

/// Returns the state of a range of at least one byte.
pub(crate) fn cachestat(file: &File, offset: u64, len: u64) -> io::Result<Cachestat> {
    let range = CachestatRange { off: offset, len };
    let mut stat = Cachestat::default();
    // SAFETY: range and stat have the kernel's layout (sizes asserted above) and live across the call; the
    // kernel reads the one and writes the other.
    let rc = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0 as libc::c_uint)
    };
    if rc == 0 { Ok(stat) } else { Err(io::Error::last_os_error()) }
}

/// Reads from the page cache. Returns the bytes up to the first page that it does not have.
pub(crate) fn read_cached(file: &File, offset: u64, into: &mut [u8]) -> io::Result<usize> {
    let vector = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    // SAFETY: the vector is one range of writable bytes that no one else uses during the call.
    let read = unsafe {
        libc::preadv2(file.as_raw_fd(), &raw const vector, 1, offset.cast_signed(), libc::RWF_NOWAIT)
    };
    match usize::try_from(read) {
        Ok(read) => Ok(read),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EAGAIN) => Ok(0),
            error => Err(error),
        },
    }
}

/// Number of pages that a range of at least one byte lies in.
pub(crate) fn pages(offset: u64, len: u64) -> u64 {
    (offset + len).div_ceil(PAGE as u64) - offset / PAGE as u64
}
