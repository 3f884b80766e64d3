// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `rewake stream-gpu` of one restore: a daemon's, or one that is started here. It outlives this command when that is killed: the restored
//! processes depend on it. What became of it it says itself, whichever of its processes is left to do so.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;

use super::Order;
use crate::control::CONNECT_LIMIT;
use crate::control::client::{self, Client};
use crate::streamer::{self, Fate, Said};

/// A streamer under way.
#[derive(Debug)]
pub(super) enum Streamer {
    /// Started here.
    Own(Own),
    /// A session of this daemon.
    OfDaemon { socket: PathBuf, session: u64, opened: Instant },
}

/// How it ended.
#[derive(Debug, Default)]
pub(super) struct Streamed {
    /// When all of the memory was there that it had taken over; none if there was none, or it was lost.
    pub(super) there: Option<Instant>,
    /// Why it is no good end.
    pub(super) reason: Option<String>,
}

impl Streamer {
    /// Has a daemon start one. Whether it brings memory of CPUs, too.
    ///
    /// # Errors
    /// The daemon refuses.
    pub(super) async fn ask(
        mut client: Client,
        socket: &Path,
        order: &Order<'_>,
        work: &Path,
    ) -> anyhow::Result<(Self, bool)> {
        let opened = client.open(order.images, work, CONNECT_LIMIT, order.options.record).await;
        let opened = opened.context("this image cannot be served; nothing was started")?;
        let streamer =
            Self::OfDaemon { socket: socket.to_owned(), session: opened.session, opened: Instant::now() };
        let Some(told) = opened.streamer else {
            bail!("the daemon is of a release that does not serve GPUs: restart it, or stop it");
        };
        Ok((streamer, told.lazy_pages))
    }

    /// Its session in its daemon; 0 of one that has none.
    pub(super) fn session(&self) -> u64 {
        match self {
            Self::Own(_) => 0,
            Self::OfDaemon { session, .. } => *session,
        }
    }

    /// CRIU has ended: so does a streamer that has taken nothing over. Waits for the end of all its processes. May be dropped: then it was
    /// asked to end.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub(super) async fn end(&mut self) -> anyhow::Result<Streamed> {
        let (socket, session, opened) = match self {
            Self::Own(own) => return own.end().await,
            Self::OfDaemon { socket, session, opened } => (socket, *session, *opened),
        };
        let ended = client::finish(socket, session).await;
        let ended = ended.context("the restored processes go on, and so does what brings their memory")?;
        let took = Duration::from_nanos(ended.summary.unwrap_or_default().elapsed_ns);
        Ok(match ended.ok {
            true => Streamed { there: (!took.is_zero()).then(|| opened + took), reason: None },
            false => Streamed { there: None, reason: Some(ended.reason) },
        })
    }
}

/// One that was started here. Dropped, it is asked to end when nothing is left to do.
#[derive(Debug)]
pub(super) struct Own {
    /// Its supervisor.
    child: Child,
    waited_for: bool,
    /// Memory of CPUs comes from it, too.
    pages: bool,
    /// Its `--status-fd`.
    words: Receiver,
}

impl Own {
    /// Starts one that the plugin finds in CRIU's work directory; with `images`, memory of CPUs comes from there, too. With
    /// `record` it records what CPUs touch.
    ///
    /// # Errors
    /// It cannot be started: its own line says why.
    pub(super) async fn start(work: &Path, images: Option<&Path>, record: bool) -> anyhow::Result<Self> {
        let mut command = streamer::command(work, images, record)?;
        let mut child = command.stdout(Stdio::piped()).spawn().context("starting rewake stream-gpu")?;
        let words = child.stdout.take().context("rewake stream-gpu has no output")?;
        let words = Receiver::from_owned_fd(words.into()).context("listening to rewake stream-gpu")?;
        let mut own = Self { child, waited_for: false, pages: images.is_some(), words };
        if next(&mut own.words).await?.is_none() {
            bail!("rewake stream-gpu could not be started: see above");
        }
        Ok(own)
    }

    async fn end(&mut self) -> anyhow::Result<Streamed> {
        self.ask_to_end();
        let (mut said, mut there) = (Said::default(), None);
        while let Some(byte) = next(&mut self.words).await? {
            if said.hear(byte) {
                there = Some(Instant::now());
            }
        }
        let status = self.child.wait().context("waiting for rewake stream-gpu")?;
        self.waited_for = true;
        let fate = match said.fate(self.pages) {
            Fate::Nothing | Fate::Open if status.code() == Some(1) => Fate::Killed,
            fate => fate,
        };
        // It has said why above.
        let reason = fate.reason().map(str::to_owned);
        Ok(Streamed { there: there.filter(|_| reason.is_none()), reason })
    }

    fn ask_to_end(&self) {
        streamer::ask_to_end(self.child.id().cast_signed());
    }
}

impl Drop for Own {
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
