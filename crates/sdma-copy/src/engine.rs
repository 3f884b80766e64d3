// SPDX-License-Identifier: MIT OR Apache-2.0
//! One GPU's copies.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use drm::control::Device as _;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Whence, lseek};
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::render::Render;

use crate::Error;
use crate::cpu::Copier;
use crate::device::{Device, MemoryDevice, import};
use crate::flight::Ticket;
use crate::rings::{Rings, SdmaCaps};
use crate::staging::{Memory, Staging};
use crate::table::{Bo, Table};
use crate::transfer::Transfer;

/// The kernel's waits end up to a tick early: at 100 ticks a second, in nanoseconds.
const TICK: u64 = 10_000_000;

/// Numbers engines, so that none takes another's BOs and tickets.
static ENGINES: AtomicU32 = AtomicU32::new(0);

/// The way that bytes go, and why not a better one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyPath {
    /// By the GPU's copy rings.
    Rings {
        /// How many.
        rings: usize,
        /// The engine's version.
        version: (u32, u32),
        /// What the staging memory is.
        memory: Memory,
        /// Why it is not ordinary pages.
        why: Option<String>,
    },
    /// By the CPU, in a thread.
    Cpu {
        /// Why not by rings.
        why: String,
    },
}

impl fmt::Display for CopyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu { why } => write!(f, "copies by the CPU ({why})"),
            Self::Rings { rings, version: (major, minor), memory, why } => {
                let memory = match memory {
                    Memory::Pages => "ordinary pages",
                    Memory::Gtt => "GTT",
                };
                write!(f, "{rings} copy rings (SDMA {major}.{minor}), staging in {memory}")?;
                why.as_ref().map_or(Ok(()), |why| write!(f, " ({why})"))
            }
        }
    }
}

/// A submission that has ended.
#[derive(Debug)]
pub struct Done {
    /// Which.
    pub ticket: Ticket,
    /// Whether its bytes are where they should be.
    pub result: Result<(), Error>,
}

/// Copies between one GPU's BOs and staging memory. Dropping it gives back all that it has in the kernel; transfers in
/// flight then end or are cancelled, and nobody hears how.
#[derive(Debug)]
pub struct CopyEngine {
    id: u32,
    minor: u32,
    staging: Staging,
    table: Table,
    way: CopyPath,
    copies: Copies,
    /// Ended, and not told yet.
    done: VecDeque<Done>,
    tickets: u64,
    lost: bool,
}

/// Who copies.
#[derive(Debug)]
enum Copies {
    /// The GPU's rings.
    Rings {
        render: Render,
        rings: Box<Rings>,
        /// None: the kernel does not tell when work ends.
        event: Option<EventFd>,
    },
    Cpu(Copier),
}

impl CopyEngine {
    /// An engine on a render node that nobody else uses: its whole address space is the engine's.
    ///
    /// # Errors
    /// The kernel refused something that every way needs.
    pub fn open(render: Render, staging: &Staging) -> Result<Self, Error> {
        let (mask, version, rule) = match SdmaCaps::of(&render)? {
            SdmaCaps::Nothing(why) => return Self::by_cpu(render, staging, &why),
            SdmaCaps::Rings { mask, version, rule } => (mask, version, rule),
        };
        let rings = match Rings::new(&render, mask, rule, staging) {
            Ok(rings) => Box::new(rings),
            Err(error) => return Self::by_cpu(render, staging, &error.to_string()),
        };
        let why = staging.why().map(str::to_owned);
        let way = CopyPath::Rings { rings: rings.count(), version, memory: staging.memory(), why };
        let event = event(render.minor())?;
        let event = if tells(&render, &event)? { Some(event) } else { None };
        Ok(Self::new(render.minor(), staging, way, Copies::Rings { render, rings, event }))
    }

    /// An engine that copies by the CPU, whatever the GPU offers; `why` is for [`Self::way`].
    ///
    /// # Errors
    /// An event descriptor or a thread could not be had.
    pub fn by_cpu(render: Render, staging: &Staging, why: &str) -> Result<Self, Error> {
        Self::with_thread(Device::Node(render), staging, why)
    }

    /// An engine for memory that stands in for the GPU of this render node, which need not be there.
    ///
    /// # Errors
    /// An event descriptor or a thread could not be had.
    pub fn in_memory(minor: u32, memory: &Arc<MemoryDevice>, staging: &Staging) -> Result<Self, Error> {
        Self::with_thread(Device::Memory(minor, Arc::clone(memory)), staging, "memory in a GPU's place")
    }

    fn with_thread(device: Device, staging: &Staging, why: &str) -> Result<Self, Error> {
        let minor = device.minor();
        let copier = Copier::new(device, staging, event(minor)?)?;
        Ok(Self::new(minor, staging, CopyPath::Cpu { why: why.to_owned() }, Copies::Cpu(copier)))
    }

