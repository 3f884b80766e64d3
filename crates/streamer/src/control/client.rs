// SPDX-License-Identifier: MIT OR Apache-2.0
//! The client's side of the control socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixStream;

use super::descriptors::receive_descriptors;
use super::frame::{FrameError, receive, send};
use super::proto::{self, Reply, Request, reply, request};
use super::{MESSAGE_LIMIT, OPEN_LIMIT, VERSION, hello};
use crate::working_set::LoadingOptions;

/// Why a request was not answered as it should be.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens.
    #[error("{}: no process listens here: start `rewake serve`, or name its socket with \
        --socket", .0.display())]
    NotServed(PathBuf),
    /// The socket cannot be used.
    #[error("{}: {error}", .path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The daemon speaks another version of the protocol.
    #[error(
        "the daemon ({program}) speaks version {version} of the control protocol, this program {VERSION}: \
         restart it"
    )]
    Version {
        /// Its program and version.
        program: String,
        /// Its version of the protocol.
        version: u32,
    },
    /// The daemon refused, for now.
    #[error("{0}")]
    Refused(String),
    /// The daemon refused, and asking again does not help.
    #[error("{0}")]
    RefusedForGood(String),
    /// The connection broke.
    #[error("talking to the daemon: {0}")]
    Frame(FrameError),
    /// The daemon closed the connection.
    #[error("the daemon closed the connection")]
    Closed,
    /// Its answer is not of the expected kind.
    #[error("the daemon gave an answer to another question")]
    Unexpected,
}

impl From<FrameError> for ClientError {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

impl ClientError {
    /// True when another connection may succeed.
    pub(super) fn is_passing(&self) -> bool {
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
    /// No process listens, or it is not a daemon of this version.
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        let connected = UnixStream::connect(path).await;
        let stream = connected.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ClientError::NotServed(path.to_owned())
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

    pub(super) async fn ask(&mut self, kind: request::Kind) -> Result<reply::Kind, ClientError> {
        self.ask_within(kind, MESSAGE_LIMIT).await
    }

    async fn ask_within(&mut self, kind: request::Kind, limit: Duration) -> Result<reply::Kind, ClientError> {
        send(&mut self.stream, &Request { kind: Some(kind) }).await?;
        self.answer(limit).await
    }

    pub(super) async fn answer(&mut self, limit: Duration) -> Result<reply::Kind, ClientError> {
        let reply: Reply = receive(&mut self.stream, limit).await?.ok_or(ClientError::Closed)?;
        match reply.kind.ok_or(ClientError::Unexpected)? {
            reply::Kind::Failure(proto::Failure { reason, lasting: true }) => {
                Err(ClientError::RefusedForGood(reason))
            }
            reply::Kind::Failure(failure) => Err(ClientError::Refused(failure.reason)),
            kind => Ok(kind),
        }
    }

    /// Has the agent start a streamer. Both paths are absolute. `loading` says what is wanted of the load.
    ///
    /// # Errors
    /// The image cannot be served, or the connection broke.
    pub async fn open(
        &mut self,
        images: &Path,
        work: &Path,
        loading: LoadingOptions,
        signers: &[PathBuf],
    ) -> Result<proto::Opened, ClientError> {
        let open = proto::Open {
            images_dir: images.as_os_str().as_bytes().to_vec(),
            work_dir: work.as_os_str().as_bytes().to_vec(),
            record: loading.record,
            on_demand_only_s: loading.on_demand_only.map_or(0, |time| time.as_secs()),
            signers: signers.iter().map(|file| file.as_os_str().as_bytes().to_vec()).collect(),
            by_plugin: false,
        };
        match self.ask_within(request::Kind::Open(open), OPEN_LIMIT).await? {
            reply::Kind::Opened(opened) => Ok(opened),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Asks what takes long: the agent says each second that it works on it.
    async fn ask_patiently(&mut self, kind: request::Kind) -> Result<reply::Kind, ClientError> {
        let mut answer = self.ask(kind).await?;
        while let reply::Kind::Waiting(_) = answer {
            answer = self.answer(MESSAGE_LIMIT).await?;
        }
        Ok(answer)
    }

    /// Has the agent get an image of a store into its cache. The image stays there as long as this
    /// connection.
    ///
    /// # Errors
    /// The agent has no cache, the image cannot be read, or the connection broke.
    pub async fn acquire(&mut self, acquire: proto::Acquire) -> Result<proto::Acquired, ClientError> {
        match self.ask_patiently(request::Kind::Acquire(acquire)).await? {
            reply::Kind::Acquired(acquired) => Ok(acquired),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Gets what brings the missing memory of an image of the agent's cache: its presence map, a socket to
    /// its fetcher, and the checksum of its layout. None: the image is complete.
    ///
    /// # Errors
    /// The agent cannot bring it, or the connection broke.
    pub(crate) async fn fetch(&mut self, id: &str) -> Result<Option<([OwnedFd; 2], u64)>, ClientError> {
        let fetch = proto::Fetch { image_id: id.to_owned() };
        match self.ask_patiently(request::Kind::Fetch(fetch)).await? {
            reply::Kind::Fetched(proto::Fetched { complete: true, .. }) => Ok(None),
            reply::Kind::Fetched(proto::Fetched { layout, .. }) => {
                Ok(Some((receive_descriptors(&self.stream).await?, layout)))
            }
            _ => Err(ClientError::Unexpected),
        }
    }

    /// The images of the agent's cache.
    ///
    /// # Errors
    /// The agent has no cache, or the connection broke.
    pub async fn cached(&mut self) -> Result<Vec<proto::CachedImage>, ClientError> {
        match self.ask_patiently(request::Kind::Cached(proto::AskCached {})).await? {
            reply::Kind::Cached(cached) => Ok(cached.images),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Has the agent remove an image from its cache. Returns its bytes.
    ///
    /// # Errors
    /// There is no such image, restores use it, or the connection broke.
    pub async fn remove_cached(&mut self, id: &str) -> Result<u64, ClientError> {
        match self.ask_patiently(request::Kind::Remove(proto::RemoveCached { id: id.to_owned() })).await? {
            reply::Kind::Removed(removed) => Ok(removed.bytes),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// The agent's sessions.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn status(&mut self) -> Result<proto::Status, ClientError> {
        match self.ask(request::Kind::Status(proto::AskStatus {})).await? {
            reply::Kind::Status(status) => Ok(status),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// The progress of a streamer.
    ///
    /// # Errors
    /// The socket is no streamer's, or the connection broke.
    pub async fn streaming(&mut self) -> Result<proto::Streaming, ClientError> {
        match self.ask(request::Kind::Streaming(proto::AskStreaming {})).await? {
            reply::Kind::Streaming(streaming) => Ok(streaming),
            _ => Err(ClientError::Unexpected),
        }
    }
}
