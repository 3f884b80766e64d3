// SPDX-License-Identifier: MIT OR Apache-2.0
//! The client's side of the control socket.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::sleep;

use super::frame::{FrameError, receive, send};
use super::proto::{self, Reply, Request, reply, request};
use super::{MESSAGE_LIMIT, OPEN_LIMIT, VERSION, hello};

/// Time without any report after which a followed session is given up. A worker's successor answers within
/// milliseconds.
const PATIENCE: Duration = Duration::from_secs(15);
const RETRY: Duration = Duration::from_millis(50);

/// Why a request was not answered as it should be.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("{}: no daemon listens here: start `rewake serve`, or name its socket with --socket", .0.display())]
    NoDaemon(PathBuf),
    /// The socket cannot be used.
    #[error("{}: {error}", .path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The daemon is of another version.
    #[error(
        "the daemon ({program}) speaks version {version} of the control protocol, this program {VERSION}: restart it"
    )]
    Version {
        /// What it says it is.
        program: String,
        /// What it speaks.
        version: u32,
    },
    /// The daemon refused.
    #[error("{0}")]
    Refused(String),
    /// The connection broke.
    #[error("talking to the daemon: {0}")]
    Frame(#[from] FrameError),
    /// The daemon closed the connection.
    #[error("the daemon closed the connection")]
    Closed,
    /// It answered something else.
    #[error("the daemon gave an answer to another question")]
    Unexpected,
}

impl ClientError {
    /// True when another connection may do better.
    fn is_passing(&self) -> bool {
        matches!(self, Self::Frame(_) | Self::Closed)
    }
}

/// A connection.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
}

impl Client {
    /// Connects and greets.
    ///
    /// # Errors
    /// Nobody listens, or it is not a daemon that can be talked to.
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        let connected = UnixStream::connect(path).await;
        let stream = connected.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ClientError::NoDaemon(path.to_owned())
            }
            _ => ClientError::Connect { path: path.to_owned(), error },
        })?;
        let mut client = Self { stream };
        send(&mut client.stream, &hello()).await?;
        let theirs: proto::Hello =
            receive(&mut client.stream, MESSAGE_LIMIT).await?.ok_or(ClientError::Closed)?;
        if theirs.version != VERSION {
            return Err(ClientError::Version { program: theirs.program, version: theirs.version });
        }
        Ok(client)
    }

    async fn ask(&mut self, kind: request::Kind) -> Result<reply::Kind, ClientError> {
        self.ask_within(kind, MESSAGE_LIMIT).await
    }

    async fn ask_within(&mut self, kind: request::Kind, limit: Duration) -> Result<reply::Kind, ClientError> {
        send(&mut self.stream, &Request { kind: Some(kind) }).await?;
        self.answer(limit).await
    }

    async fn answer(&mut self, limit: Duration) -> Result<reply::Kind, ClientError> {
        let reply: Reply = receive(&mut self.stream, limit).await?.ok_or(ClientError::Closed)?;
        match reply.kind.ok_or(ClientError::Unexpected)? {
            reply::Kind::Failure(failure) => Err(ClientError::Refused(failure.reason)),
            kind => Ok(kind),
        }
    }

    /// Opens a session. Both paths are absolute. With `record`, what CPUs touch of GPUs' memory is recorded.
    ///
    /// # Errors
    /// The image cannot be served, or the connection broke.
    pub async fn open(
        &mut self,
        images: &Path,
        work: &Path,
        connect_limit: Duration,
        record: bool,
    ) -> Result<proto::Opened, ClientError> {
        let open = proto::Open {
            images_dir: images.as_os_str().as_bytes().to_vec(),
            work_dir: work.as_os_str().as_bytes().to_vec(),
            connect_limit_ms: u32::try_from(connect_limit.as_millis()).unwrap_or(u32::MAX),
            record,
        };
        match self.ask_within(request::Kind::Open(open), OPEN_LIMIT).await? {
            reply::Kind::Opened(opened) => Ok(opened),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Ends a session that no restore has connected to.
    ///
    /// # Errors
    /// One has, the session is not being served, or the connection broke.
    pub async fn end(&mut self, session: u64) -> Result<proto::Ended, ClientError> {
        let first = self.ask(request::Kind::End(proto::End { session })).await?;
        self.rest(first, |_| {}).await
    }

    /// Everything about the daemon.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn status(&mut self) -> Result<proto::Status, ClientError> {
        match self.ask(request::Kind::Status(proto::AskStatus {})).await? {
            reply::Kind::Status(status) => Ok(status),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// How far `rewake stream-gpu` is.
    ///
    /// # Errors
    /// It is none, or the connection broke.
    pub async fn streaming(&mut self) -> Result<proto::Streaming, ClientError> {
        match self.ask(request::Kind::Streaming(proto::AskStreaming {})).await? {
            reply::Kind::Streaming(streaming) => Ok(streaming),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Follows a session to its end; `report` is called every 100 ms.
    ///
    /// # Errors
    /// The session is not known, or the connection broke.
    pub async fn follow(
        &mut self,
        session: u64,
        report: impl FnMut(proto::Session),
    ) -> Result<proto::Ended, ClientError> {
        let first = self.ask(request::Kind::Follow(proto::Follow { session })).await?;
        self.rest(first, report).await
    }

    async fn rest(
        &mut self,
        first: reply::Kind,
        mut report: impl FnMut(proto::Session),
    ) -> Result<proto::Ended, ClientError> {
        let mut kind = first;
        loop {
            match kind {
                reply::Kind::Progress(session) => report(session),
                reply::Kind::Ended(ended) => return Ok(ended),
                _ => return Err(ClientError::Unexpected),
            }
            kind = self.answer(MESSAGE_LIMIT).await?;
        }
    }
}

/// Follows a session to its end, through the death of workers; `latest` always holds the last report.
///
/// # Errors
/// The daemon is gone, does not know the session, or has been silent for 15 s.
pub async fn follow(
    socket: &Path,
    session: u64,
    latest: &watch::Sender<proto::Session>,
) -> Result<proto::Ended, ClientError> {
    let mut heard = Instant::now();
    loop {
        let attempt = async {
            let mut client = Client::connect(socket).await?;
            client
                .follow(session, |report| {
                    heard = Instant::now();
                    latest.send_replace(report);
                })
                .await
        };
        match attempt.await {
            Err(error) if error.is_passing() && heard.elapsed() < PATIENCE => sleep(RETRY).await,
            other => return other,
        }
    }
}

/// No other restore will come for a session with memory of GPUs. It has been asked to end when this returns, or has ended.
pub async fn ask_to_end(socket: &Path, session: u64) {
    let started = Instant::now();
    loop {
        let asked = async {
            let mut client = Client::connect(socket).await?;
            client.ask(request::Kind::End(proto::End { session })).await
        };
        match asked.await {
            Err(error) if error.is_passing() && started.elapsed() < PATIENCE => sleep(RETRY).await,
            _ => return,
        }
    }
}
