// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transfers with plain positioned calls on a few threads, for kernels and containers that refuse io_uring.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rewake_process::Notifier;

use super::backend::{Backend, DEPTH, Flight};
use super::request::Completion;
use super::transfer::TransferStep;
use crate::class::Class;
use crate::error::StoreError;
use crate::memory::Memory;

/// Threads per engine. Each transfer waits for the disk in its own thread. Four overlap waiting with copying;
/// each reactor may have such an engine.
const THREADS: usize = 4;

#[derive(Debug)]
pub(super) struct Threads<M: Memory> {
    shared: Arc<WorkQueue<M>>,
    threads: Vec<JoinHandle<()>>,
    /// The list that `reap` swaps with the threads' list, so that neither allocates.
    spare: Vec<Completion<M>>,
}

#[derive(Debug)]
struct WorkQueue<M> {
    queues: Mutex<TransferQueues<M>>,
    work: Condvar,
    finished: Notifier,
}

#[derive(Debug)]
struct TransferQueues<M> {
    demand: VecDeque<Flight<M>>,
    background: VecDeque<Flight<M>>,
    done: Vec<Completion<M>>,
    closing: bool,
}

impl<M: Memory> Threads<M> {
    /// Starts the threads.
    pub(super) fn new() -> Result<Self, StoreError> {
        let finished = Notifier::new()
            .map_err(|error| StoreError::Setup { act: "making the read threads' eventfd", error })?;
        let [demand, background] = [(); 2].map(|()| VecDeque::with_capacity(DEPTH));
        let queues = TransferQueues { demand, background, done: Vec::with_capacity(DEPTH), closing: false };
        let shared = Arc::new(WorkQueue { queues: Mutex::new(queues), work: Condvar::new(), finished });
        let mut backend = Self { shared, threads: Vec::new(), spare: Vec::with_capacity(DEPTH) };
        for number in 0..THREADS {
            let shared = Arc::clone(&backend.shared);
            let thread = std::thread::Builder::new()
                .name(format!("rewake-read{number}"))
                .spawn(move || shared.serve())
                .map_err(|error| StoreError::Setup { act: "starting a read thread", error })?;
            backend.threads.push(thread);
        }
        Ok(backend)
    }
}

impl<M: Memory> WorkQueue<M> {
    fn lock(&self) -> MutexGuard<'_, TransferQueues<M>> {
        // Under this lock only an allocation can panic.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        while let Some(flight) = self.next_flight() {
            let done = carry_out(flight);
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

    /// Waits for a transfer; returns None when the engine is closing. Demand reads are served first.
    fn next_flight(&self) -> Option<Flight<M>> {
        let mut queues = self.lock();
        loop {
            if queues.closing {
                return None;
            }
            let front = queues.demand.pop_front();
            if let Some(flight) = front.or_else(|| queues.background.pop_front()) {
                return Some(flight);
            }
            queues = self.work.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn carry_out<M: Memory>(mut flight: Flight<M>) -> Completion<M> {
    loop {
        let got = flight.call(usize::MAX);
        if let TransferStep::Finished(result) = flight.step(got) {
            return flight.done(result);
        }
    }
}

impl<M: Memory> Backend<M> for Threads<M> {
    fn start(&mut self, flight: Flight<M>) {
        let mut queues = self.shared.lock();
        match flight.class() {
            Class::Demand => queues.demand.push_back(flight),
            Class::Background => queues.background.push_back(flight),
        }
        drop(queues);
        self.shared.work.notify_one();
    }

    fn reap(&mut self, done: &mut Vec<Completion<M>>) {
        self.shared.finished.drain();
        std::mem::swap(&mut self.spare, &mut self.shared.lock().done);
        done.append(&mut self.spare);
    }

    fn event(&self) -> Option<&Notifier> {
        Some(&self.shared.finished)
    }
}

impl<M: Memory> Drop for Threads<M> {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has written so to standard error; its reads are lost with the engine.
            let _ = thread.join();
        }
    }
}
