// SPDX-License-Identifier: MIT OR Apache-2.0
//! The presence map: which pages of a cache file have their bytes.
//!
//! It is a memory file with one bit for each page, sealed against shrinking and growing. A fetcher writes the
//! bytes of a page into the cache file first, and then sets its bit (release). A streamer that sees the bit
//! (acquire) therefore reads these bytes. Bits are never cleared.
//!
//! Pages, and not blocks, because answers of a page server have any number of pages. 1 GiB takes 32 KiB.
//!
//! The bytes of a page server have no manifest, and a disk may lose what was written to it: a write-back
//! error drops a page of the page cache, and the next read finds the bytes from before. So the map for such
//! bytes has a checksum of each page too, of the bytes that arrived. 1 GiB takes 2 MiB more.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::ftruncate;

use crate::units::PAGE;
use crate::verification::{block_checksum, checksum_of_zeros};

const WORD: usize = size_of::<u64>();
const BITS: u64 = u64::BITS as u64;

/// A presence map, for reading.
#[derive(Debug)]
pub struct PresenceMap {
    /// Word 0 is the state, then one bit for each page, then perhaps one checksum for each page.
    map: MmapRaw,
    pages: u64,
    has_checksums: bool,
}

/// A presence map, for the process that writes the cache file.
#[derive(Debug)]
pub struct PresenceWriter(PresenceMap);

/// Makes the memory file of a presence map for a cache file of `cache` bytes, of which no page has arrived.
///
/// # Errors
/// EMFILE, ENOMEM.
pub fn presence_file(cache: u64) -> io::Result<OwnedFd> {
    memory_file(length(cache))
}

/// [`presence_file`], with checksums of the pages.
///
/// # Errors
/// EMFILE, ENOMEM.
pub fn checked_presence_file(cache: u64) -> io::Result<OwnedFd> {
    memory_file(checked_length(cache))
}

fn memory_file(length: u64) -> io::Result<OwnedFd> {
    let memory = memfd_create(c"rewake-presence", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    // A process with a descriptor for reading could open the file again, for writing.
    fchmod(&memory, Mode::S_IRUSR | Mode::S_IWUSR)?;
    ftruncate(&memory, i64::try_from(length).map_err(io::Error::other)?)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(memory.as_fd(), FcntlArg::F_ADD_SEALS(seals))?;
    Ok(memory)
}

/// Returns the bytes of a presence map.
fn length(cache: u64) -> u64 {
    first_checksum(pages(cache)) * WORD as u64
}

/// Returns the bytes of a presence map with checksums.
fn checked_length(cache: u64) -> u64 {
    length(cache) + pages(cache) * WORD as u64
}

fn pages(cache: u64) -> u64 {
    cache.div_ceil(PAGE as u64)
}

/// Returns the word with the checksum of page 0.
fn first_checksum(pages: u64) -> u64 {
    1 + pages.div_ceil(BITS)
}

impl PresenceMap {
    /// Maps the presence map of a cache file of `cache` bytes.
    ///
    /// # Errors
    /// It has another length, or is not sealed: a process could cut it under this one.
    pub fn open(file: BorrowedFd<'_>, cache: u64) -> io::Result<Self> {
        let has_checksums = check(file, cache)?;
        let map = MmapOptions::new().map_raw_read_only(file.as_raw_fd())?;
        Ok(Self { map, pages: pages(cache), has_checksums })
    }

    /// Returns whether all of these bytes have arrived.
    #[must_use]
    pub fn has(&self, offset: u64, len: usize) -> bool {
        self.prefix(offset, len) == len
    }

    /// Returns how many of these bytes have arrived, up to the first that has not.
    #[must_use]
    pub fn prefix(&self, offset: u64, len: usize) -> usize {
        let first = offset / PAGE as u64;
        let end = offset.saturating_add(len as u64);
        let absent = (first..end.div_ceil(PAGE as u64)).find(|page| !self.has_page(*page));
        let bytes = absent.map(|page| (page * PAGE as u64).saturating_sub(offset));
        bytes.map_or(len, |bytes| usize::try_from(bytes).unwrap_or(len).min(len))
    }

    /// Returns whether a page has arrived. A page beyond the end never has.
    #[must_use]
    pub fn has_page(&self, page: u64) -> bool {
        page < self.pages && self.bits(page).load(Ordering::Acquire) & 1 << (page % BITS) != 0
    }

    /// Returns the checksum of a page that has arrived, as [`block_checksum`] makes it; none where the map
    /// has no checksums.
    #[must_use]
    pub fn checksum(&self, page: u64) -> Option<u64> {
        let is_known = self.has_checksums && self.has_page(page);
        // It was written before the page's bit.
        is_known.then(|| self.checksum_of(page).load(Ordering::Relaxed))
    }

    fn checksum_of(&self, page: u64) -> &AtomicU64 {
        self.word(usize::try_from(first_checksum(self.pages) + page).unwrap_or(usize::MAX - 1))
    }

    /// Returns the number of pages that have arrived.
    #[must_use]
    pub fn arrived(&self) -> u64 {
        (1..usize::try_from(first_checksum(self.pages)).unwrap_or(usize::MAX))
            .map(|word| u64::from(self.word(word).load(Ordering::Relaxed).count_ones()))
            .sum()
    }

    /// Returns whether the peer knows that nothing more is needed of it.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.word(0).load(Ordering::Acquire) != 0
    }

    /// Returns the word with the bit of a page.
    fn bits(&self, page: u64) -> &AtomicU64 {
        self.word(1 + usize::try_from(page / BITS).unwrap_or(usize::MAX - 1))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.map.len() / WORD, "word {index} of a presence map of {} bytes", self.map.len());
        // SAFETY: the mapping is aligned to pages, has the word, and is sealed against shrinking. All
        // processes access it by atomic operations only; a mapping for reading is only read.
        unsafe { &*self.map.as_ptr().cast::<AtomicU64>().add(index) }
    }
}

