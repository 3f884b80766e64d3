// SPDX-License-Identifier: MIT OR Apache-2.0
//! How both CRIU plugins, `rewake_plugin.so` and `amdgpu_plugin.so`, make a restore lazy, and treat
//! missing memory of a session.
//!
//! - [`restore_lazily`]: a restore that the host's policy wants lazy becomes so, without an option.
//! - [`Parking`]: before a restored task runs, it gets a descriptor of its session's fd store. So it has the
//!   last reference of its userfaultfd. If all processes of the session are killed, page faults wait instead
//!   of reading zeros.
//! - [`Dumped`]: before CRIU stops anything for a dump, it waits until no process of the tree has missing
//!   memory. An image would have zeros in its place.
//!
//! Both find sessions by their notes ([`rewake_plugin_protocol::SessionNote`]). A process that has the store
//! of a session has missing memory: the session closes the descriptor when all memory is resident.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod dump;
mod lazily;
mod missing;
mod park;
pub mod policy;
mod proc;

pub use dump::{Dumped, WAIT, wait_for_tree};
pub use lazily::{PluginImages, restore_lazily};
pub use park::Parking;
