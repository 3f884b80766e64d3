// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process that was dumped, and its restores.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use softgpu_tests::criu::{Criu, Version, wait_for_the_end_of};
use softgpu_tests::dumped::soon;
use softgpu_tests::toucher::Large;
use softgpu_tests::{Held, Judge, Streamer, Toucher};

/// What `--record` leaves in the images directory.
const RECORD: &str = "rewake-working-set.json";

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
    /// What was alive on the GPUs before.
    before: Option<BTreeMap<String, u64>>,
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
        let criu = toucher.dump(Version::V4_2).with_context(|| format!("{memory:?}"))?;
        Ok(Self { memory, toucher, criu, _folder: folder })
    }

    pub(crate) fn comes_back(&self, loads: Loads) -> anyhow::Result<Running<'_>> {
        let streamer = match loads {
            Loads::Gpus => Streamer::start(self.criu.images())?,
            Loads::Both => Streamer::of_both(self.criu.images())?,
        };
        let before = Judge::find().as_ref().map(Judge::alive);
        let start = Instant::now();
        match loads {
            Loads::Gpus => self.criu.restore()?,
            Loads::Both => self.criu.restore_lazily()?,
        }
        Ok(Running { image: self, streamer, before, start, alive: start.elapsed() })
    }

    /// Its own memory is, which it has and looks at when it registers it.
    pub(crate) fn is_whole(&self) -> anyhow::Result<()> {
        let running = self.comes_back(Loads::Both)?;
        self.toucher.asked("register 0")?;
        running.ends()
    }

    /// Restores it once, and has it touch the ends of these buffers in this order: what was recorded of that.
    pub(crate) fn records(&self, touched: &[usize]) -> anyhow::Result<Vec<u8>> {
        let mut streamer = Streamer::recording(self.criu.images())?;
        let held = Held::streamers();
        self.criu.restore()?;
        // The first waits until something is loaded, and the rest of them for no more than that.
        let (first, rest) = touched.split_first().context("nothing is touched")?;
        self.toucher.ask(&format!("tail {first}"))?;
        drop(held);
        self.toucher.answer()?;
        rest.iter().try_for_each(|buffer| self.toucher.asked(&format!("tail {buffer}")))?;
        ensure!(streamer.end()?.success(), "{}", streamer.said());
        let _ = kill(Pid::from_raw(self.toucher.pid().cast_signed()), Signal::SIGKILL);
        wait_for_the_end_of(self.toucher.pid())?;
        fs::read(self.criu.images().join(RECORD)).context("what was recorded")
    }

    /// Later restores load by this record, or by none.
    pub(crate) fn has_record(&self, record: Option<&[u8]>) -> anyhow::Result<()> {
        let path = self.criu.images().join(RECORD);
        match record {
            Some(record) => fs::write(path, record)?,
            None if path.exists() => fs::remove_file(path)?,
            None => {}
        }
        Ok(())
    }

    /// What the last streamer left.
    fn timeline(&self) -> anyhow::Result<Value> {
        let text = fs::read(self.criu.images().join("rewake-timeline.json")).context("the timeline")?;
        serde_json::from_slice(&text).context("the timeline")
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
        self.touches_end_of(self.image.memory.count - 1)?;
        Ok(self.start.elapsed())
    }

    /// The last page of a buffer.
    pub(crate) fn touches_end_of(&self, buffer: usize) -> anyhow::Result<()> {
        self.image.toucher.asked(&format!("tail {buffer}"))
    }

    /// Waits until all is loaded; when its GPUs went on, since it ran.
    pub(crate) fn gate_opens(&mut self) -> anyhow::Result<Duration> {
        ensure!(self.streamer.end()?.success(), "{}", self.streamer.said());
        let timeline = self.image.timeline()?;
        let at = |what: &str| timeline["processes"][0][what].as_u64().context("no time in the timeline");
        Ok(Duration::from_micros(at("gate_open_us")?.saturating_sub(at("runs_us")?)))
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
        Ok((loaded, longest_fault(&self.image.timeline()?)?))
    }

    /// Ends it. What is left is not waited for; that the driver has taken it apart, is: it would do so beside the next restore.
    pub(crate) fn ends(mut self) -> anyhow::Result<()> {
        for pid in self.streamer.workers().into_iter().chain([self.image.toucher.pid()]) {
            // The supervisor ends whoever's memory nobody brings any more, too.
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        }
        self.streamer.end()?;
        wait_for_the_end_of(self.image.toucher.pid())?;
        let is_as_before = || Judge::find().as_ref().map(Judge::alive) == self.before;
        ensure!(soon(is_as_before), "the driver still has something of it");
        Ok(())
    }
}

/// Of the one process, by what the streamer says.
fn longest_fault(said: &Value) -> anyhow::Result<Duration> {
    let waited = said["processes"][0]["longest_fault_us"].as_u64();
    Ok(Duration::from_micros(waited.with_context(|| format!("no longest_fault_us: {said}"))?))
}
