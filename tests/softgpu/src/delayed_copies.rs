// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies held in the soft GPU's driver, so that what depends on them cannot have happened, however long a
//! test takes.

use std::fs;
use std::path::Path;

use crate::Streamer;
use crate::criu::Criu;
use crate::dumped::soon;
use crate::judge::FOLDER;

/// The name of the streamer's processes.
const STREAMER: &str = "rewake";

/// Copy engines begin no work of processes of a name; dropping this ends the hold. A streamer waits two
/// minutes for a copy.
#[derive(Debug)]
pub struct DelayedCopies(String);

impl DelayedCopies {
    /// Holds copies of processes whose first thread has this name. None where GPUs are real.
    ///
    /// # Panics
    /// The driver refuses, or has no engines.
    #[must_use]
    pub fn of(comm: &str) -> Option<Self> {
        if !Path::new(FOLDER).is_dir() {
            return None;
        }
        let rings = fs::read_to_string("/sys/module/softgpu/parameters/sdma_rings").unwrap();
        assert_ne!(rings.trim(), "0", "CPUs copy on this machine, and are not held");
        write(comm);
        Some(Self(comm.to_owned()))
    }

    /// Holds copies of all streamers.
    ///
    /// # Panics
    /// As [`DelayedCopies::of`], or GPUs are real.
    #[must_use]
    pub fn streamers() -> Self {
        Self::of(STREAMER).expect("a driver that holds copies back")
    }

    /// Lets `more` copies begin, and no others.
    ///
    /// # Panics
    /// The driver refuses.
    pub fn release(&self, more: u32) {
        write(&format!("{} {more}", self.0));
    }

    /// Releases one copy at a time, and waits for its effect, until one process's memory on one GPU is
    /// resident. No more than that is resident then, however long it takes.
    ///
    /// # Panics
    /// A released copy has no effect.
    pub fn release_until_one_is_resident(&self, criu: &Criu, streamer: &Streamer) {
        loop {
            let now = criu.memory_of_gpus();
            if now.iter().any(|(there, all)| there == all && *all > 0) {
                return;
            }
            self.release(1);
            assert!(soon(|| criu.memory_of_gpus() != now), "no copy ends: {now:?} {}", streamer.said());
        }
    }

    /// Holds no copies, whatever was set before.
    ///
    /// # Panics
    /// The driver refuses.
    pub fn none() {
        drop(Self(String::new()));
    }
}

impl Drop for DelayedCopies {
    fn drop(&mut self) {
        if Path::new(FOLDER).is_dir() {
            write("off");
        }
    }
}

fn write(line: &str) {
    let written = fs::write(Path::new(FOLDER).join("hold"), line);
    // A second panic would hide the first.
    assert!(written.is_ok() || std::thread::panicking(), "the driver does not hold {line:?}: {written:?}");
}
