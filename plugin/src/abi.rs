// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C library's calls that no crate has, descriptors that come in messages, and the process
//! that outlives CRIU.

mod watchdog;

use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

pub(crate) use watchdog::{OnCriuDeath, fork as fork_guard, task};

/// A named semaphore with the value 1; one that is there is left alone.
pub(crate) fn make_semaphore(name: &CStr, mode: u32) -> io::Result<()> {
    // SAFETY: the name ends with a zero; mode and value are the arguments that O_CREAT asks for.
    let semaphore = unsafe { libc::sem_open(name.as_ptr(), libc::O_CREAT, mode, 1_u32) };
    if semaphore == libc::SEM_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else has it.
    match unsafe { libc::sem_close(semaphore) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes over descriptors that have just been received in a message.
pub(crate) fn adopt(received: Vec<RawFd>) -> impl Iterator<Item = OwnedFd> {
    // SAFETY: the kernel has installed them for this process in the call that gave their numbers, and nobody else knows.
    received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}
