// SPDX-License-Identifier: MIT OR Apache-2.0
//! The plugin's unsafe code: calls of the C library that no crate has, received descriptors, and the CRIU
//! watchdog.

mod watchdog;

use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

pub(crate) use watchdog::{OnCriuDeath, fork as fork_watchdog};

/// Creates a named semaphore with the value 1. An existing one stays as it is.
pub(crate) fn make_semaphore(name: &CStr, mode: u32) -> io::Result<()> {
    // SAFETY: the name ends with a zero; mode and value are the arguments that O_CREAT asks for.
    let semaphore = unsafe { libc::sem_open(name.as_ptr(), libc::O_CREAT, mode, 1_u32) };
    if semaphore == libc::SEM_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: opened above, and no other code has it.
    match unsafe { libc::sem_close(semaphore) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes ownership of descriptors that were received in a message.
pub(crate) fn adopt(received: Vec<RawFd>) -> impl Iterator<Item = OwnedFd> {
    // SAFETY: the kernel installed them in the call that returned their numbers, and no other code has these
    // numbers.
    received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}
