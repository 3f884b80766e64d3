// SPDX-License-Identifier: MIT OR Apache-2.0
//! A simulated backend for tests: it gives real bytes, but late, out of order, in pieces, or not at all. The
//! same seed gives the same behaviour.

use std::io;
use std::ops::Range;

use rewake_process::Notifier;

use super::backend::{Backend, Call, Flight};
use super::request::Completion;
use super::transfer::TransferStep;
use crate::memory::Memory;

/// What the simulation does to transfers. The default only reorders them.
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
    /// Transfers that overlap these bytes of a file fail with EIO every time, as from a bad disk.
    pub broken: Option<Range<u64>>,
}

#[derive(Debug)]
pub(super) struct Sim<M> {
    plan: SimPlan,
    random: u64,
    now: u64,
    flights: Vec<(u64, Flight<M>)>,
}

impl<M: Memory> Sim<M> {
    pub(super) fn new(plan: SimPlan) -> Self {
        Self { random: plan.seed, plan, now: 0, flights: Vec::new() }
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
    fn call(&mut self, flight: &Flight<M>) -> io::Result<usize> {
        let Call { offset, len, .. } = flight.next();
        let end = offset.saturating_add(len as u64);
        let broken = self.plan.broken.as_ref().is_some_and(|bad| offset < bad.end && bad.start < end);
        if broken || self.below(100) < u64::from(self.plan.eio_percent) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if len <= 1 || self.below(100) >= u64::from(self.plan.short_percent) {
            return flight.call(len);
        }
        // Never less than an eighth, so that chance alone does not reach the bound on short reads.
        let least = (len / 8).max(1);
        let more = self.below((len - least) as u64);
        flight.call(least + usize::try_from(more).unwrap_or(0))
    }
}

impl<M: Memory> Backend<M> for Sim<M> {
    fn start(&mut self, mut flight: Flight<M>) {
        // Through the page cache: lengths need not be aligned here.
        flight.use_page_cache();
        let due = self.due();
        self.flights.push((due, flight));
    }

    fn reap(&mut self, done: &mut Vec<Completion<M>>) {
        self.now += 1;
        for _ in 0..self.flights.len() {
            let pick = usize::try_from(self.below(self.flights.len() as u64)).unwrap_or(0);
            if self.flights[pick].0 > self.now {
                continue;
            }
            let (_, mut flight) = self.flights.swap_remove(pick);
            let got = self.call(&flight);
            match flight.step(got) {
                TransferStep::Again => {
                    let due = self.due();
                    self.flights.push((due, flight));
                }
                TransferStep::Finished(result) => done.push(flight.done(result)),
            }
        }
    }

    fn event(&self) -> Option<&Notifier> {
        None
    }
}
