// SPDX-License-Identifier: MIT OR Apache-2.0
//! The first process: answers on a UNIX socket, one line of text each.
//!
//! * `start N TOKEN...`: begins to generate N tokens after the prompt; answers `started`
//! * `progress`: answers `progress N`, the tokens that have been generated so far
//! * `result`: waits for them; answers `tokens TOKEN...`
//! * `check`: answers `ok ROUNDS`, the rounds of other work during answers, or `failed REASON`
//! * `rendered PART`: answers `ok`, or `failed REASON`: a part of the process with render nodes only
//! * `own`: answers `ok`, or `failed REASON`: the program's own memory, every byte
//! * `quit`: answers `bye` and ends
//!
//! Every error is answered by `failed REASON`. No client needs to be connected while tokens are made.

use std::fs;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, anyhow, bail, ensure};

use crate::chain::Step;
use crate::family::Relative;
use crate::gpu::Gpus;
use crate::kernel::Kernel;
use crate::model;
use crate::own::Own;
use crate::rendered::Rendered;
use crate::shape::{Mode, Shape};
use crate::side::Side;
use crate::small::Small;
use crate::stage::{ACTIVATION, Ends, Stage};

/// Bytes of a request's line, at most.
const LINE: u64 = 1 << 20;

/// Microseconds of a GPU's time for each of the tokens that are dispatched at once, so that a dump finds them
/// waiting.
const BUSY: u64 = 250_000;

/// The first process's part and the other processes.
#[derive(Debug)]
struct Server {
    shape: Shape,
    stage: Stage,
    ends: Ends,
    small: Small,
    own: Own,
    relatives: Vec<Relative>,
    /// Tokens of the answer that was begun last.
    progress: Arc<AtomicUsize>,
}

/// Serves until a client says `quit`.
///
/// # Errors
/// The driver refuses, a process cannot be started, or the socket cannot be made.
pub fn serve(shape: &Shape, path: &Path) -> anyhow::Result<()> {
    shape.check()?;
    let gpus = Gpus::open(shape.gpus)?;
    let server = Server::load(shape, &gpus)?;
    let side = Side::start(shape, &gpus, &server.stage.weights()[0])?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("remove {}", path.display()));
        }
        _ => {}
    }
    let rendered = if shape.mode == Mode::RenderOnly { Some(Rendered::start(shape)?) } else { None };
    let listener = UnixListener::bind(path).with_context(|| format!("listen on {}", path.display()))?;
    println!("READY");
    let progress = Arc::clone(&server.progress);
    Desk { side, rendered, under_way: None, progress, server: Arc::new(Mutex::new(server)) }.answer(&listener)
}

/// Handles requests.
#[derive(Debug)]
struct Desk {
    // Fields drop in order: other work uses the server's memory.
    side: Option<Side>,
    rendered: Option<Rendered>,
    under_way: Option<JoinHandle<anyhow::Result<Vec<u32>>>>,
    /// The server's own, which a request reads while the server generates.
    progress: Arc<AtomicUsize>,
    server: Arc<Mutex<Server>>,
}

impl Desk {
    fn answer(&mut self, listener: &UnixListener) -> anyhow::Result<()> {
        loop {
            let (client, _) = listener.accept().context("accept a client")?;
            // A client may disconnect at any moment.
            if matches!(self.client(client), Ok(true)) {
                return Ok(());
            }
        }
    }

    /// Reads one line and answers; true if it was the last.
    fn client(&mut self, mut client: UnixStream) -> anyhow::Result<bool> {
        let mut line = String::new();
        let reader = std::io::Read::take(client.try_clone()?, LINE);
        BufReader::new(reader).read_line(&mut line)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = self.request(&words).unwrap_or_else(|error| format!("failed {error:#}"));
        writeln!(client, "{}", answer.replace('\n', " "))?;
        Ok(words == ["quit"])
    }

    fn request(&mut self, words: &[&str]) -> anyhow::Result<String> {
        match words {
            ["start", count, prompt @ ..] => {
                ensure!(self.under_way.is_none(), "an answer is unfinished already");
                let count = count.parse().with_context(|| format!("{count:?} is no number of tokens"))?;
                let prompt = tokens(prompt)?;
                self.progress.store(0, Ordering::Relaxed);
                let server = Arc::clone(&self.server);
                self.under_way = Some(thread::spawn(move || {
                    server.lock().unwrap_or_else(PoisonError::into_inner).generate(&prompt, count)
                }));
                Ok("started".to_owned())
            }
            ["progress"] => Ok(format!("progress {}", self.progress.load(Ordering::Relaxed))),
            ["result"] => {
                let thread = self.under_way.take().context("no answer was begun")?;
                let tokens = thread.join().map_err(|_| anyhow!("the answer's thread panicked"))??;
                Ok(tokens.iter().fold("tokens".to_owned(), |line, token| format!("{line} {token}")))
            }
            ["check"] => match self.side.as_ref().map_or(Ok(0), Side::rounds) {
                Ok(rounds) => Ok(format!("ok {rounds}")),
                Err(failure) => bail!("{failure}"),
            },
            ["rendered", part] => {
                self.rendered.as_mut().context("no process has render nodes only")?.check(part)?;
                Ok("ok".to_owned())
            }
            ["own"] => {
                self.server.lock().unwrap_or_else(PoisonError::into_inner).own.check()?;
                Ok("ok".to_owned())
            }
            ["quit"] => Ok("bye".to_owned()),
            other => bail!("{other:?} is no request: start, progress, result, check, rendered, own or quit"),
        }
    }
}

