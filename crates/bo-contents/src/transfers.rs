// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transfers of files, and the pace of those that nobody waits for.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags};
use rewake_image_io::files::{FileRing, Finished, Request};
use rewake_image_io::io_budget::{DemandGuard, IoBudget, Lane, PIECE, Permit};

use crate::error::Error;
use crate::io_memory::IoMemory;

/// At once: a slot's data may be in several pieces.
const MOST: usize = 64;

/// Those under way.
pub(crate) struct Transfers {
    ring: FileRing<IoMemory>,
    /// Of all that read from the same disk; none: nobody else does.
    pace: Option<Arc<IoBudget>>,
    /// By the number that is the ring's token: the caller's, and what the disk's others are told of it.
    under_way: Vec<Option<(u64, BudgetGuard)>>,
}

/// Of a transfer, to all that read from the same disk.
enum BudgetGuard {
    Nothing,
    /// Nobody waits for it.
    Background(Permit),
    Waited(#[expect(dead_code, reason = "it is told until this is dropped")] DemandGuard),
}

impl Transfers {
    pub(crate) fn new(pace: Option<Arc<IoBudget>>) -> Result<Self, Error> {
        Ok(Self { ring: FileRing::new(MOST)?, pace, under_way: (0..MOST).map(|_| None).collect() })
    }

    /// For the log: why they are one at a time, if they are.
    pub(crate) fn note(&self) -> Option<String> {
        self.ring.note()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.ring.in_flight()
    }

    /// Whether so many more can be started. Each start needs it.
    pub(crate) fn has_room(&self, count: usize) -> bool {
        self.under_way.iter().filter(|of| of.is_none()).count() >= count
    }

    /// Starts a read of all these bytes, or, if nobody waits for them, of as many of the first as make no other reader of the disk
    /// wait for long. How many; none where that is none now.
    pub(crate) fn read(&mut self, mut request: Request<IoMemory>, waited: bool) -> Option<usize> {
        let pace = self.pace.as_ref().filter(|_| !request.file.is_cached(request.offset, request.bytes));
        let told = match pace {
            None => BudgetGuard::Nothing,
            Some(pace) if waited => BudgetGuard::Waited(pace.wait()),
            Some(pace) => {
                if pace.is_busy() {
                    request.bytes = request.bytes.min(PIECE);
                    request.needed = request.needed.min(request.bytes);
                }
                if !pace.allows(Lane::Gpus, request.bytes) {
                    return None;
                }
                BudgetGuard::Background(pace.begin(Lane::Gpus, request.bytes))
            }
        };
        let bytes = request.bytes;
        self.begin(request, told);
        Some(bytes)
    }

    /// Starts any other transfer.
    pub(crate) fn start(&mut self, request: Request<IoMemory>) {
        self.begin(request, BudgetGuard::Nothing);
    }

    fn begin(&mut self, mut request: Request<IoMemory>, told: BudgetGuard) {
        let number = self.under_way.iter().position(Option::is_none).expect("room was asked for");
        self.under_way[number] = Some((request.token, told));
        request.token = number as u64;
        assert!(self.ring.submit(request).is_ok(), "more transfers than agreed");
    }

    /// Whether who was refused is to look again soon: else the end of one under way says when.
    pub(crate) fn is_for_others(&self) -> bool {
        self.in_flight() == 0 || self.pace.as_ref().is_some_and(|pace| pace.is_busy())
    }

    /// How long to wait for [`Transfers::wakers`] at most: some may have ended of which none tells.
    pub(crate) fn patience(&self) -> Duration {
        self.ring.patience()
    }

    /// Whether some have ended already.
    pub(crate) fn has_finished(&self) -> bool {
        self.ring.has_finished()
    }

    /// Those that have ended.
    pub(crate) fn finished(&mut self, into: &mut Vec<Finished>) {
        self.ring.flush();
        let first = into.len();
        self.ring.finished(into);
        for finished in &mut into[first..] {
            let number = usize::try_from(finished.token).unwrap_or(usize::MAX);
            let Some((token, told)) = self.under_way[number].take() else { continue };
            finished.token = token;
            if let (Some(pace), BudgetGuard::Background(begun)) = (&self.pace, told) {
                pace.end(begun);
            }
        }
    }

    /// Readable when some may have ended, or it may be their turn.
    pub(crate) fn wakers(&self) -> impl Iterator<Item = PollFd<'_>> {
        let turn = self.pace.as_ref().map(|pace| pace.gpus().as_fd());
        std::iter::once(self.ring.event()).chain(turn).map(|fd| PollFd::new(fd, PollFlags::POLLIN))
    }

    /// When it has slept, and before it looks.
    pub(crate) fn awake(&self) {
        self.pace.iter().for_each(|pace| pace.gpus().drain());
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        // A load that failed: others go on.
        let Some(pace) = &self.pace else { return };
        for (_, told) in self.under_way.drain(..).flatten() {
            if let BudgetGuard::Background(begun) = told {
                pace.end(begun);
            }
        }
    }
}
