// SPDX-License-Identifier: MIT OR Apache-2.0
//! File transfers, and the I/O budget of background reads.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags};
use rewake_image_io::files::{FileRing, Finished, Request};
use rewake_image_io::io_budget::{DemandGuard, IoBudget, Lane, PIECE, Permit};

use crate::error::Error;
use crate::io_memory::IoMemory;

/// The most transfers in flight: the data of a slot may need several.
const MAX_IN_FLIGHT: usize = 64;

/// File transfers in flight.
pub(crate) struct Transfers {
    ring: FileRing<IoMemory>,
    /// The budget of all readers of the disk. None: there is no other reader.
    budget: Option<Arc<IoBudget>>,
    /// By the ring's token: the caller's token, and the transfer's part in the budget.
    in_flight: Vec<Option<(u64, BudgetGuard)>>,
}

/// What a transfer holds of the budget.
enum BudgetGuard {
    Nothing,
    /// A background read.
    Background(Permit),
    Demand(#[expect(dead_code, reason = "the budget counts the demand until the drop")] DemandGuard),
}

impl Transfers {
    pub(crate) fn new(budget: Option<Arc<IoBudget>>) -> Result<Self, Error> {
        Ok(Self {
            ring: FileRing::new(MAX_IN_FLIGHT)?,
            budget,
            in_flight: (0..MAX_IN_FLIGHT).map(|_| None).collect(),
        })
    }

    /// Returns a line for the log if transfers run one at a time.
    pub(crate) fn note(&self) -> Option<String> {
        self.ring.note()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.ring.in_flight()
    }

    /// Returns whether `count` more transfers can start. A caller checks it before each start.
    pub(crate) fn has_room(&self, count: usize) -> bool {
        self.in_flight.iter().filter(|of| of.is_none()).count() >= count
    }

    /// Starts a demanded read completely. A background read is cut so that it delays no other reader for
    /// long. Returns the bytes that it reads, or None if the budget has no room now.
    pub(crate) fn read(&mut self, mut request: Request<IoMemory>, demanded: bool) -> Option<usize> {
        let budget = self.budget.as_ref().filter(|_| !request.file.is_cached(request.offset, request.bytes));
        let guard = match budget {
            None => BudgetGuard::Nothing,
            Some(budget) if demanded => BudgetGuard::Demand(budget.wait()),
            Some(budget) => {
                if budget.is_busy() {
                    request.bytes = request.bytes.min(PIECE);
                    request.needed = request.needed.min(request.bytes);
                }
                if !budget.allows(Lane::Gpus, request.bytes) {
                    return None;
                }
                BudgetGuard::Background(budget.begin(Lane::Gpus, request.bytes))
            }
        };
        let bytes = request.bytes;
        self.begin(request, guard);
        Some(bytes)
    }

    /// Starts a transfer outside the budget.
    pub(crate) fn start(&mut self, request: Request<IoMemory>) {
        self.begin(request, BudgetGuard::Nothing);
    }

    fn begin(&mut self, mut request: Request<IoMemory>, guard: BudgetGuard) {
        let number = self.in_flight.iter().position(Option::is_none).expect("the caller checked for room");
        self.in_flight[number] = Some((request.token, guard));
        request.token = number as u64;
        assert!(self.ring.submit(request).is_ok(), "the ring has fewer entries than MAX_IN_FLIGHT");
    }

    /// Returns whether a refused caller must poll. Otherwise the end of a transfer wakes it.
    pub(crate) fn must_poll(&self) -> bool {
        self.in_flight() == 0 || self.budget.as_ref().is_some_and(|budget| budget.is_busy())
    }

    /// Returns the longest wait for [`Transfers::wakers`]: some transfers may end without an event.
    pub(crate) fn patience(&self) -> Duration {
        self.ring.patience()
    }

    /// Returns whether some transfers have ended.
    pub(crate) fn has_finished(&self) -> bool {
        self.ring.has_finished()
    }

    /// Adds the transfers that have ended.
    pub(crate) fn finished(&mut self, into: &mut Vec<Finished>) {
        self.ring.flush();
        let first = into.len();
        self.ring.finished(into);
        for finished in &mut into[first..] {
            let number = usize::try_from(finished.token).unwrap_or(usize::MAX);
            let Some((token, guard)) = self.in_flight[number].take() else { continue };
            finished.token = token;
            if let (Some(budget), BudgetGuard::Background(permit)) = (&self.budget, guard) {
                budget.end(permit);
            }
        }
    }

    /// Returns descriptors that are readable when a transfer may have ended or the budget may have room.
    pub(crate) fn wakers(&self) -> impl Iterator<Item = PollFd<'_>> {
        let turn = self.budget.as_ref().map(|budget| budget.gpus().as_fd());
        std::iter::once(self.ring.event()).chain(turn).map(|fd| PollFd::new(fd, PollFlags::POLLIN))
    }

    /// Resets the wakeup after a sleep, before the caller checks the budget.
    pub(crate) fn drain_wakeup(&self) {
        if let Some(budget) = &self.budget {
            budget.gpus().drain();
        }
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // After a failed load, other readers still use the budget.
        let Some(budget) = &self.budget else { return };
        for (_, guard) in self.in_flight.drain(..).flatten() {
            if let BudgetGuard::Background(permit) = guard {
                budget.end(permit);
            }
        }
    }
}
