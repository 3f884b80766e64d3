// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control protocol (`proto/control.proto`): its messages, and the one request that a CRIU plugin makes.
//!
//! A plugin has no runtime, so that request blocks. `rewake-streamer` has the asynchronous side.

mod generated;

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};
use prost::Message;

/// The messages of `proto/control.proto`.
pub mod proto {
    pub use super::generated::*;
}

use proto::{reply, request};

/// Version of the protocol that this program speaks: both sides must speak the same.
pub const VERSION: u32 = 2;
/// Longest message, in bytes.
pub const MAX_MESSAGE: usize = 1 << 20;

/// The greeting that either side begins with.
#[must_use]
pub fn hello() -> proto::Hello {
    proto::Hello { version: VERSION, program: concat!("rewake ", env!("CARGO_PKG_VERSION")).to_owned() }
}

/// Why no streamer was started.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No agent listens.
    #[error("{}: no node agent listens here (`rewake serve`): {source}", .path.display())]
    NoAgent {
        /// The socket.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The agent did not answer in time.
    #[error("the node agent has not started a streamer within {0:?}")]
    Late(Duration),
    /// The connection broke.
    #[error("talking to the node agent: {0}")]
    Broken(io::Error),
    /// The agent has another version.
    #[error(
        "the node agent ({program}) speaks version {version} of the control protocol, this plugin {VERSION}: \
         install both of one release"
    )]
    Version {
        /// Its program and version.
        program: String,
        /// Its version of the protocol.
        version: u32,
    },
    /// The agent refused.
    #[error("the node agent refused: {0}")]
    Refused(String),
}

/// Has the agent at this socket start a streamer for a restore, and waits until the streamer listens, at most
/// `limit`.
///
/// # Errors
/// [`OpenError`]: no streamer was started, or one that ends by itself as no restore connects.
pub fn open(agent: &Path, open: proto::Open, limit: Duration) -> Result<proto::Opened, OpenError> {
    let deadline = Instant::now() + limit;
    let is_late =
        |error: &io::Error| matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
    let stream = connect(agent, limit).map_err(|source| match source {
        error if is_late(&error) => OpenError::Late(limit),
        source => OpenError::NoAgent { path: agent.to_owned(), source },
    })?;
    let asked = Agent { stream, deadline }.ask(open);
    asked.map_err(|error| if is_late(&error) { OpenError::Late(limit) } else { OpenError::Broken(error) })?
}

/// Connects, and waits at most `limit` while the agent takes no connections.
fn connect(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let stream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let micros = i64::try_from(limit.as_micros()).map_err(io::Error::other)?;
    setsockopt(&stream, sockopt::SendTimeout, &TimeVal::microseconds(micros))?;
    nix::sys::socket::connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(stream.into())
}

/// A connection to the agent.
struct Agent {
    stream: UnixStream,
    deadline: Instant,
}

impl Agent {
    fn ask(&mut self, open: proto::Open) -> io::Result<Result<proto::Opened, OpenError>> {
        self.send(&hello())?;
        let proto::Hello { version, program } = self.receive()?;
        if version != VERSION {
            return Ok(Err(OpenError::Version { program, version }));
        }
        self.send(&proto::Request { kind: Some(request::Kind::Open(open)) })?;
        Ok(match self.receive::<proto::Reply>()?.kind {
            Some(reply::Kind::Opened(opened)) => Ok(opened),
            Some(reply::Kind::Failure(failure)) => Err(OpenError::Refused(failure.reason)),
            _ => return Err(io::Error::other("an answer to another question")),
        })
    }

    fn send(&mut self, message: &impl Message) -> io::Result<()> {
        let body = message.encode_to_vec();
        let length = u32::try_from(body.len()).map_err(io::Error::other)?;
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write_all(&[&length.to_le_bytes(), &*body].concat())
    }

    fn receive<M: Message + Default>(&mut self) -> io::Result<M> {
        let mut length = [0; 4];
        self.read(&mut length)?;
        let length = usize::try_from(u32::from_le_bytes(length)).map_err(io::Error::other)?;
        if length > MAX_MESSAGE {
            return Err(io::Error::other(format!(
                "a message of {length} bytes, expected {MAX_MESSAGE} at most"
            )));
        }
        let mut body = vec![0; length];
        self.read(&mut body)?;
        M::decode(&*body).map_err(io::Error::other)
    }

    /// Reads all of it, however slowly it comes, up to the deadline.
    fn read(&mut self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            self.stream.set_read_timeout(Some(self.left()?))?;
            match self.stream.read(into) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => into = into.split_at_mut(read).1,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(300);

    /// An agent that reads what it gets, and answers with these bytes.
    fn agent(answer: Vec<u8>) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&answer).unwrap();
            // To the end: the plugin closes first.
            let _ = io::copy(&mut stream, &mut io::sink());
        });
        (dir, path)
    }

    fn framed(message: &impl Message) -> Vec<u8> {
        let body = message.encode_to_vec();
        [&u32::try_from(body.len()).unwrap().to_le_bytes(), &*body].concat()
    }

    fn replied(kind: reply::Kind) -> Vec<u8> {
        [framed(&hello()), framed(&proto::Reply { kind: Some(kind) })].concat()
    }

    #[test]
    fn a_streamer_is_started_or_the_reason_is_given() {
        let opened = proto::Opened { session: 3, lazy_pages: true, reason: String::new() };
        let (_dir, path) = agent(replied(reply::Kind::Opened(opened.clone())));
        assert_eq!(open(&path, proto::Open::default(), LIMIT).unwrap(), opened);
        let failure = proto::Failure { reason: "no such image".into(), lasting: true };
        let (_dir, path) = agent(replied(reply::Kind::Failure(failure)));
        let refused = open(&path, proto::Open::default(), LIMIT).unwrap_err();
        assert!(matches!(refused, OpenError::Refused(reason) if reason == "no such image"));
    }

    #[test]
    fn an_agent_that_takes_no_connection_is_late() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
        nix::sys::socket::bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
        // The backlog holds one.
        let _first = UnixStream::connect(&path).unwrap();
        let late = open(&path, proto::Open::default(), LIMIT).unwrap_err();
        assert!(matches!(late, OpenError::Late(LIMIT)), "{late}");
    }

    #[test]
    fn an_agent_that_is_gone_silent_old_or_another_program_is_told_apart() {
        let asked = |answer: Vec<u8>| {
            let (_dir, path) = agent(answer);
            open(&path, proto::Open::default(), LIMIT).unwrap_err()
        };
        assert!(matches!(asked(Vec::new()), OpenError::Late(LIMIT)));
        let old = proto::Hello { version: 1, program: "rewake 0.0".into() };
        assert!(matches!(asked(framed(&old)), OpenError::Version { version: 1, .. }));
        assert!(matches!(asked(vec![0xff; 8]), OpenError::Broken(_)));
        let gone = open(Path::new("/nonexistent/agent"), proto::Open::default(), LIMIT).unwrap_err();
        assert!(gone.to_string().contains("no node agent listens here"), "{gone}");
    }
}
