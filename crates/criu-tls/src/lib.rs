// SPDX-License-Identifier: MIT OR Apache-2.0
//! TLS as CRIU's page server and its clients speak it: both sides show a certificate of the same CA.
//!
//! * [`TlsOptions`]: the files and rules that the options `--tls-*` name, with CRIU's defaults.
//! * [`TlsServer`] and [`TlsClient`]: make an encrypted stream of a connected one. Towards CRIU, a client's is an
//!   [`EncryptedStream`] over a blocking socket. Between Rewakes, both sides have a [`TlsLink`], whose other side is a
//!   [`PeerCertificate`].
//! * `certificates`: reads the files. `verifier`: which certificates are accepted. `peer_name`: whose they
//!   must be.
//! * [`HandshakeError`]: why a connection was not made, and what to do. [`end_after_answer`]: so that the peer gets the
//!   reason.
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

mod certificates;
mod client;
mod encrypted;
mod ending;
mod error;
mod link;
mod peer_name;
mod server;
mod verifier;

pub use certificates::TlsOptions;
pub use client::TlsClient;
pub use encrypted::EncryptedStream;
pub use ending::end_after_answer;
pub use error::HandshakeError;
pub use link::{PeerCertificate, TlsLink};
pub use peer_name::PeerName;
pub use server::TlsServer;

use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::CryptoProvider;

/// Time that a peer has for its part of a handshake.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(30);

/// Time that a peer has to read a refusal, and to close the connection.
pub const REFUSAL_LIMIT: Duration = Duration::from_secs(10);

/// The algorithms of both sides.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
