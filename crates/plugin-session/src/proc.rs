// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the state of processes from `/proc`.

use std::fs::File;
use std::io::{BufRead as _, BufReader};

pub(crate) use rewake_process::proc::name;

/// The most processes of a tree.
const MAX_PROCESSES: usize = 1 << 16;

/// Returns a process and its descendants, parents first.
pub(crate) fn tree(root: i32) -> Vec<i32> {
    rewake_process::proc::tree(root, MAX_PROCESSES)
}

/// Whether a mapping of the process is registered with a userfaultfd for missing pages: the flag `um` in
/// `/proc/PID/smaps` (`fs/proc/task_mmu.c: show_smap_vma_flags`).
pub(crate) fn has_registered_memory(pid: i32) -> bool {
    let Ok(smaps) = File::open(format!("/proc/{pid}/smaps")) else { return false };
    let mut lines = BufReader::with_capacity(64 << 10, smaps).split(b'\n').map_while(Result::ok);
    lines.any(|line| line.strip_prefix(b"VmFlags:").is_some_and(|flags| has_flag(flags, b"um")))
}

fn has_flag(flags: &[u8], flag: &[u8]) -> bool {
    flags.split(|byte| *byte == b' ').any(|found| found == flag)
}

/// Returns the process of Rewake that traces a process, if one does: it parks or removes a session's store.
pub(crate) fn our_tracer(pid: i32) -> Option<i32> {
    let tracer = rewake_process::proc::status(pid)?.tracer;
    (tracer > 0 && name(tracer).starts_with(b"rewake")).then_some(tracer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_a_word_of_its_own() {
        assert!(has_flag(b" rd wr mr um", b"um") && has_flag(b" um sd", b"um"));
        assert!(!has_flag(b" rd num umx sd", b"um"));
    }
}
