// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections with other hosts.
//!
//! * [`PeerStream`]: a TCP connection between two Rewakes, in clear or encrypted.
//! * [`connect`] and [`Admission`]: its two sides. With TLS both show a certificate. The server sends one
//!   answer after the handshake: the client is admitted, or why not. So a client knows before its first
//!   message.
//! * [`AllowedPeer`] and [`PeerRights`]: what `--allow` says, and what follows for one peer.
//! * [`RefusalLog`]: so that hosts that are refused again and again do not fill the log.
//! * [`watch_peer`]: finds out when a peer is lost, on connections with CRIU, too.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod admission;
mod refusal_log;
mod rights;
mod stream;
mod watch;

pub use admission::{Admission, connect};
pub use refusal_log::RefusalLog;
pub use rights::{AllowedPeer, PeerRights};
pub use stream::PeerStream;
pub use watch::{PATIENT, PROMPT, PeerWatch, watch_peer};
