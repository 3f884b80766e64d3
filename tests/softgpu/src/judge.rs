// SPDX-License-Identifier: MIT OR Apache-2.0
//! The soft GPU's judge: what GPUs did that they must not, and what is alive. Real GPUs have none.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

const FOLDER: &str = "/sys/kernel/debug/softgpu";

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
    /// The list cannot be read, or is not all of them.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        let list: Vec<String> = self.read("violations").lines().map(str::to_owned).collect();
        let count: usize = self.read("violations_count").trim().parse().expect("a count");
        assert!(
            count >= list.len() && (count == list.len() || !list.is_empty()),
            "{count} violations, {list:?}"
        );
        list
    }

    /// Asserts that there are violations, all of one kind, and empties the list; gives them.
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
    /// The judge does not listen.
    pub fn clear(&self) {
        fs::write(self.folder.join("clear"), "1").expect("the judge can be told to clear");
    }

    /// Declares memory of a process on a GPU as rightly zero.
    ///
    /// # Panics
    /// The judge does not listen.
    pub fn declare_zero(&self, pid: u32, gpu: u32, address: u64, size: u64) {
        let line = format!("{pid} {gpu} {address} {size}\n");
        fs::write(self.folder.join("declare_zero"), line).expect("the judge can be told what is zero");
    }

    /// From now on this queue runs whatever the gate says: for a test that wants to see it noticed.
    ///
    /// # Panics
    /// The judge does not listen.
    pub fn break_gate(&self, pid: u32, queue: u32) {
        fs::write(self.folder.join("break_gate"), format!("{pid} {queue}\n")).expect("a gate can be broken");
    }

    /// What is alive, by name.
    ///
    /// # Panics
    /// The file cannot be read.
    #[must_use]
    pub fn alive(&self) -> BTreeMap<String, u64> {
        let text = self.read("state");
        let count = |line: &str| {
            let (name, count) = line.split_once(' ')?;
            Some((name.to_owned(), count.trim().parse().ok()?))
        };
        text.lines().filter_map(count).collect()
    }

    fn read(&self, name: &str) -> String {
        let path = self.folder.join(name);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
    }
}
