// SPDX-License-Identifier: MIT OR Apache-2.0
//! TLS itself: what is left out without the feature `tls`.
//!
//! * `certificates`: reads the files. `verifier`: which certificates are accepted. `peer_name`: whose they
//!   must be.
//! * `key_kind`: which keys can be used.
//! * `client`, `server`: both sides. `encrypted`, `link`: their streams. `explain`: what an error means.

mod certificates;
mod client;
mod encrypted;
mod explain;
mod key_kind;
mod link;
mod peer_name;
mod server;
mod verifier;

pub use client::TlsClient;
pub use encrypted::EncryptedStream;
pub(crate) use explain::explained;
pub use link::{PeerCertificate, TlsLink};
pub use peer_name::PeerName;
pub use server::TlsServer;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

/// The algorithms of both sides.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
