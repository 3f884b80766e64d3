// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies held back in the soft GPU's driver, so that what comes after them has not happened, however long a test takes.

use std::fs;
use std::path::Path;

use crate::Streamer;
use crate::criu::Criu;
use crate::dumped::soon;
use crate::judge::FOLDER;

/// What the streamer's processes are called.
const STREAMER: &str = "rewake";

/// What processes of a name have copy engines do is not begun; dropped, it is. A streamer waits two minutes for that.
#[derive(Debug)]
pub struct Held(String);

impl Held {
    /// Of processes whose first thread has this name. None where GPUs are real.
    ///
    /// # Panics
    /// The driver does not listen, or has no engines.
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

    /// Of all streamers.
    ///
    /// # Panics
    /// As [`Held::of`], or GPUs are real.
    #[must_use]
    pub fn streamers() -> Self {
        Self::of(STREAMER).expect("a driver that holds copies back")
    }

    /// So many more are begun, and no others.
    ///
    /// # Panics
    /// The driver does not listen.
    pub fn lets_go(&self, more: u32) {
        write(&format!("{} {more}", self.0));
    }

    /// A copy at a time, the next one when that is seen, until one process's memory on one GPU is there: no more is there than that one waits for, however
    /// long anything takes.
    ///
    /// # Panics
    /// Nothing comes.
    pub fn lets_go_until_one_is_whole(&self, criu: &Criu, streamer: &Streamer) {
        loop {
            let now = criu.memory_of_gpus();
            if now.iter().any(|(there, all)| there == all && *all > 0) {
                return;
            }
            self.lets_go(1);
            assert!(soon(|| criu.memory_of_gpus() != now), "nothing comes: {now:?} {}", streamer.said());
        }
    }

    /// Nobody's, whatever was before.
    ///
    /// # Panics
    /// The driver does not listen.
    pub fn nobody() {
        drop(Self(String::new()));
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if Path::new(FOLDER).is_dir() {
            write("off");
        }
    }
}

fn write(line: &str) {
    let written = fs::write(Path::new(FOLDER).join("hold"), line);
    // A panic in a panic would tell less.
    assert!(written.is_ok() || std::thread::panicking(), "the driver does not hold {line:?}: {written:?}");
}
