// SPDX-License-Identifier: MIT OR Apache-2.0
//! The processes of a streamer: their start, their successors, and the recovery of orphaned sessions.

pub mod launch;
pub mod left;
pub mod parking;
pub mod processes;
pub mod recover;
pub mod supervisor;
pub mod worker;
