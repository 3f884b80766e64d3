// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides which pages are requested next. It does no I/O.
//!
//! CRIU's protocol has one connection, and answers have the order of the requests. So a demand request waits
//! for the answers to all requests that were sent before it. [`BackgroundWindow`] bounds what may be in
//! flight for the background load. An image server has a connection for each class. A demand waits for no
//! answer of the other connection: its block is requested again. But both share the link.
//!
//! A page fault requests a block at most, and GPU memory that is demanded a chunk. Larger demand requests are
//! on the connection of page faults, so the smaller ones are first.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rewake_image_io::{Class, FetchRequest, PresenceMap};

use crate::readers::{ClientNumber, OWNER, ReaderSet};
use crate::turns::{TurnQueue, WantedPages};
use crate::window::{BUSY_PAGES, BackgroundWindow, NEAR_PAGES};

/// Pages of a block: a part of one cannot be checked.
pub(crate) const BLOCK_PAGES: u64 = rewake_image_io::BLOCK as u64 / rewake_criu_images::PAGE;
/// The most pages of one request to a page server: 256 KiB, a background read of a streamer. CRIU's server
/// needs some 100 µs for a request, whatever its length, and limits it to 1024 pages.
pub(crate) const MAX_PAGES: u64 = 64;

/// What may be in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FlightLimits {
    /// A request's start and length are multiples of this number of pages.
    unit: u64,
    /// Pages of one background request at most.
    request: u64,
    /// Pages of background requests while no thread waits.
    quiet: u64,
    /// Pages of background requests while threads wait, and [`QUIET_AFTER`] longer. Small requests cost as
    /// much as large ones: less than this is not requested while others are in flight.
    busy: u64,
    /// Whether the background has a connection of its own.
    separate: bool,
}

/// For a near page server: 512 KiB keep 4 Gbit/s busy over 1 ms; 64 KiB take 0.5 ms of a link of 1 Gbit/s.
/// For a far one [`BackgroundWindow`] has others.
pub(crate) const OF_PAGE_SERVER: FlightLimits =
    FlightLimits { unit: 1, request: MAX_PAGES, quiet: NEAR_PAGES, busy: BUSY_PAGES, separate: false };

/// For an image server: 8 MiB keep 10 Gbit/s busy over 6 ms, in chunks; 128 KiB take 1 ms of a link of 1
/// Gbit/s.
pub(crate) const OF_IMAGE_SERVER: FlightLimits =
    FlightLimits { unit: BLOCK_PAGES, request: 512, quiet: 2048, busy: 32, separate: true };

/// Connections of a fetcher at most.
pub(crate) const LANES: usize = 2;

/// After this time without a demand request, no further one is expected.
const QUIET_AFTER: Duration = Duration::from_millis(5);
/// Places up to which threads have read in order.
const PLACES: usize = 4;
/// Pages after such a place that are still in order: the background load has some of those between.
const IN_ORDER_PAGES: u64 = 2048;
/// If no random demand came for this time, threads are taken to read in order. Background requests for the
/// pages after such a place are then for what they need next.
const IN_ORDER_AFTER: Duration = Duration::from_millis(100);
/// The most requests of page faults in flight. A thread waits for each.
const MAX_DEMANDS: usize = 64;
/// The most pages of larger demand requests in flight while page faults wait, and [`QUIET_AFTER`] longer: 256
/// KiB take 2 ms of a link of 1 Gbit/s.
const MAX_LARGE_PAGES: u64 = MAX_PAGES;
/// The most requests of a class that the fetcher's owner has waiting: a streamer has a few for each reactor,
/// and one for each thread that waits.
const MAX_QUEUED: usize = 1 << 16;
/// The same of each streamer that shares the fetcher: what one queues takes no room of another.
const MAX_CLIENT_QUEUED: usize = 1 << 13;

/// The queues of a fetcher.
#[derive(Debug, Clone, Copy)]
enum Waiting {
    /// Demands for a block at most.
    Fault,
    /// Demands for more.
    Large,
    Background,
    Rest,
}

impl Waiting {
    /// Returns the class, and whether it is a part of a demand for more than a block.
    fn class(self) -> (Class, bool) {
        match self {
            Self::Fault => (Class::Demand, false),
            Self::Large => (Class::Demand, true),
            Self::Background | Self::Rest => (Class::Background, false),
        }
    }
}

