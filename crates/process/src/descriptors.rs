// SPDX-License-Identifier: MIT OR Apache-2.0
//! The descriptor table of this process.

use std::ffi::CStr;
use std::fs::File;
use std::io;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::check;

/// Closes every descriptor but the three standard ones: a parent may not have marked them to be closed on
/// exec.
///
/// # Safety
/// Nothing in this process may own such a descriptor: only a program that has just started may call it.
///
/// # Errors
/// ENOSYS: the kernel is older than Linux 5.9.
pub unsafe fn close_inherited() -> io::Result<()> {
    // SAFETY: integers only, and the caller's promise.
    check(unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) }).map(drop)
}

/// Makes an anonymous memory file of `len` bytes, closed on exec.
///
/// # Errors
/// EMFILE, ENOMEM.
pub fn memory_file(name: &CStr, len: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC)?);
    file.set_len(len)?;
    Ok(file)
}
