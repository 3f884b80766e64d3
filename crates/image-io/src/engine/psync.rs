// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads with plain positioned reads on a few threads, for kernels and containers that refuse io_uring.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::transfer::Step;
use super::{Depth, Done, Engine, Flight, Read};
use crate::cache::BlockCache;
use crate::error::StoreError;
use crate::metrics::Metrics;
use rewake_process::Notifier;

/// Threads per engine. Each read waits for the disk in its own thread. Four overlap waiting with copying;
/// each reactor may have such an engine.
const THREADS: usize = 4;

/// Reads with threads. See [`Engine`].
#[derive(Debug)]
pub struct Psync {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    depth: Depth,
    /// The list that `reap` swaps with the threads' list, so that neither allocates.
    spare: Vec<Done>,
}

#[derive(Debug)]
struct Shared {
    queues: Mutex<Queues>,
    work: Condvar,
    finished: Notifier,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct Queues {
    demand: VecDeque<Flight>,
    blocks: VecDeque<Flight>,
    done: Vec<Done>,
    closing: bool,
}

impl Psync {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`StoreError::Setup`] when the eventfd or the threads are refused.
    pub fn new(cache: &Arc<BlockCache>) -> Result<Self, StoreError> {
        let finished = Notifier::new()
            .map_err(|error| StoreError::Setup { act: "making the read threads' eventfd", error })?;
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            work: Condvar::new(),
            finished,
            metrics: Arc::clone(cache.metrics()),
        });
        let mut engine =
            Self { shared, threads: Vec::with_capacity(THREADS), depth: Depth::default(), spare: Vec::new() };
        for number in 0..THREADS {
            let shared = Arc::clone(&engine.shared);
            let thread = std::thread::Builder::new()
                .name(format!("rewake-read{number}"))
                .spawn(move || shared.serve())
                .map_err(|error| StoreError::Setup { act: "starting a read thread", error })?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // Under this lock only an allocation can panic.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        while let Some(flight) = self.next_flight() {
            let done = self.carry_out(flight);
            let first = {
                let mut queues = self.lock();
                queues.done.push(done);
                queues.done.len() == 1
            };
            if first {
                self.finished.wake();
            }
        }
    }

    /// Waits for a read; returns None when the engine is closing. Demand reads are served first.
    fn next_flight(&self) -> Option<Flight> {
        let mut queues = self.lock();
        loop {
            if queues.closing {
                return None;
            }
            let front = queues.demand.pop_front();
            if let Some(flight) = front.or_else(|| queues.blocks.pop_front()) {
                return Some(flight);
            }
            queues = self.work.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn carry_out(&self, mut flight: Flight) -> Done {
        loop {
            let file = Arc::clone(&flight.read.file);
            let next = flight.transfer.next(&file);
            let buffer = &mut flight.read.dst.whole_mut()[next.at..next.at + next.len];
            let got = next.file.read_at(buffer, next.offset);
            if let Step::Finished(result) = flight.transfer.step(&file, got) {
                return flight.done(result, &self.metrics);
            }
        }
    }
}

impl Engine for Psync {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        if !self.depth.enter(&read.dst, &self.shared.metrics) {
            return Err(read);
        }
        let demand = read.dst.is_demand();
        let flight = Flight::new(read);
        let mut queues = self.shared.lock();
        if demand {
            queues.demand.push_back(flight);
        } else {
            queues.blocks.push_back(flight);
        }
        drop(queues);
        self.shared.work.notify_one();
        Ok(())
    }

    /// Reads start as they are submitted.
    fn flush(&mut self) {}

    fn reap(&mut self, done: &mut Vec<Done>) {
        self.shared.finished.drain();
        std::mem::swap(&mut self.spare, &mut self.shared.lock().done);
        for over in self.spare.drain(..) {
            self.depth.leave(&over.dst);
            done.push(over);
        }
    }

    fn poll_fd(&self) -> Option<RawFd> {
        Some(self.shared.finished.as_raw_fd())
    }

    fn in_flight(&self) -> usize {
        self.depth.total()
    }
}

impl Drop for Psync {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has written so to standard error; its reads are lost with the engine.
            let _ = thread.join();
        }
    }
}
