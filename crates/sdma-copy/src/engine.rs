// SPDX-License-Identifier: MIT OR Apache-2.0
//! The copies of one GPU.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use drm::control::Device as _;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Whence, lseek};
use rewake_amdgpu_uapi::render::Render;
use rewake_process::Notifier;

use crate::Error;
use crate::caps::SdmaCaps;
use crate::cpu::Copier;
use crate::device::{CopyDevice, MemoryDevice, import};
use crate::flight::Ticket;
use crate::rings::Rings;
use crate::staging::{Staging, StagingMemory};
use crate::table::{Bo, Table};
use crate::transfer::Transfer;

/// One tick at 100 Hz, in nanoseconds: the kernel's waits may end up to a tick early.
const TICK_NS: u64 = 10_000_000;

/// The number of the next engine. Numbers keep BOs and tickets of different engines apart.
static ENGINES: AtomicU32 = AtomicU32::new(0);

/// The path that bytes take, and the reason why it is not a better one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyPath {
    /// The GPU's copy rings.
    Rings {
        /// The number of rings.
        rings: usize,
        /// The SDMA version.
        version: (u32, u32),
        /// The kind of staging memory.
        memory: StagingMemory,
        /// The reason why it is not ordinary pages.
        reason: Option<String>,
    },
    /// A thread of the CPU.
    Cpu {
        /// The reason why it is not rings.
        reason: String,
    },
}

impl fmt::Display for CopyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu { reason } => write!(f, "copies by the CPU ({reason})"),
            Self::Rings { rings, version: (major, minor), memory, reason } => {
                let memory = match memory {
                    StagingMemory::Pages => "ordinary pages",
                    StagingMemory::Gtt => "GTT",
                };
                write!(f, "{rings} copy rings (SDMA {major}.{minor}), staging in {memory}")?;
                reason.as_ref().map_or(Ok(()), |reason| write!(f, " ({reason})"))
            }
        }
    }
}

/// A submission that has ended.
#[derive(Debug)]
pub struct CopyCompletion {
    /// The submission.
    pub ticket: Ticket,
    /// Whether its bytes were copied.
    pub result: Result<(), Error>,
}

/// Copies between the BOs of one GPU and staging memory. A drop frees its kernel objects. Transfers in flight
/// then end or are cancelled, without a report.
#[derive(Debug)]
pub struct CopyEngine {
    id: u32,
    minor: u32,
    staging: Staging,
    table: Table,
    path: CopyPath,
    copies: CopyBackend,
    /// Submissions that have ended and were not reported.
    done: VecDeque<CopyCompletion>,
    tickets: u64,
    lost: bool,
}

/// The means of the copies.
#[derive(Debug)]
enum CopyBackend {
    /// The GPU's rings.
    Rings {
        render: Render,
        rings: Box<Rings>,
        /// None: the kernel cannot signal the end of work.
        event: Option<Notifier>,
    },
    Cpu(Copier),
}

impl CopyEngine {
    /// Opens an engine on a render node of its own: the engine uses the whole address space.
    ///
    /// # Errors
    /// The kernel refused what every path needs.
    pub fn open(render: Render, staging: &Staging) -> Result<Self, Error> {
        let (mask, version, encoding) = match SdmaCaps::of(&render)? {
            SdmaCaps::None(reason) => return Self::by_cpu(render, staging, &reason),
            SdmaCaps::Rings { mask, version, encoding } => (mask, version, encoding),
        };
        let rings = match Rings::new(&render, mask, encoding, staging) {
            Ok(rings) => Box::new(rings),
            Err(error) => return Self::by_cpu(render, staging, &error.to_string()),
        };
        let reason = staging.reason().map(str::to_owned);
        let path = CopyPath::Rings { rings: rings.count(), version, memory: staging.memory(), reason };
        let event = event(render.minor())?;
        let event = if signals_eventfd(&render, &event)? { Some(event) } else { None };
        Ok(Self::new(render.minor(), staging, path, CopyBackend::Rings { render, rings, event }))
    }

