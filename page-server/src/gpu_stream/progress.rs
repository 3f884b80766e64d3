// SPDX-License-Identifier: MIT OR Apache-2.0
//! How far a load is, told while it goes on.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rewake_contents::{Desk, Progress};
use tracing::info;

use crate::timeline::Timeline;
use crate::units;

/// Between two looks: what takes a tenth of a second has some.
const LOOK: Duration = Duration::from_millis(20);
/// Between two lines in the log.
const REPORT: Duration = Duration::from_secs(1);

/// Tells `timeline`, often, and the log, until the other half of `ended` is dropped; and what was there then.
pub(super) fn follow(desk: &Desk, timeline: &Timeline, ended: &Receiver<()>) {
    let mut logged = Instant::now();
    timeline.sample(&desk.progress());
    while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        let progress = desk.progress();
        timeline.sample(&progress);
        if logged.elapsed() >= REPORT {
            logged = Instant::now();
            progress.iter().for_each(log);
        }
    }
    timeline.sample(&desk.progress());
}

fn log(part: &Progress) {
    let &Progress { process, minor, resident, all } = part;
    info!(process, "renderD{minor}: {} of {}", units::bytes(resident), units::bytes(all));
}
