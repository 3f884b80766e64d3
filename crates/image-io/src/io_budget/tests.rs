// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;

use super::*;

fn budget(reactors: usize) -> IoBudget {
    IoBudget::new((0..reactors).map(|_| Notifier::new().unwrap()).collect()).unwrap()
}

/// Begins reads of `bytes` bytes each until the budget allows no more, and returns them.
fn begin_all(budget: &IoBudget, lane: Lane, bytes: usize, now: Instant) -> Vec<BackgroundRead> {
    let mut reads = Vec::new();
    while budget.allows_at(lane, bytes, now) && reads.len() < 1000 {
        reads.push(budget.begin_at(lane, bytes, Instant::now()));
    }
    reads
}

#[test]
fn without_waits_every_reactor_reads_ahead() {
    let budget = budget(2);
    let read = begin_all(&budget, Lane::Cpus, PIECE, Instant::now());
    assert_eq!(read.len(), 2 * QUIET_PIECES);
    read.into_iter().for_each(|read| budget.end_at(read, Instant::now()));
    assert!(budget.allows(Lane::Cpus, PIECE));
}

#[test]
fn while_threads_wait_for_a_slow_disk_one_piece_is_in_flight() {
    for lane in [Lane::Cpus, Lane::Gpus] {
        let budget = budget(2);
        budget.block.store(250_000, Ordering::Relaxed);
        let now = Instant::now();
        budget.note_demand_at(now);
        assert_eq!(begin_all(&budget, lane, PIECE, now).len(), 1);
        assert!(!budget.allows_at(Lane::Cpus, PIECE, now) && !budget.allows_at(Lane::Gpus, PIECE, now));
    }
}

#[test]
fn the_disk_is_busy_while_a_thread_waits_for_a_read() {
    let budget = Arc::new(budget(2));
    budget.block.store(250_000, Ordering::Relaxed);
    let waiting = [budget.demand(), budget.demand()];
    let later = || Instant::now() + 100 * QUIET_AFTER;
    assert_eq!(begin_all(&budget, Lane::Gpus, PIECE, later()).len(), 1);
    let [first, second] = waiting;
    drop(first);
    assert!(budget.is_busy_at(later()));
    let now = Instant::now();
    drop(second);
    assert!(budget.is_busy_at(now) && !budget.is_busy_at(later()), "busy a short time after the last wait");
}

#[test]
fn a_fast_disk_gets_more() {
    let budget = budget(2);
    budget.block.store(12_500, Ordering::Relaxed);
    let now = Instant::now();
    budget.note_demand_at(now);
    assert_eq!(begin_all(&budget, Lane::Cpus, PIECE, now).len(), 6);
}

#[test]
fn while_threads_wait_each_lane_gets_its_turn() {
    let budget = budget(2);
    budget.block.store(250_000, Ordering::Relaxed);
    let (now, mut lane, mut turns) = (Instant::now(), Lane::Cpus, Vec::new());
    budget.note_demand_at(now);
    for _ in 0..6 {
        assert!(budget.allows_at(lane, PIECE, now));
        let read = budget.begin_at(lane, PIECE, Instant::now());
        assert!(!budget.allows_at(lane.other(), PIECE, now), "one piece in all");
        budget.end_at(read, now);
        assert!(!budget.allows_at(lane, PIECE, now), "it is the other lane's turn");
        turns.push(lane);
        lane = lane.other();
    }
    // A lane that does not take its turn loses it.
    assert!(budget.allows_at(lane.other(), PIECE, now + 2 * LANE_SLICE));
}

/// Reads GPU memory alone and returns the number of reads in flight after a while. A disk gives the first
/// byte after `first`, and one read of `bytes` per `chunk`.
fn ahead(budget: &IoBudget, bytes: usize, first: Duration, chunk: Duration) -> usize {
    let (mut now, mut disk) = (budget.start, budget.start);
    let mut in_flight = std::collections::VecDeque::new();
    for _ in 0..200 {
        while budget.allows_at(Lane::Gpus, bytes, now) && in_flight.len() < 64 {
            disk = disk.max(now) + chunk;
            in_flight.push_back((budget.begin_at(Lane::Gpus, bytes, now), disk + first));
        }
        let (read, end) = in_flight.pop_front().unwrap();
        now = end;
        budget.end_at(read, now);
    }
    in_flight.len() + 1
}

#[test]
fn gpu_memory_alone_has_some_milliseconds_of_reads_in_flight() {
    let us = Duration::from_micros;
    let chunks = |first, chunk| ahead(&budget(2), CHUNK, first, chunk);
    // 1, 4, and 20 GB/s.
    assert_eq!(chunks(us(50), us(2000)), 2);
    assert!((6..=8).contains(&chunks(us(50), us(500))));
    assert!(chunks(us(50), us(100)) > 32);
    // A remote disk: the first byte after 1 ms, 4 GB/s.
    assert!((5..=8).contains(&chunks(us(1000), us(500))));
    let pieces = ahead(&budget(2), CHUNK / 2, us(50), us(250));
    assert!((12..=16).contains(&pieces), "reads of another size: {pieces}");
}

#[test]
fn a_slow_disk_has_two_chunks_in_flight_a_remote_one_any_number() {
    let ms = Duration::from_millis;
    assert_eq!(ahead(&budget(2), CHUNK, ms(0), ms(50)), 2);
    let budget = budget(2);
    budget.set_remote_fs();
    assert_eq!(ahead(&budget, CHUNK, ms(20), ms(1)), 64);
}