/// A request in flight: of pages of the presence map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FlightPages {
    /// The first page.
    pub(crate) first: u64,
    /// Their number.
    pub(crate) pages: u64,
    pub(crate) class: Class,
    /// Whether it is a part of a demand for more than a block.
    pub(crate) large: bool,
    /// Whether it is for a demand that follows no other.
    pub(crate) elsewhere: bool,
    /// Readers to wake.
    pub(crate) readers: ReaderSet,
    /// When it was sent.
    pub(crate) sent: Instant,
}

impl FlightPages {
    pub(crate) fn end(&self) -> u64 {
        self.first + self.pages
    }
}

/// The requests of streamers, and those in flight.
#[derive(Debug)]
pub(crate) struct FetchQueue {
    /// Runs of pages that can be requested.
    runs: Vec<Range<u64>>,
    limits: FlightLimits,
    /// Of a block at most.
    demand: TurnQueue,
    /// Demands for more.
    large: TurnQueue,
    background: TurnQueue,
    /// What no reader waits for: it is requested when nothing else is.
    rest: TurnQueue,
    /// By connection.
    in_flight: [VecDeque<FlightPages>; LANES],
    last_demand: Option<Instant>,
    /// The ends of demands for a block, that of the last one at the end.
    places: VecDeque<u64>,
    /// When the last demand was added that follows none of them, or is for more than a block.
    last_elsewhere: Option<Instant>,
    /// When the last demand of a block at most was added.
    last_small: Option<Instant>,
    window: BackgroundWindow,
    /// Readers whose pages have arrived.
    pub(crate) to_wake: ReaderSet,
}

impl FetchQueue {
    pub(crate) fn new(runs: Vec<Range<u64>>, limits: FlightLimits) -> Self {
        let [demand, large, background, rest] = [(); 4].map(|()| TurnQueue::default());
        Self {
            runs,
            limits,
            demand,
            large,
            background,
            rest,
            in_flight: Default::default(),
            last_demand: None,
            places: VecDeque::new(),
            last_elsewhere: None,
            last_small: None,
            window: BackgroundWindow::new(),
            to_wake: ReaderSet::default(),
        }
    }

    /// Returns the connection of a class.
    pub(crate) fn lane(&self, class: Class) -> usize {
        usize::from(self.limits.separate && class == Class::Background)
    }

    /// Adds a streamer's request.
    ///
    /// # Errors
    /// Too many wait, or it is for pages that the peer does not have.
    pub(crate) fn add(
        &mut self,
        client: ClientNumber,
        request: &FetchRequest,
        now: Instant,
    ) -> anyhow::Result<()> {
        let end =
            request.first.checked_add(request.pages.into()).context("a request beyond the last page")?;
        let (mut pages, unit) = (request.first..end, self.limits.unit);
        if unit > 1 {
            let run = run_of(&self.runs, pages.start)?;
            pages = pages.start / unit * unit..end.next_multiple_of(unit).min(run.end);
        }
        let readers = ReaderSet::one(client, request.reader);
        let mut wanted = WantedPages { pages, readers, elsewhere: false };
        let queue = match request.class {
            Class::Demand => {
                self.last_demand = Some(now);
                let is_large = wanted.pages.end - wanted.pages.start > BLOCK_PAGES;
                // The background does not follow larger ones.
                wanted.elsewhere = is_large || !follows(&mut self.places, &wanted.pages);
                if wanted.elsewhere {
                    self.last_elsewhere = Some(now);
                }
                if is_large {
                    &mut self.large
                } else {
                    self.last_small = Some(now);
                    &mut self.demand
                }
            }
            Class::Background => &mut self.background,
        };
        let most = if client == OWNER { MAX_QUEUED } else { MAX_CLIENT_QUEUED };
        ensure!(queue.len_of(client) < most, "{most} requests of the streamer wait, and it may have no more");
        queue.push(client, wanted);
        Ok(())
    }

    /// Adds all pages, for when no reader waits for others.
    pub(crate) fn add_all(&mut self) {
        self.rest = TurnQueue::default();
        for run in &self.runs {
            let (pages, readers) = (run.clone(), ReaderSet::default());
            self.rest.push(OWNER, WantedPages { pages, readers, elsewhere: false });
        }
    }

    /// Forgets a streamer that has ended. What only its readers waited for is not requested any more.
    pub(crate) fn forget(&mut self, client: ClientNumber) {
        for queue in [&mut self.demand, &mut self.large, &mut self.background] {
            queue.retain(|wanted| !wanted.readers.remove(client));
        }
        for flight in self.in_flight.iter_mut().flatten() {
            flight.readers.remove(client);
        }
        self.to_wake.remove(client);
    }

