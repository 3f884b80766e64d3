// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides which pages are requested next. It does no I/O.
//!
//! CRIU's protocol has one connection, and answers have the order of the requests. So a demand request waits for the
//! answers to all requests that were sent before it. [`BackgroundWindow`] bounds what may be in flight for the background
//! load.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rewake_image_io::{Class, FetchRequest, PresenceMap};
use rewake_page_protocol::PageRun;

use crate::plan::FetchExtent;
use crate::window::{BUSY_PAGES, BackgroundWindow};

/// Pages of one request at most: 256 KiB, a background read of a streamer. CRIU's server needs some 100 µs for a
/// request, whatever its length, and limits it to 1024 pages.
pub(crate) const MAX_PAGES: u64 = 64;
/// After this time without a demand request, no further one is expected.
const QUIET_AFTER: Duration = Duration::from_millis(5);
/// Demand requests in flight at most: a thread waits for each.
const MAX_DEMANDS: usize = 64;
/// Requests that wait at most: a streamer has a few for each reactor, and one for each thread that waits.
const MAX_QUEUED: usize = 1 << 16;

/// Pages that readers wait for.
#[derive(Debug)]
struct WantedPages {
    pages: Range<u64>,
    /// One bit for each reader.
    readers: u64,
}

/// A request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FlightPages {
    /// The first page of the cache file.
    pub(crate) first: u64,
    /// The task.
    pub(crate) pid: u32,
    /// The pages in its memory.
    pub(crate) run: PageRun,
    pub(crate) class: Class,
    /// One bit for each reader to wake.
    pub(crate) readers: u64,
    /// When it was sent.
    sent: Instant,
}

impl FlightPages {
    fn end(&self) -> u64 {
        self.first + self.run.pages()
    }
}

/// The requests of a streamer, and those in flight.
#[derive(Debug)]
pub(crate) struct FetchQueue {
    extents: Vec<FetchExtent>,
    demand: VecDeque<WantedPages>,
    background: VecDeque<WantedPages>,
    in_flight: VecDeque<FlightPages>,
    last_demand: Option<Instant>,
    window: BackgroundWindow,
    /// Readers whose pages have arrived.
    pub(crate) to_wake: u64,
}

impl FetchQueue {
    pub(crate) fn new(extents: Vec<FetchExtent>) -> Self {
        let (demand, background, in_flight) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let window = BackgroundWindow::new();
        Self { extents, demand, background, in_flight, last_demand: None, window, to_wake: 0 }
    }

    /// Adds a streamer's request.
    ///
    /// # Errors
    /// Too many wait, or it is for pages beyond the last address.
    pub(crate) fn add(&mut self, request: &FetchRequest, now: Instant) -> anyhow::Result<()> {
        let end =
            request.first.checked_add(request.pages.into()).context("a request beyond the last page")?;
        let wanted = WantedPages { pages: request.first..end, readers: 1 << (request.reader % 64) };
        let queue = match request.class {
            Class::Demand => {
                self.last_demand = Some(now);
                &mut self.demand
            }
            Class::Background => &mut self.background,
        };
        ensure!(queue.len() < MAX_QUEUED, "MAX_QUEUED = {MAX_QUEUED} requests of the streamer wait");
        queue.push_back(wanted);
        Ok(())
    }

    /// Returns whether requests are in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns the request whose answer is next.
    pub(crate) fn expected(&self) -> Option<&FlightPages> {
        self.in_flight.front()
    }

    /// Returns the request to send next; none if nothing is to be sent before an answer arrives.
    ///
    /// # Errors
    /// The streamer requests a page that is not in the plan.
    pub(crate) fn next(
        &mut self,
        presence: &PresenceMap,
        now: Instant,
    ) -> anyhow::Result<Option<FlightPages>> {
        let of = |class| self.in_flight.iter().filter(move |flight| flight.class == class);
        let demands = of(Class::Demand).count();
        let background: u64 = of(Class::Background).map(|flight| flight.run.pages()).sum();
        if demands < MAX_DEMANDS
            && let Some(flight) = self.take(Class::Demand, MAX_PAGES, presence, now)?
        {
            return Ok(Some(flight));
        }
        let is_busy = demands > 0 || self.last_demand.is_some_and(|last| now - last < QUIET_AFTER);
        let window = self.window.pages(is_busy);
        // Two are in flight at least, where the window is larger than the smallest.
        let largest = (window / 2).clamp(BUSY_PAGES, MAX_PAGES);
        let room = window.saturating_sub(background).min(largest);
        // Small requests cost as much as large ones: a part of the window is not used for them.
        if background > 0 && room < BUSY_PAGES {
            return Ok(None);
        }
        self.take(Class::Background, room, presence, now)
    }