/// Tokens from words.
///
/// # Errors
/// One of them is no 32-bit number.
pub fn tokens(words: &[&str]) -> anyhow::Result<Vec<u32>> {
    let token = |word: &&str| word.parse().with_context(|| format!("{word:?} is no token"));
    words.iter().map(token).collect()
}

impl Server {
    fn load(shape: &Shape, gpus: &Arc<Gpus>) -> anyhow::Result<Self> {
        let shared = shape.mode == Mode::SharedBo;
        let x = if shared { gpus.shared(ACTIVATION)? } else { gpus.host(ACTIVATION)? };
        let dmabuf = if shared { Some(x.export()?) } else { None };
        let stage = Stage::load(shape, 0, gpus, x)?;
        let mut relatives = Vec::new();
        for process in 1..shape.processes {
            relatives.push(Relative::start(shape, process, dmabuf.as_ref().map(|fd| fd.as_fd()))?);
        }
        let (ends, small) = (Ends::load(shape, gpus)?, Small::load(shape, gpus)?);
        Ok(Self {
            shape: shape.clone(),
            stage,
            ends,
            small,
            own: Own::load(shape)?,
            relatives,
            progress: Arc::default(),
        })
    }

    fn generate(&mut self, prompt: &[u32], count: usize) -> anyhow::Result<Vec<u32>> {
        let prompt = if prompt.is_empty() { &[0] } else { prompt };
        let start = self.own.start(self.small.start(self.stage.lane())?);
        if self.shape.mode == Mode::Graph {
            return self.generate_at_once(prompt, count, start);
        }
        let (mut hash, mut token) = (start, 0);
        let mut step = 0;
        for given in prompt {
            (hash, token) = self.step(*given, step, hash)?;
            step += 1;
        }
        let mut answer = Vec::new();
        while answer.len() < count {
            answer.push(token);
            self.progress.store(answer.len(), Ordering::Relaxed);
            (hash, token) = self.step(token, step, hash)?;
            step += 1;
        }
        Ok(answer)
    }

    /// One step: hash for the next, and the next token.
    fn step(&mut self, token: u32, step: u64, seed: u64) -> anyhow::Result<(u64, u32)> {
        let mut steps = self.ends.before(&self.stage, (token, step), true, 0);
        steps.extend(self.stage.layer_steps(seed, 0));
        let after = self.ends.after(&self.stage, step, 0);
        if self.relatives.is_empty() {
            steps.extend(after);
            self.stage.lane().run(&steps)?;
            return self.token(0, self.stage.result(0, 0));
        }
        self.stage.lane().run(&steps)?;
        let mut hash = self.stage.result(0, 0);
        let shared = self.shape.mode == Mode::SharedBo;
        for relative in &mut self.relatives {
            hash = relative.pass(&self.stage, shared, hash)?;
        }
        self.stage.lane().run(&after)?;
        self.token(0, hash)
    }

    /// Dispatches all steps before it reads any result.
    fn generate_at_once(&mut self, prompt: &[u32], count: usize, seed: u64) -> anyhow::Result<Vec<u32>> {
        let mut steps: Vec<Step> = Vec::new();
        let first = prompt.len() as u64;
        let last = first + count as u64;
        for step in 0..last.max(first) {
            let given = usize::try_from(step).ok().and_then(|step| prompt.get(step));
            let token = (given.copied().unwrap_or(0), step);
            steps.extend(self.ends.before(&self.stage, token, given.is_some(), step));
            steps.push(Step { gpu: 0, queue: 0, kernel: Kernel::Spin { microseconds: BUSY } });
            steps.extend(self.stage.layer_steps(seed, step));
            steps.extend(self.ends.after(&self.stage, step, step));
        }
        self.stage.lane().run(&steps)?;
        let token = |step| self.token(step, self.stage.result(step, 0)).map(|(_, token)| token);
        let answer = (first - 1..last.saturating_sub(1).max(first - 1))
            .map(token)
            .collect::<anyhow::Result<Vec<_>>>()?;
        self.progress.store(answer.len(), Ordering::Relaxed);
        Ok(answer)
    }

    fn token(&self, slot: u64, layers: u64) -> anyhow::Result<(u64, u32)> {
        let chased = self.ends.chased(self.stage.result(slot, 2))?;
        Ok(model::next(layers, self.stage.result(slot, 1), chased))
    }
}
