// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program from its start to its dump.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::check::Check;
use super::client::Client;
use super::program::Question;
use super::program::{Program, WARM_UP_SEEDS};
use super::redis;
use crate::criu::Image;
use crate::processes::{Process, check_interrupted, quiet};

/// The longest path of a unix socket, in bytes: its address has 108, with a zero at the end.
const SOCKET_PATH: usize = 107;

/// A dumped program.
#[derive(Debug)]
pub(crate) struct Dumped {
    pub(crate) program: Program,
    pub(crate) image: Image,
    pub(crate) socket: PathBuf,
    /// The request from the start of a restore on.
    pub(crate) first: Check,
    /// The request when all memory is resident.
    pub(crate) whole: Check,
}

impl Dumped {
    /// Computes the right answers, starts the program, checks its answers and dumps it into `directory`.
    pub(crate) fn new(program: Program, mib: u64, criu: &Path, directory: &Path) -> anyhow::Result<Self> {
        let first = Check::new(program, mib, program.first_question(mib));
        let whole = Check::new(program, mib, program.whole_question(mib));
        let Running { mut process, socket, limit } = Running::start(program, mib, directory)?;
        let image = Image::dump(criu, &mut process, directory.join("img"), limit)?;
        Ok(Self { program, image, socket, first, whole })
    }

    /// Bytes of all `pages-*.img`.
    pub(crate) fn page_bytes(&self) -> anyhow::Result<u64> {
        let mut bytes = 0;
        for file in &self.image.page_files {
            bytes += file.metadata().with_context(|| file.display().to_string())?.len();
        }
        Ok(bytes)
    }

    /// Restores the program while a client asks it from the start on. `restore` gets whether the client has
    /// ended, and its failure ends the client. Returns what both returned.
    pub(crate) fn restored_while_asked<R, A: Send>(
        &self,
        restore: impl FnOnce(&dyn Fn() -> bool) -> anyhow::Result<R>,
        ask: impl FnOnce(&Client<'_>) -> anyhow::Result<A> + Send,
    ) -> (anyhow::Result<R>, anyhow::Result<A>) {
        let stop = AtomicBool::new(false);
        let client =
            Client { socket: &self.socket, deadline: Instant::now() + self.image.limit, stop: &stop };
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&client));
            let restored = restore(&|| asked.is_finished());
            stop.store(restored.is_err(), Ordering::Relaxed);
            (restored, asked.join().expect("the client does not panic"))
        })
    }
}

/// A program that has answered its first requests.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) process: Process,
    pub(crate) socket: PathBuf,
    /// Time limit of what moves all its memory once.
    pub(crate) limit: Duration,
}

impl Running {
    /// Starts the program and checks its answers. `directory` gets its files.
    pub(crate) fn start(program: Program, mib: u64, directory: &Path) -> anyhow::Result<Self> {
        let socket = directory.join("socket");
        let length = socket.as_os_str().len();
        ensure!(
            length <= SOCKET_PATH,
            "the path {} has {length} bytes and a socket's at most {SOCKET_PATH}: give a shorter --dir",
            socket.display()
        );
        // A busy disk may write 20 MB/s only.
        let limit = Duration::from_secs(120 + mib / 16);
        let errors = directory.join("errors.log");
        let mut command = program.command(mib, &socket, directory)?;
        quiet(&mut command).stderr(File::create(&errors).with_context(|| errors.display().to_string())?);
        let mut process = Process::spawn(&mut command)?;
        let ready = Instant::now() + limit;
        let prepared =
            listens(&mut process, &socket, ready).and_then(|()| warm_up(program, mib, &socket, ready));
        prepared.with_context(|| {
            let said = std::fs::read_to_string(&errors).unwrap_or_default();
            format!("before the dump, with {mib} MiB (it wrote {:?})", said.trim())
        })?;
        Ok(Self { process, socket, limit })
    }
}

/// Waits until the program has its socket.
fn listens(process: &mut Process, socket: &Path, deadline: Instant) -> anyhow::Result<()> {
    while !socket.exists() {
        if let Ok(exit) = process.wait(Duration::from_millis(10)) {
            bail!(
                "the program ended before it listened ({}): does the machine have enough memory?",
                exit.status
            );
        }
        ensure!(
            Instant::now() < deadline,
            "the program does not listen on {} before the time limit",
            socket.display()
        );
        check_interrupted()?;
    }
    Ok(())
}

/// Fills redis, which fills nothing by itself. Then checks answers to requests as large as the first one
/// after a restore.
fn warm_up(program: Program, mib: u64, socket: &Path, deadline: Instant) -> anyhow::Result<()> {
    let stop = AtomicBool::new(false);
    let client = Client { socket, deadline, stop: &stop };
    if program == Program::Redis {
        redis::fill(&client, program.units(mib))?;
    }
    for seed in WARM_UP_SEEDS {
        let question = Question { seed, ..program.first_question(mib) };
        Check::new(program, mib, question).ask(&client, deadline)?;
    }
    Ok(())
}
