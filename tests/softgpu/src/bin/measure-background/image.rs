// SPDX-License-Identifier: MIT OR Apache-2.0
//! A dumped process, and its restores.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use softgpu_tests::accessor::Large;
use softgpu_tests::criu::{Criu, Version, wait_for_the_end_of};
use softgpu_tests::dumped::soon;
use softgpu_tests::{Accessor, DelayedCopies, Judge, Streamer};

/// The file that `--record` leaves in the images directory.
const RECORD: &str = "rewake-working-set.json";

/// What a restore loads in the background.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Loads {
    /// GPU memory.
    Gpus,
    /// GPU and CPU memory.
    Both,
}

/// A dumped process.
pub(crate) struct Image {
    pub(crate) memory: Large,
    accessor: Accessor,
    criu: Criu,
    _folder: tempfile::TempDir,
}

/// A restored process.
pub(crate) struct Running<'a> {
    image: &'a Image,
    streamer: Streamer,
    /// Objects that were alive on the GPUs before.
    before: Option<BTreeMap<String, u64>>,
    start: Instant,
    /// Time since the start of `criu restore`.
    pub(crate) alive: Duration,
}

impl Image {
    /// Dumps a process that has `own` parts of CPU memory besides.
    pub(crate) fn of(memory: Large, own: usize) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let program = std::env::current_exe()?.with_file_name("accessor");
        let program = program.to_str().context("the path of this program")?;
        let mut accessor = Accessor::start(program, folder.path(), Some(memory))?;
        if own > 0 {
            accessor.asked(&format!("allocate {own}")).with_context(|| format!("{memory:?}"))?;
        }
        let criu = accessor.dump(Version::V4_2).with_context(|| format!("{memory:?}"))?;
        Ok(Self { memory, accessor, criu, _folder: folder })
    }

    pub(crate) fn restores(&self, loads: Loads) -> anyhow::Result<Running<'_>> {
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

    /// Checks the process's own memory, which it reads when it registers it.
    pub(crate) fn is_whole(&self) -> anyhow::Result<()> {
        let running = self.restores(Loads::Both)?;
        self.accessor.asked("register 0")?;
        running.ends()
    }

    /// Restores it once, and has it access the ends of these buffers in this order. Returns the recorded
    /// working set.
    pub(crate) fn records(&self, accessed: &[usize]) -> anyhow::Result<Vec<u8>> {
        let mut streamer = Streamer::recording(self.criu.images())?;
        let delayed = DelayedCopies::streamers();
        self.criu.restore()?;
        // The first access waits until some memory is loaded, the others only for their buffers.
        let (first, rest) = accessed.split_first().context("nothing is accessed")?;
        self.accessor.ask(&format!("tail {first}"))?;
        drop(delayed);
        self.accessor.answer()?;
        rest.iter().try_for_each(|buffer| self.accessor.asked(&format!("tail {buffer}")))?;
        ensure!(streamer.end()?.success(), "{}", streamer.said());
        let _ = kill(Pid::from_raw(self.accessor.pid().cast_signed()), Signal::SIGKILL);
        wait_for_the_end_of(self.accessor.pid())?;
        fs::read(self.criu.images().join(RECORD)).context("the recorded working set")
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

    /// The timeline of the last streamer.
    fn timeline(&self) -> anyhow::Result<Value> {
        let text = fs::read(self.criu.images().join("rewake-timeline.json")).context("the timeline")?;
        serde_json::from_slice(&text).context("the timeline")
    }

    /// `rewake status` of the restore that runs now.
    fn status(&self) -> anyhow::Result<Value> {
        let rewake = self.criu.of_rewake("status")?.get_program().to_owned();
        let done = Command::new(rewake).args(["status", "--json", "-W"]).arg(self.criu.images()).output()?;
        ensure!(done.status.success(), "rewake status: {}", String::from_utf8_lossy(&done.stderr));
        serde_json::from_slice(&done.stdout).context("the output of rewake status")
    }
}

impl Running<'_> {
    /// Accesses the last page of its last buffer; returns the time since the start of `criu restore`.
    pub(crate) fn accesses_its_end(&self) -> anyhow::Result<Duration> {
        self.accesses_end_of(self.image.memory.count - 1)?;
        Ok(self.start.elapsed())
    }

    /// Accesses the last page of a buffer.
    pub(crate) fn accesses_end_of(&self, buffer: usize) -> anyhow::Result<()> {
        self.image.accessor.asked(&format!("tail {buffer}"))
    }

    /// Waits until all memory is loaded; returns when its queues were resumed, since it ran.
    pub(crate) fn gate_opens(&mut self) -> anyhow::Result<Duration> {
        ensure!(self.streamer.end()?.success(), "{}", self.streamer.said());
        let timeline = self.image.timeline()?;
        let at = |what: &str| timeline["processes"][0][what].as_u64().context("no time in the timeline");
        Ok(Duration::from_micros(at("gate_open_us")?.saturating_sub(at("runs_us")?)))
    }

    /// How long its page fault waited, as the running streamer counts.
    pub(crate) fn waited(&self) -> anyhow::Result<Duration> {
        longest_fault(&self.image.status()?)
    }

    /// Waits until all memory is loaded. Returns how long the load took, from the streamer's log, and how
    /// long the page fault waited: zero where the memory was resident before it.
    pub(crate) fn loaded(&mut self) -> anyhow::Result<(Duration, Duration)> {
        let well = self.streamer.end()?.success();
        let said = self.streamer.said();
        ensure!(well, "{said}");
        let line = said.lines().find(|line| line.contains("contents loaded: "));
        let seconds = line.and_then(|line| line.split(", ").find_map(|part| part.strip_suffix(" s")));
        let loaded = Duration::from_secs_f64(seconds.with_context(|| said.clone())?.parse()?);
        Ok((loaded, longest_fault(&self.image.timeline()?)?))
    }

    /// Ends the process without a wait for missing memory. Waits for the driver's cleanup, which would
    /// disturb the next restore.
    pub(crate) fn ends(mut self) -> anyhow::Result<()> {
        for pid in self.streamer.workers().into_iter().chain([self.image.accessor.pid()]) {
            // The supervisor ends processes whose memory is not loaded any more, too.
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        }
        self.streamer.end()?;
        wait_for_the_end_of(self.image.accessor.pid())?;
        let is_as_before = || Judge::find().as_ref().map(Judge::alive) == self.before;
        ensure!(soon(is_as_before), "the driver still has state of it");
        Ok(())
    }
}

/// The longest page fault of the one process, from the streamer's log.
fn longest_fault(said: &Value) -> anyhow::Result<Duration> {
    let waited = said["processes"][0]["longest_fault_us"].as_u64();
    Ok(Duration::from_micros(waited.with_context(|| format!("no longest_fault_us: {said}"))?))
}
