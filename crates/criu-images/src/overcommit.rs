// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether this kernel lets `criu restore --lazy-pages` map the memory of an image.
//!
//! CRIU maps private memory in two ways. A plain restore maps it with the rights that it had. A lazy one maps
//! all of it writable first, and takes the right away later. The kernel counts writable private memory as
//! memory that may be needed. So a reservation without access, of any length, can be restored plainly, and
//! may be refused lazily (source: `premap_private_vma` of CRIU's mem.c; the kernel's
//! `Documentation/mm/overcommit-accounting.rst`).

use std::fs;
use std::io;
use std::ops::Range;

use rewake_process::maps::Mapping;
use rewake_process::names::{field, lines};
use serde::{Deserialize, Serialize};

use crate::mm::Mm;

/// What the kernel lets processes map (`vm.overcommit_memory`), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overcommit {
    /// 0: one writable mapping may have this length: that of the memory and swap.
    Guess(u64),
    /// 1: anything.
    Always,
    /// 2: so much is left for the mappings of all processes.
    Never(u64),
}

/// What a lazy restore of one or several tasks maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LazyMappings {
    /// The longest mapping that is writable during the restore only.
    longest: Option<Reservation>,
    /// Bytes of all private mappings.
    total: u64,
    /// Bytes of the private mappings that the program has without write access.
    extra: u64,
}

/// A mapping without write access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Reservation {
    pid: u32,
    start: u64,
    length: u64,
}

impl LazyMappings {
    /// Adds the mappings of a task of an image.
    pub fn add(&mut self, pid: u32, mm: &Mm) {
        for vma in mm.vmas.iter().filter(|vma| vma.is_premapped()) {
            self.add_private(pid, vma.start..vma.end, vma.is_writable(), vma.is_unreserved());
        }
    }

    /// Adds the mappings of a process that runs: its `/proc/PID/smaps`.
    pub fn add_running(&mut self, pid: u32, smaps: &[u8]) {
        let mut mapping = None;
        for line in lines(smaps) {
            if let Some(next) = Mapping::parse(line) {
                mapping = Some(next);
            } else if let Some(flags) = line.strip_prefix(b"VmFlags:")
                && let Some(of) = mapping.take()
            {
                let has = |flag: &[u8]| flags.split(|byte| *byte == b' ').any(|it| it == flag);
                let is_kernel_s =
                    [&b"[vvar"[..], b"[vdso", b"[vsyscall"].iter().any(|it| of.name.starts_with(it));
                if !of.is_shared() && !is_kernel_s && !has(b"ht") {
                    self.add_private(pid, of.start..of.end, of.is_writable(), has(b"nr"));
                }
            }
        }
    }

    fn add_private(&mut self, pid: u32, of: Range<u64>, is_writable: bool, is_unreserved: bool) {
        let length = of.end.saturating_sub(of.start);
        self.total = self.total.saturating_add(length);
        if is_writable {
            return;
        }
        self.extra = self.extra.saturating_add(length);
        if !is_unreserved && self.longest.is_none_or(|other| length > other.length) {
            self.longest = Some(Reservation { pid, start: of.start, length });
        }
    }

    /// Adds the mappings of other tasks.
    pub fn join(&mut self, other: &Self) {
        self.total = self.total.saturating_add(other.total);
        self.extra = self.extra.saturating_add(other.extra);
        self.longest = [self.longest, other.longest].into_iter().flatten().max_by_key(|it| it.length);
    }
}

impl Overcommit {
    /// Reads the setting and the memory of this machine.
    ///
    /// # Errors
    /// `/proc` cannot be read, or does not say.
    pub fn now() -> io::Result<Self> {
        let (mode, memory) = (fs::read("/proc/sys/vm/overcommit_memory")?, fs::read("/proc/meminfo")?);
        Self::parse(&mode, &memory).ok_or_else(|| io::Error::other("/proc/meminfo lacks a line"))
    }

    fn parse(mode: &[u8], memory: &[u8]) -> Option<Self> {
        let bytes = |name| {
            let kib: u64 = field(memory, name)?.strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        };
        match mode.trim_ascii() {
            b"0" => Some(Self::Guess(bytes("MemTotal:")?.checked_add(bytes("SwapTotal:")?)?)),
            b"2" => Some(Self::Never(bytes("CommitLimit:")?.saturating_sub(bytes("Committed_AS:")?))),
            _ => Some(Self::Always),
        }
    }

    /// Returns why the kernel refuses these mappings to a lazy restore, and not to a plain one; `None` where
    /// it permits them.
    #[must_use]
    pub fn refusal(self, all: &LazyMappings) -> Option<String> {
        match (self, all.longest) {
            (Self::Guess(most), Some(Reservation { pid, start, length })) if length > most => Some(format!(
                "process {pid} has {} without write access at {:#x}; `criu restore --lazy-pages` makes it \
                 writable for a moment, and this kernel permits that up to the machine's {} of memory and \
                 swap (vm.overcommit_memory is 0, and 1 permits it)",
                gib(length),
                start,
                gib(most)
            )),
            (Self::Never(left), _) if all.total > left && all.total.saturating_sub(all.extra) <= left => {
                Some(format!(
                    "`criu restore --lazy-pages` makes {} of private memory writable for a moment, and this \
                     kernel has {} left for that (vm.overcommit_memory is 2)",
                    gib(all.total),
                    gib(left)
                ))
            }
            _ => None,
        }
    }
}

