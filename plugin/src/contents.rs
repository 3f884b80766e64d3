// SPDX-License-Identifier: MIT OR Apache-2.0
//! Saves and loads the memory of buffers, and reports it to CRIU's log.

use rewake_bo_contents::{Error, ProcessBuffers, Report};
use rewake_criu_plugin::{Answer, Host};

/// Writes the memory of buffers. Every buffer with contents must have a dma-buf.
pub(crate) fn save(host: &Host, processes: &[ProcessBuffers<'_>]) -> Answer {
    log_report(host, rewake_bo_contents::save(processes))
}

/// Reads the memory of all processes' buffers.
pub(crate) fn load(host: &Host, processes: &[ProcessBuffers<'_>]) -> Answer {
    log_report(host, rewake_bo_contents::load(processes))
}

fn log_report(host: &Host, result: Result<Option<Report>, Error>) -> Answer {
    if let Some(report) = result? {
        report.paths.iter().for_each(|path| host.info(path));
        host.info(&report);
    }
    Ok(())
}
