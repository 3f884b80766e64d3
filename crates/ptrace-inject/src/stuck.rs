// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that do not stop, and whether they may be left alone.
//!
//! A thread stops when it next would run its own code. One that stays in the kernel does not: it sleeps and must not be
//! disturbed (a disk, a parent in vfork), or it spins: a fault in the kernel (`read(2)` into a watched page) is broken
//! off by fatal signals only, and with any other one pending it is tried again at once, for ever
//! (`arch/x86/mm/fault.c: do_user_addr_fault`).

use std::fmt;

use crate::abi::Tid;
use crate::proc;

/// Time on a CPU after which a thread that was asked to stop is in the kernel for certain: its own code it would have
/// left at the first interrupt. Long enough to have taken any lock it wanted without sleeping.
const SURELY_IN_KERNEL_NS: u64 = 3_000_000;

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

/// A thread that was asked to stop and has not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    /// The thread.
    pub tid: i32,
    /// Why it does not stop, as far as it can be told.
    pub reason: Reason,
}

/// Why a thread does not stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// It has run in the kernel since: it waits there for a page of a userfaultfd, or has much to do.
    Spins,
    /// It sleeps in a system call, of this number; in a page fault of its own if that is -1.
    Sleeps(i64),
    /// Not told: it has not run since.
    Unknown,
}

impl Stuck {
    /// Whether mappings can be changed without it: it is not about to change them itself. (One that spins has run for
    /// so long that a change it asked for is made; a change begins with a lock, and who waits for that sleeps.)
    #[must_use]
    pub fn is_harmless(&self) -> bool {
        match self.reason {
            Reason::Spins => true,
            Reason::Sleeps(call) => !CHANGES_MAPPINGS.contains(&call),
            Reason::Unknown => false,
        }
    }
}

impl fmt::Display for Stuck {
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

/// Tells why a thread does not stop that had been `since` nanoseconds on a CPU when asked to.
pub(crate) fn reason(tid: Tid, since: Option<u64>) -> Reason {
    if let Some(call) = proc::call(tid) {
        return Reason::Sleeps(call);
    }
    match (since, proc::cpu_time(tid)) {
        (Some(since), Some(now)) if now.saturating_sub(since) >= SURELY_IN_KERNEL_NS => Reason::Spins,
        _ => Reason::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_threads_that_cannot_change_mappings_are_harmless() {
        let harmless = |reason| Stuck { tid: 1, reason }.is_harmless();
        assert!(harmless(Reason::Spins));
        assert!(harmless(Reason::Sleeps(libc::SYS_read)));
        assert!(harmless(Reason::Sleeps(libc::SYS_vfork)));
        assert!(!harmless(Reason::Sleeps(libc::SYS_munmap)));
        assert!(!harmless(Reason::Unknown));
    }
}
