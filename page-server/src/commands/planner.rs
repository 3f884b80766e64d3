// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake planner`: the process that parses an image for a streamer.

use rewake_streamer::planner::child::{self, PlannedMemory};

use crate::cli::PlannerArgs;

/// Runs the command; gives the exit code: 1 when the image cannot be served.
///
/// # Errors
/// No streamer listens.
pub fn run(options: &PlannerArgs) -> anyhow::Result<u8> {
    let memory = match options {
        PlannerArgs { remote: true, .. } => PlannedMemory::Remote,
        PlannerArgs { partial: true, .. } => PlannedMemory::Partial,
        PlannerArgs { in_cache: true, .. } => PlannedMemory::InCache,
        _ => PlannedMemory::Whole,
    };
    child::run(&options.images_dir, memory, &options.signers)
}