/// A disk that gives a chunk of GPU memory in each `chunk`; it arrives some time later.
struct Disk {
    budget: IoBudget,
    now: Instant,
    free: Instant,
    in_flight: Vec<(BackgroundRead, Instant)>,
}

impl Disk {
    fn new() -> Self {
        let budget = budget(2);
        let start = budget.start;
        Self { budget, now: start, free: start, in_flight: Vec::new() }
    }

    /// Begins as many reads as the budget allows.
    fn begin(&mut self, chunk: Duration, mut far: impl FnMut() -> Duration) {
        while self.budget.allows_at(Lane::Gpus, CHUNK, self.now) {
            self.free = self.free.max(self.now) + chunk;
            let read = self.budget.begin_at(Lane::Gpus, CHUNK, self.now);
            self.in_flight.push((read, self.free + far()));
        }
    }

    /// Reads `chunks` chunks. Returns how many times longer that takes than the disk needs.
    fn read(&mut self, chunks: u32, chunk: Duration, mut far: impl FnMut() -> Duration) -> f64 {
        let start = self.now;
        for _ in 0..chunks {
            self.begin(chunk, &mut far);
            let next = (0..self.in_flight.len()).min_by_key(|n| self.in_flight[*n].1).unwrap();
            let (read, end) = self.in_flight.remove(next);
            self.now = end;
            self.budget.end_at(read, end);
        }
        (self.now - start).as_secs_f64() / (chunks * chunk).as_secs_f64()
    }

    /// Ends all reads, and begins none.
    fn pause(&mut self) {
        for (read, end) in self.in_flight.drain(..) {
            self.now = self.now.max(end);
            self.budget.end_at(read, end);
        }
    }

    /// Returns the number of chunks in flight after each end.
    fn chunks(&self) -> f64 {
        u32::try_from(self.in_flight.len() + 1).unwrap().into()
    }
}

/// Returns the expected chunks in flight: those in transit at the disk's rate, and those that may be
/// before a demand read.
fn wanted(far: Duration, chunk: Duration) -> std::ops::RangeInclusive<f64> {
    far.div_duration_f64(chunk)..=(READAHEAD_LATENCY + far).div_duration_f64(chunk) + 2.0
}

#[test]
fn a_disk_with_high_latency_has_its_transit_in_flight() {
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
fn reads_in_flight_follow_the_rate_of_a_disk_that_changes() {
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
fn one_slow_read_does_not_raise_the_budget_for_long() {
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
fn reads_that_demand_reads_delay_do_not_count_as_latency() {
    let (mut disk, chunk, far) = (Disk::new(), Duration::from_millis(2), Duration::from_micros(100));
    disk.read(100, chunk, || far);
    disk.pause();
    disk.budget.demands.store(1, Ordering::Relaxed);
    let delayed = || Duration::from_millis(30);
    disk.read(20, chunk, delayed);
    disk.begin(chunk, delayed);
    disk.budget.demands.store(0, Ordering::Relaxed);
    disk.read(100, chunk, || far);
    assert!(wanted(far, chunk).contains(&disk.chunks()), "{} chunks", disk.chunks());
}

#[test]
fn a_disk_with_varying_latency_stays_busy() {
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
fn both_lanes_have_the_same_bytes_in_flight() {
    for reactors in [1, 8] {
        let budget = budget(reactors);
        let now = Instant::now();
        let cpu_bytes = begin_all(&budget, Lane::Cpus, PIECE, now).len() * PIECE;
        let gpu_bytes = begin_all(&budget, Lane::Gpus, CHUNK, now).len() * CHUNK;
        assert!(
            gpu_bytes >= CHUNK && gpu_bytes.abs_diff(cpu_bytes) < CHUNK,
            "{reactors}: {gpu_bytes} {cpu_bytes}"
        );
        // Later, when no CPU memory is read, on a fast disk.
        let later = Instant::now() + 2 * IDLE_LIMIT;
        budget.block.store(100, Ordering::Relaxed);
        assert!(budget.allows_at(Lane::Gpus, 1 << 30, later));
    }
}

#[test]
fn the_last_hold_that_is_dropped_wakes_the_reactors() {
    let is_awake = |notifier: &Notifier| {
        let mut eventfd = File::from(notifier.as_fd().try_clone_to_owned().unwrap());
        eventfd.read(&mut [0; 8]).is_ok()
    };
    let notifier = Notifier::new().unwrap();
    let budget = Arc::new(IoBudget::new(vec![notifier.clone()]).unwrap());
    let (one, other) = (budget.hold_background(), budget.hold_background());
    drop(one);
    assert!(budget.holds_background() && !is_awake(&notifier), "another restore holds them");
    drop(other);
    assert!(!budget.holds_background() && is_awake(&notifier), "the reactor is woken");
}

#[test]
fn the_time_of_a_block_is_its_share_of_the_reads_in_flight() {
    let budget = budget(1);
    let at = Instant::now();
    let lane = Lane::Cpus;
    budget.reading[lane as usize].store(4 * BLOCK, Ordering::Relaxed);
    budget.end_at(BackgroundRead { lane, bytes: BLOCK, at, depth: 4 * BLOCK }, at + Duration::from_millis(8));
    let block = Duration::from_nanos(budget.block.load(Ordering::Relaxed));
    assert_eq!(block, Duration::from_millis(2));
}

#[test]
fn some_time_after_the_last_wait_the_disk_is_quiet() {
    let budget = budget(2);
    let now = Instant::now();
    budget.note_demand_at(now);
    assert!(budget.is_busy_at(now));
    assert!(!budget.is_busy_at(now + 2 * QUIET_AFTER));
}
