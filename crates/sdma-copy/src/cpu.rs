// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies by the CPU, through its view of each BO: a thread that does one submission after the other, so that who submits
//! can read files meanwhile.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use nix::sys::eventfd::EventFd;
use rewake_amdgpu_uapi::abi::memory::Mapping;

use crate::Error;
use crate::device::Device;
use crate::flight::Ticket;
use crate::rings::IN_FLIGHT;
use crate::staging::Staging;
use crate::table::{Bo, Reach, Table};
use crate::transfer::Transfer;

/// The thread that copies, and what it was given. Dropping it waits for all of it.
#[derive(Debug)]
pub(crate) struct Copier {
    device: Device,
    /// None when it is to end.
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
    ended: Arc<Ended>,
    /// Given and not known to be done, in order.
    flights: VecDeque<Flight>,
    /// Lists of jobs that are done: memory that is used again.
    spare: Vec<Vec<(Arc<Mapping>, Transfer)>>,
}

/// What the thread has done.
#[derive(Debug)]
struct Ended {
    /// Without transfers.
    jobs: Mutex<Vec<Job>>,
    more: Condvar,
    event: EventFd,
}

#[derive(Debug)]
struct Flight {
    ticket: Ticket,
    transfers: usize,
    bytes: u64,
    since: Instant,
}

/// A submission: transfers that have been checked, and where their BOs are.
#[derive(Debug)]
struct Job {
    ticket: Ticket,
    transfers: Vec<(Arc<Mapping>, Transfer)>,
}

impl Copier {
    /// Its descriptor can be read when something has ended.
    pub(crate) fn new(device: Device, staging: &Staging, event: EventFd) -> Result<Self, Error> {
        let ended = Arc::new(Ended { jobs: Mutex::default(), more: Condvar::new(), event });
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

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Readable when something has ended.
    pub(crate) fn event(&self) -> &EventFd {
        &self.ended.event
    }

    pub(crate) fn room(&self) -> usize {
        IN_FLIGHT - self.flights.len()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Submits transfers that have been checked.
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
        // The channel has as much room as there are flights: it never blocks, and the thread ends with it only.
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if !sent {
            return Err(Error::Lost { minor });
        }
        let bytes = transfers.iter().map(Transfer::bytes).sum();
        self.flights.push_back(Flight { ticket, transfers: transfers.len(), bytes, since: Instant::now() });
        Ok(())
    }

    /// Where a BO is.
    pub(crate) fn view(&self, table: &mut Table, bo: Bo) -> Result<Arc<Mapping>, Error> {
        let entry = table.get(bo).ok_or_else(|| Error::Bo { minor: self.device.minor() })?;
        if let Reach::Cpu(view) = &entry.reach {
            return Ok(Arc::clone(view));
        }
        let view = self.device.view(entry.handle, entry.size)?;
        entry.reach = Reach::Cpu(Arc::clone(&view));
        Ok(view)
    }

    /// Tells what has ended since this was last asked.
    pub(crate) fn poll(&mut self, mut told: impl FnMut(Ticket)) {
        for job in self.ended.lock().drain(..) {
            // They end in their order.
            self.flights.pop_front();
            self.spare.push(job.transfers);
            told(job.ticket);
        }
    }

    /// Waits until a submission has ended, or until the deadline; None if it is not in flight. That it has ended is told by
    /// [`Copier::poll`].
    pub(crate) fn wait(&self, ticket: Ticket, deadline: Instant) -> Option<Result<(), Error>> {
        let flight = self.flights.iter().find(|flight| flight.ticket == ticket)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let missing = |jobs: &mut Vec<Job>| !jobs.iter().any(|job| job.ticket == ticket);
        let waited = self.ended.more.wait_timeout_while(self.ended.lock(), left, missing);
        let time = waited.unwrap_or_else(PoisonError::into_inner).1;
        Some(if time.timed_out() {
            let Flight { transfers, bytes, since, .. } = *flight;
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
            // It has nobody to tell of a panic.
            let _ = thread.join();
        }
    }
}

impl Ended {
    fn lock(&self) -> MutexGuard<'_, Vec<Job>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn work(staging: &Staging, ended: &Ended, jobs: &Receiver<Job>) {
    for mut job in jobs {
        for (view, transfer) in &job.transfers {
            run(staging, view, transfer);
        }
        // Device memory is written through buffers of the CPU: they are empty after this.
        fence(Ordering::SeqCst);
        // Before anyone is told: a BO that is released then has no view of ours any more.
        job.transfers.clear();
        ended.lock().push(job);
        ended.more.notify_all();
        // It fails where it would count too far: then it can be read anyway.
        let _ = ended.event.write(1);
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
