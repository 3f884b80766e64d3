// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of the handoff.

use std::io;
use std::time::Duration;

use nix::errno::Errno;

use crate::{SOCKET, VERSION};

/// A handoff failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call on the socket failed.
    #[error("{act} ({SOCKET} in CRIU's work directory)")]
    Socket {
        /// The failed step.
        act: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The other end did not send or receive in time.
    #[error("the peer has neither sent nor received for {0:?}")]
    TimedOut(Duration),
    /// The other end closed the connection.
    #[error("the peer has closed the socket: see its log")]
    Closed,
    /// The other end is another user's.
    #[error("the peer belongs to user {found}, expected {expected} or root")]
    ForeignUser {
        /// The other end's user.
        found: u32,
        /// This process's user.
        expected: u32,
    },
    /// The other end has another version of the protocol.
    #[error("the peer speaks version {0}, this one {VERSION}: install plugin and `rewake` of one release")]
    Version(u32),
    /// A message cannot be decoded or is not expected.
    #[error("expected {expected}, found {found}: are plugin and server of one version?")]
    Malformed {
        /// The expected message.
        expected: &'static str,
        /// The received message.
        found: String,
    },
    /// A message was cut off: it was too long, or had too many descriptors.
    #[error(
        "a message was cut off: more descriptors than this process may have open? raise the limit (ulimit -n)"
    )]
    Truncated,
    /// The server refused the handoff.
    #[error("the server refused: {0}")]
    Refused(String),
}

impl Error {
    /// For `map_err`: makes an error of a failed step.
    pub(crate) fn of(act: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| match errno {
            Errno::EPIPE | Errno::ECONNRESET => Self::Closed,
            errno => Self::Socket { act, source: errno.into() },
        }
    }
}
