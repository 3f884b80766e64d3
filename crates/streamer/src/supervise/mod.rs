// SPDX-License-Identifier: MIT OR Apache-2.0
//! The processes of a streamer, and what keeps sessions alive when they end.

pub mod launch;
pub mod parking;
pub mod processes;
pub mod recover;
pub mod supervisor;
pub mod worker;