    /// Opens an engine that copies by the CPU, even if the GPU has rings. `reason` appears in [`Self::path`].
    ///
    /// # Errors
    /// An event descriptor or a thread could not be created.
    pub fn by_cpu(render: Render, staging: &Staging, reason: &str) -> Result<Self, Error> {
        Self::with_thread(CopyDevice::Node(render), staging, reason)
    }

    /// Opens an engine for memory in the place of this render node's GPU, which need not exist.
    ///
    /// # Errors
    /// An event descriptor or a thread could not be created.
    pub fn in_memory(minor: u32, memory: &Arc<MemoryDevice>, staging: &Staging) -> Result<Self, Error> {
        Self::with_thread(CopyDevice::Memory(minor, Arc::clone(memory)), staging, "memory in a GPU's place")
    }

    fn with_thread(device: CopyDevice, staging: &Staging, reason: &str) -> Result<Self, Error> {
        let minor = device.minor();
        let copier = Copier::new(device, staging, event(minor)?)?;
        Ok(Self::new(minor, staging, CopyPath::Cpu { reason: reason.to_owned() }, CopyBackend::Cpu(copier)))
    }

    fn new(minor: u32, staging: &Staging, path: CopyPath, copies: CopyBackend) -> Self {
        let id = ENGINES.fetch_add(1, Ordering::Relaxed);
        let (staging, table) = (staging.clone(), Table::new(id));
        // All submissions in flight may end before the next call.
        let room = match &copies {
            CopyBackend::Rings { rings, .. } => rings.room(),
            CopyBackend::Cpu(copier) => copier.room(),
        };
        let done = VecDeque::with_capacity(room);
        Self { id, minor, staging, table, path, copies, done, tickets: 0, lost: false }
    }

    /// Returns the path that bytes take. It displays as one line for logs.
    #[must_use]
    pub fn path(&self) -> &CopyPath {
        &self.path
    }

    /// Returns the render node's number.
    #[must_use]
    pub fn minor(&self) -> u32 {
        self.minor
    }

    /// Imports a BO of at least `size` bytes by its dma-buf, which may be closed afterwards. A BO imported
    /// twice is one BO, to be released twice.
    ///
    /// # Errors
    /// It is not a dma-buf, this GPU cannot use it, or it is smaller.
    pub fn import(&mut self, dmabuf: BorrowedFd<'_>, size: u64) -> Result<Bo, Error> {
        let minor = self.minor();
        let failed =
            |errno: nix::Error| Error::Drm { minor, call: "lseek of a dma-buf", source: errno.into() };
        let whole = lseek(dmabuf, 0, Whence::SeekEnd).map_err(failed)?.cast_unsigned();
        if whole < size {
            return Err(Error::Size { minor, size: whole, wanted: size });
        }
        let handle = match &self.copies {
            CopyBackend::Rings { render, .. } => import(render, dmabuf)?,
            CopyBackend::Cpu(copier) => copier.device().import(dmabuf)?,
        };
        Ok(self.table.import(handle, whole))
    }

    /// Releases a BO. If it is in flight, [`Self::finished`] closes it in the kernel after its copies.
    ///
    /// # Errors
    /// The BO is not this engine's, or the kernel refused.
    pub fn release(&mut self, bo: Bo) -> Result<(), Error> {
        let released = self.table.release(bo).ok_or(Error::Bo { minor: self.minor })?;
        let Some(entry) = released else { return Ok(()) };
        match &mut self.copies {
            CopyBackend::Rings { render, rings, .. } => rings.close(render, &entry),
            CopyBackend::Cpu(copier) => copier.device().close(entry.handle),
        }
    }

