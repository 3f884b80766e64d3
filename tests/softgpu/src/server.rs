// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload's server, dumped in the middle of an answer: shared by tests of every plugin.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use gpu_app::client;
use gpu_app::shape::{Mode, Shape};
use rewake_testkit::soon;

use crate::Judge;
use crate::app::{App, program_for};
use crate::criu::{Criu, Version, wait_for_the_end_of};

/// The answer that is unfinished at the dump.
const PROMPT: [u32; 2] = [7, 8];
const TOKENS: usize = 12;
/// Servers that are dumped until one has unfinished work: on a slow machine the work may end before CRIU
/// stops it.
const DUMPS: u32 = 10;

/// A shape that is small enough for emulation.
#[must_use]
pub fn small() -> Shape {
    Shape { layers: 3, layer_kib: 64, cache_mib: 2, queues: 1, ..Shape::small() }
}

/// Begins the answer that is unfinished at the dump.
///
/// # Errors
/// The server does not listen.
pub fn begin(app: &App) -> anyhow::Result<()> {
    client::start(app.socket(), &PROMPT, TOKENS)
}

/// Checks the answer that was begun before the dump, and a new one.
///
/// # Errors
/// A token is wrong or missing.
pub fn answers(app: &App) -> anyhow::Result<()> {
    app.answer_is(&PROMPT, TOKENS)?;
    app.answers(&[200], 3)
}

/// A server with an unfinished answer.
#[derive(Debug)]
pub struct Server {
    /// The server.
    pub app: App,
    /// Its first process.
    pub pid: u32,
    version: Version,
    shape: Shape,
    folder: PathBuf,
    judge: Option<Judge>,
    alive: BTreeMap<String, u64>,
    packets: u64,
}

impl Server {
    /// Starts it, checks some tokens, waits for other work, and begins an answer.
    ///
    /// # Panics
    /// One of these steps fails.
    #[must_use]
    pub fn start(shape: &Shape, folder: &Path) -> Self {
        Self::start_for(Version::V4_2, shape, folder)
    }

    /// As [`Server::start`], so that this CRIU can dump it.
    ///
    /// # Panics
    /// As [`Server::start`].
    #[must_use]
    pub fn start_for(version: Version, shape: &Shape, folder: &Path) -> Self {
        let judge = Judge::find();
        let alive = judge.as_ref().map(Judge::alive).unwrap_or_default();
        let app = App::start_by(&program_for(version, folder).unwrap(), shape, folder).unwrap();
        app.answers(&[1, 2, 3], 4).unwrap();
        if shape.mode.has_rounds() {
            app.gets_busy().unwrap();
        }
        if shape.mode == Mode::RenderOnly {
            app.rendered("kept").unwrap();
        }
        begin(&app).unwrap();
        let pid = app.pid().unwrap();
        let packets = judge.as_ref().map_or(0, |judge| judge.paused().packets);
        let (shape, folder) = (shape.clone(), folder.to_owned());
        Self { app, pid, version, shape, folder, judge, alive, packets }
    }

    /// One that a test of this machine has dumped, with its files in `folder` again.
    pub(crate) fn dumped(version: Version, shape: &Shape, folder: &Path, pid: u32) -> Self {
        let judge = Judge::find();
        let alive = judge.as_ref().map(Judge::alive).unwrap_or_default();
        let packets = judge.as_ref().map_or(0, |judge| judge.paused().packets);
        let app = App::dumped(pid, shape, folder);
        Self { app, pid, version, shape: shape.clone(), folder: folder.to_owned(), judge, alive, packets }
    }

    /// Checks that `criu` dumped it in the middle of work, if its mode has some, and that nothing of it is
    /// left on the GPUs. Replaces a server that was idle by another, dumped.
    ///
    /// # Panics
    /// All were idle, or something is left.
    pub fn was_dumped(&mut self, criu: &Criu) {
        self.is_gone();
        for _ in 1..DUMPS {
            if self.packets_under_way().is_none_or(|packets| packets > 1) {
                return;
            }
            fs::remove_dir_all(criu.images()).unwrap();
            fs::create_dir(criu.images()).unwrap();
            self.app.is_over();
            *self = Self::start_for(self.version, &self.shape, &self.folder);
            criu.dump(self.pid).unwrap();
            self.is_gone();
        }
        let packets = self.packets_under_way();
        assert!(packets.is_none_or(|packets| packets > 1), "{packets:?} unfinished packets at the dump");
    }

    /// Unfinished packets at the dump; None in modes without work.
    fn packets_under_way(&self) -> Option<u64> {
        let judge = self.judge.as_ref()?;
        let busy = matches!(self.shape.mode, Mode::MidDispatch | Mode::Graph | Mode::Userptr | Mode::Svm);
        busy.then(|| judge.paused().packets - self.packets)
    }

    /// Waits for its end, and until nothing of it is left on the GPUs.
    fn is_gone(&mut self) {
        self.app.was_dumped();
        let Some(judge) = &self.judge else { return };
        // The driver cleans up ended processes in the background.
        let gone = soon(|| judge.alive() == self.alive);
        assert!(gone, "{:?} of dumped processes on the GPUs, before {:?}", judge.alive(), self.alive);
    }

    /// Checks the answer that was begun, and a new one.
    ///
    /// # Errors
    /// A token is wrong or missing.
    pub fn answers(&self) -> anyhow::Result<()> {
        answers(&self.app)
    }

    /// Checks that it answers, and that other work continues.
    ///
    /// # Panics
    /// It does not.
    pub fn works(&self) {
        self.answers().unwrap();
        if self.shape.mode.has_rounds() {
            self.app.continues(2).unwrap();
        }
        if self.shape.mode == Mode::RenderOnly {
            ["node", "kept", "fresh", "kept"].iter().for_each(|part| self.app.rendered(part).unwrap());
        }
    }

    /// Checks that it [works](Server::works), then ends it.
    ///
    /// # Panics
    /// It does not.
    pub fn ends_well(self) {
        self.works();
        self.app.quit().unwrap();
        wait_for_the_end_of(self.pid).unwrap();
    }
}
