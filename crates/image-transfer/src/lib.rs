// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a sealed image comes from another host.
//!
//! * [`protocol`]: messages, and a client that reads ranges of files.
//! * [`server`]: serves images to clients.
//! * [`pull`]: copies an image into a directory.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

pub mod protocol;
pub mod pull;
pub mod server;
