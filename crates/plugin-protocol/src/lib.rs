// SPDX-License-Identifier: MIT OR Apache-2.0
//! The protocol between CRIU's plugin for AMD GPUs and the page server during a restore. The plugin hands off
//! processes, their buffers, and the gates that keep their GPU queues evicted, as messages with descriptors
//! over a local socket. `proto/handover.proto` describes the messages and their order.
//!
//! - [`Channel`]: one end, blocking, with a deadline for every step.
//! - [`Listener`], [`connect`]: how the ends connect.
//! - [`ProcessId`]: names a process whose gate is closed, so that it is not dumped.
//! - [`plugin_folder`]: the plugin that CRIU is to load.
//! - [`SessionNote`]: what a session publishes for the plugins: the places of its fd stores, and its work
//!   directory.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod abi;
mod channel;
pub mod control;
mod dump_block;
mod error;
mod generated;
pub mod plugin_folder;
mod session;
mod socket;

/// The messages.
pub mod proto {
    pub use super::generated::*;
}

pub use channel::{Channel, MAX_DESCRIPTORS, STEP_LIMIT};
pub use dump_block::{DUMP_BLOCKS, ProcessId};
pub use error::Error;
pub use session::{
    ANY_TASK, FileId, Notes, Phase, SESSIONS, SessionNote, Skipped, Store, own_pid_namespace, sockets_of,
};
pub use socket::{Listener, connect};

/// The socket's name in CRIU's work directory, where CRIU runs during a restore.
pub const SOCKET: &str = "rewake-gpu.socket";
/// Version of the protocol. It changes when a message changes its meaning.
pub const VERSION: u32 = 5;

impl proto::Hello {
    /// Checks the peer's version, before any other message.
    ///
    /// # Errors
    /// [`Error::Version`]
    pub fn check(&self) -> Result<(), Error> {
        if self.version == VERSION { Ok(()) } else { Err(Error::Version(self.version)) }
    }
}
