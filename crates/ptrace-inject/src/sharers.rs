// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds processes that share another's memory: children of vfork before their exec, and clones with
//! CLONE_VM.

use rewake_process::kcmp::same_memory;

use crate::abi::Tid;
use crate::error::Error;
use crate::proc;

/// Refuses a process whose memory any other process shares.
pub(crate) fn refuse_any(pid: Tid) -> Result<(), Error> {
    refuse(pid, &proc::processes().map_err(Error::read("/proc"))?)
}

/// Refuses a process whose memory a child of it shares.
pub(crate) fn refuse_children(pid: Tid) -> Result<(), Error> {
    refuse(pid, &proc::children(pid))
}

fn refuse(pid: Tid, others: &[Tid]) -> Result<(), Error> {
    // An ending thread has no address space, and would seem to share the kernel's.
    while let Some(thread) = proc::threads(pid).into_iter().find(|tid| proc::has_memory(*tid)) {
        let is_same = |other: Tid| same_memory(thread, other).unwrap_or(false);
        let shares = |other: &Tid| *other != pid && is_same(*other) && proc::has_memory(*other);
        let with: Vec<Tid> = others.iter().copied().filter(shares).collect();
        if with.is_empty() {
            return Ok(());
        }
        if with.iter().all(|other| is_same(*other)) {
            return Err(Error::SharedMemory { pid, with });
        }
    }
    Err(Error::Ended { pid })
}
