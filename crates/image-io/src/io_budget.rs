// SPDX-License-Identifier: MIT OR Apache-2.0
//! Limits background reads, so that demand reads do not queue after many of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rewake_process::Notifier;

use crate::error::StoreError;
use crate::units::BLOCK;

/// Bytes of one background read while threads wait for demand reads. Adjacent blocks make one request to the
/// disk. Below 256 KiB a request costs more by its number than by its length.
pub const PIECE: usize = 4 * BLOCK;
/// Pieces of CPU memory in flight for each reactor while no thread waits for the disk: enough that the disk
/// is never idle between two of them.
const QUIET_PIECES: usize = 3;
/// Background reads that may be queued before a demand read: as many as take about this time, and one piece
/// at least.
const DEMAND_LATENCY: Duration = Duration::from_micros(300);
/// Pieces in flight at most while threads wait: more gain nothing, even on a fast disk.
const BUSY_PIECES: usize = 8;
/// After this time without a demand read, no further one is expected.
const QUIET_AFTER: Duration = Duration::from_millis(5);
/// After this time without a read, a lane counts as finished.
const IDLE_LIMIT: Duration = Duration::from_millis(20);
/// Time that a lane has to take its turn, after the other lane has read a piece.
const LANE_SLICE: Duration = Duration::from_millis(1);
/// Bytes in one read of GPU memory.
const CHUNK: usize = 2 << 20;
/// Reads of GPU memory that may be queued before the next demand read: as many as take about this time. Those
/// in transit from a remote disk come on top.
const READAHEAD_LATENCY: Duration = Duration::from_millis(4);
/// Chunks in flight that keep a disk busy, however slow it is: one is processed while the other is read.
const CHUNKS: usize = 2;

/// A read that was alone may raise the least latency to twice its value, or to this: the disk's host may have
/// served an earlier read from its cache.
const LOCAL_LATENCY: Duration = Duration::from_millis(1);

/// The kind of memory that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// CPU memory.
    Cpus,
    /// GPU memory.
    Gpus,
}

/// The limit for all background reads of a process: for both lanes and all threads. It has no locks, so its
/// answers may be slightly old.
#[derive(Debug)]
pub struct IoBudget {
    start: Instant,
    /// Notifiers of the threads that read, by lane.
    notifiers: [Vec<Notifier>; 2],
    /// Bytes of background reads in flight, by lane.
    reading: [AtomicUsize; 2],
    /// When a lane last began a read: nanoseconds since `start`; 0: never.
    began: [AtomicU64; 2],
    /// Lanes that were refused since the other lane last finished a piece.
    refused: [AtomicBool; 2],
    /// Until when it is a lane's turn: nanoseconds since `start`.
    turn: [AtomicU64; 2],
    /// When a thread last waited for a demand read: nanoseconds since `start`; 0: never.
    last_demand: AtomicU64,
    /// Demand reads in flight: see [`IoBudget::demand`].
    demands: AtomicUsize,
    /// Nanoseconds in which the disk reads one block: a running mean.
    block: AtomicU64,
    /// Nanoseconds that a read takes, its time in the disk's queue included: a running mean since the last
    /// read that was alone.
    latency: AtomicU64,
    /// The least value of `latency` since then: what a read takes that waits for no other. 0: not known.
    least: AtomicU64,
    /// Whether bytes come from another host.
    is_remote: AtomicBool,
    /// Number of [`BackgroundHold`]s.
    holds: AtomicUsize,
}

/// Limits background loads of CPU memory to blocks with priority while it exists: see
/// [`IoBudget::hold_background`].
#[derive(Debug)]
pub struct BackgroundHold(Arc<IoBudget>);

impl Drop for BackgroundHold {
    fn drop(&mut self) {
        if self.0.holds.fetch_sub(1, Ordering::Release) == 1 {
            self.0.notifiers[Lane::Cpus as usize].iter().for_each(Notifier::wake);
        }
    }
}

