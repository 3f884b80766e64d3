// SPDX-License-Identifier: MIT OR Apache-2.0
//! The device's mapping takes a placeholder's place.
//!
//! A placeholder is a shared mapping of a file of memory that stands for device memory until that is loaded. It is
//! known by file and offset, not by address: what the program has unmapped meanwhile is not there any more, what it has
//! moved, split or protected is swapped where and as it is now.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};

use crate::error::Error;
use crate::maps::{self, FileId};
use crate::placeholder::{Shown, identity, parts};
use crate::stop::Stopped;

/// What takes whose place.
#[derive(Debug, Clone, Copy)]
pub struct Swap<'a> {
    /// Where in the placeholders' file the bytes begin that are swapped, and how many; whole pages.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The device's file, as a descriptor of this process. The process has the same open file (`pidfd_getfd(2)`,
    /// SCM_RIGHTS), under whatever number: a render node that is opened again is another client of the driver, which
    /// may not map the buffer.
    pub device: BorrowedFd<'a>,
    /// What to map in place of `offset`, as an offset of the device.
    pub device_offset: u64,
}

/// Swaps of one stop.
///
/// Mappings were read once, and each device's number is looked up once, as nothing but the calls made here changes them
/// while this is there: threads that stand still make none; those that are stuck are in none that does, or this was
/// refused, and stop before they could make another; no other process has this memory ([`crate::with_stopped`]).
#[derive(Debug)]
pub struct Swapping<'s, 'a> {
    stopped: &'s mut Stopped<'a>,
    file: FileId,
    swaps: &'s [Swap<'s>],
    /// What is left of each.
    parts: Vec<Vec<Shown>>,
    /// The process's, by ours.
    numbers: BTreeMap<RawFd, RawFd>,
}

impl<'a> Stopped<'a> {
    /// Looks where the placeholders of some ranges, which do not overlap, of the file `placeholder`, a descriptor of
    /// this process, are now.
    ///
    /// The order: load the device's memory; stop; resolve threads in [`Stopped::stuck`] only if this asks for it;
    /// swap; let go; then UFFDIO_WAKE on each range swapped, for those who wait on the process's behalf (the process's
    /// own threads try again when they go on). A userfaultfd with UFFD_FEATURE_EVENT_UNMAP needs a thread that reads it
    /// meanwhile. Bytes in the placeholder ([`crate::present`]) are not taken over: merge them before, each range's
    /// just before its swap. A thread that is stuck at one goes on when that is swapped, and may write to the next.
    ///
    /// # Errors
    /// Those of [`Stopped::syscall`]; [`Error::Unstoppable`] also while a thread is changing mappings.
    pub fn swapping<'s>(
        &'s mut self,
        placeholder: BorrowedFd<'_>,
        swaps: &'s [Swap<'s>],
    ) -> Result<Swapping<'s, 'a>, Error> {
        self.refuse_changing()?;
        let file = identity(placeholder).map_err(|source| self.failed("stat the placeholder", source))?;
        let ranges: Vec<_> = swaps.iter().map(|swap| swap.offset..swap.offset + swap.length).collect();
        let mappings = maps::read(self.hand()?)?;
        let parts = parts(&mappings, file, &ranges);
        // Nothing is asked of a program that has none left: one that was executed meanwhile.
        if parts.iter().any(|parts| !parts.is_empty()) {
            self.find_tools(&mappings)?;
        }
        Ok(Swapping { stopped: self, file, swaps, parts, numbers: BTreeMap::new() })
    }

    fn refuse_changing(&self) -> Result<(), Error> {
        let stuck = self.stuck();
        if self.threads.is_empty() || !stuck.iter().all(crate::Stuck::is_harmless) {
            return Err(Error::Unstoppable { pid: self.pid, threads: stuck });
        }
        Ok(())
    }

    fn failed(&self, call: &'static str, source: io::Error) -> Error {
        Error::Call { pid: self.pid, call, source }
    }
}

impl Swapping<'_, '_> {
    /// Puts the device's mapping in the place of all placeholders of the range of `swaps[place]`, wherever they are;
    /// empty when the program has none left. Each is mapped elsewhere first, not inherited by forks, and then moved:
    /// when the device cannot be mapped, the placeholder stays.
    ///
    /// # Errors
    /// Those of [`Stopped::syscall`]; [`Error::NotOpen`]; [`Error::Lost`]. What has been swapped stays so: ask again
    /// for the rest.
    pub fn swap(&mut self, place: usize) -> Result<Vec<Shown>, Error> {
        let swap = &self.swaps[place];
        let mut swapped = Vec::new();
        while let Some(&part) = self.parts[place].last() {
            // Not before there is one: a program that has none left may have closed the device, too.
            let number = self.number(swap.device)?;
            self.swap_part(&part, number, swap.device_offset + (part.offset - swap.offset))?;
            swapped.extend(self.parts[place].pop());
        }
        Ok(swapped)
    }

    /// The number of the device's file in the thread that makes our calls, which stays the same: one that stands still
    /// leaves only when all are killed.
    fn number(&mut self, device: BorrowedFd<'_>) -> Result<RawFd, Error> {
        let numbers = match self.numbers.entry(device.as_raw_fd()) {
            Entry::Occupied(number) => return Ok(*number.get()),
            Entry::Vacant(number) => number,
        };
        Ok(*numbers.insert(self.stopped.number_of(device)?))
    }

    fn swap_part(&mut self, part: &Shown, number: RawFd, offset: u64) -> Result<(), Error> {
        let Shown { address, length, protection, .. } = *part;
        let word = |value: i32| u64::from(value.cast_unsigned());
        let arguments = [0, length, word(protection), word(libc::MAP_SHARED), word(number), offset];
        let scratch = self.stopped.syscall("map the device", libc::SYS_mmap, arguments)?;
        let advice = [scratch, length, word(libc::MADV_DONTFORK), 0, 0, 0];
        let moved =
            self.stopped.syscall("keep the device from forks", libc::SYS_madvise, advice).and_then(|_| {
                let flags = word(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
                let arguments = [scratch, length, length, flags, address, 0];
                self.stopped.syscall("put the device in the placeholder's place", libc::SYS_mremap, arguments)
            });
        let Err(error) = moved else { return Ok(()) };
        if let Error::Call { source, .. } = &error {
            self.refuse_loss(part, source.raw_os_error())?;
            self.stopped.syscall("unmap the device", libc::SYS_munmap, [scratch, length, 0, 0, 0, 0])?;
        }
        Err(error)
    }

    /// mremap may fail after it has removed what was there (`mm/mremap.c: mremap_to`).
    fn refuse_loss(&self, part: &Shown, errno: Option<i32>) -> Result<(), Error> {
        let (start, end) = (part.address, part.address + part.length);
        let mappings = maps::read(self.stopped.hand()?)?;
        if mappings.iter().any(|there| there.file == self.file && there.start <= start && end <= there.end) {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(errno.unwrap_or(libc::EIO));
        Err(Error::Lost { pid: self.stopped.pid, address: start, length: part.length, source })
    }
}
