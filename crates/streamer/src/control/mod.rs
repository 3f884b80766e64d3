// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control protocol between the agent, streamers and their clients: `proto/control.proto` over UNIX
//! sockets.
//!
//! * [`proto`]: the messages, which CRIU plugins have, too.
//! * [`frame`]: a message on a stream: a length, then that many bytes, within a time. [`descriptors`] may
//!   follow one.
//! * [`rewake_process::private_socket`]: where the agent's socket is, which users may connect.
//! * `accept`: clients, up to their first request.
//! * [`status_server`]: a streamer answers its clients.
//! * [`client`]: the other side; [`streamer`]: starts a streamer and follows it to its end.
//! * [`work_folder`]: the directory that has a streamer's socket, where one is made for each restore.

use std::time::Duration;

pub mod accept;
pub mod client;
pub mod descriptors;
pub mod frame;
pub mod status_server;
pub mod streamer;
pub mod work_folder;

pub use rewake_plugin_protocol::control::{MAX_MESSAGE, VERSION, hello, proto};

/// Time limit for sending or receiving one message, and for an idle connection between requests.
pub const MESSAGE_LIMIT: Duration = Duration::from_secs(10);
/// Time that a session may take to be opened: the agent checks an image and starts a streamer.
pub const OPEN_LIMIT: Duration = Duration::from_secs(150);
/// Time between two messages that an answer takes longer. The client waits [`MESSAGE_LIMIT`] for each.
pub const WAITING_INTERVAL: Duration = Duration::from_secs(1);
const _: () = assert!(MESSAGE_LIMIT.as_millis() > WAITING_INTERVAL.as_millis());
/// Time between two reports of a followed session.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// Clients at once. More are turned away.
pub const MAX_CLIENTS: usize = 256;
