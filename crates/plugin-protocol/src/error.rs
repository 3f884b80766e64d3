// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a handover came to nothing.

use std::io;
use std::time::Duration;

use nix::errno::Errno;

use crate::VERSION;
use crate::socket::SOCKET;

/// A handover came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error("{act} ({SOCKET} in CRIU's work directory)")]
    Socket {
        /// What was tried.
        act: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Nothing came, or what was said was not heard.
    #[error("the other end has said nothing, and heard nothing, for {0:?}")]
    Silent(Duration),
    /// It ended, or gave up.
    #[error("the other end has closed the socket: its log says why")]
    Closed,
    /// It is someone else's.
    #[error("the other end belongs to user {found}, expected {expected} or root")]
    Stranger {
        /// Who it is.
        found: u32,
        /// Who this is.
        expected: u32,
    },
    /// What it says would be misunderstood.
    #[error(
        "the other end speaks version {0}, this one {VERSION}: install plugin and `rewake` of one release"
    )]
    Version(u32),
    /// It does not make sense.
    #[error("expected {expected}, found {found}: are plugin and server of one version?")]
    Garbled {
        /// What should have come.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// It did not fit.
    #[error(
        "a message was cut off: more descriptors than this process may have open? raise the limit (ulimit -n)"
    )]
    CutOff,
    /// The server will not.
    #[error("the server refused: {0}")]
    Refused(String),
}

impl Error {
    /// For `map_err`.
    pub(crate) fn of(act: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| match errno {
            Errno::EPIPE | Errno::ECONNRESET => Self::Closed,
            errno => Self::Socket { act, source: errno.into() },
        }
    }
}
