// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long it takes until a process runs again, and until its CPU has what it touches at the end of its memory, by how much of that its
//! GPU has, and in how many buffers. Images have few bytes that are not zero, so that 8 GiB fit into memory. `cargo xtask bench behind`
//! runs it; a table comes on standard output.

use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use softgpu_tests::toucher::Large;
use softgpu_tests::{Streamer, Toucher};

/// 64 MiB, 1 GiB and 8 GiB in as many buffers, and 8 GiB in more.
const MEMORIES: [Large; 4] = [
    Large { count: 16, mib: 4 },
    Large { count: 16, mib: 64 },
    Large { count: 16, mib: 512 },
    Large { count: 128, mib: 64 },
];
const ROUNDS: usize = 7;

struct Dumped {
    memory: Large,
    toucher: Toucher,
    criu: Criu,
    _folder: tempfile::TempDir,
    runs: Vec<Duration>,
    touched: Vec<Duration>,
}

impl Dumped {
    fn of(memory: Large) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let program = std::env::current_exe()?.with_file_name("toucher");
        let program = program.to_str().context("the path of this program")?;
        let mut toucher = Toucher::start(program, folder.path(), Some(memory))?;
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("images"))?;
        criu.dump(toucher.pid())?;
        toucher.was_dumped()?;
        Ok(Self { memory, toucher, criu, _folder: folder, runs: Vec::new(), touched: Vec::new() })
    }

    /// From the start of `criu restore`: it runs; it has seen the last page of its last buffer. What is left is not waited for.
    fn comes_back(&mut self) -> anyhow::Result<()> {
        let mut streamer = Streamer::start(self.criu.images())?;
        let start = Instant::now();
        self.criu.restore()?;
        self.runs.push(start.elapsed());
        self.toucher.asked(&format!("tail {}", self.memory.count - 1))?;
        self.touched.push(start.elapsed());
        for pid in streamer.workers().into_iter().chain([self.toucher.pid()]) {
            kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
        }
        streamer.end()?;
        wait_for_the_end_of(self.toucher.pid())
    }
}

/// Least, median and most, in milliseconds.
fn spread(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let at = |place: usize| times.get(place).map_or(0, Duration::as_millis);
    format!("{} {} {}", at(0), at(times.len() / 2), at(times.len() - 1))
}

fn main() -> anyhow::Result<()> {
    let mut all = Vec::new();
    for memory in MEMORIES {
        all.push(Dumped::of(memory).map_err(|error| anyhow!("{memory:?}: {error:#}"))?);
    }
    for _ in 0..ROUNDS {
        for dumped in &mut all {
            dumped.comes_back().map_err(|error| anyhow!("{:?}: {error:#}", dumped.memory))?;
        }
    }
    println!("| memory of the GPU | runs after, ms: least, median, most | has seen its last page after |");
    println!("|---|---|---|");
    for Dumped { memory: Large { count, mib }, runs, touched, .. } in &mut all {
        println!("| {count} x {mib} MiB | {} | {} |", spread(runs), spread(touched));
    }
    Ok(())
}
