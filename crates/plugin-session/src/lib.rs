// SPDX-License-Identifier: MIT OR Apache-2.0
//! What both CRIU plugins, `rewake_plugin.so` and `amdgpu_plugin.so`, do about memory that a session has not loaded yet.
//!
//! * [`Parking`]: before a restored task runs, it gets a descriptor of its session's fd store. The last reference of its
//!   userfaultfd is then its own: with all of the session's processes killed, page faults wait instead of reading zeros.
//! * [`Dumped`]: before CRIU stops anything for a dump, it waits until no process of the tree has missing memory. An image
//!   would have zeros there.
//!
//! Both know sessions by their notes ([`rewake_plugin_protocol::SessionNote`]). A process that holds the store of a session has
//! missing memory: the session closes the descriptor when all is resident.
#![forbid(unsafe_code)]

mod dump;
mod look;
mod park;
mod proc;

pub use dump::{Dumped, WAIT, wait_for_tree};
pub use park::Parking;
