// SPDX-License-Identifier: MIT OR Apache-2.0
//! The time at the start of a restore in which nothing is loaded that no thread waits for.

use std::cell::Cell;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::ensure;
use rewake_manifest::WORKING_SET_NAME;
use tracing::{info, warn};

use super::access_log::MOST_BLOCKS;
use super::file::{self, AddedToFile};
use crate::cpu::ReactorPool;
use crate::ledger::SessionState;
use crate::session::image::Image;
use crate::session::{Session, WorkingSetPart};
use crate::units;

/// Without a page fault for this long after the first one, the program has accessed what it needs first: the
/// recording ends.
const QUIET_LIMIT: Duration = Duration::from_secs(3);
/// The longest recording of a restore that has no other limit.
const RECORDING_LIMIT: Duration = Duration::from_secs(30);
const _: () = assert!(RECORDING_LIMIT.as_millis() > QUIET_LIMIT.as_millis());
/// Time between two looks whether the working set is resident: a sixteenth of the time so far, within these
/// bounds.
const FIRST_INTERVAL: Duration = Duration::from_millis(5);
const LONGEST_INTERVAL: Duration = Duration::from_millis(100);
/// Time between two looks at the number of page faults.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// The longest time in which memory is loaded only when it is accessed.
const ON_DEMAND_LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

/// What a user requests of the load, in addition to the memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadingOptions {
    /// Record the working set. An earlier one is not loaded first then: its order would be recorded again.
    pub record: bool,
    /// For this long, CPU memory is loaded only when it is accessed.
    pub on_demand_only: Option<Duration>,
}

impl LoadingOptions {
    /// Checks what a user wants of an image.
    ///
    /// # Errors
    /// It has GPU state, and nothing would be recorded; or the time is too long.
    pub fn check(self, has_gpus: bool) -> anyhow::Result<()> {
        let Some(time) = self.on_demand_only else { return Ok(()) };
        ensure!(
            time <= ON_DEMAND_LIMIT,
            "--on-demand-only: expected at most {} seconds, found {}",
            ON_DEMAND_LIMIT.as_secs(),
            time.as_secs()
        );
        ensure!(
            !has_gpus || self.record,
            "--on-demand-only: this image has GPU state, and GPUs run when all memory that they reach is \
             resident; add --record to record for that time"
        );
        Ok(())
    }

    /// Whether a restore begins with such a time.
    pub(crate) fn begins_on_demand(self) -> bool {
        self.record || self.on_demand_only.is_some()
    }
}

/// Prepares a session of an image: what is loaded first, and whether that is all at first.
pub(crate) fn prepare(session: Session, image: &Image, options: LoadingOptions) -> Session {
    let session = session.with_options(options);
    if !session.is_on_demand() {
        image.working_set_parts().into_iter().for_each(|part| session.expect_working_set(part));
    }
    if let Some(note) = image.working_set_note() {
        warn!("{note}");
    }
    session
}

/// Prepares a session that a successor takes over. Once its processes run, the rest is loaded at once: the
/// successor does not know what was accessed before, nor for how long.
pub(crate) fn prepare_successor(
    session: Session,
    image: &Image,
    state: SessionState,
    options: LoadingOptions,
) -> Session {
    let runs = state == SessionState::Running;
    if runs && options.begins_on_demand() {
        warn!("a worker died: the rest of the memory is loaded from now on, and nothing is recorded");
    }
    let session = session.with_options(if runs { LoadingOptions::default() } else { options });
    if !session.is_on_demand() && !image.working_set_parts().is_empty() {
        // GPU memory is resident where there is a successor.
        session.expect_working_set(WorkingSetPart::Cpus);
    }
    session
}

/// Waits for what comes before the rest of the memory, of a session whose processes run: the time in which it
/// is loaded only when it is accessed, or the working set.
pub(crate) async fn load_first(
    image: &Image,
    session: &Session,
    pool: &ReactorPool,
    asked_to_stop: &Cell<bool>,
) {
    if session.is_on_demand() {
        wait(session, asked_to_stop).await;
        session.end_on_demand();
        pool.look_again();
        record(image, session);
    } else if !image.working_set_parts().is_empty() {
        let began = Instant::now();
        while !is_over(session) && !pool.is_first_resident(session) {
            tokio::time::sleep((began.elapsed() / 16).clamp(FIRST_INTERVAL, LONGEST_INTERVAL)).await;
        }
        session.note_working_set(WorkingSetPart::Cpus);
    }
}

