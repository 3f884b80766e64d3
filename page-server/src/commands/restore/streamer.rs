// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `rewake stream-gpu` of one restore: a daemon's, or one that is started here. It outlives this command when that is killed: the restored
//! processes depend on it. What became of it it says itself, whichever of its processes is left to do so.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{END_LIMIT, RestoreRequest};
use crate::control::CONNECT_LIMIT;
use crate::control::client::{self, Client, ClientError};
use crate::control::proto::Session;
use rewake_streamer::supervise::launch::{self, StatusFlags};

/// A streamer under way.
#[derive(Debug)]
pub(super) enum Streamer {
    /// Started here.
    Own(Own),
    /// A session of a daemon.
    OfDaemon(OfDaemon),
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
    /// Its session in its daemon; 0 of one that has none.
    pub(super) fn session(&self) -> u64 {
        match self {
            Self::Own(_) => 0,
            Self::OfDaemon(of) => of.session,
        }
    }

    /// CRIU has ended: so does a streamer that has taken nothing over. Waits for the end of all its processes. May be dropped: then it was
    /// asked to end.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub(super) async fn end(&mut self) -> anyhow::Result<Streamed> {
        match self {
            Self::Own(own) => own.end().await,
            Self::OfDaemon(of) => of.end().await,
        }
    }

    /// Asks it to end when nothing is left to do, and does not wait for that.
    pub(super) async fn let_go(&mut self) {
        match self {
            // When it is dropped.
            Self::Own(_) => {}
            Self::OfDaemon(of) => {
                let _ = timeout(END_LIMIT, client::ask_to_end(&of.socket, of.session)).await;
            }
        }
    }
}

/// A session of a daemon.
#[derive(Debug)]
pub(super) struct OfDaemon {
    socket: PathBuf,
    session: u64,
    /// It brings memory of CPUs, too.
    pub(super) pages: bool,
    /// From the beginning: a daemon does not remember for ever how a session ended, nor does it live for ever.
    followed: JoinHandle<Result<Streamed, ClientError>>,
}

impl OfDaemon {
    /// Has a daemon start one.
    ///
    /// # Errors
    /// The daemon refuses.
    pub(super) async fn ask(
        mut client: Client,
        socket: &Path,
        order: &RestoreRequest<'_>,
        work: &Path,
    ) -> anyhow::Result<Self> {
        let opened = client.open(order.images, work, CONNECT_LIMIT, order.options.record).await;
        let opened = opened.context("this image cannot be served; nothing was started")?;
        let (socket, session) = (socket.to_owned(), opened.session);
        let Some(told) = opened.streamer else {
            // That serves memory of CPUs, and waits for a restore.
            let _ = timeout(END_LIMIT, client.end(session)).await;
            bail!("the daemon is of a release that does not serve GPUs: restart it");
        };
        let followed = tokio::spawn(follow(socket.clone(), session));
        Ok(Self { socket, session, pages: told.lazy_pages, followed })
    }

    async fn end(&mut self) -> anyhow::Result<Streamed> {
        if !self.followed.is_finished() {
            client::ask_to_end(&self.socket, self.session).await;
        }
        let followed = (&mut self.followed).await.context("following the daemon")?;
        followed.context("the restored processes go on, and so does what brings their memory")
    }
}

async fn follow(socket: PathBuf, session: u64) -> Result<Streamed, ClientError> {
    let ended = client::follow(&socket, session, &watch::channel(Session::default()).0).await?;
    let summary = ended.summary.unwrap_or_default();
    let ago = Duration::from_nanos(summary.elapsed_ns.saturating_sub(summary.there_ns));
    Ok(match ended.ok {
        true if summary.there_ns > 0 => Streamed { there: Instant::now().checked_sub(ago), reason: None },
        true => Streamed::default(),
        false => Streamed { there: None, reason: Some(ended.reason) },
    })
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
        let mut command = launch::command(work, images, record)?;
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
        let (mut said, mut there) = (StatusFlags::default(), None);
        while let Some(byte) = next(&mut self.words).await? {
            if said.hear(byte) {
                there = Some(Instant::now());
            }
        }
        let status = self.child.wait().context("waiting for rewake stream-gpu")?;
        self.waited_for = true;
        // It has said why above.
        let reason = said.fate(self.pages, status.code()).reason().map(str::to_owned);
        Ok(Streamed { there: there.filter(|_| reason.is_none()), reason })
    }

    fn ask_to_end(&self) {
        launch::ask_to_end(self.child.id().cast_signed());
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
