// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a session has served.

use std::time::Duration;

use rewake_uffd::PAGE_SIZE;
use tracing::{info, warn};

use crate::session::root::ProgramState;
use crate::units;

/// The result of a session that has ended well.
#[derive(Debug, Clone)]
pub struct SessionSummary {
    /// Tasks restored, zombies included.
    pub tasks: usize,
    /// Pages that reactors filled with bytes.
    pub pages_copied: u64,
    /// Pages that reactors filled with the zero page.
    pub pages_zero: u64,
    /// Pages that were missing when processes ended.
    pub pages_ended: u64,
    /// Page faults served.
    pub faults: u64,
    /// The time from the opening of the session to the last page.
    pub elapsed: Duration,
    /// What has become of a program of which processes ended before all their memory was resident.
    pub program: ProgramState,
}

/// Logs that all CPU memory of a session is resident, or was missing when processes ended.
pub fn report(summary: &SessionSummary) {
    let pages = summary.pages_copied + summary.pages_zero;
    info!(
        tasks = summary.tasks,
        pages,
        zero_pages = summary.pages_zero,
        faults = summary.faults,
        seconds = format!("{:.3}", summary.elapsed.as_secs_f64()),
        "{}",
        if summary.pages_ended == 0 {
            "all CPU memory is resident"
        } else {
            "no process waits for CPU memory any more"
        }
    );
    if summary.pages_ended > 0 {
        let missing = units::bytes(summary.pages_ended * PAGE_SIZE);
        warn!("processes ended before all their CPU memory was resident: {missing} were missing");
    }
}
