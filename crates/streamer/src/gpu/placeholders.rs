// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process's placeholders: memory that stands where its CPUs reach a device's, until that is loaded and takes its place.
//!
//! A touch of one is a fault that waits here. When its buffer is resident the process is stopped for some hundred microseconds, and
//! the device put where the placeholder was. If it does not stop (its only thread is in the kernel and touches on its behalf), the
//! placeholder is given a copy of the device's bytes, and what the program has made of them goes to the device before that takes the
//! place (`docs/decisions/0009-tracer.md`, 0010).

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use rewake_plugin_protocol::proto;
use rewake_ptrace_inject::{
    Error, PlaceholderMapping, Swap, placeholder_mappings, populated_ranges, with_stopped,
};
use rewake_uffd::abi::{FEATURE_FORK, FEATURE_REMAP};
use rewake_uffd::{FillPort as _, Message, PAGE_SIZE, RawMessage, Stop, Uffd, address_space_ended};

use super::bar_mappings::BarMappings;
use super::placeholder_range::{Buffer, PlaceholderRange, parts};
use crate::ledger::fd_store::{Entry, FdStore, Kind};
use crate::supervise::processes;
use crate::sys;

/// For threads to stop. Those that cannot are found out within milliseconds; this is for a machine that has more to run than it can.
const PATIENCE: Duration = Duration::from_secs(1);
/// Given to a program that does not stop, at once: what a `read(2)` into a placeholder goes on with. A CPU reads device memory at some tens
/// of MB/s.
const COPIED: u64 = 256 << 10;
/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);
/// Looks for a child of a fork that is under way: ten seconds.
const FORKED: u32 = 1000;
/// Looks at whether a process that cannot be looked at is ending: a second.
const ENDING: u32 = 100;
/// Messages that one system call gives.
const MESSAGES: usize = 64;

/// What the plugin has handed over of a process; nothing watches it yet.
#[derive(Debug)]
pub(super) struct ReceivedPlaceholders {
    file: OwnedFd,
    /// Whoever watches them has it.
    uffd: Mutex<Option<OwnedFd>>,
    /// By address.
    mappings: Vec<proto::Mapping>,
}

/// Placeholders that are watched. **Not closed when dropped**: what is missing would be zeros then. It is at the end of the process,
/// when the supervisor has killed whoever is still behind a gate.
#[derive(Debug)]
pub(super) struct Placeholders<'a> {
    /// The process's place among those loaded, and its number.
    process: usize,
    pid: i32,
    /// Of the process, in the ledger.
    pidfd: RawFd,
    uffd: ManuallyDrop<Uffd>,
    handed: &'a ReceivedPlaceholders,
    /// The process's own files of render nodes, by the GPUs' names in the image.
    renders: &'a [(u32, OwnedFd)],
    /// By offset.
    parts: Vec<PlaceholderRange<'a>>,
    /// Whether the program has moved some: they are looked for then.
    moved: bool,
}

/// What a touched address shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AccessedRange {
    /// The image's number of the buffer.
    pub(super) buffer: usize,
    /// Where in the placeholders' file, and how many bytes of it follow in the mapping.
    offset: u64,
    rest: u64,
}

/// What became of a swap.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done {
        /// How long it stood still: since its threads were asked to, until all was done.
        stopped: Duration,
    },
    /// The process does not stand still now.
    NotNow(String),
    /// It has ended.
    Ended,
}

impl ReceivedPlaceholders {
    pub(super) fn new(files: Vec<OwnedFd>) -> anyhow::Result<Self> {
        let files: Result<[OwnedFd; 2], _> = files.try_into();
        let wrong =
            |files: Vec<OwnedFd>| anyhow!("placeholders came with {} descriptors, not 2", files.len());
        let [file, uffd] = files.map_err(wrong)?;
        Ok(Self { file, uffd: Mutex::new(Some(uffd)), mappings: Vec::new() })
    }