    /// Takes the first pages of a class that are absent and not in flight.
    fn take(
        &mut self,
        class: Class,
        most: u64,
        presence: &PresenceMap,
        now: Instant,
    ) -> anyhow::Result<Option<FlightPages>> {
        let Self { extents, demand, background, in_flight, to_wake, .. } = self;
        let queue = if class == Class::Demand { demand } else { background };
        while let Some(wanted) = queue.front_mut() {
            skip(wanted, presence, in_flight);
            if wanted.pages.is_empty() {
                *to_wake |= wanted.readers;
                queue.pop_front();
                continue;
            }
            let first = wanted.pages.start;
            let extent = extent_of(extents, first)?;
            let needed =
                |page: &u64| !presence.has_page(*page) && !in_flight.iter().any(|of| covers(of, *page));
            let limit = (first + most).min(extent.first + extent.pages);
            let mut readers = 0;
            let mut end = first;
            while let Some(wanted) = queue.front_mut().filter(|wanted| wanted.pages.start == end) {
                end += (end..limit.min(wanted.pages.end)).take_while(needed).count() as u64;
                readers |= wanted.readers;
                wanted.pages.start = end;
                if !wanted.pages.is_empty() {
                    break;
                }
                queue.pop_front();
            }
            let run =
                PageRun::new(extent.vaddr + (first - extent.first) * rewake_criu_images::PAGE, end - first)?;
            let flight = FlightPages { first, pid: extent.pid, run, class, readers, sent: now };
            in_flight.push_back(flight);
            return Ok(Some(flight));
        }
        Ok(None)
    }

    /// Takes the answer to the first request in flight, of its first `pages` pages. The others are requested again.
    pub(crate) fn answered(&mut self, pages: u64, now: Instant) {
        let Some(flight) = self.in_flight.pop_front() else { return };
        self.window.note(now - flight.sent, flight.class == Class::Background);
        self.to_wake |= flight.readers;
        if pages < flight.run.pages() {
            let rest = WantedPages { pages: flight.first + pages..flight.end(), readers: flight.readers };
            let queue = if flight.class == Class::Demand { &mut self.demand } else { &mut self.background };
            queue.push_front(rest);
        }
    }
}

/// Skips the first pages of a request that have arrived or are in flight.
fn skip(wanted: &mut WantedPages, presence: &PresenceMap, in_flight: &mut VecDeque<FlightPages>) {
    while !wanted.pages.is_empty() {
        let page = wanted.pages.start;
        if let Some(flight) = in_flight.iter_mut().find(|flight| covers(flight, page)) {
            flight.readers |= wanted.readers;
            wanted.pages.start = flight.end().min(wanted.pages.end);
        } else if presence.has_page(page) {
            wanted.pages.start += 1;
        } else {
            return;
        }
    }
}

fn covers(flight: &FlightPages, page: u64) -> bool {
    (flight.first..flight.end()).contains(&page)
}

