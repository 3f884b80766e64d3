// SPDX-License-Identifier: MIT OR Apache-2.0
//! Samples the progress of a restore while it runs.

use std::io;
use std::time::{Duration, Instant};

use tracing::info;

use super::Timeline;
use super::model::{ProcessMemory, Record};
use crate::sys;
use crate::units;

/// The time between two samples: a restore of a tenth of a second has some.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
/// The time between two lines in the log.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Starts a thread that samples `timeline` until it has ended, and logs the progress.
///
/// # Errors
/// No thread can be started.
pub fn follow(timeline: Timeline) -> io::Result<()> {
    sys::thread_without_signals("timeline", move || {
        let mut logged = Instant::now();
        while timeline.look() {
            if logged.elapsed() >= REPORT_INTERVAL {
                logged = Instant::now();
                let record = timeline.record();
                record.memory.iter().filter(|of| of.resident_us.is_none()).for_each(|of| log(&record, of));
            }
            std::thread::sleep(SAMPLE_INTERVAL);
        }
    })
}

fn log(record: &Record, of: &ProcessMemory) {
    let process = record.process_of(of).map_or(0, |process| process.pid);
    info!(process, "{}: {} of {}", of.whose(), units::bytes(of.resident), units::bytes(of.bytes));
}