    /// More of them.
    pub(super) fn add(&mut self, told: proto::Mappings) -> anyhow::Result<()> {
        for mapping in told.mappings {
            let proto::Mapping { address, length, offset, device_offset, .. } = mapping;
            let whole = [address, length, offset, device_offset].iter().all(|number| number % PAGE_SIZE == 0);
            let ends = address.checked_add(length).is_some() && offset.checked_add(length).is_some();
            let behind = self.mappings.last().is_none_or(|last| last.address + last.length <= address);
            ensure!(whole && ends && behind && length > 0, "a placeholder makes no sense: {mapping:?}");
            self.mappings.push(mapping);
        }
        Ok(())
    }

    /// The numbers of the buffers that they stand for.
    pub(super) fn buffers(&self) -> Vec<usize> {
        let mut numbers: Vec<usize> = self.mappings.iter().map(|mapping| mapping.buffer as usize).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Watches them in the stopped process: all of them, and that there are no others.
    ///
    /// # Errors
    /// One is missing or is something else. The process must not run then: an unwatched placeholder reads as zeros.
    pub(super) fn watch<'a>(
        &'a self,
        process: usize,
        pidfd: RawFd,
        buffers: Vec<Buffer<'a>>,
        renders: &'a [(u32, OwnedFd)],
        store: &FdStore,
    ) -> anyhow::Result<Placeholders<'a>> {
        let pid = sys::pidfd_pid(pidfd).context("finding the process")?;
        let there = placeholder_mappings(pid, self.file.as_fd(), 0..u64::MAX)?;
        let told = |shown: &PlaceholderMapping, mapping: &proto::Mapping| {
            (shown.address, shown.length, shown.offset) == (mapping.address, mapping.length, mapping.offset)
        };
        let same = there.len() == self.mappings.len()
            && there.iter().zip(&self.mappings).all(|(shown, mapping)| told(shown, mapping));
        ensure!(
            same,
            "process {pid} has other placeholders than were told: {there:x?}, not {:x?}",
            self.mappings
        );
        let there = populated_ranges(self.file.as_fd(), 0, u64::MAX).context("looking at placeholders")?;
        ensure!(
            there.is_empty(),
            "the placeholders of process {pid} have bytes before anybody gave them some"
        );
        let uffd = self.uffd.lock().unwrap_or_else(PoisonError::into_inner).take();
        let uffd = uffd.context("placeholders are watched already")?;
        // If every process of ours is killed, touches of a placeholder wait: closed, it would read as zeros.
        store
            .put(
                Entry { kind: Kind::Placeholders, index: u32::try_from(process)?, life: 0 },
                &[uffd.as_raw_fd()],
            )
            .context("putting the userfaultfd of placeholders into the session's fd store")?;
        let uffd = Uffd::negotiate(uffd, FEATURE_FORK | FEATURE_REMAP).context("UFFDIO_API")?;
        // From the first that is watched: not closed on errors either.
        let uffd = ManuallyDrop::new(uffd);
        for mapping in &self.mappings {
            let registered = uffd.register_missing(mapping.address, mapping.length);
            registered.with_context(|| format!("watching a placeholder at {:#x}", mapping.address))?;
        }
        let parts = parts(&self.mappings, renders, buffers)?;
        Ok(Placeholders { process, pid, pidfd, uffd, handed: self, renders, parts, moved: false })
    }
}

