// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `rewake stream-gpu` of one restore. It outlives this command when that is killed: the restored processes depend on it.
//! What became of it it says itself, whichever of its processes is left to do so.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;

use crate::ledger::Word;

/// A streamer under way.
#[derive(Debug)]
pub(super) struct Streamer {
    /// Its supervisor.
    child: Child,
    waited_for: bool,
    /// Memory of CPUs comes from it, too.
    pages: bool,
    /// Its `--status-fd`.
    words: Receiver,
}

/// What became of memory that could come later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Streamed {
    /// It took nothing over: the plugin had nothing for it, or did it all itself.
    Nothing,
    /// All gates are open and all memory of CPUs is back, since then.
    Open(Instant),
    /// Those before gates were killed, or those with missing memory.
    Killed,
    /// Nobody is left to say: they stand before their gates for ever.
    Abandoned,
}

impl Streamer {
    /// Starts one that the plugin finds in CRIU's work directory; with `images`, memory of CPUs comes from there, too. With
    /// `record` it records what CPUs touch.
    ///
    /// # Errors
    /// It cannot be started: its own line says why.
    pub(super) async fn start(work: &Path, images: Option<&Path>, record: bool) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let mut command = Command::new(program);
        // Its output is what it tells. No terminal's signal is for it.
        command.arg("stream-gpu").arg("-W").arg(work).args(["--status-fd", "1"]).process_group(0);
        if let Some(images) = images {
            command.arg("-D").arg(images);
        }
        if record {
            command.arg("--record");
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting rewake stream-gpu")?;
        let words = child.stdout.take().context("rewake stream-gpu has no output")?;
        let words = Receiver::from_owned_fd(words.into()).context("listening to rewake stream-gpu")?;
        let mut streamer = Self { child, waited_for: false, pages: images.is_some(), words };
        if next(&mut streamer.words).await?.is_none() {
            bail!("rewake stream-gpu could not be started: see above");
        }
        Ok(streamer)
    }

    /// CRIU has ended: so does a streamer that has taken nothing over. Waits for the end of all its processes.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub(super) async fn end(&mut self) -> anyhow::Result<Streamed> {
        self.ask_to_end();
        let (mut streamed, mut back) = (Streamed::Nothing, None);
        while let Some(byte) = next(&mut self.words).await? {
            streamed = match (Word::read(byte), streamed) {
                (Some(Word::Back), same) => {
                    back = Some(Instant::now());
                    same
                }
                (_, Streamed::Killed) => Streamed::Killed,
                (Some(Word::Shut), _) => Streamed::Abandoned,
                (Some(Word::Open), Streamed::Open(since)) => Streamed::Open(since),
                (Some(Word::Open), _) => Streamed::Open(Instant::now()),
                (Some(Word::Killed), _) => Streamed::Killed,
                (None, same) => same,
            };
        }
        let status = self.child.wait().context("waiting for rewake stream-gpu")?;
        self.waited_for = true;
        Ok(match streamed {
            // Memory of CPUs was lost when nobody stood before a gate.
            Streamed::Nothing | Streamed::Open(_)
                if self.pages && back.is_none() || status.code() == Some(1) =>
            {
                Streamed::Killed
            }
            Streamed::Open(since) => Streamed::Open(back.map_or(since, |back| back.max(since))),
            Streamed::Nothing => back.map_or(Streamed::Nothing, Streamed::Open),
            same => same,
        })
    }

    /// The whole group: a worker whose supervisor was killed is asked by nobody else.
    fn ask_to_end(&self) {
        // All may have ended; the number is the group's until it was waited for.
        let _ = killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        if !self.waited_for {
            self.ask_to_end();
        }
    }
}

/// What it says next; none when nobody is left to say anything.
async fn next(words: &mut Receiver) -> anyhow::Result<Option<u8>> {
    let mut byte = [0];
    let count = words.read(&mut byte).await.context("listening to rewake stream-gpu")?;
    Ok((count == 1).then_some(byte[0]))
}