/// Waits for the end of the time in which memory is loaded only when it is accessed. SIGTERM ends it early,
/// and so does a reactor that has no room for a forked child.
async fn wait(session: &Session, asked_to_stop: &Cell<bool>) {
    let only_for = session.options().on_demand_only;
    let limit = only_for.unwrap_or(RECORDING_LIMIT);
    let began = Instant::now();
    let [served, waiting] = [&session.stats.faults, &session.stats.waiting];
    let mut activity = FaultActivity { served: served.load(Ordering::Relaxed), latest: None };
    let is_on = || session.is_on_demand() && !asked_to_stop.get() && !is_over(session);
    while began.elapsed() < limit && is_on() {
        let counts = (served.load(Ordering::Relaxed), waiting.load(Ordering::Relaxed));
        if activity.is_over(counts, Instant::now()) && only_for.is_none() {
            return;
        }
        tokio::time::sleep(LOOK_INTERVAL.min(limit.saturating_sub(began.elapsed()))).await;
    }
}

/// When the latest page fault was seen.
#[derive(Debug)]
struct FaultActivity {
    served: u64,
    /// None before the first: CRIU may run scripts and load memory for long before the program runs.
    latest: Option<Instant>,
}

impl FaultActivity {
    /// Returns whether no page fault was seen for [`QUIET_LIMIT`], by the numbers of served and of waiting
    /// ones. A page of another host may take long to arrive.
    fn is_over(&mut self, (served, waiting): (u64, u64), now: Instant) -> bool {
        if served != self.served || waiting > 0 {
            *self = Self { served, latest: Some(now) };
        }
        self.latest.is_some_and(|latest| now.duration_since(latest) >= QUIET_LIMIT)
    }
}

fn is_over(session: &Session) -> bool {
    session.is_empty() || session.has_failed()
}

/// Adds what was accessed to the working set of the image. A failure is logged only: the restore is right
/// without.
fn record(image: &Image, session: &Session) {
    // A restore that fails says little about others.
    let Some(log) = session.log().filter(|_| !session.has_failed()) else { return };
    let accessed = log.working_set(|pid| image.plan(pid).map(|task| &task.plan));
    if accessed.is_empty() {
        warn!(
            "{WORKING_SET_NAME}: no CPU memory is recorded, as none was accessed before the recording ended"
        );
        return;
    }
    if log.blocks() > MOST_BLOCKS {
        warn!(
            "{WORKING_SET_NAME}: {} blocks were accessed, {MOST_BLOCKS} at most are recorded",
            log.blocks()
        );
    }
    let add = || -> anyhow::Result<AddedToFile> {
        let images = image.open_directory(&session.images)?;
        file::add(images.as_fd(), image.dump(), accessed)
    };
    match add() {
        Ok(added) => {
            let bytes = units::bytes(added.bytes);
            info!("{WORKING_SET_NAME}: added {bytes} of CPU memory that was accessed");
        }
        Err(error) => warn!("the working set of CPU memory is not recorded: {error:#}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_loads_nothing_is_a_day_and_not_for_gpus() {
        let of =
            |record, seconds| LoadingOptions { record, on_demand_only: Some(Duration::from_secs(seconds)) };
        for (options, has_gpus, is_right) in [
            (LoadingOptions::default(), true, true),
            (of(false, 86_400), false, true),
            (of(false, 86_401), false, false),
            (of(false, 5), true, false),
            (of(true, 5), true, true),
        ] {
            assert_eq!(options.check(has_gpus).is_ok(), is_right, "{options:?} {has_gpus}");
        }
    }

    #[test]
    fn a_recording_ends_a_while_after_page_faults() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut activity = FaultActivity { served: 5, latest: None };
        assert!(!activity.is_over((5, 0), start + 20 * second), "the program does not run yet");
        assert!(!activity.is_over((6, 0), start + 21 * second));
        assert!(!activity.is_over((6, 1), start + 23 * second), "a thread waits");
        assert!(!activity.is_over((6, 1), start + 40 * second));
        assert!(!activity.is_over((7, 0), start + 41 * second));
        assert!(!activity.is_over((7, 0), start + 43 * second));
        assert!(activity.is_over((7, 0), start + 41 * second + QUIET_LIMIT));
    }
}