impl<'a> Placeholders<'a> {
    /// The process's place among those loaded.
    pub(super) fn process(&self) -> usize {
        self.process
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    pub(super) fn uffd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// Addresses that were touched since it was last asked.
    ///
    /// # Errors
    /// A child has inherited placeholders, and nothing serves it: the process's children are killed.
    pub(super) fn touched(&mut self) -> anyhow::Result<Vec<u64>> {
        let mut found = Vec::new();
        loop {
            let mut slots = [RawMessage::default(); MESSAGES];
            let count = self.uffd.read(&mut slots).context("reading a userfaultfd")?;
            for message in slots[..count].iter().filter_map(RawMessage::decode) {
                match message {
                    Message::Fault { address } => found.push(address),
                    Message::Remap { .. } => self.moved = true,
                    Message::Fork { uffd } => {
                        self.end_child(uffd);
                        bail!(
                            "process {} has forked with device memory that is not there yet (MADV_DOFORK?): it and its children are killed",
                            self.pid
                        )
                    }
                    _ => {}
                }
            }
            if count < MESSAGES {
                return Ok(found);
            }
        }
    }

    /// Kills the process's descendants until the one that has inherited is gone: it is nobody's yet while its parent waits for the
    /// message to be read. What it touches meanwhile waits.
    fn end_child(&self, uffd: RawFd) {
        // SAFETY: made by the read that gave the message, and nobody else's. Not closed: what is missing would be zeros.
        let uffd = ManuallyDrop::new(unsafe { sys::take_over(uffd) });
        for _ in 0..FORKED {
            if address_space_ended(uffd.as_fd()) {
                break;
            }
            processes::kill_descendants(self.pid, self.pidfd);
            std::thread::sleep(LOOK);
        }
    }

    /// Whether the memory that is watched has ended, with its process or by exec: soon, if a call to it has just failed.
    fn is_gone(&self) -> bool {
        address_space_ended(self.uffd.as_fd())
    }

    fn is_going(&self) -> bool {
        (0..ENDING).any(|_| {
            self.is_gone() || {
                std::thread::sleep(LOOK);
                false
            }
        })
    }

    /// What an address shows; none if the device is there already, or nothing.
    pub(super) fn at(&self, address: u64) -> anyhow::Result<Option<AccessedRange>> {
        let file = self.handed.file.as_fd();
        let found = if self.moved {
            let there = match placeholder_mappings(self.pid, file, 0..u64::MAX) {
                Err(_) if self.is_going() => return Ok(None),
                there => there?,
            };
            let is = |shown: &&PlaceholderMapping| {
                (shown.address..shown.address + shown.length).contains(&address)
            };
            there.iter().find(is).map(|shown| (address - shown.address, shown.offset, shown.length))
        } else {
            let next = self.handed.mappings.partition_point(|mapping| mapping.address <= address);
            let before = next.checked_sub(1).map(|before| &self.handed.mappings[before]);
            let here = before.filter(|mapping| address < mapping.address + mapping.length);
            here.map(|mapping| (address - mapping.address, mapping.offset, mapping.length))
        };
        let Some((within, offset, length)) = found else { return Ok(None) };
        let offset = offset + within;
        let part = self.part_at(offset).filter(|part| !part.swapped);
        Ok(part.map(|part| AccessedRange { buffer: part.buffer.number, offset, rest: length - within }))
    }

    fn part_at(&self, offset: u64) -> Option<&PlaceholderRange<'a>> {
        let next = self.parts.partition_point(|part| part.offset <= offset);
        let before = next.checked_sub(1).map(|before| &self.parts[before]);
        before.filter(|part| offset < part.offset + part.length)
    }

    /// Buffers whose place the device has not taken yet.
    pub(super) fn left(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().filter(|part| !part.swapped).map(|part| part.buffer.number)
    }

    /// Puts the device in the place of all placeholders of resident buffers, in one stop.
    ///
    /// # Errors
    /// It cannot be done: the process must be killed.
    pub(super) fn swap(
        &mut self,
        buffers: &BTreeSet<usize>,
        views: &mut BarMappings,
    ) -> anyhow::Result<Outcome> {
        let pid = self.pid;
        // Its number may be another's.
        if self.is_gone() {
            return Ok(Outcome::Ended);
        }
        let (handed, renders, process) = (self.handed, self.renders, self.process);
        let is_one = |part: &&mut PlaceholderRange<'_>| buffers.contains(&part.buffer.number);
        let mut parts: Vec<&mut PlaceholderRange<'_>> = self.parts.iter_mut().filter(is_one).collect();
        let swaps: Vec<Swap<'_>> = parts.iter().map(|part| part.swap(renders)).collect();
        let stopped = with_stopped(pid, PATIENCE, |stopped| {
            let (since, mut done) = (stopped.since(), Vec::new());
            let mut swapping = stopped.prepare_swaps(handed.file.as_fd(), &swaps)?;
            for (place, part) in parts.iter_mut().enumerate() {
                merge(handed, process, part, views)?;
                done.extend(swapping.swap(place)?);
                part.swapped = true;
            }
            anyhow::Ok((done, since.elapsed()))
        });
        let done = stopped.map_err(anyhow::Error::from).and_then(|done| done);
        match done {
            Ok((done, stopped)) => {
                // The process's own threads try again by themselves; those who wait on its behalf do not.
                done.iter().for_each(|part| self.wake(part.address, part.length));
                Ok(Outcome::Done { stopped })
            }
            Err(error) => match error.downcast_ref::<Error>() {
                _ if self.is_gone() => Ok(Outcome::Ended),
                Some(
                    Error::Ended { .. }
                    | Error::Unstoppable { .. }
                    | Error::SharedMemory { .. }
                    | Error::Traced { .. },
                ) => Ok(Outcome::NotNow(error.to_string())),
                _ if self.is_going() => Ok(Outcome::Ended),
                _ => Err(error.context(format!("putting device memory in its place in process {pid}"))),
            },
        }
    }

