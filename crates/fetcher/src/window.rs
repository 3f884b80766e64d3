// SPDX-License-Identifier: MIT OR Apache-2.0
//! How many pages of background requests, and of demands for more than a block, may be in flight.
//!
//! Answers have the order of the requests, so a demand request waits for all that were sent before it. A link
//! is busy with as many bytes as it delivers in one round trip. More of them wait in front of it, and delay a
//! demand.

use std::time::Duration;

/// Pages in flight at most while threads wait and the peer is near: 64 KiB. There the time of a demand is
/// that of processors, which the background load uses, too.
pub(crate) const BUSY_PAGES: u64 = 16;
/// Pages in flight at most if the peer is near, and before the first answer: 512 KiB.
pub(crate) const NEAR_PAGES: u64 = 128;
/// Pages in flight at most if the peer is far: 2 MiB keep 16 Gbit/s busy over 1 ms.
const FAR_PAGES: u64 = 512;
/// A peer whose fastest answer took at least this long is far.
const FAR: Duration = Duration::from_micros(300);
/// Time that a background request may wait for those before it. A block takes 0.5 ms of a link of 1 Gbit/s.
const QUEUE_LIMIT: Duration = Duration::from_micros(750);

/// The window of background requests: it grows while answers come at once, and shrinks while they queue.
#[derive(Debug)]
pub(crate) struct BackgroundWindow {
    pages: u64,
    /// The time of the fastest answer.
    fastest: Option<Duration>,
}

impl BackgroundWindow {
    pub(crate) fn new() -> Self {
        Self { pages: NEAR_PAGES, fastest: None }
    }

    /// Returns the number of pages that may be in flight.
    pub(crate) fn pages(&self, threads_wait: bool) -> u64 {
        if threads_wait && !self.is_far() { BUSY_PAGES } else { self.pages }
    }

    fn is_far(&self) -> bool {
        self.fastest.is_some_and(|fastest| fastest >= FAR)
    }

    /// Notes how long an answer took, and whether its request was one that the window limits.
    pub(crate) fn note(&mut self, took: Duration, is_limited: bool) {
        let fastest = self.fastest.map_or(took, |fastest| fastest.min(took));
        self.fastest = Some(fastest);
        if !is_limited {
            return;
        }
        let most = if self.is_far() { FAR_PAGES } else { NEAR_PAGES };
        self.pages = if took - fastest > QUEUE_LIMIT {
            (self.pages - BUSY_PAGES).max(BUSY_PAGES)
        } else {
            (self.pages + BUSY_PAGES).min(most)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    /// Answers over a link: `pages` in flight each time, of which one takes `page`. Returns the window
    /// afterwards.
    fn settled(round_trip: Duration, page: Duration) -> BackgroundWindow {
        let mut window = BackgroundWindow::new();
        window.note(round_trip + page, false);
        for _ in 0..200 {
            let transfer = page * u32::try_from(window.pages(false)).unwrap();
            window.note(round_trip.max(transfer) + page * 16, true);
        }
        window
    }

    #[test]
    fn a_far_link_is_kept_busy_and_little_waits_before_it() {
        // 1 Gbit/s: 33 µs for a page. 31 pages are on the way in 1 ms.
        let window = settled(1000 * MICROSECOND, 33 * MICROSECOND);
        for threads_wait in [false, true] {
            let pages = window.pages(threads_wait);
            assert!((31..=64).contains(&pages), "{pages}");
        }
    }

    #[test]
    fn a_slow_link_has_one_block_in_flight() {
        assert_eq!(settled(100 * MICROSECOND, 330 * MICROSECOND).pages(false), BUSY_PAGES);
    }

    #[test]
    fn a_near_peer_has_one_block_in_flight_while_threads_wait() {
        let window = settled(40 * MICROSECOND, MICROSECOND);
        assert_eq!([true, false].map(|wait| window.pages(wait)), [BUSY_PAGES, NEAR_PAGES]);
    }
}
