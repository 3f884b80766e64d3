// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the state of processes from `/proc`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};

/// Returns a process and its descendants, parents first.
pub(crate) fn tree(root: i32) -> Vec<i32> {
    let mut found = BTreeSet::from([root]);
    let mut tree = vec![root];
    let mut next = 0;
    while let Some(pid) = tree.get(next) {
        let new: Vec<i32> = children(*pid).into_iter().filter(|child| found.insert(*child)).collect();
        tree.extend(new);
        next += 1;
    }
    tree
}

/// Returns the children of a process's threads; none where it has ended.
fn children(pid: i32) -> Vec<i32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok());
    let lists: Vec<String> = lists.collect();
    lists.iter().flat_map(|list| list.split_ascii_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}

/// Returns a process's name, for messages.
pub(crate) fn name(pid: i32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
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
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?.trim().parse().ok()?;
    (tracer > 0 && name(tracer).starts_with("rewake")).then_some(tracer)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_flag_is_a_word_of_its_own() {
        assert!(has_flag(b" rd wr mr um", b"um") && has_flag(b" um sd", b"um"));
        assert!(!has_flag(b" rd num umx sd", b"um"));
    }

    #[test]
    fn a_tree_has_its_root_first_and_all_descendants() {
        // A shell that waits, with a child that has a child.
        let script = "(sleep 1000; true) & wait";
        let mut shell = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let root = shell.id().cast_signed();
        let whole = (0..1000).map(|_| tree(root)).find(|tree| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            tree.len() == 3 && name(tree[2]) == "sleep"
        });
        let whole = whole.unwrap_or_else(|| panic!("{:?}", tree(root)));
        assert_eq!(whole[0], root);
        let own = tree(std::process::id().cast_signed());
        assert!(whole.iter().all(|pid| own.contains(pid)), "{own:?}, {whole:?}");
        for pid in &whole[1..] {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(*pid), nix::sys::signal::Signal::SIGKILL)
                .unwrap();
        }
        shell.kill().unwrap();
        shell.wait().unwrap();
        assert_eq!(tree(root), [root], "a process that has ended has no children");
    }
}
