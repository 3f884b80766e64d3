// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a tree may be frozen before the destination asks for GRANT.

use std::time::{Duration, Instant};

/// Time in which nothing is sent. It ends the wait, and is what a restore has that sends nothing.
const STILL_LIMIT: Duration = Duration::from_secs(60);
/// Bytes that must be sent in a second: 32 Mbit/s. Pages that need not travel count, too.
const SLOWEST: u64 = 4 << 20;

/// The wait of one freeze.
#[derive(Debug)]
pub(crate) struct FrozenWait {
    since: Instant,
    /// Bytes that must be sent before GRANT. What is requested again prolongs no wait.
    bytes: u64,
    /// Bytes that this side had sent when it looked last.
    sent: u64,
    sent_at: Instant,
    /// Bytes that it had sent before the freeze.
    before: u64,
}

impl FrozenWait {
    /// Begins when the tree is frozen. `bytes` bytes must be sent before GRANT, in addition to the ones that
    /// were sent `before`.
    pub(crate) fn begin(bytes: u64, before: u64) -> Self {
        let now = Instant::now();
        Self { since: now, bytes, sent: before, sent_at: now, before }
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
        let sent = sent.saturating_sub(self.before).min(self.bytes);
        let limit = STILL_LIMIT + Duration::from_secs(sent / SLOWEST);
        (all > limit).then(|| {
            let (sent, bytes) = (sent >> 20, self.bytes >> 20);
            format!(
                "the restore was not ready {} s after the freeze, with {sent} of {bytes} MiB sent",
                limit.as_secs()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_wait_is_as_long_as_what_travels_needs() {
        let mut wait = FrozenWait::begin(100 * SLOWEST, 7);
        let begin = wait.since;
        for passed in 1..=160 {
            let sent = 7 + u64::from(passed) * SLOWEST;
            assert_eq!(wait.look_at(sent, begin + passed * SECOND), None, "{passed} s");
        }
        // More than must be sent: it was requested again.
        let reason = wait.look_at(161 * SLOWEST, begin + 161 * SECOND).unwrap();
        assert_eq!(reason, "the restore was not ready 160 s after the freeze, with 400 of 400 MiB sent");
    }

    #[test]
    fn a_wait_ends_when_nothing_is_sent() {
        let mut wait = FrozenWait::begin(1000 * SLOWEST, 0);
        let (begin, sent) = (wait.since, 100 * SLOWEST);
        assert_eq!(wait.look_at(sent, begin + 50 * SECOND), None);
        assert_eq!(wait.look_at(sent, begin + 110 * SECOND), None);
        let reason = wait.look_at(sent, begin + 111 * SECOND).unwrap();
        assert_eq!(reason, "the restore was not ready 60 s after the last byte was sent");
    }

    #[test]
    fn a_byte_each_minute_does_not_keep_a_tree_frozen() {
        let mut wait = FrozenWait::begin(1000 * SLOWEST, 0);
        let begin = wait.since;
        assert_eq!(wait.look_at(1, begin + 30 * SECOND), None);
        let reason = wait.look_at(2, begin + 61 * SECOND).unwrap();
        assert_eq!(reason, "the restore was not ready 60 s after the freeze, with 0 of 4000 MiB sent");
    }
}
