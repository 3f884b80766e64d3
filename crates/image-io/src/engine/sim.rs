// SPDX-License-Identifier: MIT OR Apache-2.0
//! A simulated engine for tests: it gives real bytes, but late, out of order, in pieces, or not at all. The
//! same seed gives the same behaviour.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::transfer::Step;
use super::{Depth, Done, Engine, Flight, Read};
use crate::cache::BlockCache;
use crate::metrics::Metrics;

/// What the simulation does to reads. The default only reorders them.
#[derive(Debug, Clone, Default)]
pub struct SimPlan {
    /// The same seed and the same calls give the same behaviour.
    pub seed: u64,
    /// Each system call takes up to this many calls of `reap` more than one.
    pub max_delay: u32,
    /// Of 100 system calls, how many are cut short.
    pub short_percent: u8,
    /// Of 100 system calls, how many fail with EIO.
    pub eio_percent: u8,
    /// Reads that overlap these bytes of a file fail with EIO every time, as from a bad disk.
    pub broken: Option<Range<u64>>,
}

/// The simulated engine. See [`Engine`]; it has no descriptor to poll.
#[derive(Debug)]
pub struct Sim {
    plan: SimPlan,
    random: u64,
    now: u64,
    flights: Vec<(u64, Flight)>,
    depth: Depth,
    metrics: Arc<Metrics>,
}

impl Sim {
    /// Makes a simulation that follows `plan`, with its counters in `cache`.
    pub fn new(cache: &Arc<BlockCache>, plan: SimPlan) -> Self {
        let random = plan.seed;
        let metrics = Arc::clone(cache.metrics());
        Self { plan, random, now: 0, flights: Vec::new(), depth: Depth::default(), metrics }
    }

    /// Returns a number below `bound` by SplitMix64.
    fn below(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound.max(1)
    }

    fn due(&mut self) -> u64 {
        self.now + 1 + self.below(u64::from(self.plan.max_delay) + 1)
    }

    /// Makes one system call, with the plan's delays and faults.
    fn call(&mut self, flight: &mut Flight) -> io::Result<usize> {
        let file = Arc::clone(&flight.read.file);
        let next = flight.transfer.next(&file);
        let end = next.offset.saturating_add(next.len as u64);
        let broken = self.plan.broken.as_ref().is_some_and(|bad| next.offset < bad.end && bad.start < end);
        if broken || self.below(100) < u64::from(self.plan.eio_percent) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let mut len = next.len;
        if len > 1 && self.below(100) < u64::from(self.plan.short_percent) {
            // Never less than an eighth, so that chance alone does not reach the bound on short reads.
            let least = (len / 8).max(1);
            let more = self.below((len - least) as u64);
            len = least + usize::try_from(more).unwrap_or(0);
        }
        // Through the page cache also for direct reads: lengths need not be aligned here.
        file.buffered().read_at(&mut flight.read.dst.whole_mut()[next.at..next.at + len], next.offset)
    }
}

impl Engine for Sim {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if !self.depth.enter(&read.dst, &self.metrics) {
            return Err(read);
        }
        let due = self.due();
        self.flights.push((due, Flight::new(read)));
        Ok(())
    }

    /// Does nothing: reads start as they are submitted.
    fn flush(&mut self) {}

    fn reap(&mut self, done: &mut Vec<Done>) {
        self.now += 1;
        for _ in 0..self.flights.len() {
            let pick = usize::try_from(self.below(self.flights.len() as u64)).unwrap_or(0);
            if self.flights[pick].0 > self.now {
                continue;
            }
            let (_, mut flight) = self.flights.swap_remove(pick);
            let got = self.call(&mut flight);
            let file = Arc::clone(&flight.read.file);
            match flight.transfer.step(&file, got) {
                Step::Again => {
                    let due = self.due();
                    self.flights.push((due, flight));
                }
                Step::Finished(result) => {
                    self.depth.leave(&flight.read.dst);
                    done.push(flight.done(result, &self.metrics));
                }
            }
        }
    }

    fn poll_fd(&self) -> Option<RawFd> {
        None
    }

    fn in_flight(&self) -> usize {
        self.depth.total()
    }
}
