// SPDX-License-Identifier: MIT OR Apache-2.0
//! Watches a process's placeholders: anonymous memory in the place of CPU mappings of VRAM, while the
//! buffers are missing.
//!
//! An access to a placeholder is a page fault. When its buffer is resident, the process is stopped for some
//! hundred microseconds and the placeholder is swapped for the buffer's mapping. A process may not stop: its
//! only thread is in the kernel, which accesses the placeholder for it. Then the placeholder gets a copy of
//! the buffer's bytes. What the program writes there is copied to the buffer before the swap
//! (`docs/decisions/0009-tracer.md`, 0010).

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
use super::placeholder_range::{PlaceholderBuffer, PlaceholderRange, parts};
use crate::ledger::fd_store::{EntryKind, FdStore, StoreEntry};
use crate::supervise::processes;
use crate::sys;

/// How long threads may take to stop. Threads that cannot stop are found within milliseconds; this bound is
/// for an overloaded machine.
const STOP_LIMIT: Duration = Duration::from_secs(1);
/// How many bytes a program that does not stop gets at once, for example for a `read(2)` into a placeholder.
/// A CPU reads device memory at some tens of MB/s.
const COPIED: u64 = 256 << 10;
/// The time between two checks.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// The number of checks for the end of a forked child: ten seconds.
const FORKED: u32 = 1000;
/// The number of checks whether an inaccessible process is ending: a second.
const ENDING: u32 = 100;
/// The number of messages that one system call reads.
const MESSAGES: usize = 64;

/// The placeholders that the plugin has handed over for one process; they are not watched yet.
#[derive(Debug)]
pub(super) struct ReceivedPlaceholders {
    file: OwnedFd,
    /// `None` when [`Placeholders`] owns it.
    uffd: Mutex<Option<OwnedFd>>,
    /// By address.
    mappings: Vec<proto::Mapping>,
}

/// Placeholders that are watched. **Not closed when dropped**: missing memory would read as zeros then. The
/// kernel closes the userfaultfd when this process ends, after the supervisor has killed the processes with
/// closed gates.
#[derive(Debug)]
pub(super) struct Placeholders<'a> {
    /// The process's index among those loaded, and its number.
    process: usize,
    pid: i32,
    /// The process descriptor, which the ledger owns.
    pidfd: RawFd,
    uffd: ManuallyDrop<Uffd>,
    handed: &'a ReceivedPlaceholders,
    /// The process's own files of render nodes, by the GPUs' names in the image.
    renders: &'a [(u32, OwnedFd)],
    /// By offset.
    parts: Vec<PlaceholderRange<'a>>,
    /// Whether the program has moved placeholders: their addresses are looked up then.
    moved: bool,
    bar_mappings: BarMappings,
}

/// What is mapped at an accessed address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AccessedRange {
    /// The image's number of the buffer.
    pub(super) buffer: usize,
    /// The offset in the placeholders' file, and how many bytes of it follow in the mapping.
    offset: u64,
    rest: u64,
}

/// The result of a swap.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SwapOutcome {
    Done {
        /// How long the process was stopped: from the request to its threads until the swap was complete.
        stopped: Duration,
    },
    /// The process does not stop now.
    NotNow(String),
    /// The process has ended.
    Ended,
}

impl ReceivedPlaceholders {
    pub(super) fn new(files: Vec<OwnedFd>) -> anyhow::Result<Self> {
        let files: Result<[OwnedFd; 2], _> = files.try_into();
        let wrong = |files: Vec<OwnedFd>| {
            anyhow!("the plugin sent placeholders with {} descriptors, not 2", files.len())
        };
        let [file, uffd] = files.map_err(wrong)?;
        Ok(Self { file, uffd: Mutex::new(Some(uffd)), mappings: Vec::new() })
    }

    /// Adds mappings, in the order of their addresses.
    pub(super) fn add(&mut self, message: proto::Mappings) -> anyhow::Result<()> {
        for mapping in message.mappings {
            let proto::Mapping { address, length, offset, device_offset, .. } = mapping;
            let whole = [address, length, offset, device_offset].iter().all(|number| number % PAGE_SIZE == 0);
            let ends = address.checked_add(length).is_some() && offset.checked_add(length).is_some();
            let behind = self.mappings.last().is_none_or(|last| last.address + last.length <= address);
            ensure!(whole && ends && behind && length > 0, "a placeholder makes no sense: {mapping:?}");
            self.mappings.push(mapping);
        }
        Ok(())
    }

