// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server that was dumped once, and its restores, each from a disk whose bytes are in no cache. Every token
//! and every byte of its own memory is checked.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gpu_app::client;
use gpu_app::model::Model;
use gpu_app::shape::Shape;
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use softgpu_tests::{Judge, Streamer};

use crate::cache::{drop_files, files};
use crate::plugin::log::Contents;

/// The request: one token goes through all weights.
const PROMPT: [u32; 1] = [141];
const TOKENS: usize = 1;

/// What a restore loads in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Nothing.
    AtOnce,
    /// GPU memory.
    Gpu,
    /// GPU and CPU memory.
    Both,
}

impl Way {
    pub(super) const ALL: [Self; 3] = [Self::AtOnce, Self::Gpu, Self::Both];
}

/// A restore. Times are since the start of `criu restore`, but for the last.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// `criu restore` has returned.
    pub(super) alive: Duration,
    /// The first answer has arrived.
    pub(super) answered: Duration,
    /// All memory is resident.
    pub(super) resident: Duration,
    /// How long another answer took then.
    pub(super) answer: Duration,
    /// The load of GPU memory, from the log of the process that did it.
    pub(super) contents: Contents,
    /// Times of the background load.
    pub(super) behind: Option<Behind>,
}

/// Seconds since the handoff.
#[derive(Debug, Clone, Copy)]
pub(super) struct Behind {
    /// The process runs, and the background load of GPU memory begins.
    pub(super) runs: f64,
    /// The last byte of that is resident.
    pub(super) last: f64,
    /// Queues of the first process are resumed, and of the last one.
    pub(super) gates: [f64; 2],
}

/// The server, and its right answer.
#[derive(Debug)]
pub(super) struct Subject {
    app: App,
    pid: u32,
    pub(super) criu: Criu,
    answer: Vec<u32>,
    own: bool,
    _folder: tempfile::TempDir,
}

impl Subject {
    /// Starts it and dumps it, with its images in a folder of `dir`.
    pub(super) fn dumped(shape: &Shape, dir: &std::path::Path) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("a folder for the process's socket")?;
        let mut app = App::start(shape, folder.path())?;
        let pid = app.pid().context("it has just been started")?;
        let answer = Model::new(shape).generate(&PROMPT, TOKENS);
        let found = client::generate(app.socket(), &PROMPT, TOKENS)?;
        ensure!(found == answer, "the process answers {found:?} before the dump, expected {answer:?}");
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &dir.join("images"))?;
        criu.dump_by_rewake(pid)?;
        app.was_dumped();
        // Every restore of it is ended here.
        app.is_over();
        Ok(Self { app, pid, criu, answer, own: shape.own_mib > 0, _folder: folder })
    }

    /// Bytes of the image: of CPU memory, and of everything.
    pub(super) fn image(&self) -> anyhow::Result<(u64, u64)> {
        let (mut pages, mut all) = (0, 0);
        for file in self.files()? {
            let bytes = file.metadata()?.len();
            all += bytes;
            if file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("pages-")) {
                pages += bytes;
            }
        }
        Ok((pages, all))
    }

    fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let all = files(self.criu.images())?;
        Ok(all.into_iter().filter(|file| file.is_file()).collect())
    }

    /// Restores it, sends requests, and ends it.
    pub(super) fn restores(&self, way: Way) -> anyhow::Result<Sample> {
        drop_files(&self.files()?)?;
        let mut streamer = match way {
            Way::AtOnce => None,
            Way::Gpu => Some(Streamer::start(self.criu.images())?),
            Way::Both => Some(Streamer::of_both(self.criu.images())?),
        };
        let start = Instant::now();
        if way == Way::Both {
            self.criu.restore_lazily()?;
        } else {
            self.criu.restore()?;
        }
        let alive = start.elapsed();
        let (answered, resident) = std::thread::scope(|scope| {
            let streamed = scope.spawn(|| {
                let Some(streamer) = &mut streamer else { return Ok(alive) };
                let well = streamer.end()?.success();
                ensure!(well, "{}", streamer.said());
                Ok(start.elapsed())
            });
            let answered = self.answers().map(|()| start.elapsed());
            let resident = streamed.join().expect("it only waits")?;
            anyhow::Ok((answered?, resident))
        })?;
        let again = Instant::now();
        self.answers()?;
        let answer = again.elapsed();
        let said = streamer.as_ref().map_or_else(|| self.criu.log("restore"), Streamer::said);
        let contents =
            Contents::of_rewake(&said).with_context(|| format!("no line about contents: {said}"))?;
        let behind = streamer.map(|_| self.behind()).transpose()?;
        self.ends()?;
        Ok(Sample { alive, answered, resident, answer, contents, behind })
    }

    /// Requests one answer, which must be right.
    pub(super) fn answers(&self) -> anyhow::Result<()> {
        let found = client::generate(self.app.socket(), &PROMPT, TOKENS)?;
        ensure!(found == self.answer, "the restored process answers {found:?}, expected {:?}", self.answer);
        Ok(())
    }

    /// Removes the timeline, so that the next restore writes its own.
    fn behind(&self) -> anyhow::Result<Behind> {
        let path = self.criu.images().join("rewake-timeline.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        let timeline: serde_json::Value = serde_json::from_str(&text).context("the timeline")?;
        let memory = timeline["memory"].as_array().context("the timeline has no memory")?;
        let last = memory.iter().filter_map(|of| of["resident_us"].as_u64()).max();
        let last = last.context("the memory was never resident")? as f64 / 1e6;
        let runs =
            timeline["processes"][0]["runs_us"].as_u64().context("the process never ran")? as f64 / 1e6;
        let processes = timeline["processes"].as_array().into_iter().flatten();
        let gates = || processes.clone().filter_map(|of| of["gate_open_us"].as_u64());
        let (first, all) = gates().min().zip(gates().max()).context("no gate was opened")?;
        Ok(Behind { runs, last, gates: [first, all].map(|at| at as f64 / 1e6) })
    }

    /// Checks its own memory, every byte, and ends it.
    pub(super) fn ends(&self) -> anyhow::Result<()> {
        if self.own {
            client::ask(self.app.socket(), "own")?;
        }
        let violations = Judge::find().map_or_else(Vec::new, |judge| judge.violations());
        ensure!(violations.is_empty(), "{violations:?}");
        client::ask(self.app.socket(), "quit")?;
        wait_for_the_end_of(self.pid)
    }
}
