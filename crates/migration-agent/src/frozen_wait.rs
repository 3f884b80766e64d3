// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a tree may be frozen before the destination asks for GRANT.

use std::time::{Duration, Instant};

/// Time in which nothing is sent. It ends the wait, and is what a restore has that sends nothing.
const STILL_LIMIT: Duration = Duration::from_secs(60);
/// Bytes that a link must take in a second: 32 Mbit/s.
const SLOWEST: u64 = 4 << 20;

/// The wait of one freeze.
#[derive(Debug)]
pub(crate) struct FrozenWait {
    since: Instant,
    limit: Duration,
    /// Bytes that this side had sent when it looked last.
    sent: u64,
    sent_at: Instant,
}

impl FrozenWait {
    /// Begins when the tree is frozen. So many bytes travel before GRANT.
    pub(crate) fn begin(bytes: u64) -> Self {
        let now = Instant::now();
        let limit = STILL_LIMIT + Duration::from_secs(bytes / SLOWEST);
        Self { since: now, limit, sent: 0, sent_at: now }
    }

    /// Looks at how many bytes this side has sent. Returns why the wait ends.
    pub(crate) fn look(&mut self, sent: u64) -> Option<String> {
        self.look_at(sent, Instant::now())
    }

    fn look_at(&mut self, sent: u64, now: Instant) -> Option<String> {
        if sent != self.sent {
            (self.sent, self.sent_at) = (sent, now);
        }
        let (still, all) = (now - self.sent_at, now - self.since);
        if still > STILL_LIMIT {
            let limit = STILL_LIMIT.as_secs();
            return Some(format!("the restore was not ready {limit} s after the last byte was sent"));
        }
        (all > self.limit)
            .then(|| format!("the restore was not ready {} s after the freeze", self.limit.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_as_long_as_what_travels_needs() {
        let second = Duration::from_secs(1);
        let mut wait = FrozenWait::begin(100 * SLOWEST);
        let begin = wait.since;
        for passed in 1..=160 {
            assert_eq!(wait.look_at(u64::from(passed), begin + passed * second), None);
        }
        let reason = wait.look_at(161, begin + 161 * second).unwrap();
        assert_eq!(reason, "the restore was not ready 160 s after the freeze");
    }

    #[test]
    fn a_wait_ends_when_nothing_is_sent() {
        let second = Duration::from_secs(1);
        let mut wait = FrozenWait::begin(1000 * SLOWEST);
        let begin = wait.since;
        assert_eq!(wait.look_at(1, begin + 50 * second), None);
        assert_eq!(wait.look_at(1, begin + 110 * second), None);
        let reason = wait.look_at(1, begin + 111 * second).unwrap();
        assert_eq!(reason, "the restore was not ready 60 s after the last byte was sent");
    }
}
