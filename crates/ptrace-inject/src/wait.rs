// SPDX-License-Identifier: MIT OR Apache-2.0
//! Polling waits with a timeout: the kernel has no timed wait for a tracee.

use std::thread;
use std::time::{Duration, Instant};

/// Polls that only yield the CPU: a stop usually takes microseconds.
const YIELDS: u32 = 16;
/// The shortest and longest sleep between two polls. Each is twice the one before, because most stops take
/// microseconds and a few take milliseconds.
const SHORTEST_INTERVAL: Duration = Duration::from_micros(20);
const LONGEST_INTERVAL: Duration = Duration::from_micros(500);

/// The interval that sets the minimum number of polls. A suspended machine uses up the time without polling.
const POLL_INTERVAL: Duration = Duration::from_millis(4);

/// A wait in progress.
#[derive(Debug)]
pub(crate) struct Wait {
    until: Instant,
    /// The least number of polls before the timeout.
    min_polls: u128,
    polls: u32,
    pause: Duration,
}

impl Wait {
    pub(crate) fn of(timeout: Duration) -> Self {
        let min_polls = timeout.as_millis() / POLL_INTERVAL.as_millis();
        Self { until: Instant::now() + timeout, min_polls, polls: 0, pause: SHORTEST_INTERVAL }
    }

    /// Returns true after the timeout, else false after a pause.
    pub(crate) fn is_over(&mut self) -> bool {
        if Instant::now() >= self.until && u128::from(self.polls) >= self.min_polls {
            return true;
        }
        self.polls += 1;
        if self.polls <= YIELDS {
            thread::yield_now();
        } else {
            thread::sleep(self.pause);
            self.pause = (self.pause * 2).min(LONGEST_INTERVAL);
        }
        false
    }

    /// Returns true now and then, for checks that are slower.
    pub(crate) fn is_long(&self) -> bool {
        self.polls > YIELDS && self.polls.is_multiple_of(4)
    }
}
