// SPDX-License-Identifier: MIT OR Apache-2.0
//! The soft GPU's judge: violations by GPUs, and what is alive. Real GPUs have none.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// Where its files are.
pub(crate) const FOLDER: &str = "/sys/kernel/debug/softgpu";

/// How long a process must be stopped where none should be: the driver, too, stops queues for moments.
pub const LONG: Duration = Duration::from_secs(12);
/// The same where a stopped process is expected.
pub const A_WHILE: Duration = Duration::from_secs(1);
/// Polling interval.
const LOOK: Duration = Duration::from_millis(50);

/// Why a process's queues do not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gate {
    /// The process id.
    pub pid: u32,
    /// PROCESS_INFO was called, and UNPAUSE was not.
    pub paused: bool,
    /// Evictions of its queues that were not undone, for each GPU.
    pub evicted: Vec<u32>,
}

/// Work on compute queues when they were paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paused {
    /// Unfinished dispatches.
    pub waves: u64,
    /// Unfinished packets, including the packets of these dispatches.
    pub packets: u64,
}

/// The judge's files.
#[derive(Debug)]
pub struct Judge {
    folder: PathBuf,
}

impl Judge {
    /// None where GPUs are real.
    #[must_use]
    pub fn find() -> Option<Self> {
        let folder = PathBuf::from(FOLDER);
        folder.is_dir().then_some(Self { folder })
    }

    /// One line for each violation: kind, pid, GPU, address, packet, detail.
    ///
    /// # Panics
    /// The list cannot be read, or is incomplete.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        let count = || self.read("violations_count").trim().parse::<usize>().expect("a count");
        // The judge may add violations between two reads.
        let before = count();
        let list: Vec<String> = self.read("violations").lines().map(str::to_owned).collect();
        let after = count();
        assert!(
            after >= list.len() && (before <= list.len() || !list.is_empty()),
            "{before} to {after} violations, {list:?}"
        );
        list
    }

    /// Asserts that there are violations, all of one kind, and empties the list; returns them.
    ///
    /// # Panics
    /// There are none, or others.
    pub fn take(&self, kind: &str) -> Vec<String> {
        let list = self.violations();
        self.clear();
        let all = list.iter().all(|line| line.split_whitespace().next() == Some(kind));
        assert!(all && !list.is_empty(), "expected violations of kind {kind}, found {list:#?}");
        list
    }

    /// Empties the list.
    ///
    /// # Panics
    /// The judge refuses.
    pub fn clear(&self) {
        fs::write(self.folder.join("clear"), "1").expect("the judge's list can be cleared");
    }

    /// Declares that memory of a process on a GPU is zero by intent.
    ///
    /// # Panics
    /// The judge refuses.
    pub fn declare_zero(&self, pid: u32, gpu: u32, address: u64, size: u64) {
        let line = format!("{pid} {gpu} {address} {size}\n");
        fs::write(self.folder.join("declare_zero"), line).expect("memory can be declared zero");
    }

    /// Lets this queue run from now on, whatever the gate says: for a test that the judge reports it.
    ///
    /// # Panics
    /// The judge refuses.
    pub fn break_gate(&self, pid: u32, queue: u32) {
        fs::write(self.folder.join("break_gate"), format!("{pid} {queue}\n")).expect("a gate can be broken");
    }

    /// What is alive, by name.
    ///
    /// # Panics
    /// The file cannot be read.
    #[must_use]
    pub fn alive(&self) -> BTreeMap<String, u64> {
        counts(&self.read("state"))
    }

    /// Work that PROCESS_INFO interrupted, of all processes since the module was loaded.
    ///
    /// # Panics
    /// The file cannot be read, or is malformed.
    #[must_use]
    pub fn paused(&self) -> Paused {
        let counts = counts(&self.read("paused"));
        Paused { waves: counts["waves"], packets: counts["packets"] }
    }

    /// Every process that has compute state, with its gates, at this moment.
    ///
    /// # Panics
    /// The file cannot be read, or is malformed.
    #[must_use]
    pub fn gates(&self) -> Vec<Gate> {
        let text = self.read("gates");
        let gate = |line: &str| {
            let numbers: Option<Vec<u32>> = line.split(' ').map(|number| number.parse().ok()).collect();
            let [pid, paused, evicted @ ..] = &numbers?[..] else { return None };
            Some(Gate { pid: *pid, paused: *paused == 1, evicted: evicted.to_vec() })
        };
        text.lines().map(|line| gate(line).unwrap_or_else(|| panic!("no gate: {line:?}"))).collect()
    }

    /// Processes whose queues the driver has evicted and not resumed.
    ///
    /// # Panics
    /// As [`Judge::gates`].
    #[must_use]
    pub fn closed_gates(&self) -> usize {
        self.gates().iter().filter(|gate| gate.paused).count()
    }

    /// Processes whose queues are stopped and are not resumed by themselves: paused, or evicted by something
    /// that was never undone. The driver, too, stops queues for moments, so a positive answer takes seconds.
    ///
    /// # Panics
    /// As [`Judge::gates`].
    #[must_use]
    pub fn stopped(&self) -> Vec<Gate> {
        self.stopped_for(LONG)
    }

    /// As [`Judge::stopped`], for processes that are expected to be stopped: for all of `time`.
    ///
    /// # Panics
    /// As [`Judge::gates`].
    #[must_use]
    pub fn stopped_for(&self, time: Duration) -> Vec<Gate> {
        let end = Instant::now() + time;
        let still = |gate: &Gate| gate.paused || gate.evicted.iter().any(|count| *count != 0);
        let mut found: Vec<Gate> = self.gates().into_iter().filter(still).collect();
        while !found.is_empty() && Instant::now() < end {
            thread::sleep(LOOK);
            let now = self.gates();
            found.retain_mut(|old| {
                let new = now.iter().find(|new| new.pid == old.pid && still(new));
                new.is_some_and(|new| {
                    *old = new.clone();
                    true
                })
            });
        }
        found
    }

    fn read(&self, name: &str) -> String {
        let path = self.folder.join(name);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
    }
}

/// `name count` on each line.
fn counts(text: &str) -> BTreeMap<String, u64> {
    let count = |line: &str| {
        let (name, count) = line.split_once(' ')?;
        Some((name.to_owned(), count.trim().parse().ok()?))
    };
    text.lines().filter_map(count).collect()
}
