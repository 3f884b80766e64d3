// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replaces placeholders by mappings of the device.
//!
//! A placeholder is a shared mapping of a memfd that takes the place of device memory until that is loaded.
//! File and offset identify it, not its address. What the program has unmapped is not swapped. What it has
//! moved, split or protected is swapped at its current place.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};

use rewake_process::kcmp::same_file;

use crate::error::Error;
use crate::maps::{self, FileId};
use crate::placeholder::{PlaceholderMapping, identity, parts};
use crate::proc;
use crate::stop::Stopped;

/// A swap of a part of the placeholder file.
#[derive(Debug, Clone, Copy)]
pub struct Swap<'a> {
    /// The offset of the part in the placeholder file, in whole pages.
    pub offset: u64,
    /// The length in bytes.
    pub length: u64,
    /// The device's file, a descriptor of this process. The process must have the same open file under some
    /// number (`pidfd_getfd(2)`, SCM_RIGHTS). A render node that is opened again is another client of the
    /// driver, which may not map the buffer.
    pub device: BorrowedFd<'a>,
    /// The offset of the device that is mapped in place of `offset`.
    pub device_offset: u64,
}

/// The swaps of one stop.
///
/// Mappings are read once, and each device's number is looked up once. Only injected calls change them while
/// this exists: stopped threads make no calls. Stuck threads are in no call that changes mappings, or the
/// swaps were refused; and they stop before another call. No other process shares the memory
/// ([`crate::with_stopped`]).
#[derive(Debug)]
pub struct SwapBatch<'s, 'a> {
    stopped: &'s mut Stopped<'a>,
    file: FileId,
    swaps: &'s [Swap<'s>],
    /// The remaining parts of each swap.
    parts: Vec<Vec<PlaceholderMapping>>,
    /// Descriptor numbers in the process, by the numbers in this process.
    numbers: BTreeMap<RawFd, RawFd>,
}

impl<'a> Stopped<'a> {
    /// Finds the placeholders of these ranges of the file `placeholder`, a descriptor of this process. The
    /// ranges must not overlap.
    ///
    /// The order: load the device's memory, stop the process, swap, resume it, and call UFFDIO_WAKE on each
    /// swapped range. The wake is for other processes that wait there for this one; its own threads retry
    /// when they resume. Resolve threads in [`Stopped::stuck`] only if an error requires it. With
    /// UFFD_FEATURE_EVENT_UNMAP, a thread must read the userfaultfd meanwhile. Pages in the placeholder
    /// ([`crate::populated_ranges`]) are not copied: write a range's pages to the device just before its
    /// swap. A thread that is stuck at a range resumes when that is swapped, and may write to the next.
    ///
    /// # Errors
    /// The errors of [`Stopped::syscall`]; [`Error::Unstoppable`] also while a thread changes mappings.
    pub fn prepare_swaps<'s>(
        &'s mut self,
        placeholder: BorrowedFd<'_>,
        swaps: &'s [Swap<'s>],
    ) -> Result<SwapBatch<'s, 'a>, Error> {
        self.refuse_changing()?;
        let file = identity(placeholder).map_err(|source| self.failed("stat the placeholder", source))?;
        let ranges: Vec<_> = swaps.iter().map(|swap| swap.offset..swap.offset + swap.length).collect();
        let mappings = maps::read(self.calling_thread()?)?;
        let parts = parts(&mappings, file, &ranges);
        // A program without placeholders needs no calls: it may be a new one after an exec.
        if parts.iter().any(|parts| !parts.is_empty()) {
            self.find_call_setup(&mappings)?;
        }
        Ok(SwapBatch { stopped: self, file, swaps, parts, numbers: BTreeMap::new() })
    }

    fn refuse_changing(&self) -> Result<(), Error> {
        let stuck = self.stuck();
        if self.threads.is_empty() || !stuck.iter().all(crate::StuckThread::is_harmless) {
            return Err(Error::Unstoppable { pid: self.pid, threads: stuck });
        }
        Ok(())
    }

    fn failed(&self, call: &'static str, source: io::Error) -> Error {
        Error::Call { pid: self.pid, call, source }
    }
}