    /// Returns whether requests are in flight, on any connection.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.iter().all(VecDeque::is_empty)
    }

    /// Returns the request whose answer is next on a connection.
    pub(crate) fn expected(&self, lane: usize) -> Option<&FlightPages> {
        self.in_flight[lane].front()
    }

    /// Returns the request to send next, or `None` if nothing is to be sent before an answer arrives.
    /// `with_rest`: of what [`FetchQueue::add_all`] has added, too.
    ///
    /// # Errors
    /// The streamer requests a page that is not in the plan.
    pub(crate) fn next(
        &mut self,
        presence: &PresenceMap,
        now: Instant,
        with_rest: bool,
    ) -> anyhow::Result<Option<FlightPages>> {
        let all = || self.in_flight.iter().flatten();
        let pages = |class, large| -> u64 {
            let alike = all().filter(|flight| (flight.class, flight.large) == (class, large));
            alike.map(|flight| flight.pages).sum()
        };
        let (background, large) = (pages(Class::Background, false), pages(Class::Demand, true));
        let faults = all().filter(|flight| flight.class == Class::Demand && !flight.large).count();
        let FlightLimits { unit, request, quiet, busy, separate, .. } = self.limits;
        let is_recent = |last: Option<Instant>| last.is_some_and(|last| now - last < QUIET_AFTER);
        if faults < MAX_DEMANDS
            && let Some(flight) = self.take(Waiting::Fault, MAX_PAGES, presence, now)?
        {
            return Ok(Some(flight));
        }
        // On one connection larger demands and the background share a window, which follows the link.
        let (shared, before) =
            if separate { (quiet, large) } else { (self.window.pages(false), large + background) };
        let most =
            if faults > 0 || is_recent(self.last_small) { shared.min(MAX_LARGE_PAGES) } else { shared };
        let room = most.saturating_sub(before).min(MAX_PAGES) / unit * unit;
        if room > 0
            && let Some(flight) = self.take(Waiting::Large, room, presence, now)?
        {
            return Ok(Some(flight));
        }
        if !separate && !self.large.is_empty() {
            // The background would take the room that the next answer makes.
            return Ok(None);
        }
        let faults_wait = faults > 0 || is_recent(self.last_demand);
        // On one connection, even what a thread reads next would wait for the background.
        let is_busy = large > 0 || faults_wait && !(separate && self.is_next_in_order(now));
        let window = match (separate, is_busy) {
            (false, _) => self.window.pages(is_busy),
            (true, true) => busy,
            (true, false) => quiet,
        };
        // On one connection two are in flight at least, where the window is larger than the smallest.
        let largest = if separate { request } else { (window / 2).clamp(busy, request) };
        // The last block of a file has fewer pages: without this, the next request would end in the midst of
        // a block.
        let room = window.saturating_sub(background).min(largest) / unit * unit;
        if background > 0 && room < busy {
            return Ok(None);
        }
        let flight = self.take(Waiting::Background, room, presence, now)?;
        // A store reads the block before and after a request, too: large ones cost less.
        let is_worth_it = room >= request || background == 0;
        if flight.is_some() || !with_rest || !is_worth_it {
            return Ok(flight);
        }
        self.take(Waiting::Rest, room, presence, now)
    }

    /// Returns whether threads read in order, and the next background request is for what they need next.
    fn is_next_in_order(&self, now: Instant) -> bool {
        let is_after =
            |place: &u64, page: u64| (*place..place.saturating_add(IN_ORDER_PAGES)).contains(&page);
        self.last_elsewhere.is_some_and(|last| now - last > IN_ORDER_AFTER)
            && !self.in_flight.iter().flatten().any(|flight| flight.elsewhere)
            && self
                .background
                .peek()
                .is_some_and(|wanted| self.places.iter().any(|place| is_after(place, wanted.pages.start)))
    }

    /// Takes the first pages of a queue that are absent and not in flight.
    fn take(
        &mut self,
        of: Waiting,
        most: u64,
        presence: &PresenceMap,
        now: Instant,
    ) -> anyhow::Result<Option<FlightPages>> {
        let (class, large) = of.class();
        let lane = self.lane(class);
        let Self { runs, in_flight, to_wake, limits, .. } = self;
        let queue = match of {
            Waiting::Large => &mut self.large,
            Waiting::Fault => &mut self.demand,
            Waiting::Background => &mut self.background,
            Waiting::Rest => &mut self.rest,
        };
        // A thread does not wait for the background's connection.
        let looked_at = if limits.separate && class == Class::Demand { 1 } else { LANES };
        while let Some(wanted) = queue.first() {
            skip(wanted, presence, &mut in_flight[..looked_at]);
            if wanted.pages.is_empty() {
                to_wake.add(&wanted.readers);
                queue.pop();
                continue;
            }
            let first = wanted.pages.start;
            let run = run_of(runs, first)?;
            let flying = &in_flight[..looked_at];
            let needed = |page: &u64| {
                !presence.has_page(*page) && !flying.iter().flatten().any(|of| covers(of, *page))
            };
            let limit = (first + most).min(run.end);
            let (mut readers, mut elsewhere, mut has_more) = (ReaderSet::default(), false, true);
            let mut end = first;
            while let Some(wanted) = queue.first().filter(|wanted| wanted.pages.start == end) {
                end += (end..limit.min(wanted.pages.end)).take_while(needed).count() as u64;
                readers.add(&wanted.readers);
                elsewhere |= wanted.elsewhere;
                wanted.pages.start = end;
                if !wanted.pages.is_empty() {
                    break;
                }
                has_more = queue.pop();
                if !has_more {
                    break;
                }
            }
            if has_more {
                queue.next_turn();
            }
            let flight =
                FlightPages { first, pages: end - first, class, large, elsewhere, readers, sent: now };
            in_flight[lane].push_back(flight.clone());
            return Ok(Some(flight));
        }
        Ok(None)
    }

    /// Takes the answer to the first request in flight, of its first `pages` pages. The others are requested
    /// again.
    pub(crate) fn answered(&mut self, lane: usize, pages: u64, now: Instant) {
        let Some(flight) = self.in_flight[lane].pop_front() else { return };
        self.window.note(now - flight.sent, flight.class == Class::Background || flight.large);
        self.to_wake.add(&flight.readers);
        if pages < flight.pages {
            let rest = WantedPages {
                pages: flight.first + pages..flight.end(),
                readers: flight.readers,
                elsewhere: flight.elsewhere,
            };
            let queue = match flight.class {
                Class::Demand if flight.large => &mut self.large,
                Class::Demand => &mut self.demand,
                Class::Background => &mut self.background,
            };
            queue.push_first(rest);
        }
    }

    /// Takes the next part of the answer to the first request in flight: its first `pages` pages. The others
    /// follow.
    pub(crate) fn arrived(&mut self, lane: usize, pages: u64) {
        let Some(flight) = self.in_flight[lane].front_mut() else { return };
        self.to_wake.add(&flight.readers);
        flight.first += pages;
        flight.pages = flight.pages.saturating_sub(pages);
        if flight.pages == 0 {
            self.in_flight[lane].pop_front();
        }
    }
}