    /// Submits transfers that end together. Does not block.
    ///
    /// # Errors
    /// Nothing was submitted. [`Error::Full`] and [`Error::Long`] are limits: [`Self::room`] and
    /// [`COPIES`](crate::COPIES).
    pub fn submit(&mut self, transfers: &[Transfer]) -> Result<Ticket, Error> {
        let minor = self.minor();
        if self.lost {
            return Err(Error::Lost { minor });
        }
        for transfer in transfers {
            self.check(transfer)?;
        }
        let ticket = Ticket { engine: self.id, number: self.tickets };
        match &mut self.copies {
            CopyBackend::Rings { render, rings, event } => {
                let event = event.as_ref().map(Notifier::as_fd);
                rings.submit(render, (&mut self.table, &self.staging), transfers, ticket, event)?;
            }
            CopyBackend::Cpu(copier) => copier.submit(&mut self.table, transfers, ticket)?,
        }
        self.tickets += 1;
        Ok(ticket)
    }

    fn check(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let (at, bytes) = (transfer.at(), transfer.bytes());
        let bo = self.table.get(transfer.bo()).ok_or(Error::Bo { minor: self.minor })?;
        check_range("a BO", at, bytes, bo.size)?;
        match transfer.place() {
            Some(place) => {
                let shape = self.staging.shape();
                let slot_bytes = if place.slot.index() < shape.slots { shape.slot_bytes } else { 0 };
                check_range("a slot", place.at, bytes, slot_bytes)
            }
            None if at.is_multiple_of(4) && bytes.is_multiple_of(4) => Ok(()),
            None => {
                Err(Error::Range { what: "a BO", at, bytes, size: bo.size, reason: "a fill is whole words" })
            }
        }
    }

    /// Returns the number of submissions that fit before one ends.
    #[must_use]
    pub fn room(&self) -> usize {
        match &self.copies {
            CopyBackend::Rings { rings, .. } => rings.room(),
            CopyBackend::Cpu(copier) => copier.room(),
        }
    }

    /// Returns the number of submissions whose end was not reported.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        let copied = match &self.copies {
            CopyBackend::Rings { rings, .. } => rings.in_flight(),
            CopyBackend::Cpu(copier) => copier.in_flight(),
        };
        copied + self.done.len()
    }

    /// Returns a descriptor that is readable when a submission has ended since the last [`Self::finished`].
    /// Never read it yourself. It is None where the kernel has no SYNCOBJ_EVENTFD (before Linux 6.6). Then
    /// call [`Self::finished`] every few hundred microseconds, or [`Self::wait`] for the oldest ticket.
    #[must_use]
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.event().map(Notifier::as_fd)
    }

    fn event(&self) -> Option<&Notifier> {
        match &self.copies {
            CopyBackend::Rings { event, .. } => event.as_ref(),
            CopyBackend::Cpu(copier) => Some(copier.event()),
        }
    }

    /// Returns the submissions that ended since the last call, each once. Does not block. The next call
    /// returns those that are not taken from the iterator.
    ///
    /// # Errors
    /// The kernel could not close a released BO. The next call returns what has ended.
    pub fn finished(&mut self) -> Result<impl Iterator<Item = CopyCompletion> + '_, Error> {
        if let Some(event) = self.event() {
            event.drain();
        }
        self.poll()?;
        Ok(std::iter::from_fn(|| self.done.pop_front()))
    }

    fn poll(&mut self) -> Result<(), Error> {
        let (done, lost) = (&mut self.done, &mut self.lost);
        match &mut self.copies {
            CopyBackend::Rings { render, rings, .. } => {
                rings.poll(render, &mut self.table, |ticket, result| {
                    *lost |= result.is_err();
                    done.push_back(CopyCompletion { ticket, result });
                })
            }
            CopyBackend::Cpu(copier) => {
                copier.poll(|ticket| done.push_back(CopyCompletion { ticket, result: Ok(()) }));
                Ok(())
            }
        }
    }

    /// Waits for a submission, up to 10 ms past the deadline. [`Self::finished`] does not return it
    /// afterwards.
    ///
    /// # Errors
    /// [`Error::Failed`]: its bytes were not copied. [`Error::Late`]: it is still in flight at the deadline.
    pub fn wait(&mut self, ticket: Ticket, deadline: Instant) -> Result<(), Error> {
        let waited = match &self.copies {
            CopyBackend::Rings { render, rings, .. } => {
                rings.wait(render, ticket, nanoseconds(deadline, TICK_NS))
            }
            CopyBackend::Cpu(copier) => copier.wait(ticket, deadline),
        };
        if let Some(waited) = waited {
            waited?;
            self.poll()?;
        }
        let place = self.done.iter().position(|done| done.ticket == ticket);
        let done = place.and_then(|place| self.done.remove(place));
        done.ok_or(Error::Ticket { minor: self.minor })?.result
    }
}

