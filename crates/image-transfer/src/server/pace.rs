// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether a client's replies are compressed: in the way that was faster on its connection.

use std::time::Duration;

/// Bytes after which a way of sending is compared with the other one: more than the socket holds, which takes
/// the first ones at once.
const WINDOW: u64 = 8 << 20;
/// Bytes that are sent in one way before the other way is tested again.
const RETEST_BYTES: u64 = 1 << 30;
/// Time of a GB that no compression beats. LZ4 needs more for itself.
const FAST: Duration = Duration::from_millis(1000);

/// What a way of sending costs.
#[derive(Debug, Clone, Copy, Default)]
struct SendCost {
    bytes: u64,
    time: Duration,
}

impl SendCost {
    /// The time of a GB.
    fn of_gb(self) -> Duration {
        let seconds = self.time.as_secs_f64() * 1e9 / (self.bytes as f64).max(1.0);
        Duration::from_secs_f64(seconds)
    }

    /// Earlier replies count less and less.
    fn add(&mut self, bytes: u64, time: Duration) {
        if self.bytes >= 2 * WINDOW {
            *self = Self { bytes: self.bytes / 2, time: self.time / 2 };
        }
        self.bytes += bytes;
        self.time += time;
    }
}

/// The replies of one connection.
#[derive(Debug, Default)]
pub(crate) struct ReplyPace {
    is_compressed: bool,
    plain: SendCost,
    compressed: SendCost,
    /// Bytes in the present way since the last change.
    since: u64,
}

impl ReplyPace {
    /// Whether the next reply is compressed.
    pub(crate) fn is_compressed(&self) -> bool {
        self.is_compressed
    }

    /// Notes what a reply took: to compress its bytes, and to send them.
    pub(crate) fn note(&mut self, bytes: u64, time: Duration) {
        let now = if self.is_compressed { &mut self.compressed } else { &mut self.plain };
        now.add(bytes, time);
        self.since += bytes;
        let now = *now;
        let other = if self.is_compressed { self.plain } else { self.compressed };
        let is_slower = other.bytes > 0 && other.of_gb() < now.of_gb();
        let is_due = other.bytes == 0 || self.since >= RETEST_BYTES;
        let changes = self.since >= WINDOW && (is_slower || is_due && now.of_gb() > FAST);
        if changes {
            (self.is_compressed, self.since) = (!self.is_compressed, 0);
            // What it costs now is not known.
            *(if self.is_compressed { &mut self.compressed } else { &mut self.plain }) = SendCost::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPLY: u64 = 2 << 20;

    /// Sends `mib` MiB, where a GB takes these times in ms. Returns how many of them were compressed.
    fn sent(pace: &mut ReplyPace, mib: u64, plain: u64, compressed: u64) -> u64 {
        let mut count = 0;
        for _ in 0..mib / (REPLY >> 20) {
            let of_gb = if pace.is_compressed() { compressed } else { plain };
            count += u64::from(pace.is_compressed()) * (REPLY >> 20);
            pace.note(REPLY, Duration::from_nanos(of_gb * REPLY / 1000));
        }
        count
    }

    #[test]
    fn on_a_slow_link_all_but_the_first_replies_are_compressed() {
        let mut pace = ReplyPace::default();
        assert_eq!(sent(&mut pace, 1000, 8500, 2500), 1000 - 8);
    }

    #[test]
    fn on_a_fast_link_no_reply_is_compressed() {
        assert_eq!(sent(&mut ReplyPace::default(), 4000, 900, 2500), 0);
    }

    #[test]
    fn what_compression_does_not_shorten_is_tested_now_and_then() {
        let mut pace = ReplyPace::default();
        assert_eq!(sent(&mut pace, 1000, 8500, 9000), 8);
        assert_eq!(sent(&mut pace, 1000, 8500, 9000), 8);
    }

    #[test]
    fn a_link_that_changes_is_noticed() {
        let mut pace = ReplyPace::default();
        assert_eq!(sent(&mut pace, 500, 8500, 2500), 492);
        assert!(sent(&mut pace, 3000, 900, 2500) < 1100, "it has become fast");
        assert!(sent(&mut pace, 1000, 8500, 2500) > 900, "it is slow again");
    }
}