    fn new(minor: u32, staging: &Staging, way: CopyPath, copies: Copies) -> Self {
        let id = ENGINES.fetch_add(1, Ordering::Relaxed);
        let (staging, table) = (staging.clone(), Table::new(id));
        // All that can be in flight may end before somebody asks.
        let room = match &copies {
            Copies::Rings { rings, .. } => rings.room(),
            Copies::Cpu(copier) => copier.room(),
        };
        let done = VecDeque::with_capacity(room);
        Self { id, minor, staging, table, way, copies, done, tickets: 0, lost: false }
    }

    /// The way that bytes go: one line for logs.
    #[must_use]
    pub fn way(&self) -> &CopyPath {
        &self.way
    }

    /// The render node's number.
    #[must_use]
    pub fn minor(&self) -> u32 {
        self.minor
    }

    /// A BO by its dma-buf, which is not needed any more afterwards. It has at least `size` bytes. The same BO imported
    /// twice is one, to be released twice.
    ///
    /// # Errors
    /// No dma-buf, one that this GPU cannot use, or a smaller one.
    pub fn import(&mut self, dmabuf: BorrowedFd<'_>, size: u64) -> Result<Bo, Error> {
        let minor = self.minor();
        let failed =
            |errno: nix::Error| Error::Drm { minor, call: "lseek of a dma-buf", source: errno.into() };
        let whole = lseek(dmabuf, 0, Whence::SeekEnd).map_err(failed)?.cast_unsigned();
        if whole < size {
            return Err(Error::Size { minor, size: whole, wanted: size });
        }
        let handle = match &self.copies {
            Copies::Rings { render, .. } => import(render, dmabuf)?,
            Copies::Cpu(copier) => copier.device().import(dmabuf)?,
        };
        Ok(self.table.import(handle, whole))
    }

    /// Gives a BO back. If it is in flight, the kernel hears of it when that has ended ([`Self::finished`]).
    ///
    /// # Errors
    /// It is none of this engine's, or the kernel refused.
    pub fn release(&mut self, bo: Bo) -> Result<(), Error> {
        let released = self.table.release(bo).ok_or(Error::Bo { minor: self.minor })?;
        let Some(entry) = released else { return Ok(()) };
        match &mut self.copies {
            Copies::Rings { render, rings, .. } => rings.close(render, &entry),
            Copies::Cpu(copier) => copier.device().close(entry.handle),
        }
    }

