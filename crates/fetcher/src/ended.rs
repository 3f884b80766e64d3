// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a fetcher ends before its work is done.

use std::io::ErrorKind;

use rewake_criu_tls::HandshakeError;

/// Marks an error: the peer has ended the connection, or another host between has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerEnded;

impl std::fmt::Display for PeerEnded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the peer ended the connection")
    }
}

/// Marks an error: the peer violates the protocol.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WrongAnswer;

impl std::fmt::Display for WrongAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a wrong answer")
    }
}

/// Marks an error of this host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LocalFailure;

impl std::fmt::Display for LocalFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "this host")
    }
}

/// Says what an error of the connection means.
pub(crate) fn explained(error: std::io::Error) -> anyhow::Error {
    match (HandshakeError::of(&error), error.kind()) {
        (Some(explained), _) => explained.into(),
        (None, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
            anyhow::Error::from(error).context(PeerEnded)
        }
        (None, _) => error.into(),
    }
}
