// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits for the work of a GPU.

use std::thread::sleep;
use std::time::{Duration, Instant};

use rewake_criu_plugin::Answer;

/// Time between two looks at work in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Looks again until `look` has an answer, or until `end`.
///
/// The kernel's own waits take a deadline of the first time namespace's clock, which a restored task cannot
/// read: CRIU has set the task's clocks back to the time of the dump.
pub(crate) fn until<T>(end: Instant, look: impl Fn() -> Answer<Option<T>>) -> Answer<Option<T>> {
    loop {
        let late = Instant::now() >= end;
        match look()? {
            None if !late => sleep(POLL_INTERVAL),
            answer => return Ok(answer),
        }
    }
}
