// SPDX-License-Identifier: MIT OR Apache-2.0
//! Identifies the process. A pid does not: a restored task may have CRIU's own number in its pid namespace.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Distinguishes the process that made it from its forks: a byte that the kernel clears in forks
/// (`MADV_WIPEONFORK`).
#[derive(Debug)]
pub(crate) struct ProcessMark {
    mark: &'static AtomicBool,
}

impl ProcessMark {
    /// Marks this process, for as long as it lives.
    pub(crate) fn new() -> io::Result<Self> {
        // The kernel maps whole pages; forks get a page of zeros instead.
        let len = size_of::<AtomicBool>();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping of the kernel's choice changes no existing mapping.
        let page =
            unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: exactly the mapping just made, which nothing refers to yet.
        if unsafe { libc::madvise(page, len, libc::MADV_WIPEONFORK) } < 0 {
            let error = io::Error::last_os_error();
            // SAFETY: as above; the page was never used.
            unsafe { libc::munmap(page, len) };
            return Err(error);
        }
        // SAFETY: a page of zeros, aligned and never unmapped, has a valid AtomicBool: false. A fork's copy
        // is such a page, too.
        let mark = unsafe { &*page.cast::<AtomicBool>() };
        mark.store(true, Ordering::Relaxed);
        Ok(Self { mark })
    }

    /// Whether this is the process that made the mark.
    pub(crate) fn is_here(&self) -> bool {
        self.mark.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_does_not_have_the_mark() {
        let mark = ProcessMark::new().unwrap();
        // SAFETY: the child only reads memory and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(mark.is_here())) };
        }
        let mut status = -1;
        // SAFETY: `status` is live; the child is this process's.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0, "the fork has the mark");
        assert!(mark.is_here());
    }
}
