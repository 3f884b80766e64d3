// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves sealed images to other hosts: it gives ranges of files that a manifest names, and nothing else.
//!
//! * [`exports`]: which images there are. [`connection`]: the requests of one client. `pace`: whether its
//!   replies are compressed. [`clients`]: a thread for each client. [`peers`]: peers that are admitted.
//!
//! It checks no byte that it sends: the client does, by the manifest.

pub mod clients;
pub mod connection;
pub mod exports;
mod pace;
pub mod peers;
