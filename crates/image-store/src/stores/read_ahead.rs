// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads ahead of clients that read a file in order: a request to a store takes milliseconds, so what they
//! need next is requested before they ask for it. It does no I/O.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rewake_image_io::BLOCK;

/// Places in files that are read in order, at once: threads of programs, and the background load.
const PLACES: usize = 4;
/// The first window, in bytes: each further read in order doubles it.
const FIRST_WINDOW: u64 = 4 * BLOCK as u64;
/// The largest window.
const MOST_WINDOW: u64 = 64 << 20;
/// Bytes between two reads that are still in order: the client has what is between them.
const GAP: u64 = 2 * BLOCK as u64;

/// Stored bytes of one request: they take 4 ms of a link of 1 Gbit/s. A client that needs one of its blocks
/// waits for the whole request.
pub(crate) const PIECE: u64 = 512 << 10;
/// Minimum of stored bytes that are requested ahead while clients also read randomly. A random read may queue
/// behind these two requests.
const LEAST_AHEAD: u64 = 2 * PIECE;
/// The same while all clients read in order, if the store sends that many bytes in [`IN_ORDER_MS`], so that a
/// link of 1 Gbit/s stays busy while a store takes 30 ms for an answer. The first random read waits for all
/// of them.
const LEAST_IN_ORDER: u64 = 8 * PIECE;
/// Milliseconds.
const IN_ORDER_MS: u64 = 75;
/// After this time without a read elsewhere, no further one is expected.
const IN_ORDER_AFTER: Duration = Duration::from_millis(100);
/// The most stored bytes that are requested ahead: 8 MiB keep 3 Gbit/s busy over 20 ms.
const MOST_AHEAD: u64 = 8 << 20;
/// Requests ahead at once: some of those that a store may have are left for page faults.
const MOST_REQUESTS: usize = 12;
/// Time that a request may wait for those before it: a page fault elsewhere waits as long.
const QUEUE_LIMIT: Duration = Duration::from_millis(10);

/// A place up to which a file was read in order.
#[derive(Debug, Clone, Copy)]
struct ReadPlace {
    file: u32,
    /// The end of the last read.
    end: u64,
    /// The end of what was requested ahead.
    ahead: u64,
    window: u64,
}

/// What is requested ahead.
#[derive(Debug, Default)]
struct RequestsAhead {
    /// Used last at the end.
    places: Vec<ReadPlace>,
    /// Requests in flight, their stored bytes, and how many bytes may be.
    requests: usize,
    bytes: u64,
    limit: u64,
    /// The time of the fastest answer, and the highest rate of one, in bytes a second.
    fastest: Option<Duration>,
    rate: u64,
    /// When a client last read near none of the places, or had that answer.
    elsewhere: Option<Instant>,
}

impl RequestsAhead {
    fn may_begin(&self) -> bool {
        let in_order = self.elsewhere.is_some_and(|last| last.elapsed() > IN_ORDER_AFTER);
        let in_time = self.rate / 1000 * IN_ORDER_MS;
        let least = if in_order { in_time.clamp(LEAST_AHEAD, LEAST_IN_ORDER) } else { LEAST_AHEAD };
        self.bytes < self.limit.max(least) && self.requests < MOST_REQUESTS
    }
}

/// The read-ahead of an image, for all of its clients.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    flight: Mutex<RequestsAhead>,
    /// Bytes of the largest window, in a file and in the store.
    window: u64,
    pub(crate) stored_window: u64,
}

impl ReadAhead {
    /// `kept`: stored bytes that were read last and stay in memory, each of `compression` bytes of files. All
    /// windows have room in half of them, and what was read last in the other half. The caller bounds the
    /// stored bytes of a window: not all of an image compresses alike.
    pub(crate) fn new(kept: usize, compression: u64) -> Self {
        let flight = RequestsAhead { limit: LEAST_AHEAD, ..Default::default() };
        let stored_window = (kept / 2 / PLACES) as u64;
        let window = (stored_window * compression).min(MOST_WINDOW);
        Self { flight: Mutex::new(flight), window, stored_window }
    }

