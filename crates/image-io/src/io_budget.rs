// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much may be asked of the disk that nobody waits for, so that whoever does wait is not behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::{BLOCK, Notifier, StoreError};

/// Bytes asked for together while threads wait: adjacent blocks make one request to the disk, and below 256 KiB a request costs
/// more by its number than by its length.
pub const PIECE: usize = 4 * BLOCK;
/// Pieces of CPUs' memory under way on the disk for each reactor when nobody waits for it: enough that it is never idle
/// between two of them.
const QUIET_PIECES: usize = 3;
/// Reads that may lie between a demand read and the disk: about this much time of them, and one piece at least.
const DEMAND_LATENCY: Duration = Duration::from_micros(300);
/// Pieces under way at most while threads wait: beyond it even a fast disk gains nothing.
const BUSY_PIECES: usize = 8;
/// So long after the last wait for the disk, the next one is not expected any more.
const QUIET_AFTER: Duration = Duration::from_millis(5);
/// So long after its last read a lane is taken to have come to its end.
const IDLE: Duration = Duration::from_millis(20);
/// For a lane to take its turn, when the other one has had a piece.
const LANE_SLICE: Duration = Duration::from_millis(1);
/// What GPUs' memory is read in.
const CHUNK: usize = 2 << 20;
/// Reads of GPUs' memory that may lie between the disk and the first read that somebody waits for: about this much time of them, beside those
/// that are on their way from a disk that is far.
const READAHEAD_LATENCY: Duration = Duration::from_millis(4);
/// Chunks that keep a disk busy, however slow it is: while one is looked after, the other is read.
const CHUNKS: usize = 2;

/// No disk is taken to be nearer where it is asked how much farther it is than before: its host may have had the bytes.
const LOCAL_LATENCY: Duration = Duration::from_millis(1);

/// Whose memory is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// That of CPUs.
    Cpus,
    /// That of GPUs.
    Gpus,
}

/// The pace of all background reads of a process: of both lanes, by any thread. No locks; what it says may be a moment old.
#[derive(Debug)]
pub struct IoBudget {
    start: Instant,
    /// Of the threads that read a lane's.
    wakers: [Vec<Notifier>; 2],
    /// Bytes under way on the disk that nobody waits for, by lane.
    reading: [AtomicUsize; 2],
    /// When a lane last began to read: nanoseconds since `start`, 0 for never.
    began: [AtomicU64; 2],
    /// Lanes that were refused since the other one last ended a piece.
    refused: [AtomicBool; 2],
    /// Until when it is a lane's turn: nanoseconds since `start`.
    turn: [AtomicU64; 2],
    /// When somebody last had to wait for the disk, the same.
    waited: AtomicU64,
    /// Reads under way that somebody waits for: see [`IoBudget::wait`].
    waiting: AtomicUsize,
    /// What one block takes the disk, in nanoseconds: a running mean.
    block: AtomicU64,
    /// What a read takes, the time in which it waits for others included: a running mean since one had the disk to itself, nanoseconds.
    latency: AtomicU64,
    /// The least that this has been since: what a read takes that waits for none. 0: not known.
    least: AtomicU64,
    /// Whether bytes come from another host.
    from_afar: AtomicBool,
    /// Restores that stand still until what comes first is there.
    standing: AtomicUsize,
}

/// Of memory of CPUs only what comes first is filled as long as this is there: see [`IoBudget::hold_background`].
#[derive(Debug)]
pub struct BackgroundHold(Arc<IoBudget>);

impl Drop for BackgroundHold {
    fn drop(&mut self) {
        if self.0.standing.fetch_sub(1, Ordering::Release) == 1 {
            self.0.wakers[Lane::Cpus as usize].iter().for_each(Notifier::wake);
        }
    }
}

/// Somebody waits for the disk as long as this is there: see [`IoBudget::wait`].
#[derive(Debug)]
pub struct DemandGuard(Arc<IoBudget>);

impl Drop for DemandGuard {
    fn drop(&mut self) {
        self.0.note_demand();
        self.0.waiting.fetch_sub(1, Ordering::Release);
    }
}

/// A background read under way.
#[derive(Debug)]
pub struct Permit {
    lane: Lane,
    bytes: usize,
    at: Instant,
    /// Bytes under way with it, its own included.
    depth: usize,
}

impl Lane {
    fn other(self) -> Self {
        match self {
            Self::Cpus => Self::Gpus,
            Self::Gpus => Self::Cpus,
        }
    }
}

