// SPDX-License-Identifier: MIT OR Apache-2.0
//! The node agent, `rewake serve`: starts a streamer for each restore that a client asks for, and reports on
//! all of them.
//!
//! It holds no userfaultfd and no image. When it ends, streamers and restored processes continue; the next
//! agent finds the sessions by the file that this one has left ([`sessions_file`]).
//!
//! * `session`: one restore: its streamer is started, followed, and remembered when it has ended.
//! * [`server`]: clients of the control socket. `cache`: their requests for the node's cache.
//! * `recovery`: has sessions served again whose streamers were killed.
//! * `counts`: adds up what sessions have counted. `metrics`: these numbers for Prometheus.

mod answer;
mod cache;
mod counts;
mod metrics;
mod recovery;
pub mod server;
mod session;
mod sessions_file;

pub use self::server::run;
