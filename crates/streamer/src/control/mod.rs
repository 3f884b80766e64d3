// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control protocol between the agent, streamers and their clients: `proto/control.proto` over UNIX sockets.
//!
//! * [`proto`]: the messages, generated.
//! * [`frame`]: a message on a stream: a length, then that many bytes, within a time. [`descriptors`] may follow one.
//! * [`crate::session::address`]: where the agent's socket is, which users may connect.
//! * `accept`: clients, up to their first request.
//! * [`status_server`]: a streamer answers its clients.
//! * [`client`]: the other side; [`streamer`]: starts a streamer and follows it to its end.
//! * [`work_folder`]: the directory that has a streamer's socket, where one is made for each restore.

use std::time::Duration;

pub mod accept;
pub mod client;
pub mod descriptors;
pub mod frame;
mod generated;
pub mod status_server;
pub mod streamer;
pub mod work_folder;

/// The messages of `proto/control.proto`.
pub mod proto {
    pub use super::generated::*;
}

/// Version of the protocol that this program speaks: both sides must speak the same.
pub const VERSION: u32 = 2;
/// Longest message, in bytes.
pub const MAX_MESSAGE: usize = 1 << 20;
/// Time limit for sending or receiving one message, and for an idle connection between requests.
pub const MESSAGE_LIMIT: Duration = Duration::from_secs(10);
/// Time that a session may take to be opened: the agent checks an image and starts a streamer.
pub const OPEN_LIMIT: Duration = Duration::from_secs(150);
/// Time between two messages that an answer takes longer.
pub const WAITING: Duration = Duration::from_secs(1);
/// Time between two reports of a followed session.
pub const REPORT: Duration = Duration::from_millis(100);
/// Clients at once. More are turned away.
pub const MAX_CLIENTS: usize = 256;

/// The greeting that either side begins with.
#[must_use]
pub fn hello() -> proto::Hello {
    proto::Hello { version: VERSION, program: concat!("rewake ", env!("CARGO_PKG_VERSION")).to_owned() }
}
