// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long the fetcher waits for answers of a peer.
//!
//! Two limits hold, because each finds what the other one does not: a peer that has died sends no byte, and a
//! peer that sends a byte now and then would keep a page fault waiting for ever.

use std::time::{Duration, Instant};

use rewake_criu_images::PAGE;

use crate::queue::FlightPages;

/// Limit for an answer without a single byte.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Bytes a second below which a peer counts as dead: a fault's page takes longer than a program waits for.
const LOWEST_RATE: u64 = 64 << 10;

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LateAnswer {
    #[error("no byte of an answer for {} s", ANSWER_LIMIT.as_secs())]
    Silent,
    #[error("an answer of {pages} pages has not arrived within {seconds} s: expected {LOWEST_RATE} bytes/s")]
    Slow { pages: u64, seconds: u64 },
}

/// The limits of one connection.
#[derive(Debug)]
pub(crate) struct AnswerLimits {
    /// When the last byte arrived, or the first request after it was sent.
    alive: Instant,
    /// The answer that is next.
    next: Option<NextAnswer>,
}

#[derive(Debug, Clone, Copy)]
struct NextAnswer {
    /// The page after its last one, which stays the same while parts of it arrive.
    end: u64,
    pages: u64,
    since: Instant,
}

impl NextAnswer {
    fn limit(&self) -> Duration {
        ANSWER_LIMIT + Duration::from_secs(self.pages * PAGE / LOWEST_RATE)
    }
}

impl AnswerLimits {
    pub(crate) fn new(now: Instant) -> Self {
        Self { alive: now, next: None }
    }

    /// Notes that bytes have arrived.
    pub(crate) fn heard(&mut self, now: Instant) {
        self.alive = now;
    }

    /// Returns when the last byte arrived.
    pub(crate) fn alive(&self) -> Instant {
        self.alive
    }

    /// Notes which request's answer is next.
    pub(crate) fn expects(&mut self, request: Option<&FlightPages>, now: Instant) {
        let Some(request) = request else {
            (self.alive, self.next) = (now, None);
            return;
        };
        if self.next.is_none_or(|next| next.end != request.end()) {
            self.next = Some(NextAnswer { end: request.end(), pages: request.pages, since: now });
        }
    }

    /// Returns how long the next answer may still take, or `None` while no request is in flight.
    pub(crate) fn left(&self, now: Instant) -> Option<Duration> {
        let next = self.next?;
        let silent = ANSWER_LIMIT.saturating_sub(now - self.alive);
        Some(silent.min(next.limit().saturating_sub(now - next.since)))
    }

    /// # Errors
    /// The next answer is late.
    pub(crate) fn check(&self, now: Instant) -> Result<(), LateAnswer> {
        let Some(next) = self.next else { return Ok(()) };
        if now - self.alive >= ANSWER_LIMIT {
            return Err(LateAnswer::Silent);
        }
        if now - next.since >= next.limit() {
            return Err(LateAnswer::Slow { pages: next.pages, seconds: next.limit().as_secs() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::readers::ReaderSet;
    use rewake_image_io::Class;

    const SECOND: Duration = Duration::from_secs(1);

    fn request(first: u64, pages: u64, sent: Instant) -> FlightPages {
        let readers = ReaderSet::default();
        FlightPages { first, pages, class: Class::Demand, large: false, elsewhere: true, readers, sent }
    }

    /// Seconds until an answer of `pages` pages is late, of a peer that sends a byte each second.
    fn drip(pages: u64) -> (u64, LateAnswer) {
        let start = Instant::now();
        let mut limits = AnswerLimits::new(start);
        limits.expects(Some(&request(7, pages, start)), start);
        for second in 1.. {
            let now = start + second * SECOND;
            limits.heard(now);
            if let Err(late) = limits.check(now) {
                return (second.into(), late);
            }
            assert!(limits.left(now).unwrap() > Duration::ZERO);
        }
        unreachable!()
    }

    #[test]
    fn a_byte_now_and_then_is_no_answer() {
        assert_eq!(drip(1), (30, LateAnswer::Slow { pages: 1, seconds: 30 }));
        assert_eq!(drip(512), (62, LateAnswer::Slow { pages: 512, seconds: 62 }));
    }

    #[test]
    fn a_part_of_an_answer_begins_no_new_limit_and_the_next_request_does() {
        let start = Instant::now();
        let mut limits = AnswerLimits::new(start);
        limits.expects(Some(&request(0, 16, start)), start);
        let later = start + 29 * SECOND;
        limits.heard(later);
        limits.expects(Some(&request(4, 12, start)), later);
        assert_eq!(limits.left(later), Some(2 * SECOND));
        limits.expects(Some(&request(16, 16, start)), later);
        assert_eq!(limits.left(later), Some(30 * SECOND));
    }

    #[test]
    fn a_silent_peer_is_late_and_an_idle_connection_never() {
        let start = Instant::now();
        let mut limits = AnswerLimits::new(start);
        let later = start + 3600 * SECOND;
        assert_eq!((limits.left(later), limits.check(later)), (None, Ok(())));
        limits.expects(None, later);
        limits.expects(Some(&request(0, 512, later)), later);
        assert_eq!(limits.check(later + 29 * SECOND), Ok(()));
        assert_eq!(limits.check(later + 30 * SECOND), Err(LateAnswer::Silent));
    }
}
