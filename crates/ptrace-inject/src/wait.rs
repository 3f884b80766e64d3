// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits with an end, in small steps: the kernel has no wait for a tracee that takes a time.

use std::thread;
use std::time::{Duration, Instant};

/// Looks at a tracee that only give way to others: a stop usually takes microseconds.
const EAGER: u32 = 16;
/// The shortest and the longest sleep between two looks.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_micros(500);

/// Looks come at least so often: a machine that stood still for a while took the time of a wait and did not look.
const SELDOM: Duration = Duration::from_millis(4);

/// A wait that is under way.
#[derive(Debug)]
pub(crate) struct Wait {
    until: Instant,
    /// Looks before it is over.
    least: u128,
    looks: u32,
    pause: Duration,
}

impl Wait {
    pub(crate) fn of(patience: Duration) -> Self {
        let least = patience.as_millis() / SELDOM.as_millis();
        Self { until: Instant::now() + patience, least, looks: 0, pause: SHORTEST }
    }

    /// True when the time is over; otherwise after a pause.
    pub(crate) fn is_over(&mut self) -> bool {
        if Instant::now() >= self.until && u128::from(self.looks) >= self.least {
            return true;
        }
        self.looks += 1;
        if self.looks <= EAGER {
            thread::yield_now();
        } else {
            thread::sleep(self.pause);
            self.pause = (self.pause * 2).min(LONGEST);
        }
        false
    }

    /// True now and then: time to look at what takes longer to see.
    pub(crate) fn is_long(&self) -> bool {
        self.looks > EAGER && self.looks.is_multiple_of(4)
    }
}
