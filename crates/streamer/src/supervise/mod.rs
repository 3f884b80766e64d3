// SPDX-License-Identifier: MIT OR Apache-2.0
//! The processes of a streamer: their start, their successors, and the recovery of orphaned sessions.

pub mod launch;
pub mod leftover_stores;
pub mod parking;
pub mod processes;
pub mod recover;
pub mod store_id;
pub mod supervisor;
pub mod worker;
