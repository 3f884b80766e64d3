// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much memory this process may fill: that of the host, and that of its control group.

use std::fs;
use std::path::{Path, PathBuf};

use rewake_process::proc::control_group;

/// Where the kernel mounts version 2 of the control groups.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Returns the bytes that this process can have without swap: free memory, and page cache that the kernel can
/// take back. None where the kernel does not say.
pub(crate) fn available() -> Option<u64> {
    let host = host_memory(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let own = control_group("self").ok().flatten();
    let limits = own.map(|own| group_memory(Path::new(CGROUPS), &own));
    Some(limits.flatten().map_or(host, |of_groups| of_groups.min(host)))
}

/// Reads `MemAvailable` (proc_meminfo(5)).
fn host_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Returns the least memory that is left in a control group and those that it is in. None: no group has a
/// limit.
fn group_memory(root: &Path, group: &Path) -> Option<u64> {
    group.ancestors().filter_map(|group| left(&root.join(group))).min()
}

/// Returns what a group's limit leaves. The kernel takes the group's page cache back at the limit.
fn left(group: &Path) -> Option<u64> {
    let number = |name: PathBuf| fs::read_to_string(name).ok()?.trim().parse::<u64>().ok();
    let limit = number(group.join("memory.max"))?;
    let used = number(group.join("memory.current"))?;
    let stat = fs::read_to_string(group.join("memory.stat")).ok()?;
    let count = |key| {
        let line = stat.lines().find_map(|line| line.strip_prefix(key));
        line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let page_cache = count("active_file ") + count("inactive_file ");
    Some(limit.saturating_sub(used.saturating_sub(page_cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_memory() {
        assert!(available().unwrap() > 1 << 20);
        assert_eq!(host_memory("MemFree: 3 kB\nMemAvailable:   5 kB\n"), Some(5 << 10));
        assert_eq!(host_memory("MemFree: 3 kB\n"), None);
    }

    #[test]
    fn the_narrowest_control_group_decides() {
        let root = tempfile::tempdir().unwrap();
        let group = |name: &str, max: &str, current: &str, stat: &str| {
            let folder = root.path().join(name);
            fs::create_dir_all(&folder).unwrap();
            for (file, text) in [("memory.max", max), ("memory.current", current), ("memory.stat", stat)] {
                fs::write(folder.join(file), text).unwrap();
            }
        };
        group("a/b/c", "max\n", "10\n", "anon 10\n");
        assert_eq!(group_memory(root.path(), Path::new("a/b/c")), None);
        group("a/b", "1000\n", "700\n", "anon 100\nactive_file 250\ninactive_file 350\n");
        assert_eq!(group_memory(root.path(), Path::new("a/b/c")), Some(900));
        group("a", "800\n", "700\n", "anon 700\n");
        assert_eq!(group_memory(root.path(), Path::new("a/b/c")), Some(100));
        group("a", "500\n", "700\n", "anon 700\n");
        assert_eq!(group_memory(root.path(), Path::new("a/b/c")), Some(0));
    }
}
