// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long it takes until a process runs again, and until its CPU has what it touches at the end of its memory, by how much of that its
//! GPU has. Images have few bytes that are not zero, so that 8 GiB fit into memory.
//!
//! `cargo xtask plugin && cargo build --bins && cargo xtask vm --mem 13000 --time-limit 1200 --module-args "gpus=1 gfx=90a
//! vram_mib=9216" -- target/debug/measure-behind`

use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use softgpu_tests::toucher::LARGE;
use softgpu_tests::{Streamer, Toucher};

/// Large buffers: 64 MiB, 1 GiB, 8 GiB.
const COUNTS: [usize; 3] = [1, 16, 128];
const ROUNDS: usize = 5;

struct Dumped {
    count: usize,
    toucher: Toucher,
    criu: Criu,
    _folder: tempfile::TempDir,
}

impl Dumped {
    fn of(count: usize) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let program = std::env::current_exe()?.with_file_name("toucher");
        let program = program.to_str().context("the path of this program")?;
        let mut toucher = Toucher::start(program, folder.path(), Some(count))?;
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("images"))?;
        criu.dump(toucher.pid())?;
        toucher.was_dumped()?;
        Ok(Self { count, toucher, criu, _folder: folder })
    }

    fn mib(&self) -> usize {
        (self.count * LARGE) >> 20
    }

    /// Since the start of `criu restore`: it runs; it has seen the last page of its last buffer. What is left is not waited for.
    fn comes_back(&self) -> anyhow::Result<(Duration, Duration)> {
        let mut streamer = Streamer::start(self.criu.images())?;
        let start = Instant::now();
        self.criu.restore()?;
        let runs = start.elapsed();
        self.toucher.asked(&format!("tail {}", self.count - 1))?;
        let touched = start.elapsed();
        for pid in streamer.workers().into_iter().chain([self.toucher.pid()]) {
            kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
        }
        streamer.end()?;
        wait_for_the_end_of(self.toucher.pid())?;
        Ok((runs, touched))
    }
}

fn main() -> anyhow::Result<()> {
    let all = COUNTS.map(Dumped::of);
    for _ in 0..ROUNDS {
        for dumped in &all {
            let dumped = dumped.as_ref().map_err(|error| anyhow!("{error:#}"))?;
            let mib = dumped.mib();
            let (runs, touched) = dumped.comes_back()?;
            println!("{mib} MiB: runs after {runs:?}, has seen its last page after {touched:?}");
        }
    }
    Ok(())
}