impl SwapBatch<'_, '_> {
    /// Swaps all placeholders of the range of `swaps[place]`, wherever they are. Returns `None` if the
    /// program has no such placeholder left. The device is mapped elsewhere first, excluded from forks, and
    /// then moved. If that mapping fails, the placeholder stays.
    ///
    /// # Errors
    /// The errors of [`Stopped::syscall`]; [`Error::NotOpen`]; [`Error::Lost`]. Parts that were swapped stay
    /// swapped: call this again for the rest.
    pub fn swap(&mut self, place: usize) -> Result<Vec<PlaceholderMapping>, Error> {
        let swap = &self.swaps[place];
        let mut swapped = Vec::new();
        while let Some(&part) = self.parts[place].last() {
            // This waits for a placeholder: a program without any may have closed the device.
            let number = self.number(swap.device)?;
            self.swap_part(&part, number, swap.device_offset + (part.offset - swap.offset))?;
            swapped.extend(self.parts[place].pop());
        }
        Ok(swapped)
    }

    /// Returns the number of the device's file in the thread that makes injected calls. That thread stays the
    /// same: a stopped thread disappears only if all are killed.
    fn number(&mut self, device: BorrowedFd<'_>) -> Result<RawFd, Error> {
        let numbers = match self.numbers.entry(device.as_raw_fd()) {
            Entry::Occupied(number) => return Ok(*number.get()),
            Entry::Vacant(number) => number,
        };
        let (pid, tid) = (self.stopped.pid, self.stopped.calling_thread()?);
        let is_it = |number: &RawFd| same_file(device.as_raw_fd(), tid, *number).unwrap_or(false);
        let found = proc::descriptors(tid)?.into_iter().find(is_it);
        Ok(*numbers.insert(found.ok_or(Error::NotOpen { pid })?))
    }

    fn swap_part(&mut self, part: &PlaceholderMapping, number: RawFd, offset: u64) -> Result<(), Error> {
        let PlaceholderMapping { address, length, protection, .. } = *part;
        let word = |value: i32| u64::from(value.cast_unsigned());
        let arguments = [0, length, word(protection), word(libc::MAP_SHARED), word(number), offset];
        let scratch = self.stopped.syscall("map the device", libc::SYS_mmap, arguments)?;
        let advice = [scratch, length, word(libc::MADV_DONTFORK), 0, 0, 0];
        let moved =
            self.stopped.syscall("exclude the device from forks", libc::SYS_madvise, advice).and_then(|_| {
                let flags = word(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
                let arguments = [scratch, length, length, flags, address, 0];
                self.stopped.syscall("replace the placeholder by the device", libc::SYS_mremap, arguments)
            });
        let Err(error) = moved else { return Ok(()) };
        if let Error::Call { source, .. } = &error {
            self.refuse_loss(part, source.raw_os_error())?;
            self.stopped.syscall("unmap the device", libc::SYS_munmap, [scratch, length, 0, 0, 0, 0])?;
        }
        Err(error)
    }

    /// Reports a lost mapping: mremap may fail after it has unmapped the placeholder (`mm/mremap.c:
    /// mremap_to`).
    fn refuse_loss(&self, part: &PlaceholderMapping, errno: Option<i32>) -> Result<(), Error> {
        let (start, end) = (part.address, part.address + part.length);
        let mappings = maps::read(self.stopped.calling_thread()?)?;
        if mappings.iter().any(|there| there.file == self.file && there.start <= start && end <= there.end) {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(errno.unwrap_or(libc::EIO));
        Err(Error::Lost { pid: self.stopped.pid, address: start, length: part.length, source })
    }
}
