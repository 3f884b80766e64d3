// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which process this is. A pid does not tell: a restored task may have CRIU's own number in a namespace of its own.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tells the process that made it from its forks: a byte that the kernel clears in them (`MADV_WIPEONFORK`).
#[derive(Debug)]
pub(crate) struct ProcessMark {
    here: &'static AtomicBool,
}

impl ProcessMark {
    /// Marks this process, for as long as it lives.
    pub(crate) fn new() -> io::Result<Self> {
        // The kernel gives whole pages; forks get a page of zeros in its place.
        let len = size_of::<AtomicBool>();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping of the kernel's choice touches nothing that exists.
        let page =
            unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: exactly the mapping just made, which nothing refers to yet.
        if unsafe { libc::madvise(page, len, libc::MADV_WIPEONFORK) } < 0 {
            let error = io::Error::last_os_error();
            // SAFETY: as above; it goes away unused.
            unsafe { libc::munmap(page, len) };
            return Err(error);
        }
        // SAFETY: a page of zeros, aligned, never unmapped, holds an AtomicBool: false. A fork's copy is such a page, too.
        let here = unsafe { &*page.cast::<AtomicBool>() };
        here.store(true, Ordering::Relaxed);
        Ok(Self { here })
    }

    /// Whether this is the process that made the mark.
    pub(crate) fn is_here(&self) -> bool {
        self.here.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_is_told_from_the_process_that_made_the_mark() {
        let mark = ProcessMark::new().unwrap();
        // SAFETY: the child only reads memory and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(mark.is_here())) };
        }
        let mut status = -1;
        // SAFETY: `status` is live; the child is ours.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0, "the fork takes itself for the process that made the mark");
        assert!(mark.is_here());
    }
}
