// SPDX-License-Identifier: MIT OR Apache-2.0
//! The page server: serves restores while their processes run already.
//!
//! * [`supervisor`], [`ledger`], [`fd_store`], [`session_store`], [`parking`], [`recover`]: nothing is lost when processes of ours die.
//! * [`worker`], [`daemon`], [`open_session`], [`socket`]: sessions, on one control thread.
//! * [`session`], [`image`], [`spaces`], [`processes`]: what a session is, what it serves, whom; [`registered`]: what first.
//! * [`fill`]: the data plane.
//! * [`inspect`], [`doctor`]: what an image holds, and what a machine lacks.
//! * [`gpu_stream`]: memory of GPUs behind running processes; [`streamer`]: the program that does it, for those who start it.
//! * [`timeline`]: how that goes, for people and programs.
//! * [`gpu_plugin`]: where CRIU finds its plugin for GPUs. [`holes`]: what a dump leaves out.
//! * [`control`]: what a long-lived daemon and its clients say to each other.
//! * [`cli`], [`commands`], [`criu_args`], [`logging`], [`units`]: for people and their scripts.

pub mod address_spaces;
pub mod cli;
pub mod commands;
pub mod control;
pub mod criu_args;
pub mod daemon;
pub mod doctor;
pub mod duplicates_file;
pub mod fd_store;
pub mod fill;
pub mod gpu_pinned;
pub mod gpu_plugin;
pub mod gpu_stream;
pub mod image;
pub mod inspect;
pub mod ledger;
pub mod logging;
pub mod open_session;
pub mod parking;
mod peer;
pub mod processes;
pub mod recover;
pub mod session;
pub mod session_store;
mod sidecar_file;
pub mod socket;
pub mod sparse;
pub mod streamer;
pub mod supervisor;
pub mod sys;
pub mod timeline;
#[cfg(test)]
mod uffd_child;
pub mod units;
pub mod worker;