/// Notes a demand for a block. Returns whether it follows an earlier one, or is for the same block.
fn follows(places: &mut VecDeque<u64>, pages: &Range<u64>) -> bool {
    let in_order = |end: &u64| {
        (end.saturating_sub(BLOCK_PAGES)..end.saturating_add(IN_ORDER_PAGES)).contains(&pages.start)
    };
    let found = places.iter().rposition(in_order);
    if found.is_some() || places.len() == PLACES {
        places.remove(found.unwrap_or(0));
    }
    places.push_back(pages.end);
    found.is_some()
}

/// Skips the first pages of a request that have arrived or are in flight.
fn skip(wanted: &mut WantedPages, presence: &PresenceMap, in_flight: &mut [VecDeque<FlightPages>]) {
    while !wanted.pages.is_empty() {
        let page = wanted.pages.start;
        if let Some(flight) = in_flight.iter_mut().flatten().find(|flight| covers(flight, page)) {
            flight.readers.add(&wanted.readers);
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

fn run_of(runs: &[Range<u64>], page: u64) -> anyhow::Result<Range<u64>> {
    let at = runs.partition_point(|run| run.end <= page);
    let found = runs.get(at).filter(|run| run.start <= page);
    found.cloned().with_context(|| {
        format!("the streamer requests page {page:#x} of the presence map, which the peer does not have")
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, OwnedFd};

    use rewake_criu_images::PAGE;
    use rewake_image_io::{PresenceWriter, presence_file};

    use super::*;

    const CACHE: u64 = 8192;

    struct Scene {
        queue: FetchQueue,
        presence: PresenceWriter,
        now: Instant,
        _file: OwnedFd,
    }

    /// Runs of two tasks.
    fn scene() -> Scene {
        scene_with(vec![0..100, 100..1000], OF_PAGE_SERVER)
    }

    fn scene_with(runs: Vec<Range<u64>>, limits: FlightLimits) -> Scene {
        let file = presence_file(CACHE * PAGE).unwrap();
        let presence = PresenceWriter::open(file.as_fd(), CACHE * PAGE).unwrap();
        Scene { queue: FetchQueue::new(runs, limits), presence, now: Instant::now(), _file: file }
    }

    impl Scene {
        fn add(&mut self, class: Class, reader: u8, pages: Range<u64>) {
            let (first, count) = (pages.start, u32::try_from(pages.end - pages.start).unwrap());
            let request = FetchRequest { class, reader, pages: count, first };
            self.queue.add(OWNER, &request, self.now).unwrap();
        }

        fn next(&mut self) -> Option<Range<u64>> {
            let flight = self.queue.next(self.presence.map(), self.now, true).unwrap()?;
            Some(flight.first..flight.end())
        }

        /// Blocks arrive on a connection of an image server.
        fn blocks(&mut self, lane: usize, blocks: u64) -> u64 {
            let first = self.queue.expected(lane).unwrap().first;
            self.presence.set(first, blocks * BLOCK_PAGES);
            self.queue.arrived(lane, blocks * BLOCK_PAGES);
            std::mem::take(&mut self.queue.to_wake).of(OWNER)
        }

        /// The answer to the first request in flight arrives.
        fn arrives(&mut self, pages: u64) -> u64 {
            let first = self.queue.expected(0).unwrap().first;
            self.presence.set(first, pages);
            self.queue.answered(0, pages, self.now);
            std::mem::take(&mut self.queue.to_wake).of(OWNER)
        }
    }

    #[test]
    fn a_demand_request_overtakes_background_requests_that_wait() {
        let mut scene = scene();
        (0..40).for_each(|n| scene.add(Class::Background, 0, 100 + 16 * n..116 + 16 * n));
        assert_eq!([scene.next(), scene.next()], [100..164, 164..228].map(Some));
        assert_eq!(scene.next(), None, "as much as may be is in flight");
        scene.add(Class::Demand, 1, 5..6);
        assert_eq!(scene.next(), Some(5..6));
        assert_eq!(scene.arrives(64), 1);
        assert_eq!(scene.arrives(64), 1);
        assert_eq!(scene.next(), Some(228..244), "a thread waits");
        assert_eq!(scene.next(), None);
        assert_eq!(scene.arrives(1), 1 << 1);
        scene.now += QUIET_AFTER;
        assert_eq!(scene.next(), Some(244..308), "no thread waits any more");
    }

    #[test]
    fn the_rest_of_a_short_answer_is_requested_again_at_once() {
        let mut scene = scene();
        scene.add(Class::Demand, 2, 90..110);
        assert_eq!([scene.next(), scene.next()], [90..100, 100..110].map(Some));
        scene.add(Class::Demand, 3, 50..51);
        assert_eq!(scene.arrives(4), 1 << 2);
        assert_eq!([scene.next(), scene.next()], [50..51, 94..100].map(Some));
    }

    #[test]
    fn pages_are_requested_once_and_all_their_readers_are_woken() {
        let mut scene = scene();
        scene.add(Class::Background, 0, 0..16);
        assert_eq!(scene.next(), Some(0..16));
        scene.add(Class::Demand, 1, 3..4);
        scene.add(Class::Background, 2, 8..20);
        scene.now += QUIET_AFTER;
        assert_eq!([scene.next(), scene.next()], [Some(16..20), None]);
        assert_eq!(std::mem::take(&mut scene.queue.to_wake).of(OWNER), 1 << 1, "its page is in flight");
        assert_eq!(scene.arrives(16), 0b111);
        assert_eq!(scene.arrives(4), 0b100);
        scene.add(Class::Demand, 5, 0..20);
        assert_eq!((scene.next(), scene.queue.to_wake.of(OWNER)), (None, 1 << 5), "all pages have arrived");
    }

    #[test]
    fn larger_demands_share_the_window_of_one_connection() {
        let mut scene = scene();
        scene.queue.runs = vec![0..900, 900..1000];
        let round = |scene: &mut Scene, took| {
            scene.now += took;
            while let Some(flight) = scene.queue.expected(0).cloned() {
                scene.arrives(flight.pages);
            }
            std::iter::from_fn(|| scene.next()).map(|pages| pages.end - pages.start).sum::<u64>()
        };
        scene.add(Class::Background, 0, 900..964);
        assert_eq!(scene.next(), Some(900..964));
        scene.add(Class::Demand, 1, 0..900);
        assert_eq!([scene.next(), scene.next()], [Some(0..64), None]);
        let rounds = [(); 2].map(|()| round(&mut scene, Duration::from_millis(1)));
        assert_eq!(rounds, [128 + 2 * 16, 160 + 3 * 16], "answers do not queue: the link is far and fast");
        for _ in 0..16 {
            round(&mut scene, Duration::from_millis(2));
        }
        scene.add(Class::Demand, 1, 0..900);
        scene.presence = scene_with(vec![], OF_PAGE_SERVER).presence;
        assert_eq!(round(&mut scene, Duration::from_millis(2)), 16, "they do now");
    }

    #[test]
    fn of_an_image_whole_blocks_are_requested() {
        let mut scene = scene_with(vec![0..30, 32..40, 48..1024], OF_IMAGE_SERVER);
        scene.add(Class::Demand, 1, 19..20);
        scene.add(Class::Demand, 1, 37..38);
        scene.add(Class::Background, 0, 48..64);
        assert_eq!([scene.next(), scene.next(), scene.next()], [16..30, 32..40, 48..64].map(Some));
        assert_eq!(scene.next(), None);
        let request = FetchRequest { class: Class::Demand, reader: 0, pages: 1, first: 40 };
        assert!(scene.queue.add(OWNER, &request, scene.now).is_err(), "it is in no file");
    }

    #[test]
    fn a_demand_does_not_wait_for_the_background_of_an_image() {
        let mut scene = scene_with(vec![0..1000, 1008..1024], OF_IMAGE_SERVER);
        scene.add(Class::Background, 0, 0..512);
        scene.add(Class::Background, 0, 512..560);
        assert_eq!([scene.next(), scene.next()], [0..512, 512..560].map(Some));
        assert_eq!(scene.blocks(1, 2), 1 << 0, "its readers are woken before all of it has arrived");
        scene.add(Class::Demand, 3, 20..21);
        assert_eq!((scene.next(), scene.queue.to_wake.of(OWNER)), (None, 1 << 3), "it has arrived");
        scene.queue.to_wake = ReaderSet::default();
        scene.add(Class::Demand, 3, 100..101);
        scene.add(Class::Demand, 4, 99..100);
        scene.add(Class::Background, 0, 96..112);
        assert_eq!(
            [scene.next(), scene.next()],
            [Some(96..112), None],
            "it is requested twice, not three times"
        );
        assert_eq!(scene.blocks(0, 1), 1 << 3 | 1 << 4);
        (0..31).for_each(|_| {
            scene.blocks(1, 1);
        });
        assert_eq!(scene.queue.expected(1).map(|flight| flight.first), Some(528));
    }

    #[test]
    fn page_faults_precede_larger_demands_of_an_image() {
        let mut scene = scene_with(vec![0..1000, 1008..1024], OF_IMAGE_SERVER);
        scene.add(Class::Demand, 5, 0..512);
        assert_eq!([scene.next(), scene.next()], [0..64, 64..128].map(Some), "no page fault waits");
        scene.add(Class::Demand, 1, 520..521);
        scene.add(Class::Demand, 2, 600..601);
        assert_eq!([scene.next(), scene.next()], [512..528, 592..608].map(Some));
        assert_eq!(scene.next(), None, "256 KiB of the larger demand are in flight");
        let arrive = |scene: &mut Scene, blocks| {
            (0..blocks).for_each(|_| {
                scene.blocks(0, 1);
            });
        };
        arrive(&mut scene, 6);
        assert_eq!([scene.next(), scene.next()], [Some(128..160), None], "half of that has arrived");
        arrive(&mut scene, 4);
        assert_eq!([scene.next(), scene.next()], [Some(160..192), None], "another page fault is likely");
        scene.now += QUIET_AFTER;
        assert_eq!([scene.next(), scene.next()], [192..256, 256..320].map(Some));
    }

    /// A page fault on a block, so long after the last act. Returns how many pages are requested for the
    /// background then. All of it arrives.
    fn background_beside(scene: &mut Scene, page: u64, after: Duration) -> Option<u64> {
        scene.now += after;
        scene.add(Class::Demand, 1, page..page + 1);
        assert_eq!(scene.next(), Some(page..page + BLOCK_PAGES));
        let background = scene.next().map(|pages| pages.end - pages.start);
        scene.blocks(0, 1);
        (0..background.unwrap_or(0) / BLOCK_PAGES).for_each(|_| {
            scene.blocks(1, 1);
        });
        background
    }

    #[test]
    fn faults_in_order_leave_the_background_its_window() {
        let mut scene = scene_with(vec![0..4096, 4096..8000], OF_IMAGE_SERVER);
        scene.add(Class::Background, 0, 1024..4096);
        let mut beside = |page, after| background_beside(&mut scene, page, after);
        assert_eq!(beside(16, Duration::ZERO), Some(32), "the first place");
        assert_eq!(beside(32, IN_ORDER_AFTER), Some(32));
        assert_eq!(beside(64, QUIET_AFTER / 2), Some(512), "the background loads what they need next");
        assert_eq!(beside(5008, QUIET_AFTER / 2), Some(32), "elsewhere");
        assert_eq!(beside(80, IN_ORDER_AFTER / 2), Some(32), "another place is likely");
        assert_eq!(beside(5024, IN_ORDER_AFTER), Some(512), "two threads");

        scene.add(Class::Demand, 2, 5040..5104);
        let next = [scene.next(), scene.next()].map(|pages| pages.map(|pages| pages.end - pages.start));
        assert_eq!(next, [Some(64), Some(32)], "the background does not follow larger demands");
    }

    #[test]
    fn a_background_elsewhere_stays_small_beside_faults_in_order() {
        let mut scene = scene_with(vec![0..4096, 4096..8000], OF_IMAGE_SERVER);
        scene.add(Class::Background, 0, 4096..8000);
        let mut beside = |page, after| background_beside(&mut scene, page, after);
        assert_eq!(beside(16, Duration::ZERO), Some(32));
        assert_eq!(beside(32, 2 * IN_ORDER_AFTER), Some(32));
        assert_eq!(beside(48, QUIET_AFTER / 2), Some(32));
    }

    #[test]
    fn the_background_stays_small_while_a_fault_elsewhere_waits() {
        let mut scene = scene_with(vec![0..4096, 4096..8000], OF_IMAGE_SERVER);
        scene.add(Class::Background, 0, 1024..4096);
        assert_eq!(background_beside(&mut scene, 16, Duration::ZERO), Some(32));
        scene.add(Class::Demand, 1, 5008..5009);
        scene.now += 2 * IN_ORDER_AFTER;
        scene.add(Class::Demand, 2, 32..33);
        let next = [(); 3].map(|()| scene.next().map(|pages| pages.end - pages.start));
        assert_eq!(next, [Some(16), Some(16), Some(32)]);
    }

    #[test]
    fn two_threads_in_one_block_read_in_order() {
        let mut scene = scene_with(vec![0..4096, 4096..8000], OF_IMAGE_SERVER);
        scene.add(Class::Background, 0, 1024..4096);
        scene.add(Class::Demand, 1, 16..17);
        scene.now += IN_ORDER_AFTER;
        scene.add(Class::Demand, 2, 17..18);
        assert_eq!(scene.next(), Some(16..32));
        assert_eq!(scene.next(), Some(1024..1056), "the first one was elsewhere");
        scene.blocks(0, 1);
        (0..2).for_each(|_| {
            scene.blocks(1, 1);
        });
        assert_eq!(background_beside(&mut scene, 32, QUIET_AFTER / 2), Some(512));
    }

    #[test]
    fn on_one_connection_faults_in_order_keep_the_background_small() {
        let mut scene = scene_with(vec![0..4096, 4096..8000], OF_PAGE_SERVER);
        scene.add(Class::Background, 0, 1024..4096);
        let mut beside = |page: u64, after| {
            scene.now += after;
            scene.add(Class::Demand, 1, page..page + 16);
            assert_eq!(scene.next(), Some(page..page + 16));
            let background = scene.next().map_or(0, |pages| pages.end - pages.start);
            scene.arrives(16);
            scene.arrives(background);
            background
        };
        let first = beside(16, Duration::ZERO);
        assert_eq!([beside(32, 2 * IN_ORDER_AFTER), beside(48, QUIET_AFTER / 2)], [first; 2]);
    }

    #[test]
    fn short_last_blocks_in_flight_leave_requests_whole() {
        let mut scene = scene_with(vec![0..5, 16..1000, 1008..1024], OF_IMAGE_SERVER);
        scene.add(Class::Background, 0, 0..5);
        scene.queue.limits.quiet = 512;
        scene.add(Class::Background, 0, 16..1000);
        assert_eq!([scene.next(), scene.next()], [Some(0..5), Some(16..16 + 496)]);
        assert_eq!(scene.next(), None, "less than is worth a request is left");
    }

    #[test]
    fn all_that_is_absent_can_be_requested() {
        let mut scene = scene_with(vec![0..30, 32..1000], OF_IMAGE_SERVER);
        scene.presence.set(0, 30);
        scene.presence.set(48, 16);
        scene.queue.add_all();
        assert_eq!([scene.next(), scene.next(), scene.next()], [32..48, 64..576, 576..1000].map(Some));
        assert_eq!((scene.next(), scene.queue.is_idle()), (None, false));
    }

    #[test]
    fn the_rest_of_an_image_waits_until_nothing_else_does() {
        let mut scene = scene_with(vec![0..1000, 1008..1024], OF_IMAGE_SERVER);
        scene.queue.add_all();
        let next = |scene: &mut Scene, with_rest| {
            let flight = scene.queue.next(scene.presence.map(), scene.now, with_rest).unwrap();
            flight.map(|flight| flight.first..flight.end())
        };
        assert_eq!(next(&mut scene, false), None);
        scene.add(Class::Background, 0, 640..656);
        assert_eq!([next(&mut scene, true), next(&mut scene, true)], [640..656, 0..512].map(Some));
    }

    #[test]
    fn pages_are_requested_once_for_all_streamers() {
        let mut scene = scene_with(vec![0..1000, 1008..1024], OF_IMAGE_SERVER);
        let other = ClientNumber(7);
        let request = |class, first| FetchRequest { class, reader: 2, pages: 16, first };
        for (class, first) in [(Class::Demand, 16), (Class::Background, 64)] {
            for client in [OWNER, other] {
                scene.queue.add(client, &request(class, first), scene.now).unwrap();
            }
        }
        assert_eq!([scene.next(), scene.next(), scene.next()], [Some(16..32), Some(64..80), None]);
        scene.presence.set(16, 16);
        scene.queue.arrived(0, 16);
        assert_eq!([OWNER, other].map(|client| scene.queue.to_wake.of(client)), [4, 4]);
    }

    #[test]
    fn a_streamer_that_ends_leaves_no_request() {
        let mut scene = scene_with(vec![0..1000, 1008..1024], OF_IMAGE_SERVER);
        let other = ClientNumber(7);
        let request = |first| FetchRequest { class: Class::Demand, reader: 1, pages: 16, first };
        for (client, first) in [(other, 0), (other, 16), (OWNER, 16)] {
            scene.queue.add(client, &request(first), scene.now).unwrap();
        }
        scene.queue.forget(other);
        assert_eq!([scene.next(), scene.next()], [Some(16..32), None]);
    }

    #[test]
    fn a_page_of_no_task_is_an_error() {
        let mut scene = scene();
        scene.add(Class::Demand, 0, 999..1001);
        assert_eq!(scene.next(), Some(999..1000));
        let error = scene.queue.next(scene.presence.map(), scene.now, true).unwrap_err();
        assert!(error.to_string().contains("page 0x3e8"), "{error}");
    }

    #[test]
    fn the_number_of_requests_that_wait_is_bounded() {
        let mut scene = scene();
        (0..MAX_QUEUED).for_each(|_| scene.add(Class::Demand, 0, 0..1));
        let request = FetchRequest { class: Class::Demand, reader: 0, pages: 1, first: 0 };
        assert!(scene.queue.add(OWNER, &request, scene.now).is_err());
    }

    #[test]
    fn a_streamer_that_shares_a_fetcher_may_queue_less() {
        let mut scene = scene_with(vec![0..1000, 1008..1024], OF_IMAGE_SERVER);
        let request = FetchRequest { class: Class::Demand, reader: 0, pages: 1, first: 0 };
        let mut add = |client| scene.queue.add(ClientNumber(client), &request, scene.now);
        (0..MAX_CLIENT_QUEUED).for_each(|_| add(1).unwrap());
        let error = add(1).unwrap_err().to_string();
        assert!(error.contains("it may have no more"), "{error}");
        // Others have all of their room, however many are greedy.
        (2..40).for_each(|client| (0..MAX_CLIENT_QUEUED).for_each(|_| add(client).unwrap()));
        add(40).unwrap();
        (0..MAX_QUEUED).for_each(|_| scene.queue.add(OWNER, &request, scene.now).unwrap());
    }

    #[test]
    fn a_streamer_waits_for_few_requests_of_a_greedy_one() {
        let mut scene = scene_with(vec![0..1 << 19, 1 << 19..1 << 20], OF_IMAGE_SERVER);
        let request =
            |block: u64| FetchRequest { class: Class::Demand, reader: 0, pages: 16, first: block * 32 };
        let mut add =
            |client, block| scene.queue.add(ClientNumber(client), &request(block), scene.now).unwrap();
        (0..8000).for_each(|block| add(1, block));
        (2..9).for_each(|client| add(client, 20_000 + u64::from(client)));
        let next: Vec<_> = (0..14).map(|_| scene.next().unwrap().start).collect();
        assert!((20_002..20_009).all(|block| next.contains(&(block * 32))), "{next:?}");
    }
}