impl IoBudget {
    /// For threads that read memory of CPUs, and are woken by these.
    ///
    /// # Errors
    /// [`StoreError::Setup`] when descriptors are out.
    pub fn new(reactors: Vec<Notifier>) -> Result<Self, StoreError> {
        let gpus = Notifier::new().map_err(|error| StoreError::Setup { act: "making an eventfd", error })?;
        Ok(Self {
            start: Instant::now(),
            wakers: [reactors, vec![gpus]],
            reading: Default::default(),
            began: Default::default(),
            refused: Default::default(),
            turn: Default::default(),
            waited: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            block: AtomicU64::new(0),
            latency: AtomicU64::new(0),
            least: AtomicU64::new(0),
            from_afar: AtomicBool::new(false),
            standing: AtomicUsize::new(0),
        })
    }

    /// A restore is about to stand still, with all processors and the disk left to what it waits for.
    #[must_use]
    pub fn hold_background(self: &Arc<Self>) -> BackgroundHold {
        self.standing.fetch_add(1, Ordering::Relaxed);
        BackgroundHold(Arc::clone(self))
    }

    /// Whether a restore stands still: only what comes first is filled, and what is waited for.
    #[must_use]
    pub fn holds_background(&self) -> bool {
        self.standing.load(Ordering::Acquire) > 0
    }

    /// Wakes who reads memory of GPUs and was refused, when it may be its turn.
    #[must_use]
    pub fn gpus(&self) -> &Notifier {
        &self.wakers[Lane::Gpus as usize][0]
    }

    /// Somebody waits for a read until that is dropped, however long it takes: schedulers and disks let a stream of adjacent reads go before
    /// one that is far from them (mq-deadline for half a second).
    #[must_use]
    pub fn wait(self: &Arc<Self>) -> DemandGuard {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        DemandGuard(Arc::clone(self))
    }

    /// Somebody waits for the disk.
    pub fn note_demand(&self) {
        self.note_demand_at(Instant::now());
    }

    fn note_demand_at(&self, now: Instant) {
        self.waited.store(self.nanos(now).max(1), Ordering::Relaxed);
    }

