// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of buffers, to and from the image, with a word in CRIU's log.

use rewake_bo_contents::{Error, Process, Report};
use rewake_criu_plugin::{Answer, Host};

/// Writes the memory of buffers. Those that have bytes must all have a dma-buf.
pub(crate) fn save(host: &Host, processes: &[Process<'_>]) -> Answer {
    told(host, rewake_bo_contents::save(processes))
}

/// Reads the memory of all processes' buffers.
pub(crate) fn load(host: &Host, processes: &[Process<'_>]) -> Answer {
    told(host, rewake_bo_contents::load(processes))
}

fn told(host: &Host, done: Result<Option<Report>, Error>) -> Answer {
    if let Some(report) = done? {
        report.paths.iter().for_each(|way| host.info(way));
        host.info(&report);
    }
    Ok(())
}