impl PresenceWriter {
    /// Maps the presence map of a cache file of `cache` bytes.
    ///
    /// # Errors
    /// As for [`PresenceMap::open`].
    pub fn open(file: BorrowedFd<'_>, cache: u64) -> io::Result<Self> {
        let has_checksums = check(file, cache)?;
        let map = MmapOptions::new().map_raw(file.as_raw_fd())?;
        Ok(Self(PresenceMap { map, pages: pages(cache), has_checksums }))
    }

    /// Returns the map for reading.
    #[must_use]
    pub fn map(&self) -> &PresenceMap {
        &self.0
    }

    /// Notes that pages have arrived: their bytes are in the cache file.
    ///
    /// # Panics
    /// They are beyond the end of the file.
    pub fn set(&self, first: u64, pages: u64) {
        let end = first + pages;
        assert!(end <= self.0.pages, "page {end} of a cache of {} pages", self.0.pages);
        let mut at = first;
        while at < end {
            let stop = end.min((at / BITS + 1) * BITS);
            let ones = u64::MAX >> (BITS - (stop - at));
            self.0.bits(at).fetch_or(ones << (at % BITS), Ordering::Release);
            at = stop;
        }
    }

    /// Notes that no bytes of pages arrive: they are zeros in the cache file.
    ///
    /// # Panics
    /// They are beyond the end of the file.
    pub fn no_bytes(&self, first: u64, pages: u64) {
        for page in (first..first + pages).filter(|_| self.0.has_checksums) {
            self.0.checksum_of(page).store(checksum_of_zeros(PAGE), Ordering::Relaxed);
        }
        self.set(first, pages);
    }

    /// Notes that the bytes of pages have arrived, and are in the cache file.
    ///
    /// # Panics
    /// They are beyond the end of the file.
    pub fn arrived(&self, first: u64, pages: u64, bytes: &[u8]) {
        for (page, bytes) in (first..first + pages).zip(bytes.chunks(PAGE)).filter(|_| self.0.has_checksums) {
            assert!(page < self.0.pages, "page {page} of a cache of {} pages", self.0.pages);
            self.0.checksum_of(page).store(block_checksum(bytes), Ordering::Relaxed);
        }
        self.set(first, pages);
    }

    /// Notes that the peer has received the last message.
    pub fn close(&self) {
        self.0.word(0).store(1, Ordering::Release);
    }
}