    /// Whether somebody waited for the disk a moment ago: what is asked of it then comes in pieces of [`PIECE`].
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.is_busy_at(Instant::now())
    }

    fn is_busy_at(&self, now: Instant) -> bool {
        self.waiting.load(Ordering::Acquire) > 0 || self.is_recent(&self.waited, now, QUIET_AFTER)
    }

    /// Whether so many bytes more may be read.
    #[must_use]
    pub fn allows(&self, lane: Lane, bytes: usize) -> bool {
        self.allows_at(lane, bytes, Instant::now())
    }

    fn allows_at(&self, lane: Lane, bytes: usize, now: Instant) -> bool {
        if self.is_busy_at(now) {
            let all: usize = self.reading.iter().map(|of| of.load(Ordering::Relaxed)).sum();
            let turn = self.turn[lane.other() as usize].load(Ordering::Relaxed) <= self.nanos(now);
            let may = turn && (all == 0 || all + bytes <= self.busy_bytes());
            self.refused[lane as usize].store(!may, Ordering::Relaxed);
            return may;
        }
        let own = self.under_way(lane);
        own == 0 || own + bytes <= self.quiet_bytes(lane, now)
    }

    /// Of a lane. Memory of GPUs has as much as that of CPUs where both are read: they share the disk by what they have under way.
    fn quiet_bytes(&self, lane: Lane, now: Instant) -> usize {
        let of_cpus = QUIET_PIECES * self.wakers[Lane::Cpus as usize].len() * PIECE;
        match lane {
            Lane::Cpus => of_cpus,
            Lane::Gpus if self.is_recent(&self.began[Lane::Cpus as usize], now, IDLE) => of_cpus.max(CHUNK),
            Lane::Gpus => self.readahead_bytes(),
        }
    }

    /// Bytes of some files come from another host: what they take is no measure of what is before them there, and only many at once are fast.
    pub fn set_remote_fs(&self) {
        self.from_afar.store(true, Ordering::Relaxed);
    }

    /// What keeps the disk busy, and no more of it than somebody who comes to wait for it can be behind. Elsewhere staging memory is the bound.
    ///
    /// What a block takes is short of the disk's rate where too little is under way: then reads take no longer than the least, and each time
    /// a chunk more is allowed. Where reads wait for one another it is the rate, and no more is.
    fn readahead_bytes(&self) -> usize {
        if self.from_afar.load(Ordering::Relaxed) {
            return usize::MAX;
        }
        let block = self.block.load(Ordering::Relaxed);
        let in_time = |nanos: u64| {
            let blocks = usize::try_from(nanos.checked_div(block).unwrap_or(0)).unwrap_or(usize::MAX);
            blocks.saturating_mul(BLOCK)
        };
        let least = self.least.load(Ordering::Relaxed);
        // The mean of reads that differ is more than the least: half as much again, or it would never be enough for those. And half a chunk
        // for what means are behind.
        let more = in_time((least / 2).min(nanos(READAHEAD_LATENCY))).max(CHUNK + CHUNK / 2);
        in_time(nanos(READAHEAD_LATENCY)).max(in_time(least).saturating_add(more)).max(CHUNKS * CHUNK)
    }

    fn busy_bytes(&self) -> usize {
        let piece = (PIECE / BLOCK) as u64 * self.block.load(Ordering::Relaxed).max(1);
        let pieces = usize::try_from(nanos(DEMAND_LATENCY) / piece).unwrap_or(BUSY_PIECES);
        pieces.clamp(1, BUSY_PIECES) * PIECE
    }

    /// Bytes of a lane that are under way and that nobody waits for.
    #[must_use]
    pub fn under_way(&self, lane: Lane) -> usize {
        self.reading[lane as usize].load(Ordering::Relaxed)
    }

    /// A background read goes to the disk.
    pub fn begin(&self, lane: Lane, bytes: usize) -> Permit {
        let at = Instant::now();
        self.began[lane as usize].store(self.nanos(at).max(1), Ordering::Relaxed);
        self.turn[lane as usize].store(0, Ordering::Relaxed);
        self.reading[lane as usize].fetch_add(bytes, Ordering::Relaxed);
        let depth = self.reading.iter().map(|of| of.load(Ordering::Relaxed)).sum();
        Permit { lane, bytes, at, depth }
    }

    /// It is back, or was not submitted after all.
    pub fn end(&self, begun: Permit) {
        self.end_at(begun, Instant::now());
    }

    #[expect(clippy::needless_pass_by_value, reason = "a read ends once")]
    fn end_at(&self, begun: Permit, now: Instant) {
        self.reading[begun.lane as usize].fetch_sub(begun.bytes, Ordering::Relaxed);
        let other = begun.lane.other();
        // One piece each, where few are under way: or the lane that looks more often would have all of them.
        if self.refused[other as usize].swap(false, Ordering::Relaxed) {
            self.turn[other as usize].store(self.nanos(now + LANE_SLICE), Ordering::Relaxed);
            self.wakers[other as usize].iter().for_each(Notifier::wake);
        }
        // Reads queue behind one another: each block's own share of the time.
        let blocks = begun.depth.div_ceil(BLOCK).max(1) as u64;
        let took = nanos(now.duration_since(begun.at));
        self.block.store(mean(self.block.load(Ordering::Relaxed), took / blocks), Ordering::Relaxed);
        self.measure(&begun, took);
    }

    /// What a read takes that waits for no other: one that was alone tells it anew, of the others the least does.
    fn measure(&self, begun: &Permit, took: u64) {
        let least = self.least.load(Ordering::Relaxed);
        let (latency, least) = if begun.depth == begun.bytes {
            // It may have taken long by chance, once.
            let most = least.saturating_mul(2).max(nanos(LOCAL_LATENCY));
            let took = if least == 0 { took } else { took.min(most) };
            (took, took)
        } else {
            let latency = mean(self.latency.load(Ordering::Relaxed), took);
            (latency, latency.min(least))
        };
        self.latency.store(latency, Ordering::Relaxed);
        self.least.store(least, Ordering::Relaxed);
    }

    fn is_recent(&self, moment: &AtomicU64, now: Instant, within: Duration) -> bool {
        let moment = moment.load(Ordering::Relaxed);
        moment != 0 && self.nanos(now).saturating_sub(moment) <= nanos(within)
    }

    fn nanos(&self, moment: Instant) -> u64 {
        nanos(moment.saturating_duration_since(self.start))
    }
}

