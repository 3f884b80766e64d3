// SPDX-License-Identifier: MIT OR Apache-2.0
//! What CRIU's plugin for AMD GPUs hands to the page server while a restore goes on: processes, their buffers, and the
//! gates that keep their GPUs still, as messages with descriptors over a local socket. Who says what and when stands in
//! `proto/handover.proto`.
//!
//! * [`Channel`]: one end, blocking, with a deadline for every step.
//! * [`Listener`], [`connect`]: how the ends meet.
//! * [`ProcessId`]: whose gate is shut, for those who would dump it.
//! * [`SessionNote`]: what a session publishes for the plugins: where its fd store is, and whose restore it serves.

mod abi;
mod channel;
mod dump_block;
mod error;
mod generated;
mod session;
mod socket;

/// The messages.
pub mod proto {
    pub use super::generated::*;
}

pub use channel::{Channel, MAX_DESCRIPTORS, PATIENCE};
pub use dump_block::{FOLDER, ProcessId};
pub use error::Error;
pub use session::{FileId, Notes, Phase, SESSIONS, SessionNote, Skipped, Store, sockets_of};
pub use socket::{Listener, SOCKET, connect};

/// Of the conversation. It changes when a message changes its meaning.
pub const VERSION: u32 = 4;

impl proto::Hello {
    /// To be asked of the other end's before anything else is said.
    ///
    /// # Errors
    /// [`Error::Version`]
    pub fn check(&self) -> Result<(), Error> {
        if self.version == VERSION { Ok(()) } else { Err(Error::Version(self.version)) }
    }
}
