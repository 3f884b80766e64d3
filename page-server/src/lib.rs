// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake`: the command line around [`rewake_streamer`].
//!
//! * [`cli`], [`commands`], [`criu_args`], [`logging`]: for users and their scripts.
//! * [`agent`]: `rewake serve`, which starts streamers.
//! * [`page_server`]: a server in the place of `criu page-server`.
//! * [`inspect`], [`doctor`]: what an image holds, and what a machine lacks.
//! * [`sparse`]: what a dump leaves out.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

pub mod agent;
pub mod cli;
pub mod commands;
pub mod criu_args;
pub mod doctor;
pub mod inspect;
pub mod logging;
pub mod page_server;
pub mod sparse;
