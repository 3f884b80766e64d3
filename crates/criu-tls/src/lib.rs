// SPDX-License-Identifier: MIT OR Apache-2.0
//! TLS as CRIU's page server and its clients speak it: both sides show a certificate of the same CA.
//!
//! * [`TlsOptions`]: the files and rules that the options `--tls-*` name, with CRIU's defaults.
//! * [`TlsServer`] and [`TlsClient`]: make an encrypted stream of a connected one. Towards CRIU, a client's
//!   is an [`EncryptedStream`] over a blocking socket. Between Rewakes, both sides have a [`TlsLink`], whose
//!   other side is a [`PeerCertificate`].
//! * `tls`: all that needs the feature `tls`. `absent`: the same names in a program without it, where `--tls`
//!   is refused, with what to build.
//! * [`HandshakeError`]: why a connection was not made, and what to do. [`end_after_answer`]: so that the
//!   peer gets the reason.
//!
//! What CRIU's own side needs (measured with 4.1.1 and 4.2.1, GnuTLS 3.8):
//! - A server sends no session tickets. `criu dump` takes one for an answer that did not arrive, and fails. A
//!   lazy client aborts when one arrives while it has no request outstanding (read in its source).
//! - A server sends the header of an answer in a record of its own, and its pages in others. A lazy client
//!   reads as many bytes as it needs, and waits for its socket while GnuTLS still has the rest. Each write
//!   into a stream of this crate begins a record, so a caller only has to write header and pages one after
//!   the other.
//! - A client sends each request in a record of its own: CRIU's server reads headers in the same way.
//! - After the last message both sides send a closing alert, and wait for the peer's.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod ending;
mod error;
mod options;

// Its tests run in every build of tests.
#[cfg(any(test, not(feature = "tls")))]
#[cfg_attr(feature = "tls", allow(dead_code, unreachable_pub))]
mod absent;
#[cfg(feature = "tls")]
mod tls;

use std::time::Duration;

#[cfg(not(feature = "tls"))]
use absent as built;
pub use built::{EncryptedStream, PeerCertificate, PeerName, TlsClient, TlsLink, TlsServer};
pub use ending::end_after_answer;
pub use error::HandshakeError;
pub use options::TlsOptions;
#[cfg(feature = "tls")]
use tls as built;

use built::explained;

/// Time that a peer has for its part of a handshake.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);

/// Time that a peer has to read a refusal, and to close the connection.
pub const REFUSAL_LIMIT: Duration = Duration::from_secs(10);