fn gib(bytes: u64) -> String {
    format!("{}.{} GiB", bytes >> 30, ((bytes & ((1 << 30) - 1)) * 10) >> 30)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::Vma;

    const GIB: u64 = 1 << 30;

    /// Private anonymous memory of the program at this address.
    fn memory(gib: u64, prot: u32, more_flags: u32) -> Vma {
        let (start, end) = (GIB, (1 + gib) * GIB);
        let (flags, status) = (0x22 | more_flags, 1 << 9 | 1);
        Vma { start, end, prot, flags, status, offset: 0, object: 0, advice: 0 }
    }

    fn all(vmas: &[Vma]) -> LazyMappings {
        let mut all = LazyMappings::default();
        vmas.iter().enumerate().for_each(|(task, vma)| {
            let pid = 7 + u32::try_from(task).unwrap();
            all.add(pid, &Mm { vmas: vec![*vma], guards: Vec::new() });
        });
        all
    }

    #[test]
    fn a_reservation_longer_than_the_memory_is_refused_by_the_heuristic_only() {
        let reservation = all(&[memory(1, 3, 0), memory(400, 0, 0), memory(300, 1, 0)]);
        let refusal = Overcommit::Guess(23 * GIB).refusal(&reservation).unwrap();
        assert!(
            refusal.starts_with("process 8 has 400.0 GiB without write access at 0x40000000; "),
            "{refusal}"
        );
        assert!(refusal.contains("machine's 23.0 GiB of memory and swap"), "{refusal}");
        assert_eq!(Overcommit::Guess(400 * GIB).refusal(&reservation), None);
        assert_eq!(Overcommit::Always.refusal(&reservation), None);
        // MAP_NORESERVE is not counted. Writable memory is refused to a plain restore, too.
        assert_eq!(Overcommit::Guess(GIB).refusal(&all(&[memory(400, 0, 0x4000), memory(9, 3, 0)])), None);
        // Nor is shared memory, and huge pages.
        let shared = Vma { flags: 0x21, status: 1 << 8 | 1, ..memory(400, 0, 0) };
        assert_eq!(Overcommit::Guess(GIB).refusal(&all(&[shared, memory(400, 0, 0x4_0000)])), None);
    }

    #[test]
    fn a_process_that_runs_shows_what_its_image_will_have() {
        let line = |length_gib: u64, rights: &str, name: &str, flags: &str| {
            let (start, end) = (GIB, (1 + length_gib) * GIB);
            format!(
                "{start:x}-{end:x} {rights} 00000000 00:00 0  {name}\nRss: 0 kB\nVmFlags: mr mw me {flags} \n"
            )
        };
        let smaps = [
            line(3, "rw-p", "[heap]", "ac"),
            line(400, "---p", "", "sd"),
            line(500, "---p", "", "nr sd"),
            line(600, "---s", "", ""),
            line(700, "r--p", "", "ht"),
            line(800, "r--p", "[vvar]", ""),
        ]
        .concat();
        let mut running = LazyMappings::default();
        running.add_running(8, smaps.as_bytes());
        assert_eq!(running, {
            let mut of_image = all(&[memory(3, 3, 0), memory(400, 0, 0), memory(500, 0, 0x4000)]);
            of_image.longest.as_mut().unwrap().pid = 8;
            of_image
        });
        running.add_running(8, b"1000-2000 rw-p\xff\n\nVmFlags:\n");
        LazyMappings::default().add_running(1, &fs::read("/proc/self/smaps").unwrap());
    }

    #[test]
    fn without_overcommit_the_sum_counts() {
        let sum = all(&[memory(3, 3, 0), memory(5, 0, 0x4000)]);
        assert!(
            Overcommit::Never(7 * GIB).refusal(&sum).unwrap().contains("makes 8.0 GiB of private memory")
        );
        assert_eq!(Overcommit::Never(8 * GIB).refusal(&sum), None);
        assert_eq!(Overcommit::Never(2 * GIB).refusal(&sum), None, "a plain restore is refused, too");
        // The sums are a peer's.
        let more_than_all = LazyMappings { longest: None, total: 1, extra: 2 };
        assert!(Overcommit::Never(0).refusal(&more_than_all).is_some());
    }

    #[test]
    fn the_machine_says_what_it_permits() {
        let memory = b"MemTotal:  3 kB\nSwapTotal: 1 kB\nCommitLimit: 9 kB\nCommitted_AS: 7 kB\n";
        let parse = |mode: &[u8]| Overcommit::parse(mode, memory);
        assert_eq!(parse(b"0\n"), Some(Overcommit::Guess(4096)));
        assert_eq!(parse(b"1\n"), Some(Overcommit::Always));
        assert_eq!(parse(b"2\n"), Some(Overcommit::Never(2048)));
        assert_eq!(Overcommit::parse(b"0\n", b"MemTotal: 3 kB\n"), None);
        Overcommit::now().unwrap();
    }
}
