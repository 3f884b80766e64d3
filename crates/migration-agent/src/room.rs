// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether a host has room for a tree: memory, the memory that its cgroup permits, and disk space.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use nix::sys::statvfs::statvfs;
use rewake_process::maps::Mapping;
use rewake_process::names::{self, lines};
use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::folder::WORK;

const MIB: u64 = 1 << 20;
/// Bytes of disk space for each byte of lazy memory: the candidates, and the cache file of `rewake
/// lazy-pages`.
const COPIES: u64 = 2;

/// The memory of a tree, in bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TreeSize {
    /// In memory or swap; shared memory is counted once.
    pub(crate) resident: u64,
    /// Private and anonymous: sent before the freeze, or loaded by page faults.
    pub(crate) anonymous: u64,
}

impl TreeSize {
    /// Adds a process.
    pub(crate) fn add(&mut self, pid: i32) -> anyhow::Result<()> {
        let path = format!("/proc/{pid}/smaps_rollup");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let kib = |name: &str| field(&text, name).unwrap_or(0);
        self.resident += kib("Pss:") + kib("SwapPss:");
        self.anonymous += kib("Anonymous:") + kib("SwapPss:");
        Ok(())
    }
}

/// A field of a file whose lines are `NAME: NUMBER kB`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Bytes of private huge pages (MAP_HUGETLB) by the KiB that one has. They are no ordinary memory: a host has
/// as many as its user has reserved.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HugePages(BTreeMap<u64, u64>);

impl HugePages {
    /// Adds the memory of a process, from its `/proc/PID/smaps`.
    pub(crate) fn add(&mut self, smaps: &[u8]) {
        let (mut length, mut kib) = (0, 0);
        for line in lines(smaps) {
            if let Some(mapping) = Mapping::parse(line) {
                length = if mapping.is_shared() { 0 } else { mapping.end.saturating_sub(mapping.start) };
            } else if let Some(size) = names::field(line, "KernelPageSize:") {
                kib = size.trim_end_matches("kB").trim_ascii_end().parse().unwrap_or(0);
            } else if let Some(flags) = line.strip_prefix(b"VmFlags:")
                && flags.split(|byte| *byte == b' ').any(|flag| flag == b"ht")
                && length > 0
            {
                *self.0.entry(kib).or_default() += length;
            }
        }
    }

    /// What this host lacks of them.
    pub(crate) fn refused(&self) -> Vec<String> {
        let lacks = |(kib, bytes): (&u64, &u64)| {
            let folder = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB");
            let number = |name: &str| {
                let text = fs::read_to_string(format!("{folder}/{name}")).unwrap_or_default();
                text.trim_end().parse::<u64>().unwrap_or(0)
            };
            let more = number("nr_overcommit_hugepages").saturating_sub(number("surplus_hugepages"));
            let free = number("free_hugepages").saturating_sub(number("resv_hugepages")) + more;
            let needed = bytes.div_ceil(kib.saturating_mul(1024).max(1));
            (needed > free).then(|| {
                format!(
                    "the program has {needed} huge pages of {kib} KiB, and {free} are free here: raise \
                     {folder}/nr_hugepages"
                )
            })
        };
        self.0.iter().filter_map(lacks).collect()
    }
}

/// What this host lacks for a tree.
pub(crate) fn refused(size: TreeSize) -> anyhow::Result<Vec<String>> {
    let mut refusals = Vec::new();
    let meminfo = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    let free = field(&meminfo, "MemAvailable:").unwrap_or(u64::MAX);
    if size.resident > free {
        let (needed, free) = (size.resident / MIB, free / MIB);
        refusals.push(format!("the program has {needed} MiB resident, and {free} MiB are available here"));
    }
    // Without groups of version 2 the restore is refused elsewhere.
    for (group, free) in cgroup::free_memory().unwrap_or_default() {
        if size.resident > free {
            let (needed, free) = (size.resident / MIB, free / MIB);
            let group = group.display();
            refusals.push(format!(
                "the program has {needed} MiB resident, and cgroup {group} permits {free} MiB"
            ));
        }
    }
    let free = free_disk(Path::new(WORK))?;
    let needed = size.anonymous.saturating_mul(COPIES);
    if needed > free {
        let (needed, free) = (needed / MIB, free / MIB);
        refusals.push(format!("{needed} MiB of disk space are needed in {WORK}, and {free} MiB are free"));
    }
    Ok(refusals)
}

fn free_disk(path: &Path) -> anyhow::Result<u64> {
    let found = statvfs(path).with_context(|| format!("looking at {}", path.display()))?;
    Ok(found.blocks_available() * found.fragment_size())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_that_a_host_has_not_reserved_are_refused() {
        let of = |rights: &str, flags: &str| {
            let sizes = "Size: 4096 kB\nKernelPageSize:    2048 kB\nMMUPageSize: 2048 kB\n";
            format!(
                "40000000-40400000 {rights} 00000000 00:0f 5  /anon_hugepage (deleted)\n{sizes}VmFlags: rd \
                 {flags}\n"
            )
        };
        let mut pages = HugePages::default();
        let smaps = of("rw-p", "ht de") + &of("rw-s", "ht") + &of("rw-p", "ac") + &of("rw-p", "ht");
        pages.add(smaps.as_bytes());
        assert_eq!(pages, HugePages([(2048, 8 << 20)].into()));
        assert_eq!(HugePages::default().refused(), [""; 0]);
        let refused = HugePages([(2048, 1 << 50)].into()).refused();
        assert!(
            refused[0].starts_with("the program has 536870912 huge pages of 2048 KiB, and "),
            "{refused:?}"
        );
        // The numbers are a peer's.
        assert_eq!(HugePages([(1 << 54, 1), (0, u64::MAX)].into()).refused().len(), 2);
    }

    #[test]
    fn a_tree_that_is_too_large_is_refused_with_numbers() {
        let mut size = TreeSize::default();
        size.add(std::process::id().cast_signed()).unwrap();
        assert!(size.resident > 0 && size.anonymous > 0 && size.anonymous < size.resident * 2, "{size:?}");
        assert_eq!(refused(size).unwrap(), [""; 0]);
        let large = refused(TreeSize { anonymous: 1 << 50, ..TreeSize::default() }).unwrap();
        assert!(
            large[0].starts_with("2147483648 MiB of disk space are needed in /var/tmp, and "),
            "{large:?}"
        );
    }
}
