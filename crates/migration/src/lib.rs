// SPDX-License-Identifier: MIT OR Apache-2.0
//! The protocol of a live migration, as two state machines without I/O.
//!
//! * [`message`]: what the sides send each other.
//! * [`record`]: what each side writes down before it acts, and what a restart makes of it.
//! * [`source`]: the side that has the program. Start here.
//! * [`destination`]: the side that restores it.
//! * [`blocks`]: which bytes of the program's memory are at the destination.
//!
//! A machine takes an input and returns outputs, which its driver carries out in order. A driver owns the
//! sockets, CRIU, the freezer and the record. `tests/simulation.rs` drives both machines through cuts and
//! crashes.
//!
//! ```text
//! source                        destination
//!   Hello, Offer       ──────▶    compares both hosts
//!                      ◀──────    Accept, or Abort
//!   pre-copy           ──────▶
//!   freezes the tree
//!   files, Metadata    ──────▶    starts the restore
//!                      ◀─pages─▶
//!                      ◀──────    Ready: the restore waits at its last step
//!   GRANT is written
//!   Grant              ──────▶    RELEASE is written; the program runs
//!                      ◀─pages─▶
//!                      ◀──────    Commit: all memory is resident
//!   kills the tree
//!   Discarded          ──────▶    done
//! ```
//! Invariant I9: the source's tree may run while its record does not say GRANT. The destination's may run
//! once its record says RELEASE, which it writes after it received Grant.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

pub mod blocks;
pub mod destination;
pub mod message;
pub mod record;
pub mod source;