fn event(minor: u32) -> Result<Notifier, Error> {
    Notifier::new().map_err(|source| Error::Drm { minor, call: "eventfd", source })
}

/// Returns whether the kernel signals event descriptors when work ends.
fn signals_eventfd(render: &Render, event: &Notifier) -> Result<bool, Error> {
    let minor = render.minor();
    let failed = |call| move |source| Error::Drm { minor, call, source };
    let signalled = render.create_syncobj(true).map_err(failed("SYNCOBJ_CREATE"))?;
    let signals_eventfd = render.syncobj_eventfd(signalled, 0, event.as_fd(), false).is_ok();
    render.destroy_syncobj(signalled).map_err(failed("SYNCOBJ_DESTROY"))?;
    // The syncobj was created signalled.
    Ok(signals_eventfd && event.drain())
}

/// Returns an instant as the time of the monotonic clock, plus `more` nanoseconds.
fn nanoseconds(deadline: Instant, more: u64) -> u64 {
    let left = deadline.saturating_duration_since(Instant::now());
    // The clock cannot fail. Without it, the time is in the past, and there is no wait.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(0, |now| now.tv_sec().cast_unsigned() * 1_000_000_000 + now.tv_nsec().cast_unsigned());
    let left = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
    // The kernel takes times beyond i64 as past or infinite.
    now.saturating_add(left).saturating_add(more).min(i64::MAX.cast_unsigned())
}

fn check_range(what: &'static str, at: u64, bytes: u64, size: u64) -> Result<(), Error> {
    let reason = match at.checked_add(bytes) {
        _ if bytes == 0 => "it has no bytes",
        Some(end) if end <= size => return Ok(()),
        _ => "beyond the end",
    };
    Err(Error::Range { what, at, bytes, size, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_inside_and_not_empty() {
        assert!(check_range("a BO", 4095, 1, 4096).is_ok());
        for (at, bytes, reason) in [(4096, 1, "beyond"), (0, 0, "no bytes"), (1, u64::MAX, "beyond")] {
            let error = check_range("a BO", at, bytes, 4096).unwrap_err().to_string();
            assert!(error.contains("a BO of 0x1000 bytes") && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn the_path_is_one_line_with_its_reason() {
        let rings = |memory, reason: Option<&str>| {
            CopyPath::Rings { rings: 2, version: (4, 4), memory, reason: reason.map(str::to_owned) }
                .to_string()
        };
        assert_eq!(rings(StagingMemory::Pages, None), "2 copy rings (SDMA 4.4), staging in ordinary pages");
        assert_eq!(
            rings(StagingMemory::Gtt, Some("no /dev/udmabuf")),
            "2 copy rings (SDMA 4.4), staging in GTT (no /dev/udmabuf)"
        );
        let cpu = CopyPath::Cpu { reason: "no ring".to_owned() };
        assert_eq!(cpu.to_string(), "copies by the CPU (no ring)");
    }

    #[test]
    fn a_past_deadline_is_now_and_a_far_one_is_finite() {
        let now = nanoseconds(Instant::now(), 0);
        let tick = nanoseconds(Instant::now(), TICK_NS) - now;
        assert!((TICK_NS..TICK_NS + 1_000_000_000).contains(&tick), "{tick}");
        let late = Instant::now() + std::time::Duration::from_secs(1 << 40);
        assert_eq!(nanoseconds(late, TICK_NS), i64::MAX.cast_unsigned());
    }
}