    /// Whoever waits for a page looks again.
    pub(super) fn wake(&self, address: u64, length: u64) {
        // It fails where nothing is mapped any more, and nobody waits then.
        let _ = self.uffd.wake(address, length);
    }

    /// Gives a placeholder that was touched the bytes that the device has there, and some more behind them.
    ///
    /// # Errors
    /// They cannot be had.
    pub(super) fn copy(
        &mut self,
        address: u64,
        touched: AccessedRange,
        views: &mut BarMappings,
    ) -> anyhow::Result<()> {
        let Some(part) = self.part_at(touched.offset) else { return Ok(()) };
        let length = touched.rest.min(part.offset + part.length - touched.offset).min(COPIED);
        let view = view(self.process, part, views)?;
        let mut bytes = vec![0; usize::try_from(length)?];
        view.read(part.within(touched.offset), &mut bytes);
        let mut done = self.uffd.copy(address, &bytes);
        if done.stop == Some(Stop::NotMapped) && done.bytes == 0 {
            // The mapping ends earlier by now, or is another: what is touched is still there, or it is looked for.
            self.moved = true;
            done = self.uffd.copy(address, &bytes[..usize::try_from(PAGE_SIZE)?]);
        }
        match done.stop {
            // Whatever is behind the touched page comes when it is touched.
            _ if done.bytes > 0 => Ok(()),
            // A change that its reader has not seen yet: it is touched again.
            None | Some(Stop::Present | Stop::Changing | Stop::NotMapped | Stop::Gone) => {
                self.wake(address, PAGE_SIZE);
                Ok(())
            }
            Some(stop) => bail!("filling a placeholder of process {} at {address:#x}: {stop:?}", self.pid),
        }
    }

    /// All are gone: nothing is watched any more.
    pub(super) fn close(self) {
        drop(ManuallyDrop::into_inner(self.uffd));
    }
}

/// What the program has made of copies goes to the device.
fn merge(
    handed: &ReceivedPlaceholders,
    process: usize,
    part: &PlaceholderRange<'_>,
    views: &mut BarMappings,
) -> anyhow::Result<()> {
    let ranges = populated_ranges(handed.file.as_fd(), part.offset, part.length)
        .context("looking for changed pages")?;
    if ranges.is_empty() {
        return Ok(());
    }
    let file = std::fs::File::from(handed.file.try_clone()?);
    let mut bytes = vec![0; usize::try_from(COPIED)?];
    let view = view(process, part, views)?;
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            let length = usize::try_from((range.end - at).min(COPIED))?;
            file.read_exact_at(&mut bytes[..length], at).context("reading changed pages")?;
            view.write(part.within(at), &bytes[..length]);
            at += length as u64;
        }
    }
    Ok(())
}

fn view<'v>(
    process: usize,
    part: &PlaceholderRange<'_>,
    views: &'v mut BarMappings,
) -> anyhow::Result<&'v rewake_amdgpu_uapi::abi::memory::Mapping> {
    let Buffer { number, gpu: (_, minor), dmabuf, bytes } = part.buffer;
    let view = views.of((process, number), minor, dmabuf, bytes);
    view.with_context(|| format!("looking at buffer {number} of renderD{minor}"))
}
