// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process that was dumped, and its restores.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use softgpu_tests::toucher::Large;
use softgpu_tests::{Streamer, Toucher};

/// What comes behind a process.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Loads {
    /// Memory of its GPU.
    Gpus,
    /// And that of its CPU.
    Both,
}

/// One that was dumped.
pub(crate) struct Image {
    pub(crate) memory: Large,
    toucher: Toucher,
    criu: Criu,
    _folder: tempfile::TempDir,
}

/// One that runs again.
pub(crate) struct Running<'a> {
    image: &'a Image,
    streamer: Streamer,
    start: Instant,
    /// Since the start of `criu restore`.
    pub(crate) alive: Duration,
}

impl Image {
    /// With so many parts of its own memory besides.
    pub(crate) fn of(memory: Large, own: usize) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let program = std::env::current_exe()?.with_file_name("toucher");
        let program = program.to_str().context("the path of this program")?;
        let mut toucher = Toucher::start(program, folder.path(), Some(memory))?;
        if own > 0 {
            toucher.asked(&format!("allocate {own}")).with_context(|| format!("{memory:?}"))?;
        }
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("images"))?;
        criu.dump(toucher.pid()).with_context(|| format!("{memory:?}"))?;
        toucher.was_dumped()?;
        Ok(Self { memory, toucher, criu, _folder: folder })
    }

    pub(crate) fn comes_back(&self, loads: Loads) -> anyhow::Result<Running<'_>> {
        let streamer = match loads {
            Loads::Gpus => Streamer::start(self.criu.images())?,
            Loads::Both => Streamer::of_both(self.criu.images())?,
        };
        let start = Instant::now();
        match loads {
            Loads::Gpus => self.criu.restore()?,
            Loads::Both => self.criu.restore_lazily()?,
        }
        Ok(Running { image: self, streamer, start, alive: start.elapsed() })
    }

    /// Its own memory is, which it has and looks at when it registers it.
    pub(crate) fn is_whole(&self) -> anyhow::Result<()> {
        let running = self.comes_back(Loads::Both)?;
        self.toucher.asked("register 0")?;
        running.ends()
    }

    /// `rewake status` of what runs now.
    fn status(&self) -> anyhow::Result<Value> {
        let rewake = self.criu.of_rewake("status")?.get_program().to_owned();
        let done = Command::new(rewake).args(["status", "--json", "-W"]).arg(self.criu.images()).output()?;
        ensure!(done.status.success(), "rewake status: {}", String::from_utf8_lossy(&done.stderr));
        serde_json::from_slice(&done.stdout).context("what rewake status says")
    }
}

impl Running<'_> {
    /// The last page of its last buffer; since the start of `criu restore`.
    pub(crate) fn touches_its_end(&self) -> anyhow::Result<Duration> {
        self.image.toucher.asked(&format!("tail {}", self.image.memory.count - 1))?;
        Ok(self.start.elapsed())
    }

    /// How long its touch waited, as the streamer counts, which has not ended yet.
    pub(crate) fn waited(&self) -> anyhow::Result<Duration> {
        longest_fault(&self.image.status()?)
    }

    /// Waits until all is loaded. How long that took, by the streamer's line about contents, and how long the touch waited: not at all,
    /// where all was there before it.
    pub(crate) fn loaded(&mut self) -> anyhow::Result<(Duration, Duration)> {
        let well = self.streamer.end()?.success();
        let said = self.streamer.said();
        ensure!(well, "{said}");
        let line = said.lines().find(|line| line.contains("contents loaded: "));
        let seconds = line.and_then(|line| line.split(", ").find_map(|part| part.strip_suffix(" s")));
        let loaded = Duration::from_secs_f64(seconds.with_context(|| said.clone())?.parse()?);
        let timeline = fs::read_to_string(self.image.criu.images().join("rewake-timeline.json"))?;
        Ok((loaded, longest_fault(&serde_json::from_str(&timeline)?)?))
    }

    /// Ends it. What is left is not waited for.
    pub(crate) fn ends(mut self) -> anyhow::Result<()> {
        for pid in self.streamer.workers().into_iter().chain([self.image.toucher.pid()]) {
            // The supervisor ends whoever's memory nobody brings any more, too.
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        }
        self.streamer.end()?;
        wait_for_the_end_of(self.image.toucher.pid())
    }
}

/// Of the one process, by what the streamer says.
fn longest_fault(said: &Value) -> anyhow::Result<Duration> {
    let waited = said["processes"][0]["longest_fault_us"].as_u64();
    Ok(Duration::from_micros(waited.with_context(|| format!("no longest_fault_us: {said}"))?))
}