    /// Submits transfers as one: they end together. Does not block.
    ///
    /// # Errors
    /// [`Error::Full`] and [`Error::Long`] are limits ([`Self::room`], [`COPIES`](crate::COPIES)); nothing was submitted
    /// then, nor with any other error.
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
            Copies::Rings { render, rings, event } => {
                let event = event.as_ref().map(EventFd::as_fd);
                rings.submit(render, (&mut self.table, &self.staging), transfers, ticket, event)?;
            }
            Copies::Cpu(copier) => copier.submit(&mut self.table, transfers, ticket)?,
        }
        self.tickets += 1;
        Ok(ticket)
    }

    /// The CPU's view of a BO where the CPU copies: what is in memory anyway can be put there at once, and one copy is less than
    /// two. None where rings copy.
    ///
    /// # Errors
    /// None of this engine's BOs, or one that the CPU cannot reach.
    pub fn view(&mut self, bo: Bo) -> Result<Option<Arc<Mapping>>, Error> {
        match &self.copies {
            Copies::Rings { .. } => Ok(None),
            Copies::Cpu(copier) => copier.view(&mut self.table, bo).map(Some),
        }
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

    /// Submissions that can be made before one has ended.
    #[must_use]
    pub fn room(&self) -> usize {
        match &self.copies {
            Copies::Rings { rings, .. } => rings.room(),
            Copies::Cpu(copier) => copier.room(),
        }
    }

    /// Submissions whose end has not been told.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        let copied = match &self.copies {
            Copies::Rings { rings, .. } => rings.in_flight(),
            Copies::Cpu(copier) => copier.in_flight(),
        };
        copied + self.done.len()
    }

    /// A descriptor that can be read when something has ended since [`Self::finished`] was last called; never read it
    /// yourself. None where the kernel has no SYNCOBJ_EVENTFD (before Linux 6.6): look at [`Self::finished`] every few
    /// hundred microseconds, or [`Self::wait`] for the oldest ticket.
    #[must_use]
    pub fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.event().map(EventFd::as_fd)
    }

    fn event(&self) -> Option<&EventFd> {
        match &self.copies {
            Copies::Rings { event, .. } => event.as_ref(),
            Copies::Cpu(copier) => Some(copier.event()),
        }
    }

    /// What has ended since this was last called, each once. Does not block. Of what is not taken from the iterator the
    /// next call tells.
    ///
    /// # Errors
    /// The kernel would not close a BO that was released; what ended is told by the next call.
    pub fn finished(&mut self) -> Result<impl Iterator<Item = Done> + '_, Error> {
        if let Some(event) = self.event() {
            // Nothing to read is no error: it was looked at before.
            let _ = event.read();
        }
        self.poll()?;
        Ok(std::iter::from_fn(|| self.done.pop_front()))
    }

    fn poll(&mut self) -> Result<(), Error> {
        let (done, lost) = (&mut self.done, &mut self.lost);
        match &mut self.copies {
            Copies::Rings { render, rings, .. } => rings.poll(render, &mut self.table, |ticket, result| {
                *lost |= result.is_err();
                done.push_back(Done { ticket, result });
            }),
            Copies::Cpu(copier) => {
                copier.poll(|ticket| done.push_back(Done { ticket, result: Ok(()) }));
                Ok(())
            }
        }
    }

    /// Waits for one submission, at most 10 ms longer than asked. [`Self::finished`] does not tell of it then.
    ///
    /// # Errors
    /// [`Error::Failed`]: its bytes are not there. [`Error::Late`]: not done at the deadline, and still in flight.
    pub fn wait(&mut self, ticket: Ticket, deadline: Instant) -> Result<(), Error> {
        let waited = match &self.copies {
            Copies::Rings { render, rings, .. } => rings.wait(render, ticket, nanoseconds(deadline, TICK)),
            Copies::Cpu(copier) => copier.wait(ticket, deadline),
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

fn event(minor: u32) -> Result<EventFd, Error> {
    let failed = |errno: nix::Error| Error::Drm { minor, call: "eventfd", source: errno.into() };
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).map_err(failed)
}

/// Whether the kernel signals event descriptors when work ends.
fn tells(render: &Render, event: &EventFd) -> Result<bool, Error> {
    let minor = render.minor();
    let failed = |call| move |source| Error::Drm { minor, call, source };
    let signalled = render.create_syncobj(true).map_err(failed("SYNCOBJ_CREATE"))?;
    let tells = render.syncobj_eventfd(signalled, 0, event.as_fd(), false).is_ok();
    render.destroy_syncobj(signalled).map_err(failed("SYNCOBJ_DESTROY"))?;
    // It has just been signalled.
    Ok(tells && event.read().is_ok())
}

/// An instant as the monotonic clock shows it, and some nanoseconds more.
fn nanoseconds(deadline: Instant, more: u64) -> u64 {
    let left = deadline.saturating_duration_since(Instant::now());
    // The clock cannot fail; without it nothing is waited for.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(0, |now| now.tv_sec().cast_unsigned() * 1_000_000_000 + now.tv_nsec().cast_unsigned());
    let left = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
    // The kernel takes times beyond i64 for the past, or for ever.
    now.saturating_add(left).saturating_add(more).min(i64::MAX.cast_unsigned())
}

fn check_range(what: &'static str, at: u64, bytes: u64, size: u64) -> Result<(), Error> {
    let reason = match at.checked_add(bytes) {
        _ if bytes == 0 => "there is nothing to do",
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
        for (at, bytes, reason) in [(4096, 1, "beyond"), (0, 0, "nothing"), (1, u64::MAX, "beyond")] {
            let error = check_range("a BO", at, bytes, 4096).unwrap_err().to_string();
            assert!(error.contains("a BO of 0x1000 bytes") && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn the_way_is_one_line_with_its_reason() {
        let rings = |memory, why: Option<&str>| {
            CopyPath::Rings { rings: 2, version: (4, 4), memory, why: why.map(str::to_owned) }.to_string()
        };
        assert_eq!(rings(Memory::Pages, None), "2 copy rings (SDMA 4.4), staging in ordinary pages");
        assert_eq!(
            rings(Memory::Gtt, Some("no /dev/udmabuf")),
            "2 copy rings (SDMA 4.4), staging in GTT (no /dev/udmabuf)"
        );
        let cpu = CopyPath::Cpu { why: "no ring".to_owned() };
        assert_eq!(cpu.to_string(), "copies by the CPU (no ring)");
    }

    #[test]
    fn a_deadline_that_has_passed_is_now_and_a_far_one_is_not_for_ever() {
        let now = nanoseconds(Instant::now(), 0);
        let tick = nanoseconds(Instant::now(), TICK) - now;
        assert!((TICK..TICK + 1_000_000_000).contains(&tick), "{tick}");
        let late = Instant::now() + std::time::Duration::from_secs(1 << 40);
        assert_eq!(nanoseconds(late, TICK), i64::MAX.cast_unsigned());
    }
}
