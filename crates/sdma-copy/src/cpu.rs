// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies by the CPU through its mapping of each BO. A thread runs the submissions in order, so the
//! submitting thread can read files meanwhile.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_process::Notifier;

use crate::Error;
use crate::device::CopyDevice;
use crate::flight::Ticket;
use crate::rings::IN_FLIGHT;
use crate::staging::Staging;
use crate::table::{Bo, Reach, Table};
use crate::transfer::Transfer;

/// The copying thread and its submissions. A drop waits for all of them.
#[derive(Debug)]
pub(crate) struct Copier {
    device: CopyDevice,
    /// None: the thread shall end.
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
    ended: Arc<FinishedJobs>,
    /// Submissions in order whose end [`Copier::poll`] has not reported.
    flights: VecDeque<CpuSubmission>,
    /// Empty lists of finished jobs, whose allocations are reused.
    spare: Vec<Vec<(Arc<Mapping>, Transfer)>>,
}

/// Jobs that the thread has finished.
#[derive(Debug)]
struct FinishedJobs {
    /// The jobs, without their transfers.
    jobs: Mutex<Vec<Job>>,
    more: Condvar,
    event: Notifier,
}

#[derive(Debug)]
struct CpuSubmission {
    ticket: Ticket,
    transfers: usize,
    bytes: u64,
    since: Instant,
}

/// A submission: checked transfers with the mappings of their BOs.
#[derive(Debug)]
struct Job {
    ticket: Ticket,
    transfers: Vec<(Arc<Mapping>, Transfer)>,
}

impl Copier {
    /// Starts the thread. `event` is readable when a submission has ended.
    pub(crate) fn new(device: CopyDevice, staging: &Staging, event: Notifier) -> Result<Self, Error> {
        let ended = Arc::new(FinishedJobs { jobs: Mutex::default(), more: Condvar::new(), event });
        let (jobs, receiver) = sync_channel(IN_FLIGHT);
        let work = {
            let (staging, ended) = (staging.clone(), Arc::clone(&ended));
            move || work(&staging, &ended, &receiver)
        };
        let failed = |source| Error::Thread { minor: device.minor(), source };
        let name = format!("copies-{}", device.minor());
        let thread = std::thread::Builder::new().name(name).spawn(work).map_err(failed)?;
        Ok(Self {
            device,
            jobs: Some(jobs),
            thread: Some(thread),
            ended,
            flights: VecDeque::new(),
            spare: Vec::new(),
        })
    }

    pub(crate) fn device(&self) -> &CopyDevice {
        &self.device
    }

    /// Returns a descriptor that is readable when a submission has ended.
    pub(crate) fn event(&self) -> &Notifier {
        &self.ended.event
    }

    pub(crate) fn room(&self) -> usize {
        IN_FLIGHT - self.flights.len()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Submits checked transfers.
    pub(crate) fn submit(
        &mut self,
        table: &mut Table,
        transfers: &[Transfer],
        ticket: Ticket,
    ) -> Result<(), Error> {
        let minor = self.device.minor();
        if self.room() == 0 {
            return Err(Error::Full { minor });
        }
        let mut placed = self.spare.pop().unwrap_or_default();
        for transfer in transfers {
            placed.push((self.view(table, transfer.bo())?, *transfer));
        }
        let job = Job { ticket, transfers: placed };
        // This never blocks: the channel has room for all flights. It is closed only when the thread has
        // ended.
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if !sent {
            return Err(Error::Lost { minor });
        }
        let bytes = transfers.iter().map(Transfer::bytes).sum();
        self.flights.push_back(CpuSubmission {
            ticket,
            transfers: transfers.len(),
            bytes,
            since: Instant::now(),
        });
        Ok(())
    }

    /// Returns the CPU mapping of a BO.
    pub(crate) fn view(&self, table: &mut Table, bo: Bo) -> Result<Arc<Mapping>, Error> {
        let entry = table.get(bo).ok_or_else(|| Error::Bo { minor: self.device.minor() })?;
        if let Reach::Cpu(view) = &entry.reach {
            return Ok(Arc::clone(view));
        }
        let view = self.device.view(entry.handle, entry.size)?;
        entry.reach = Reach::Cpu(Arc::clone(&view));
        Ok(view)
    }

    /// Reports the submissions that ended since the last call.
    pub(crate) fn poll(&mut self, mut on_end: impl FnMut(Ticket)) {
        for job in self.ended.lock().drain(..) {
            // Submissions end in order.
            self.flights.pop_front();
            self.spare.push(job.transfers);
            on_end(job.ticket);
        }
    }

    /// Waits until a submission has ended, or until the deadline. Returns `None` if it is not in flight.
    /// [`Copier::poll`] still reports its end.
    pub(crate) fn wait(&self, ticket: Ticket, deadline: Instant) -> Option<Result<(), Error>> {
        let flight = self.flights.iter().find(|flight| flight.ticket == ticket)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let missing = |jobs: &mut Vec<Job>| !jobs.iter().any(|job| job.ticket == ticket);
        let waited = self.ended.more.wait_timeout_while(self.ended.lock(), left, missing);
        let time = waited.unwrap_or_else(PoisonError::into_inner).1;
        Some(if time.timed_out() {
            let CpuSubmission { transfers, bytes, since, .. } = *flight;
            Err(Error::Slow { minor: self.device.minor(), transfers, bytes, age: since.elapsed() })
        } else {
            Ok(())
        })
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A drop cannot report a panic.
            let _ = thread.join();
        }
    }
}

impl FinishedJobs {
    fn lock(&self) -> MutexGuard<'_, Vec<Job>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn work(staging: &Staging, ended: &FinishedJobs, jobs: &Receiver<Job>) {
    for mut job in jobs {
        for (view, transfer) in &job.transfers {
            run(staging, view, transfer);
        }
        // Device memory is written through write-combining buffers of the CPU, which this empties.
        fence(Ordering::SeqCst);
        // The mappings are dropped before the end is visible, so that a BO released then has none left.
        job.transfers.clear();
        ended.lock().push(job);
        ended.more.notify_all();
        ended.event.wake();
    }
}

fn run(staging: &Staging, view: &Mapping, transfer: &Transfer) {
    let length = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
    match *transfer {
        Transfer::Load { at, from, bytes, .. } => {
            let (memory, offset) = staging.view(from, bytes);
            memory.copy(offset, view, at, length(bytes));
        }
        Transfer::Save { at, to, bytes, .. } => {
            let (memory, offset) = staging.view(to, bytes);
            view.copy(at, memory, offset, length(bytes));
        }
        Transfer::Fill { at, bytes, word, .. } => view.fill32(at, length(bytes / 4), word),
    }
}