/// Returns whether the map has checksums.
fn check(file: BorrowedFd<'_>, cache: u64) -> io::Result<bool> {
    let len = nix::sys::stat::fstat(file)?.st_size.cast_unsigned();
    let seals = SealFlag::from_bits_truncate(fcntl(file, FcntlArg::F_GET_SEALS)?);
    let sealed = seals.contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW);
    if sealed && [length(cache), checked_length(cache)].contains(&len) {
        return Ok(len != length(cache));
    }
    let text =
        format!("a presence map of {len} bytes (sealed: {sealed}): expected {}, sealed", length(cache));
    Err(io::Error::new(io::ErrorKind::InvalidData, text))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const PAGES: u64 = 200;

    fn maps() -> (PresenceMap, PresenceWriter) {
        let file = presence_file(PAGES * PAGE as u64).unwrap();
        let cache = PAGES * PAGE as u64;
        (PresenceMap::open(file.as_fd(), cache).unwrap(), PresenceWriter::open(file.as_fd(), cache).unwrap())
    }

    #[test]
    fn a_reader_sees_the_pages_that_a_writer_has_set() {
        let (map, writer) = maps();
        for (first, pages) in [(0, 1), (60, 70), (199, 1)] {
            writer.set(first, pages);
        }
        let set: Vec<u64> = (0..PAGES + 10).filter(|page| map.has_page(*page)).collect();
        let expected: Vec<u64> = [0].into_iter().chain(60..130).chain([199]).collect();
        assert_eq!(set, expected);
        assert_eq!(map.arrived(), expected.len() as u64);
    }

    #[test]
    fn the_bytes_before_the_first_absent_page_have_arrived() {
        let (map, writer) = maps();
        writer.set(3, 2);
        let at = |offset: usize, len| map.prefix(offset as u64, len);
        assert_eq!(at(3 * PAGE, 4 * PAGE), 2 * PAGE);
        assert_eq!(at(3 * PAGE + 100, 4 * PAGE), 2 * PAGE - 100);
        assert_eq!(at(3 * PAGE + 100, 10), 10);
        assert_eq!([at(2 * PAGE, 2 * PAGE), at(5 * PAGE, PAGE)], [0, 0]);
        assert!(map.has(3 * PAGE as u64, 2 * PAGE) && !map.has(3 * PAGE as u64, 2 * PAGE + 1));
    }

    #[test]
    fn a_map_that_can_be_cut_or_has_another_length_is_refused() {
        let file = presence_file(PAGE as u64).unwrap();
        assert!(PresenceMap::open(file.as_fd(), 65 * PAGE as u64).is_err());
        let loose = memfd_create(c"loose", MFdFlags::MFD_CLOEXEC).unwrap();
        ftruncate(&loose, 16).unwrap();
        assert!(PresenceMap::open(loose.as_fd(), PAGE as u64).is_err());
        assert!(ftruncate(&file, 0).is_err());
    }

    #[test]
    fn a_descriptor_for_reading_does_not_permit_writing() {
        let file = presence_file(PAGE as u64).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let read_only = std::fs::File::open(path).unwrap();
        assert!(PresenceWriter::open(read_only.as_fd(), PAGE as u64).is_err());
        let map = PresenceMap::open(read_only.as_fd(), PAGE as u64).unwrap();
        PresenceWriter::open(file.as_fd(), PAGE as u64).unwrap().set(0, 1);
        assert!(map.has_page(0));
        // Nor does it to a process of another user that opens the file again.
        assert_eq!(read_only.metadata().unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_checked_map_has_the_checksums_of_the_bytes_that_arrived() {
        let cache = PAGES * PAGE as u64 - 100;
        let bytes: Vec<u8> = (0..=255).cycle().take(3 * PAGE - 100).collect();
        let sums = |file: OwnedFd| {
            PresenceWriter::open(file.as_fd(), cache).unwrap().arrived(PAGES - 3, 3, &bytes);
            let map = PresenceMap::open(file.as_fd(), cache).unwrap();
            assert_eq!(map.arrived(), 3, "checksums are no pages");
            (PAGES - 4..=PAGES).map(|page| map.checksum(page)).collect::<Vec<_>>()
        };
        let of = |page: &[u8]| Some(block_checksum(page));
        let arrived: Vec<_> = bytes.chunks(PAGE).map(of).collect();
        assert_eq!(sums(checked_presence_file(cache).unwrap()), [&[None][..], &arrived, &[None]].concat());
        assert_eq!(sums(presence_file(cache).unwrap()), [None; 5]);
        let file = checked_presence_file(cache).unwrap();
        PresenceWriter::open(file.as_fd(), cache).unwrap().no_bytes(7, 1);
        let map = PresenceMap::open(file.as_fd(), cache).unwrap();
        assert_eq!(map.checksum(7), of(&[0; PAGE]));
    }

    #[test]
    fn the_last_message_is_noted() {
        let (map, writer) = maps();
        assert!(!map.is_closed());
        writer.close();
        assert!(map.is_closed() && !map.has_page(0));
    }
}
