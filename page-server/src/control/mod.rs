// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control protocol between `rewake serve` and its clients: `proto/control.proto` over a UNIX socket.
//!
//! * [`proto`]: the messages, generated.
//! * [`frame`]: a message on a stream: a length, then that many bytes, within a time.
//! * [`rewake_streamer::session::address`]: where the socket is, who may speak.
//! * `accept`: clients, up to their first request.
//! * [`registry`], [`server`]: the daemon's side; `streamer_session`: its sessions with GPU memory.
//! * [`status_server`]: `rewake stream-gpu` answers how far it is.
//! * [`client`]: the other side.

use std::time::Duration;

mod accept;
pub mod client;
pub mod frame;
mod generated;
pub mod registry;
pub mod server;
pub mod status_server;
mod streamer_session;

/// The messages of `proto/control.proto`.
pub mod proto {
    pub use super::generated::*;
}

/// Version of the protocol that this program speaks: both sides must speak the same.
pub const VERSION: u32 = 1;
/// Longest message, in bytes.
pub const MAX_MESSAGE: usize = 1 << 20;
/// Time that one message may take to come or to go, and that a connection may be idle between requests.
pub const MESSAGE_LIMIT: Duration = Duration::from_secs(10);
/// Time that a session may take to be opened: an image is checked, a streamer begins.
pub const OPEN_LIMIT: Duration = Duration::from_secs(60);
/// Time between two reports of a followed session.
pub const REPORT: Duration = Duration::from_millis(100);
/// Time that a restore has to connect when its client sets no limit.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(60);
/// Clients at once. More are turned away.
pub const MAX_CLIENTS: usize = 256;

/// The greeting that either side begins with.
#[must_use]
pub fn hello() -> proto::Hello {
    proto::Hello { version: VERSION, program: concat!("rewake ", env!("CARGO_PKG_VERSION")).to_owned() }
}