/// A running mean with one more; 0: of none.
fn mean(so_far: u64, own: u64) -> u64 {
    if so_far == 0 { own } else { so_far - so_far / 8 + own / 8 }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::os::fd::AsFd as _;

    use super::*;

    fn pace(reactors: usize) -> IoBudget {
        IoBudget::new((0..reactors).map(|_| Notifier::new().unwrap()).collect()).unwrap()
    }

    /// Begins reads of so many bytes until no more are allowed; their bytes.
    fn begin_all(pace: &IoBudget, lane: Lane, bytes: usize, now: Instant) -> Vec<Permit> {
        let mut begun = Vec::new();
        while pace.allows_at(lane, bytes, now) && begun.len() < 1000 {
            begun.push(pace.begin(lane, bytes));
        }
        begun
    }

    #[test]
    fn without_waits_every_reactor_reads_ahead() {
        let pace = pace(2);
        let begun = begin_all(&pace, Lane::Cpus, PIECE, Instant::now());
        assert_eq!(begun.len(), 2 * QUIET_PIECES);
        begun.into_iter().for_each(|begun| pace.end(begun));
        assert!(pace.allows(Lane::Cpus, PIECE));
    }

    #[test]
    fn while_threads_wait_for_a_slow_disk_one_piece_is_under_way_of_either_lane() {
        for lane in [Lane::Cpus, Lane::Gpus] {
            let pace = pace(2);
            pace.block.store(250_000, Ordering::Relaxed);
            let now = Instant::now();
            pace.note_demand_at(now);
            assert_eq!(begin_all(&pace, lane, PIECE, now).len(), 1);
            assert!(!pace.allows_at(Lane::Cpus, PIECE, now) && !pace.allows_at(Lane::Gpus, PIECE, now));
        }
    }

    #[test]
    fn as_long_as_a_read_is_waited_for_it_is_busy() {
        let pace = Arc::new(pace(2));
        pace.block.store(250_000, Ordering::Relaxed);
        let waiting = [pace.wait(), pace.wait()];
        let later = || Instant::now() + 100 * QUIET_AFTER;
        assert_eq!(begin_all(&pace, Lane::Gpus, PIECE, later()).len(), 1);
        let [first, second] = waiting;
        drop(first);
        assert!(pace.is_busy_at(later()));
        let now = Instant::now();
        drop(second);
        assert!(pace.is_busy_at(now) && !pace.is_busy_at(later()), "as after any wait");
    }

    #[test]
    fn a_fast_disk_gets_more() {
        let pace = pace(2);
        pace.block.store(12_500, Ordering::Relaxed);
        let now = Instant::now();
        pace.note_demand_at(now);
        assert_eq!(begin_all(&pace, Lane::Cpus, PIECE, now).len(), 6);
    }

    #[test]
    fn while_threads_wait_each_lane_has_its_turn() {
        let pace = pace(2);
        pace.block.store(250_000, Ordering::Relaxed);
        let (now, mut lane, mut turns) = (Instant::now(), Lane::Cpus, Vec::new());
        pace.note_demand_at(now);
        for _ in 0..6 {
            assert!(pace.allows_at(lane, PIECE, now));
            let begun = pace.begin(lane, PIECE);
            assert!(!pace.allows_at(lane.other(), PIECE, now), "one piece in all");
            pace.end_at(begun, now);
            assert!(!pace.allows_at(lane, PIECE, now), "it is the other's turn");
            turns.push(lane);
            lane = lane.other();
        }
        // Whoever does not take it has it no more.
        assert!(pace.allows_at(lane.other(), PIECE, now + 2 * LANE_SLICE));
    }

    /// Reads of GPUs' memory alone that are under way after a while, where the first byte takes `first` and the disk gives one of so many `bytes`
    /// each `chunk`.
    fn ahead(pace: &IoBudget, bytes: usize, first: Duration, chunk: Duration) -> usize {
        let (mut now, mut disk) = (pace.start, pace.start);
        let mut under_way = std::collections::VecDeque::new();
        for _ in 0..200 {
            while pace.allows_at(Lane::Gpus, bytes, now) && under_way.len() < 64 {
                disk = disk.max(now) + chunk;
                under_way.push_back((Permit { at: now, ..pace.begin(Lane::Gpus, bytes) }, disk + first));
            }
            let (begun, end) = under_way.pop_front().unwrap();
            now = end;
            pace.end_at(begun, now);
        }
        under_way.len() + 1
    }

    #[test]
    fn of_memory_of_gpus_alone_some_milliseconds_are_under_way() {
        let us = Duration::from_micros;
        let chunks = |first, chunk| ahead(&pace(2), CHUNK, first, chunk);
        // 1, 4, and 20 GB/s.
        assert_eq!(chunks(us(50), us(2000)), 2);
        assert!((6..=8).contains(&chunks(us(50), us(500))));
        assert!(chunks(us(50), us(100)) > 32);
        // A disk of another host's, its first byte after 1 ms, 4 GB/s.
        assert!((5..=8).contains(&chunks(us(1000), us(500))));
        let pieces = ahead(&pace(2), CHUNK / 2, us(50), us(250));
        assert!((12..=16).contains(&pieces), "of other sizes: {pieces}");
    }

    #[test]
    fn two_chunks_are_under_way_on_a_slow_disk_and_any_number_where_it_is_another_host_s() {
        let ms = Duration::from_millis;
        assert_eq!(ahead(&pace(2), CHUNK, ms(0), ms(50)), 2);
        let pace = pace(2);
        pace.set_remote_fs();
        assert_eq!(ahead(&pace, CHUNK, ms(20), ms(1)), 64);
    }

    /// A disk that gives a chunk of GPUs' memory in each `chunk`, which is here when some time more has passed.
    struct Disk {
        pace: IoBudget,
        now: Instant,
        free: Instant,
        under_way: Vec<(Permit, Instant)>,
    }

    impl Disk {
        fn new() -> Self {
            let pace = pace(2);
            let start = pace.start;
            Self { pace, now: start, free: start, under_way: Vec::new() }
        }

        /// Begins as many reads as are allowed.
        fn begin(&mut self, chunk: Duration, mut far: impl FnMut() -> Duration) {
            while self.pace.allows_at(Lane::Gpus, CHUNK, self.now) {
                self.free = self.free.max(self.now) + chunk;
                let begun = Permit { at: self.now, ..self.pace.begin(Lane::Gpus, CHUNK) };
                self.under_way.push((begun, self.free + far()));
            }
        }

        /// Reads so many chunks; how many times longer than the disk needs for them.
        fn read(&mut self, chunks: u32, chunk: Duration, mut far: impl FnMut() -> Duration) -> f64 {
            let start = self.now;
            for _ in 0..chunks {
                self.begin(chunk, &mut far);
                let next = (0..self.under_way.len()).min_by_key(|n| self.under_way[*n].1).unwrap();
                let (begun, end) = self.under_way.remove(next);
                self.now = end;
                self.pace.end_at(begun, end);
            }
            (self.now - start).as_secs_f64() / (chunks * chunk).as_secs_f64()
        }

        /// Nothing is read for a while.
        fn pause(&mut self) {
            for (begun, end) in self.under_way.drain(..) {
                self.now = self.now.max(end);
                self.pace.end_at(begun, end);
            }
        }

        /// Chunks that are under way after each end.
        fn chunks(&self) -> f64 {
            u32::try_from(self.under_way.len() + 1).unwrap().into()
        }
    }

    /// Chunks that are on their way from it at its rate, and as many and what may be before somebody's read.
    fn wanted(far: Duration, chunk: Duration) -> std::ops::RangeInclusive<f64> {
        far.div_duration_f64(chunk)..=(READAHEAD_LATENCY + far).div_duration_f64(chunk) + 2.0
    }

    #[test]
    fn a_disk_that_is_far_has_what_is_on_its_way_and_little_more() {
        for (far, chunk) in [(5000, 1000), (5000, 250), (20_000, 1000), (3000, 1000), (100, 2000)] {
            let (far, chunk) = (Duration::from_micros(far), Duration::from_micros(chunk));
            let mut disk = Disk::new();
            disk.read(400, chunk, || far);
            let times = disk.read(100, chunk, || far);
            let at = format!("{far:?} and {chunk:?} each: {} chunks, {times} of its time", disk.chunks());
            assert!(wanted(far, chunk).contains(&disk.chunks()), "{at}");
            assert!(times < 1.05, "{at}");
        }
    }

    #[test]
    fn a_disk_whose_rate_changes_has_what_it_needs_by_and_by() {
        let (mut disk, far) = (Disk::new(), Duration::from_millis(5));
        for chunk in [1000, 4000, 500, 2000, 1000].map(Duration::from_micros) {
            disk.read(200, chunk, || far);
            let times = disk.read(100, chunk, || far);
            let at = format!("{chunk:?} each: {} chunks, {times} of its time", disk.chunks());
            assert!(wanted(far, chunk).contains(&disk.chunks()), "{at}");
            assert!(times < 1.15, "{at}");
        }
    }

    #[test]
    fn a_read_that_once_takes_long_is_forgotten() {
        let (chunk, far) = (Duration::from_millis(2), Duration::from_micros(100));
        for before in [0, 100] {
            let mut disk = Disk::new();
            disk.read(before, chunk, || far);
            disk.pause();
            disk.read(1, chunk, || Duration::from_millis(30));
            disk.read(100, chunk, || far);
            assert!(wanted(far, chunk).contains(&disk.chunks()), "{before}: {} chunks", disk.chunks());
        }
    }

    #[test]
    fn what_takes_long_because_threads_wait_for_the_disk_does_not_make_it_far() {
        let (mut disk, chunk, far) = (Disk::new(), Duration::from_millis(2), Duration::from_micros(100));
        disk.read(100, chunk, || far);
        disk.pause();
        disk.pace.waiting.store(1, Ordering::Relaxed);
        let kept_back = || Duration::from_millis(30);
        disk.read(20, chunk, kept_back);
        disk.begin(chunk, kept_back);
        disk.pace.waiting.store(0, Ordering::Relaxed);
        disk.read(100, chunk, || far);
        assert!(wanted(far, chunk).contains(&disk.chunks()), "{} chunks", disk.chunks());
    }

    #[test]
    fn reads_of_which_some_come_from_farther_than_others_are_enough() {
        let (mut disk, chunk, mut seed) = (Disk::new(), Duration::from_millis(1), 1_u32);
        // From 2 to 8 ms.
        let mut far = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            Duration::from_micros(2000 + u64::from(seed >> 16) % 6000)
        };
        disk.read(200, chunk, &mut far);
        let times = disk.read(800, chunk, &mut far);
        let at = format!("{} chunks, {times} of its time", disk.chunks());
        assert!(wanted(Duration::from_millis(5), chunk).contains(&disk.chunks()), "{at}");
        assert!(times < 1.15, "{at}");
    }

    #[test]
    fn where_both_are_read_they_have_as_much_under_way_as_each_other() {
        for reactors in [1, 8] {
            let pace = pace(reactors);
            let now = Instant::now();
            let of_cpus = begin_all(&pace, Lane::Cpus, PIECE, now).len() * PIECE;
            let of_gpus = begin_all(&pace, Lane::Gpus, CHUNK, now).len() * CHUNK;
            assert!(of_gpus >= CHUNK && of_gpus.abs_diff(of_cpus) < CHUNK, "{reactors}: {of_gpus} {of_cpus}");
            // When no memory of CPUs is read any more, on a disk that is fast.
            let later = Instant::now() + 2 * IDLE;
            pace.block.store(100, Ordering::Relaxed);
            assert!(pace.allows_at(Lane::Gpus, 1 << 30, later));
        }
    }

    #[test]
    fn as_long_as_a_restore_stands_still_only_what_comes_first_is_filled() {
        let is_awake = |waker: &Notifier| {
            let mut eventfd = File::from(waker.as_fd().try_clone_to_owned().unwrap());
            eventfd.read(&mut [0; 8]).is_ok()
        };
        let waker = Notifier::new().unwrap();
        let pace = Arc::new(IoBudget::new(vec![waker.clone()]).unwrap());
        let (one, other) = (pace.hold_background(), pace.hold_background());
        drop(one);
        assert!(pace.holds_background() && !is_awake(&waker), "another one does");
        drop(other);
        assert!(!pace.holds_background() && is_awake(&waker), "whoever fills is told");
    }

    #[test]
    fn what_a_block_takes_is_its_share_of_the_reads_it_waited_with() {
        let pace = pace(1);
        let at = Instant::now();
        let lane = Lane::Cpus;
        pace.reading[lane as usize].store(4 * BLOCK, Ordering::Relaxed);
        pace.end_at(Permit { lane, bytes: BLOCK, at, depth: 4 * BLOCK }, at + Duration::from_millis(8));
        let block = Duration::from_nanos(pace.block.load(Ordering::Relaxed));
        assert_eq!(block, Duration::from_millis(2));
    }

    #[test]
    fn some_time_after_the_last_wait_the_disk_is_the_background_s_again() {
        let pace = pace(2);
        let now = Instant::now();
        pace.note_demand_at(now);
        assert!(pace.is_busy_at(now));
        assert!(!pace.is_busy_at(now + 2 * QUIET_AFTER));
    }
}