/// A read's part in the budget, while this exists.
#[derive(Debug)]
pub struct Permit {
    budget: Arc<IoBudget>,
    /// None: a demand read.
    background: Option<BackgroundRead>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        match self.background {
            Some(read) => self.budget.end_at(read, Instant::now()),
            None => {
                self.budget.note_demand_at(Instant::now());
                self.budget.demands.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

/// A background read in flight.
#[derive(Debug, Clone, Copy)]
struct BackgroundRead {
    lane: Lane,
    bytes: usize,
    at: Instant,
    /// Bytes in flight when it began, its own included.
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
    /// Makes a budget for `reactors`: one notifier for each thread that reads CPU memory.
    ///
    /// # Errors
    /// [`StoreError::Setup`] when no descriptor is left.
    pub fn new(reactors: Vec<Notifier>) -> Result<Self, StoreError> {
        let gpus = Notifier::new().map_err(|error| StoreError::Setup { act: "making an eventfd", error })?;
        Ok(Self {
            start: Instant::now(),
            notifiers: [reactors, vec![gpus]],
            reading: Default::default(),
            began: Default::default(),
            refused: Default::default(),
            turn: Default::default(),
            last_demand: AtomicU64::new(0),
            demands: AtomicUsize::new(0),
            block: AtomicU64::new(0),
            latency: AtomicU64::new(0),
            least: AtomicU64::new(0),
            is_remote: AtomicBool::new(false),
            holds: AtomicUsize::new(0),
        })
    }

    /// Holds background loads without priority. The caller's restore waits for memory with its processes
    /// stopped, and needs all processors and the disk.
    #[must_use]
    pub fn hold_background(self: &Arc<Self>) -> BackgroundHold {
        self.holds.fetch_add(1, Ordering::Relaxed);
        BackgroundHold(Arc::clone(self))
    }

    /// Whether a restore holds background loads: then only blocks with priority and demanded ones are filled.
    #[must_use]
    pub fn holds_background(&self) -> bool {
        self.holds.load(Ordering::Acquire) > 0
    }

    /// The notifier that the budget wakes when a refused read of GPU memory may be allowed.
    #[must_use]
    pub fn gpus(&self) -> &Notifier {
        &self.notifiers[Lane::Gpus as usize][0]
    }

    /// Counts a demand read until the permit is dropped, however long it takes. I/O schedulers and disks
    /// prefer a stream of adjacent reads to one that is far from them (mq-deadline for half a second).
    #[must_use]
    pub fn demand(self: &Arc<Self>) -> Permit {
        self.demands.fetch_add(1, Ordering::Relaxed);
        Permit { budget: Arc::clone(self), background: None }
    }

    /// Counts a background read until the permit is dropped. Returns `None` if the lane may not read another
    /// `bytes` bytes.
    #[must_use]
    pub fn background(self: &Arc<Self>, lane: Lane, bytes: usize) -> Option<Permit> {
        let now = Instant::now();
        self.allows_at(lane, bytes, now).then(|| {
            let background = Some(self.begin_at(lane, bytes, now));
            Permit { budget: Arc::clone(self), background }
        })
    }

    fn note_demand_at(&self, now: Instant) {
        self.last_demand.store(self.nanos(now).max(1), Ordering::Relaxed);
    }

    /// Whether a thread waits for the disk or did within 5 ms: background reads then have at most
    /// [`PIECE`] bytes.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.is_busy_at(Instant::now())
    }

    fn is_busy_at(&self, now: Instant) -> bool {
        self.demands.load(Ordering::Acquire) > 0 || self.is_recent(&self.last_demand, now, QUIET_AFTER)
    }

    /// Whether a lane may read another `bytes` bytes.
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
        let own = self.in_flight(lane);
        own == 0 || own + bytes <= self.quiet_bytes(lane, now)
    }

    /// The bytes that a lane may have in flight while no thread waits. Lanes share the disk by their bytes in
    /// flight: where both read, GPU memory gets as much as CPU memory.
    fn quiet_bytes(&self, lane: Lane, now: Instant) -> usize {
        let cpu_bytes = QUIET_PIECES * self.notifiers[Lane::Cpus as usize].len() * PIECE;
        match lane {
            Lane::Cpus => cpu_bytes,
            Lane::Gpus if self.is_recent(&self.began[Lane::Cpus as usize], now, IDLE_LIMIT) => {
                cpu_bytes.max(CHUNK)
            }
            Lane::Gpus => self.readahead_bytes(),
        }
    }

    /// Notes that files lie on another host: then a read's time does not measure the disk's queue, and
    /// only many reads in flight are fast.
    pub fn set_remote_fs(&self) {
        self.is_remote.store(true, Ordering::Relaxed);
    }

    /// The bytes of GPU memory in flight that keep the disk busy and still bound the wait of a demand read.
    /// On remote file systems staging memory is the only bound.
    ///
    /// With too few reads in flight, the time for a block is more than the disk needs. Then a read takes no
    /// longer than the least latency, and each time one chunk more is allowed. Where reads wait for other
    /// reads, the time for a block is the disk's rate, and no more is allowed.
    fn readahead_bytes(&self) -> usize {
        if self.is_remote.load(Ordering::Relaxed) {
            return usize::MAX;
        }
        let block = self.block.load(Ordering::Relaxed);
        let in_time = |nanos: u64| {
            let blocks = usize::try_from(nanos.checked_div(block).unwrap_or(0)).unwrap_or(usize::MAX);
            blocks.saturating_mul(BLOCK)
        };
        let least = self.least.load(Ordering::Relaxed);
        // The mean of reads that differ is more than the least latency: without half of it on top, the budget
        // would never be enough for them. Half a chunk more is for the lag of the means.
        let more = in_time((least / 2).min(nanos(READAHEAD_LATENCY))).max(CHUNK + CHUNK / 2);
        in_time(nanos(READAHEAD_LATENCY)).max(in_time(least).saturating_add(more)).max(CHUNKS * CHUNK)
    }

    fn busy_bytes(&self) -> usize {
        let piece = (PIECE / BLOCK) as u64 * self.block.load(Ordering::Relaxed).max(1);
        let pieces = usize::try_from(nanos(DEMAND_LATENCY) / piece).unwrap_or(BUSY_PIECES);
        pieces.clamp(1, BUSY_PIECES) * PIECE
    }

    /// Bytes of a lane's background reads in flight.
    #[must_use]
    pub fn in_flight(&self, lane: Lane) -> usize {
        self.reading[lane as usize].load(Ordering::Relaxed)
    }

    fn begin_at(&self, lane: Lane, bytes: usize, at: Instant) -> BackgroundRead {
        self.began[lane as usize].store(self.nanos(at).max(1), Ordering::Relaxed);
        self.turn[lane as usize].store(0, Ordering::Relaxed);
        self.reading[lane as usize].fetch_add(bytes, Ordering::Relaxed);
        let depth = self.reading.iter().map(|of| of.load(Ordering::Relaxed)).sum();
        BackgroundRead { lane, bytes, at, depth }
    }

    fn end_at(&self, read: BackgroundRead, now: Instant) {
        self.reading[read.lane as usize].fetch_sub(read.bytes, Ordering::Relaxed);
        let other = read.lane.other();
        // One piece for each lane, where few are in flight: otherwise the lane that checks more often would
        // get all of them.
        if self.refused[other as usize].swap(false, Ordering::Relaxed) {
            self.turn[other as usize].store(self.nanos(now + LANE_SLICE), Ordering::Relaxed);
            self.notifiers[other as usize].iter().for_each(Notifier::wake);
        }
        // Reads wait for the reads before them: a block's time is its share.
        let blocks = read.depth.div_ceil(BLOCK).max(1) as u64;
        let took = nanos(now.duration_since(read.at));
        self.block.store(mean(self.block.load(Ordering::Relaxed), took / blocks), Ordering::Relaxed);
        self.measure(&read, took);
    }

    /// Measures the latency of a read that waits for no other. A read that was alone sets it; the least of
    /// the other reads lowers it.
    fn measure(&self, read: &BackgroundRead, took: u64) {
        let least = self.least.load(Ordering::Relaxed);
        let (latency, least) = if read.depth == read.bytes {
            // One read may have taken long by chance.
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

/// Adds one value to a running mean; 0 means that it has no value yet.
fn mean(so_far: u64, own: u64) -> u64 {
    if so_far == 0 { own } else { so_far - so_far / 8 + own / 8 }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