    /// Notes that a client reads a range of a file. Returns the range to request ahead, mostly an empty one,
    /// and whether the read is elsewhere: near none of the places.
    pub(crate) fn note(&self, file: u32, range: &Range<u64>, length: u64) -> (Range<u64>, bool) {
        let mut flight = self.flight.lock().unwrap_or_else(PoisonError::into_inner);
        let follows = |place: &ReadPlace| {
            place.file == file
                && place.end <= range.start
                && range.start <= place.ahead.max(place.end.saturating_add(GAP))
        };
        let is_near = |place: &ReadPlace| {
            place.file == file
                && place.end <= range.start.saturating_add(self.window)
                && range.start <= place.ahead.saturating_add(self.window)
        };
        let elsewhere = !flight.places.iter().any(is_near);
        if elsewhere {
            flight.elsewhere = Some(Instant::now());
        }
        let Some(found) = flight.places.iter().rposition(follows) else {
            if flight.places.len() == PLACES {
                flight.places.remove(0);
            }
            flight.places.push(ReadPlace { file, end: range.end, ahead: range.end, window: 0 });
            return (0..0, elsewhere);
        };
        let mut place = flight.places.remove(found);
        place.end = range.end;
        place.window = (2 * place.window).clamp(FIRST_WINDOW, self.window);
        let start = place.ahead.max(range.end);
        let end = length.min(range.end + place.window);
        // Few large requests: a new one is made when half of the window has been read.
        let is_due = end == length || start + place.window / 2 <= end;
        let wanted = if is_due && start < end && flight.may_begin() { start..end } else { 0..0 };
        place.ahead = start.max(wanted.end);
        flight.places.push(place);
        (wanted, elsewhere)
    }

    /// Notes that a client has the answer to a read elsewhere.
    pub(crate) fn answered_elsewhere(&self) {
        let mut flight = self.flight.lock().unwrap_or_else(PoisonError::into_inner);
        flight.elsewhere = Some(Instant::now());
    }

    /// Notes that `bytes` are requested ahead. Returns false if no more may be in flight: the caller stops
    /// there.
    pub(crate) fn begin(&self, bytes: u64) -> bool {
        let mut flight = self.flight.lock().unwrap_or_else(PoisonError::into_inner);
        let may = flight.may_begin();
        if may {
            flight.bytes += bytes;
            flight.requests += 1;
        }
        may
    }

    /// Notes that what a client's read would have requested ahead ends here, as no more may be in flight.
    pub(crate) fn stop_at(&self, file: u32, wanted: &Range<u64>, end: u64) {
        let mut flight = self.flight.lock().unwrap_or_else(PoisonError::into_inner);
        let places = flight.places.iter_mut();
        for place in places.filter(|place| place.file == file && place.ahead == wanted.end) {
            place.ahead = end;
        }
    }