    /// Returns the numbers of the buffers that have placeholders.
    pub(super) fn buffers(&self) -> Vec<usize> {
        let mut numbers: Vec<usize> = self.mappings.iter().map(|mapping| mapping.buffer as usize).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Watches all placeholders in the stopped process, and checks that it has no others.
    ///
    /// # Errors
    /// A placeholder is missing or another mapping. The process must not run then: an unwatched placeholder
    /// reads as zeros.
    pub(super) fn watch<'a>(
        &'a self,
        process: usize,
        pidfd: RawFd,
        buffers: Vec<PlaceholderBuffer<'a>>,
        renders: &'a [(u32, OwnedFd)],
        store: &FdStore,
    ) -> anyhow::Result<Placeholders<'a>> {
        let pid = sys::pidfd_pid(pidfd).context("finding the process")?;
        let there = placeholder_mappings(pid, self.file.as_fd(), 0..u64::MAX)?;
        let matches = |shown: &PlaceholderMapping, mapping: &proto::Mapping| {
            (shown.address, shown.length, shown.offset) == (mapping.address, mapping.length, mapping.offset)
        };
        let same = there.len() == self.mappings.len()
            && there.iter().zip(&self.mappings).all(|(shown, mapping)| matches(shown, mapping));
        ensure!(
            same,
            "process {pid} has other placeholders than the plugin reported: {there:x?}, not {:x?}",
            self.mappings
        );
        let there = populated_ranges(self.file.as_fd(), 0, u64::MAX).context("looking at placeholders")?;
        ensure!(
            there.is_empty(),
            "the placeholders of process {pid} have bytes before the streamer filled them"
        );
        let uffd = self.uffd.lock().unwrap_or_else(PoisonError::into_inner).take();
        let uffd = uffd.context("placeholders are watched already")?;
        // If every process of the streamer is killed, page faults in placeholders wait: with the userfaultfd
        // closed they would read zeros.
        store
            .put(
                StoreEntry { kind: EntryKind::Placeholders, index: u32::try_from(process)?, life: 0 },
                &[uffd.as_raw_fd()],
            )
            .context("putting the userfaultfd of placeholders into the session's fd store")?;
        let uffd = Uffd::negotiate(uffd, FEATURE_FORK | FEATURE_REMAP).context("UFFDIO_API")?;
        // Not closed on errors either: placeholders are watched from here on.
        let uffd = ManuallyDrop::new(uffd);
        for mapping in &self.mappings {
            let registered = uffd.register_missing(mapping.address, mapping.length);
            registered.with_context(|| format!("watching a placeholder at {:#x}", mapping.address))?;
        }
        let parts = parts(&self.mappings, renders, buffers)?;
        let (moved, bar_mappings) = (false, BarMappings::default());
        Ok(Placeholders { process, pid, pidfd, uffd, handed: self, renders, parts, moved, bar_mappings })
    }
}

