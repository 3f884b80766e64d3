// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a sealed image is read from another host (`proto/image.proto`): a client opens an image, and reads
//! ranges of its files. Everything else is in the manifest, which is read first: names, lengths, hashes,
//! zeros, duplicates.
//!
//! * [`message`]: one message on a stream, in both directions.
//! * [`client`]: a client's side of a connection.
//! * [`compressed`]: data that travels compressed.
//! * [`stored_parts`]: data that travels as a store has it.
//! * [`open_files`]: files that a side keeps open.

pub mod client;
pub mod compressed;
mod generated;
pub mod message;
pub mod open_files;
pub mod stored_parts;

pub use generated::{Data, DataForm, Hello, Open, Opened, Read, Reply, Request, reply, request};

/// The version of the protocol. A peer with another one is refused.
pub const VERSION: u32 = 3;
/// The most bytes of one read: a chunk.
pub const MAX_READ: u32 = 2 << 20;
/// The number of the recorded working set among the files.
pub const WORKING_SET_NUMBER: u32 = u32::MAX;
/// The most bytes of a message, without the data after it. A name is at most 4096 bytes long.
pub const MAX_MESSAGE: usize = 16 << 10;
/// The most reads that a client may have outstanding. The server stops reading requests earlier: its replies
/// wait for the client.
pub const MAX_OUTSTANDING: usize = 64;
/// The port of an image server, unless another is given.
pub const PORT: u16 = 7913;

/// Returns the first message of this program.
#[must_use]
pub fn hello() -> Hello {
    Hello { version: VERSION, program: format!("rewake {}", env!("CARGO_PKG_VERSION")) }
}

/// Returns the message of a reply.
#[must_use]
pub fn reply_of(what: reply::What) -> Reply {
    Reply { what: Some(what) }
}