    /// Notes the answer to a request of `bytes` bytes. The limit grows while answers come at once, and
    /// shrinks while they queue.
    pub(crate) fn end(&self, bytes: u64, took: Duration) {
        let mut flight = self.flight.lock().unwrap_or_else(PoisonError::into_inner);
        flight.bytes -= bytes;
        flight.requests -= 1;
        let fastest = flight.fastest.map_or(took, |fastest| fastest.min(took));
        flight.fastest = Some(fastest);
        let rate = u128::from(bytes) * 1_000_000 / took.as_micros().max(1);
        flight.rate = flight.rate.max(u64::try_from(rate).unwrap_or(u64::MAX));
        let limit = flight.limit;
        flight.limit = if took > 2 * fastest + QUEUE_LIMIT {
            (limit - PIECE).max(LEAST_AHEAD)
        } else {
            (limit + PIECE / 2).min(MOST_AHEAD)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const LENGTH: u64 = 1 << 30;
    const KEPT: usize = 32 << 20;
    const MILLISECOND: Duration = Duration::from_millis(1);

    /// Reads 64 KiB from an offset in KiB. Returns what is requested ahead, in KiB.
    fn read(ahead: &ReadAhead, file: u32, at: u64) -> Range<u64> {
        let (wanted, _) = ahead.note(file, &(at * KIB..(at + 64) * KIB), LENGTH);
        wanted.start / KIB..wanted.end / KIB
    }

    #[test]
    fn reads_in_order_have_a_window_that_doubles() {
        let ahead = ReadAhead::new(KEPT, 1);
        assert!(read(&ahead, 1, 0).is_empty());
        assert_eq!(read(&ahead, 1, 64), 128..384);
        assert_eq!(read(&ahead, 1, 128), 384..704);
        // Half of a window of 1 MiB is not free yet.
        assert!(read(&ahead, 1, 192).end == 256 + 1024);
        let mut end = 256 + 1024;
        for at in (256..32 << 10).step_by(64) {
            let wanted = read(&ahead, 1, at);
            assert!(wanted.is_empty() || wanted.start == end && wanted.end - end >= 512, "{wanted:?}");
            end = end.max(wanted.end);
            assert!(end > at + 64, "nothing is requested ahead of {at}");
        }
        assert!((end - (32 << 10)) <= 4 << 10, "{end}");
    }

    #[test]
    fn random_reads_request_nothing_ahead_and_leave_a_sweep_alone() {
        let ahead = ReadAhead::new(KEPT, 1);
        read(&ahead, 1, 0);
        for step in 1..100 {
            assert!(read(&ahead, 2, step * 7919 % 100_000 * 64).is_empty(), "{step}");
            let _ = read(&ahead, 1, step * 64);
        }
        let place =
            ahead.flight.lock().unwrap().places.iter().find(|place| place.file == 1).copied().unwrap();
        assert!(place.window == 4 << 20 && place.ahead > place.end, "{place:?}");
    }

    #[test]
    fn a_client_that_has_some_blocks_still_reads_in_order() {
        let ahead = ReadAhead::new(KEPT, 1);
        read(&ahead, 1, 0);
        assert!(!read(&ahead, 1, 64 + 128).is_empty());
        // What was requested ahead is skipped.
        assert!(!read(&ahead, 1, 512).is_empty());
        assert!(read(&ahead, 1, 100_032).is_empty());
    }

    #[test]
    fn requests_that_queue_are_fewer() {
        let ahead = ReadAhead::new(KEPT, 1);
        let settled = |took: Duration| {
            for _ in 0..100 {
                assert!(ahead.begin(PIECE));
                ahead.end(PIECE, took);
            }
            ahead.flight.lock().unwrap().limit
        };
        assert_eq!(settled(5 * MILLISECOND), MOST_AHEAD);
        assert_eq!(settled(21 * MILLISECOND), LEAST_AHEAD);
        let begun = [(); 3].map(|()| ahead.begin(PIECE));
        assert_eq!(begun, [true, true, false]);
    }

    /// How many requests of a piece may be in flight, so long after the last read elsewhere.
    fn in_flight(ahead: &ReadAhead, after: Duration) -> usize {
        ahead.flight.lock().unwrap().elsewhere = Instant::now().checked_sub(after);
        let begun = (0..=MOST_REQUESTS).take_while(|_| ahead.begin(PIECE)).count();
        let mut flight = ahead.flight.lock().unwrap();
        (flight.requests, flight.bytes) = (0, 0);
        begun
    }

    #[test]
    fn reads_in_order_have_more_in_flight_than_reads_elsewhere() {
        let ahead = ReadAhead::new(KEPT, 1);
        // Answers that queue, the first of them at 58 MB/s.
        for took in [9, 50, 50, 50] {
            assert!(ahead.begin(PIECE));
            ahead.end(PIECE, took * MILLISECOND);
        }
        assert_eq!(in_flight(&ahead, Duration::ZERO), 2);
        assert_eq!(in_flight(&ahead, 2 * IN_ORDER_AFTER), 8);

        let slow = ReadAhead::new(KEPT, 1);
        assert!(slow.begin(PIECE));
        slow.end(PIECE, 47 * MILLISECOND);
        slow.flight.lock().unwrap().limit = LEAST_AHEAD;
        assert_eq!(in_flight(&slow, 2 * IN_ORDER_AFTER), 2, "100 Mbit/s");
    }

    #[test]
    fn reads_near_a_place_are_not_elsewhere() {
        let ahead = ReadAhead::new(KEPT, 1);
        let is_elsewhere = |file, at: u64| ahead.note(file, &(at * KIB..(at + 64) * KIB), LENGTH).1;
        assert!(is_elsewhere(1, 64 << 10));
        // After it, and what the background load has passed.
        assert!(![(65 << 10), (64 << 10) + 64, 61 << 10].map(|at| is_elsewhere(1, at)).contains(&true));
        assert!(is_elsewhere(1, 40 << 10));
        assert!(is_elsewhere(2, 64 << 10), "another file");
    }
}
