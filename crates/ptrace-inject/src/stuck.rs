// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that do not stop, and whether that is harmless.
//!
//! A thread stops before it next runs its own code. One that stays in the kernel does not stop. It may be in
//! uninterruptible sleep (a disk, a parent in vfork), or it may spin. Only fatal signals interrupt a page
//! fault in the kernel (`read(2)` into a page of a userfaultfd). With any other signal pending, the kernel
//! retries the fault at once, for ever (`arch/x86/mm/fault.c: do_user_addr_fault`).

use std::fmt;

/// System calls that change mappings (x86-64 numbers).
const CHANGES_MAPPINGS: [libc::c_long; 13] = [
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_pkey_mprotect,
    libc::SYS_remap_file_pages,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_shmat,
    libc::SYS_shmdt,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_prctl,
];

/// An interrupted thread that has not stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StuckThread {
    /// The thread.
    pub tid: i32,
    /// The reason, as far as known.
    pub reason: Reason,
}

/// The reason why a thread does not stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// It has run in the kernel since the interrupt: it waits for a page of a userfaultfd, or works long.
    Spins,
    /// It sleeps in the system call with this number, or in a page fault of its own (-1).
    Sleeps(i64),
    /// Unknown, because it has not run since.
    Unknown,
}

impl StuckThread {
    /// Returns whether mappings can be changed without this thread, because it will not change them itself. A
    /// spinning thread has run long enough to complete its change: a change begins with a lock, and a thread
    /// that waits for a lock sleeps.
    #[must_use]
    pub fn is_harmless(&self) -> bool {
        match self.reason {
            Reason::Spins => true,
            Reason::Sleeps(call) => !CHANGES_MAPPINGS.contains(&call),
            Reason::Unknown => false,
        }
    }
}

impl fmt::Display for StuckThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tid = self.tid;
        match self.reason {
            Reason::Spins => {
                write!(f, "thread {tid} waits in the kernel for a page (or has much to do there)")
            }
            Reason::Sleeps(-1) => write!(f, "thread {tid} sleeps in a page fault"),
            Reason::Sleeps(call) => write!(f, "thread {tid} sleeps in system call {call}"),
            Reason::Unknown => write!(f, "thread {tid} has not run"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_threads_that_cannot_change_mappings_are_harmless() {
        let harmless = |reason| StuckThread { tid: 1, reason }.is_harmless();
        assert!(harmless(Reason::Spins));
        assert!(harmless(Reason::Sleeps(libc::SYS_read)));
        assert!(harmless(Reason::Sleeps(libc::SYS_vfork)));
        assert!(!harmless(Reason::Sleeps(libc::SYS_munmap)));
        assert!(!harmless(Reason::Unknown));
    }
}