impl<'a> Placeholders<'a> {
    /// Returns the process's index among those loaded.
    pub(super) fn process(&self) -> usize {
        self.process
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    pub(super) fn uffd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// Returns the addresses of page faults since the last call.
    ///
    /// # Errors
    /// A child has inherited placeholders, and nothing serves it: the process's children are killed.
    pub(super) fn accessed(&mut self) -> anyhow::Result<Vec<u64>> {
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
                            "process {} has forked with missing device memory (MADV_DOFORK?): it and its \
                             children are killed",
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

    /// Kills the process's descendants until the child that inherited placeholders has ended. The child has
    /// no pid that is known here while its parent waits for the message to be read. Its page faults wait
    /// meanwhile.
    fn end_child(&self, uffd: RawFd) {
        // SAFETY: the read that gave the message made it, and nothing else owns it. Not closed: missing
        // memory would read as zeros.
        let uffd = ManuallyDrop::new(unsafe { sys::take_over(uffd) });
        for _ in 0..FORKED {
            if address_space_ended(uffd.as_fd()) {
                break;
            }
            processes::kill_descendants(self.pid, self.pidfd);
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Returns whether the watched address space has ended, with its process or by exec. It may follow soon
    /// after a failed call to the process.
    fn is_gone(&self) -> bool {
        address_space_ended(self.uffd.as_fd())
    }

    fn is_going(&self) -> bool {
        (0..ENDING).any(|_| {
            self.is_gone() || {
                std::thread::sleep(LOOK_INTERVAL);
                false
            }
        })
    }

    /// Returns the placeholder at an address; `None` if the buffer was swapped already, or nothing is
    /// mapped.
    pub(super) fn at(&self, address: u64) -> anyhow::Result<Option<AccessedRange>> {
        let file = self.handed.file.as_fd();
        let found = if self.moved {
            let there = match placeholder_mappings(self.pid, file, 0..u64::MAX) {
                Err(Error::Ended { .. }) => return Ok(None),
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
        let part = part_at(&self.parts, offset).filter(|part| !part.swapped);
        Ok(part.map(|part| AccessedRange { buffer: part.buffer.number, offset, rest: length - within }))
    }

    /// Returns the buffers that still have placeholders.
    pub(super) fn left(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().filter(|part| !part.swapped).map(|part| part.buffer.number)
    }

    /// Swaps all placeholders of resident buffers in one stop.
    ///
    /// # Errors
    /// The swap fails: the process must be killed.
    pub(super) fn swap(&mut self, buffers: &BTreeSet<usize>) -> anyhow::Result<SwapOutcome> {
        let pid = self.pid;
        // The pid may belong to another process by now.
        if self.is_gone() {
            return Ok(SwapOutcome::Ended);
        }
        let (handed, renders, views) = (self.handed, self.renders, &mut self.bar_mappings);
        let is_one = |part: &&mut PlaceholderRange<'_>| buffers.contains(&part.buffer.number);
        let mut parts: Vec<&mut PlaceholderRange<'_>> = self.parts.iter_mut().filter(is_one).collect();
        let swaps: Vec<Swap<'_>> = parts.iter().map(|part| part.swap(renders)).collect();
        let stopped = with_stopped(pid, STOP_LIMIT, |stopped| {
            let (since, mut done) = (stopped.since(), Vec::new());
            let mut swapping = stopped.prepare_swaps(handed.file.as_fd(), &swaps)?;
            for (place, part) in parts.iter_mut().enumerate() {
                merge(handed, part, views)?;
                done.extend(swapping.swap(place)?);
                part.swapped = true;
            }
            anyhow::Ok((done, since.elapsed()))
        });
        let done = stopped.map_err(anyhow::Error::from).and_then(|done| done);
        match done {
            Ok((done, stopped)) => {
                // The process's own threads fault again without a wake; kernel threads that access memory
                // for it do not.
                done.iter().for_each(|part| self.wake(part.address, part.length));
                Ok(SwapOutcome::Done { stopped })
            }
            Err(error) => match error.downcast_ref::<Error>() {
                _ if self.is_gone() => Ok(SwapOutcome::Ended),
                Some(
                    Error::Ended { .. }
                    | Error::Unstoppable { .. }
                    | Error::SharedMemory { .. }
                    | Error::Traced { .. },
                ) => Ok(SwapOutcome::NotNow(error.to_string())),
                _ if self.is_going() => Ok(SwapOutcome::Ended),
                _ => Err(error.context(format!("putting device memory in its place in process {pid}"))),
            },
        }
    }

    /// Wakes the threads that wait for these pages; they fault again.
    pub(super) fn wake(&self, address: u64, length: u64) {
        // It fails where nothing is mapped any more, and no thread waits then.
        let _ = self.uffd.wake(address, length);
    }

    /// Fills a placeholder with the buffer's bytes at an accessed address, and with some that follow.
    ///
    /// # Errors
    /// The bytes cannot be read or filled.
    pub(super) fn copy(&mut self, address: u64, accessed: AccessedRange) -> anyhow::Result<()> {
        let Some(part) = part_at(&self.parts, accessed.offset) else { return Ok(()) };
        let length = accessed.rest.min(part.offset + part.length - accessed.offset).min(COPIED);
        let view = view(part, &mut self.bar_mappings)?;
        let mut bytes = vec![0; usize::try_from(length)?];
        view.read(part.within(accessed.offset), &mut bytes);
        let mut done = self.uffd.copy(address, &bytes);
        if done.stop == Some(Stop::NotMapped) && done.bytes == 0 {
            // The mapping is shorter or replaced by now. One page is tried; later accesses look up the
            // mapping.
            self.moved = true;
            done = self.uffd.copy(address, &bytes[..usize::try_from(PAGE_SIZE)?]);
        }
        match done.stop {
            // The pages that were not filled are filled at their own page faults.
            _ if done.bytes > 0 => Ok(()),
            // The mapping is changing, and its message was not read yet: the thread faults again.
            None | Some(Stop::Present | Stop::Changing | Stop::NotMapped | Stop::Gone) => {
                self.wake(address, PAGE_SIZE);
                Ok(())
            }
            Some(stop) => bail!("filling a placeholder of process {} at {address:#x}: {stop:?}", self.pid),
        }
    }

    /// Closes the userfaultfd when no placeholder is left.
    pub(super) fn close(self) {
        drop(ManuallyDrop::into_inner(self.uffd));
    }
}

fn part_at<'p, 'a>(parts: &'p [PlaceholderRange<'a>], offset: u64) -> Option<&'p PlaceholderRange<'a>> {
    let next = parts.partition_point(|part| part.offset <= offset);
    let before = next.checked_sub(1).map(|before| &parts[before]);
    before.filter(|part| offset < part.offset + part.length)
}

/// Writes what the program has changed in copies to the buffer.
fn merge(
    handed: &ReceivedPlaceholders,
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
    let view = view(part, views)?;
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
    part: &PlaceholderRange<'_>,
    views: &'v mut BarMappings,
) -> anyhow::Result<&'v rewake_amdgpu_uapi::abi::memory::Mapping> {
    let PlaceholderBuffer { number, gpu: (_, minor), dmabuf, bytes } = part.buffer;
    let view = views.of(number, minor, dmabuf, bytes);
    view.with_context(|| format!("looking at buffer {number} of renderD{minor}"))
}