fn extent_of(extents: &[FetchExtent], page: u64) -> anyhow::Result<FetchExtent> {
    let at = extents.partition_point(|extent| extent.first + extent.pages <= page);
    let found = extents.get(at).filter(|extent| extent.first <= page);
    found
        .copied()
        .with_context(|| format!("the streamer requests page {page:#x} of the cache, which is no task's"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, OwnedFd};

    use rewake_criu_images::PAGE;
    use rewake_image_io::{PresenceWriter, presence_file};

    use super::*;

    const CACHE: u64 = 1024;

    struct Scene {
        queue: FetchQueue,
        presence: PresenceWriter,
        now: Instant,
        _file: OwnedFd,
    }

    /// Extents: 0..100 of task 7 from 0x100000, 100..1000 of task 8 from 0x900000.
    fn scene() -> Scene {
        let file = presence_file(CACHE * PAGE).unwrap();
        let presence = PresenceWriter::open(file.as_fd(), CACHE * PAGE).unwrap();
        let extents = vec![
            FetchExtent { first: 0, vaddr: 0x10_0000, pages: 100, pid: 7 },
            FetchExtent { first: 100, vaddr: 0x90_0000, pages: 900, pid: 8 },
        ];
        Scene { queue: FetchQueue::new(extents), presence, now: Instant::now(), _file: file }
    }

    impl Scene {
        fn add(&mut self, class: Class, reader: u8, pages: Range<u64>) {
            let (first, count) = (pages.start, u32::try_from(pages.end - pages.start).unwrap());
            let request = FetchRequest { class, reader, pages: count, first };
            self.queue.add(&request, self.now).unwrap();
        }

        fn next(&mut self) -> Option<(u32, u64, u64)> {
            let flight = self.queue.next(self.presence.map(), self.now).unwrap()?;
            Some((flight.pid, flight.run.vaddr(), flight.run.pages()))
        }

        /// The answer to the first request in flight arrives.
        fn arrives(&mut self, pages: u64) -> u64 {
            let first = self.queue.expected().unwrap().first;
            self.presence.set(first, pages);
            self.queue.answered(pages, self.now);
            std::mem::take(&mut self.queue.to_wake)
        }
    }

    #[test]
    fn a_demand_request_overtakes_background_requests_that_wait() {
        let mut scene = scene();
        (0..40).for_each(|n| scene.add(Class::Background, 0, 100 + 16 * n..116 + 16 * n));
        assert_eq!([scene.next(), scene.next()], [(8, 0x90_0000, 64), (8, 0x94_0000, 64)].map(Some));
        assert_eq!(scene.next(), None, "NEAR_PAGES are in flight");
        scene.add(Class::Demand, 1, 5..6);
        assert_eq!(scene.next(), Some((7, 0x10_5000, 1)));
        assert_eq!(scene.arrives(64), 1);
        assert_eq!(scene.arrives(64), 1);
        assert_eq!(scene.next(), Some((8, 0x98_0000, BUSY_PAGES)), "a thread waits");
        assert_eq!(scene.next(), None);
        assert_eq!(scene.arrives(1), 1 << 1);
        scene.now += QUIET_AFTER;
        assert_eq!(scene.next(), Some((8, 0x99_0000, 64)), "no thread waits any more");
    }

    #[test]
    fn the_rest_of_a_short_answer_is_requested_again_at_once() {
        let mut scene = scene();
        scene.add(Class::Demand, 2, 90..110);
        assert_eq!([scene.next(), scene.next()], [(7, 0x15_a000, 10), (8, 0x90_0000, 10)].map(Some));
        scene.add(Class::Demand, 3, 50..51);
        assert_eq!(scene.arrives(4), 1 << 2);
        assert_eq!([scene.next(), scene.next()], [(7, 0x15_e000, 6), (7, 0x13_2000, 1)].map(Some));
    }

    #[test]
    fn pages_are_requested_once_and_all_their_readers_are_woken() {
        let mut scene = scene();
        scene.add(Class::Background, 0, 0..16);
        assert_eq!(scene.next(), Some((7, 0x10_0000, 16)));
        scene.add(Class::Demand, 1, 3..4);
        scene.add(Class::Background, 2, 8..20);
        scene.now += QUIET_AFTER;
        assert_eq!([scene.next(), scene.next()], [Some((7, 0x11_0000, 4)), None]);
        assert_eq!(std::mem::take(&mut scene.queue.to_wake), 1 << 1, "its page is in flight");
        assert_eq!(scene.arrives(16), 0b111);
        assert_eq!(scene.arrives(4), 0b100);
        scene.add(Class::Demand, 5, 0..20);
        assert_eq!((scene.next(), scene.queue.to_wake), (None, 1 << 5), "all pages have arrived");
    }

    #[test]
    fn a_page_of_no_task_is_an_error() {
        let mut scene = scene();
        scene.add(Class::Demand, 0, 999..1001);
        assert_eq!(scene.next(), Some((8, 0xc8_3000, 1)));
        let error = scene.queue.next(scene.presence.map(), scene.now).unwrap_err();
        assert!(error.to_string().contains("page 0x3e8"), "{error}");
    }

    #[test]
    fn the_number_of_requests_that_wait_is_bounded() {
        let mut scene = scene();
        (0..MAX_QUEUED).for_each(|_| scene.add(Class::Demand, 0, 0..1));
        let request = FetchRequest { class: Class::Demand, reader: 0, pages: 1, first: 0 };
        assert!(scene.queue.add(&request, scene.now).is_err());
    }
}
