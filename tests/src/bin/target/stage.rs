// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files through which a target and its test communicate.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::Context;
use rewake_tests::pattern::{BASE, PAGE, Pattern};

use crate::memory::Region;

/// Wrong pages that are reported one by one; the rest is only counted.
const REPORTED: usize = 8;

/// The stage of a scenario: its files, region and errors.
#[derive(Debug)]
pub(crate) struct Stage {
    /// Directory of ready, go and verdict.
    pub(crate) dir: PathBuf,
    /// Pages of the main region.
    pub(crate) pages: usize,
    /// Seed of everything.
    pub(crate) seed: u64,
    bad: AtomicUsize,
    lost: AtomicBool,
}

impl Stage {
    pub(crate) fn new(dir: PathBuf, mib: usize, seed: u64) -> Self {
        let pages = (mib << 20) / PAGE;
        Self { dir, pages, seed, bad: AtomicUsize::new(0), lost: AtomicBool::new(false) }
    }

    /// Panics go to the verdict file: standard error is /dev/null.
    pub(crate) fn report_panics(dir: &Path) {
        let path = dir.join("verdict");
        std::panic::set_hook(Box::new(move |panic| append(&path, &format!("ERROR {panic}"))));
    }

    /// The main region, filled with the stage's content.
    pub(crate) fn filled(&self) -> anyhow::Result<Region> {
        let region = Region::map(BASE, self.pages, Pattern::new(self.seed))?;
        region.fill_all();
        Ok(region)
    }

    /// Writes "ready" for the test, which then dumps, and returns when the test says "go", after the restore.
    pub(crate) fn ready_then_go(&self) -> anyhow::Result<()> {
        File::create(self.dir.join("ready")).context("create the ready file")?;
        self.wait_for_go();
        Ok(())
    }

    /// Returns when the test says "go".
    pub(crate) fn wait_for_go(&self) {
        self.wait_for("go");
    }

    /// Returns when the test says "stop".
    pub(crate) fn wait_for_stop(&self) {
        self.wait_for("stop");
    }

    fn wait_for(&self, name: &str) {
        while !self.dir.join(name).exists() {
            sleep(Duration::from_millis(1));
        }
    }

    /// True once the test asked for the end.
    pub(crate) fn stop_asked(&self) -> bool {
        self.dir.join("stop").exists()
    }

    /// Records that `what` holds bytes it must not hold.
    pub(crate) fn bad(&self, what: &str) {
        if self.bad.fetch_add(1, Ordering::Relaxed) < REPORTED {
            self.say(&format!("BAD {what}"));
        }
    }

    /// Records that another process of this target was killed.
    pub(crate) fn lost(&self, what: &str) {
        self.lost.store(true, Ordering::Relaxed);
        self.say(&format!("LOST {what}"));
    }

    /// True while nothing wrong was seen.
    pub(crate) fn clean(&self) -> bool {
        self.bad.load(Ordering::Relaxed) == 0
    }

    /// The status a process of this target exits with.
    pub(crate) fn status(&self) -> u8 {
        match (self.clean(), self.lost.load(Ordering::Relaxed)) {
            (false, _) => 1,
            (true, true) => 3,
            (true, false) => 0,
        }
    }

    /// Writes the last verdict line and returns the exit status.
    pub(crate) fn end(&self, result: anyhow::Result<()>) -> ExitCode {
        let status = match result {
            Ok(()) => self.status(),
            Err(error) => {
                self.say(&format!("ERROR {error:#}"));
                2
            }
        };
        match status {
            0 => self.say("OK"),
            1 => self.say(&format!("BAD {} in all", self.bad.load(Ordering::Relaxed))),
            _ => {}
        }
        ExitCode::from(status)
    }

    fn say(&self, line: &str) {
        append(&self.dir.join("verdict"), line);
    }
}

/// One write in append mode: lines of several processes never mix. A target that cannot report dies loudly.
fn append(path: &Path, line: &str) {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    assert!(written.is_ok(), "cannot write {}: {written:?}", path.display());
}
