// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that a GPU, a device or another process may write at any time. It is never borrowed. Volatile and
//! atomic accesses with bounds checks read and write it.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Bytes in a page.
pub const PAGE: u64 = 4096;

/// The words that [`Mapping::is_zero`] reads before it decides.
const WORDS: usize = 16;

/// A range of this process's addresses, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
    access: Access,
}

/// The CPU's access to a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// No access: the addresses are only reserved.
    None,
    /// Loads and stores.
    ReadWrite,
}

impl Access {
    fn protection(self) -> i32 {
        match self {
            Self::None => libc::PROT_NONE,
            Self::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

// SAFETY: a mapping belongs to the process, not to a thread, and all accesses are volatile or atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above: no reference to its bytes is ever made.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps private zeroed memory.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn anonymous(length: u64) -> io::Result<Self> {
        Self::map(0, length, Access::ReadWrite, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)
    }

    /// Maps private zeroed memory at a free address. A restored process has its memory at its old addresses.
    ///
    /// # Errors
    /// The kernel's errno; EEXIST if the addresses are in use.
    pub fn anonymous_at(address: u64, length: u64) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        Self::map(address, length, Access::ReadWrite, flags, None)
    }

    /// Reserves addresses for later device mappings.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn reserve(length: u64) -> io::Result<Self> {
        Self::map(
            0,
            length,
            Access::None,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            None,
        )
    }

    /// Maps `length` bytes of a device or file from `offset`, at any free address.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<Self> {
        Self::map(0, length, Access::ReadWrite, libc::MAP_SHARED, Some((fd, offset)))
    }

    /// Maps `length` bytes of a device or file from `offset` without access, to see whether the driver
    /// permits it.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn inaccessible(fd: BorrowedFd<'_>, offset: u64, length: u64) -> io::Result<Self> {
        Self::map(0, length, Access::None, libc::MAP_SHARED, Some((fd, offset)))
    }

    fn map(
        address: u64,
        length: u64,
        access: Access,
        flags: i32,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> io::Result<Self> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let length = usize::try_from(length).ok().filter(|length| *length > 0).ok_or_else(invalid)?;
        let (fd, offset) = file.map_or((-1, 0), |(fd, offset)| (fd.as_raw_fd(), offset));
        let wanted = std::ptr::with_exposed_provenance_mut(usize::try_from(address).map_err(|_| invalid())?);
        // SAFETY: without MAP_FIXED the kernel takes free addresses only.
        let start =
            unsafe { libc::mmap(wanted, length, access.protection(), flags, fd, offset.cast_signed()) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(invalid)?;
        Ok(Self { start, length, access })
    }

    /// Replaces all of this mapping by a device or file. As in ROCm's library, a forked child does not
    /// inherit it.
    ///
    /// # Errors
    /// The kernel's errno; the addresses may then be unmapped.
    pub fn replace(&mut self, fd: BorrowedFd<'_>, offset: u64, access: Access) -> io::Result<()> {
        // SAFETY: exactly the addresses that this mapping owns, and nothing refers to its bytes.
        let start = unsafe {
            libc::mmap(
                self.start.as_ptr().cast(),
                self.length,
                access.protection(),
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd.as_raw_fd(),
                offset.cast_signed(),
            )
        };
        if start == libc::MAP_FAILED {
            self.access = Access::None;
            return Err(io::Error::last_os_error());
        }
        self.access = access;
        self.advise(libc::MADV_DONTFORK)
    }

    /// Returns the first address, which is also the GPU's where the two are kept equal.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.length as u64
    }

    /// Returns false: a mapping has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the CPU's access.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Discards the pages: anonymous memory reads as zero afterwards.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn discard(&self) -> io::Result<()> {
        self.advise(libc::MADV_DONTNEED)
    }

    /// Populates all pages, writable, so that no later access waits for one.
    ///
    /// # Errors
    /// The kernel's errno: ENOMEM if memory is exhausted, EINVAL before Linux 5.14.
    pub fn populate(&self) -> io::Result<()> {
        self.advise(libc::MADV_POPULATE_WRITE)
    }

    /// Excludes the mapping from core dumps of this process, because it holds memory of others.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn keep_from_core_dumps(&self) -> io::Result<()> {
        self.advise(libc::MADV_DONTDUMP)
    }

    fn advise(&self, advice: i32) -> io::Result<()> {
        // SAFETY: the addresses are this mapping's, and nothing borrows their bytes.
        let result = unsafe { libc::madvise(self.start.as_ptr().cast(), self.length, advice) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Returns the address of `length` bytes at `at`.
    ///
    /// # Panics
    /// The bytes exceed the mapping, are misaligned, or the mapping has no access, which is a bug of the
    /// caller.
    fn at(&self, at: u64, length: usize, align: u64) -> *mut u8 {
        let end = at.checked_add(length as u64).filter(|end| *end <= self.len());
        assert!(end.is_some(), "{length} bytes at {at:#x} of a mapping of {:#x}", self.len());
        assert!(at.is_multiple_of(align), "{at:#x} is not aligned to {align}");
        assert!(self.access == Access::ReadWrite, "the mapping has no access");
        let at = usize::try_from(at).unwrap_or(self.length);
        // SAFETY: within the mapping, as just checked.
        unsafe { self.start.as_ptr().add(at) }
    }

    /// Copies bytes out of the mapping.
    ///
    /// # Panics
    /// The bytes exceed the mapping.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        let from = self.at(at, into.len(), 1);
        let words = if from.addr().is_multiple_of(8) { into.len() / 8 } else { 0 };
        for word in 0..words {
            // SAFETY: in bounds by `at`, aligned; volatile because others write here.
            let value = unsafe { from.cast::<u64>().add(word).read_volatile() };
            into[word * 8..word * 8 + 8].copy_from_slice(&value.to_ne_bytes());
        }
        for (byte, into) in into.iter_mut().enumerate().skip(words * 8) {
            // SAFETY: in bounds by `at`.
            *into = unsafe { from.add(byte).read_volatile() };
        }
    }

    /// Copies bytes into the mapping.
    ///
    /// # Panics
    /// The bytes exceed the mapping.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let to = self.at(at, bytes.len(), 1);
        let words = if to.addr().is_multiple_of(8) { bytes.len() / 8 } else { 0 };
        for (word, chunk) in bytes.chunks_exact(8).take(words).enumerate() {
            let value = u64::from_ne_bytes(chunk.try_into().unwrap_or_default());
            // SAFETY: in bounds by `at`, aligned; volatile because others read here.
            unsafe { to.cast::<u64>().add(word).write_volatile(value) };
        }
        for (byte, value) in bytes.iter().enumerate().skip(words * 8) {
            // SAFETY: in bounds by `at`.
            unsafe { to.add(byte).write_volatile(*value) };
        }
    }

    /// Returns the address of `length` bytes at `at`, for calls that take one (io_uring, `pread`). The caller
    /// keeps the mapping alive and makes no reference to it, because others may write there.
    ///
    /// # Panics
    /// The bytes exceed the mapping.
    #[must_use]
    pub fn pointer(&self, at: u64, length: usize) -> NonNull<u8> {
        NonNull::new(self.at(at, length, 1)).unwrap_or(self.start)
    }

    /// Returns whether `length` bytes at `at` are all zero, at the speed of memory.
    ///
    /// # Panics
    /// The bytes exceed the mapping.
    #[must_use]
    pub fn is_zero(&self, at: u64, length: usize) -> bool {
        let start = self.at(at, length, 1);
        let head = start.align_offset(8).min(length);
        let words = (length - head) / 8;
        // SAFETY: in bounds by `at`; volatile because others write here.
        let byte = |index: usize| unsafe { start.add(index).read_volatile() };
        // SAFETY: as above, and the head makes it aligned.
        let word = |index: usize| unsafe { start.add(head).cast::<u64>().add(index).read_volatile() };
        let blocks = words / WORDS;
        (0..head).all(|index| byte(index) == 0)
            && (0..blocks)
                .all(|block| (0..WORDS).fold(0, |all, index| all | word(block * WORDS + index)) == 0)
            && (blocks * WORDS..words).all(|index| word(index) == 0)
            && (head + words * 8..length).all(|index| byte(index) == 0)
    }

    /// Copies `length` bytes at `at` to another mapping. It writes past the CPU's caches, which would first
    /// read the overwritten bytes. It copies words where both are aligned alike, as device memory needs.
    ///
    /// # Panics
    /// The bytes exceed one of the mappings.
    pub fn copy(&self, at: u64, to: &Self, to_at: u64, length: usize) {
        let (from, to) = (self.at(at, length, 1), to.at(to_at, length, 1));
        let alike = from.addr() % 8 == to.addr() % 8;
        let head = if alike { from.align_offset(8).min(length) } else { length };
        let words = (length - head) / 8;
        // SAFETY: both in bounds by `at`; volatile because others read and write there.
        let byte = |index: usize| unsafe { to.add(index).write_volatile(from.add(index).read_volatile()) };
        (0..head).for_each(byte);
        for index in 0..words {
            // SAFETY: as above, and the heads make both aligned.
            unsafe {
                let value = from.add(head).cast::<u64>().add(index).read_volatile();
                write_past_caches(to.add(head).cast::<u64>().add(index), value);
            }
        }
        order_writes();
        (head + words * 8..length).for_each(byte);
    }

    /// Fills `words` 32-bit words at `at`.
    ///
    /// # Panics
    /// The words exceed the mapping, or are misaligned.
    pub fn fill32(&self, at: u64, words: usize, value: u32) {
        let to = self.at(at, words * 4, 4).cast::<u32>();
        for index in 0..words {
            // SAFETY: in bounds and aligned by `at`; volatile because others read here.
            unsafe { to.add(index).write_volatile(value) };
        }
    }

    /// Loads a 64-bit word with acquire ordering.
    ///
    /// # Panics
    /// The word exceeds the mapping, or is misaligned.
    #[must_use]
    pub fn load64(&self, at: u64) -> u64 {
        let word = self.at(at, 8, 8).cast();
        // SAFETY: in bounds and aligned; all accesses to it are atomic or volatile.
        unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Acquire)
    }

    /// Stores a 64-bit word with release ordering.
    ///
    /// # Panics
    /// The word exceeds the mapping, or is misaligned.
    pub fn store64(&self, at: u64, value: u64) {
        let word = self.at(at, 8, 8).cast();
        // SAFETY: as `load64`.
        unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Release);
    }

    /// Replaces `old` by `new` atomically, and returns whether the word was `old`.
    ///
    /// # Panics
    /// The word exceeds the mapping, or is misaligned.
    #[must_use]
    pub fn replace64(&self, at: u64, old: u64, new: u64) -> bool {
        let word = self.at(at, 8, 8).cast();
        // SAFETY: as `load64`.
        let word = unsafe { AtomicU64::from_ptr(word) };
        word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Loads a 32-bit word.
    ///
    /// # Panics
    /// The word exceeds the mapping, or is misaligned.
    #[must_use]
    pub fn load32(&self, at: u64) -> u32 {
        let word = self.at(at, 4, 4).cast();
        // SAFETY: as `load64`.
        unsafe { AtomicU32::from_ptr(word) }.load(Ordering::Acquire)
    }

    /// Stores a 32-bit word with release ordering.
    ///
    /// # Panics
    /// The word exceeds the mapping, or is misaligned.
    pub fn store32(&self, at: u64, value: u32) {
        let word = self.at(at, 4, 4).cast();
        // SAFETY: as `load64`.
        unsafe { AtomicU32::from_ptr(word) }.store(value, Ordering::Release);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the addresses are this mapping's, and nothing borrows their bytes.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Writes a word as `write_volatile` does, past the caches. [`order_writes`] must precede any other access to
/// it.
///
/// # Safety
/// As for `write_volatile`.
unsafe fn write_past_caches(to: *mut u64, value: u64) {
    // SAFETY: the caller guarantees it; every x86-64 processor has the instruction.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_stream_si64(to.cast(), value.cast_signed());
    }
    // SAFETY: the caller guarantees it.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe {
        to.write_volatile(value);
    }
}

/// Orders writes past the caches before all later writes.
fn order_writes() {
    // SAFETY: it only orders; every x86-64 processor has the instruction.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_words_access_the_same_memory_at_any_alignment() {
        let memory = Mapping::anonymous(PAGE).unwrap();
        let bytes: Vec<u8> = (1..=21).collect();
        memory.write(3, &bytes);
        let mut back = [0; 23];
        memory.read(2, &mut back);
        assert_eq!((back[0], &back[1..22], back[22]), (0, &bytes[..], 0));
        assert_eq!(memory.load64(8), u64::from_le_bytes([6, 7, 8, 9, 10, 11, 12, 13]));
        memory.store32(8, 0xdead_beef);
        assert_eq!(memory.load64(8), 0x0d0c_0b0a_dead_beef);
        assert!(!memory.replace64(8, 1, 2));
        assert!(memory.replace64(8, 0x0d0c_0b0a_dead_beef, 2));
        assert_eq!(memory.load64(8), 2);
        memory.discard().unwrap();
        assert_eq!(memory.load64(8), 0);
    }

    #[test]
    fn a_nonzero_byte_is_found_at_any_offset() {
        let memory = Mapping::anonymous(PAGE).unwrap();
        for (at, length) in [(0, 4096), (3, 1000), (5, 2), (8, 131), (7, 0)] {
            assert!(memory.is_zero(at, length), "{length} bytes at {at}");
            for byte in 0..length as u64 {
                memory.write(at + byte, &[1]);
                assert!(!memory.is_zero(at, length), "{length} bytes at {at}, byte {byte}");
                memory.write(at + byte, &[0]);
            }
        }
        memory.write(2, &[1]);
        memory.write(1003, &[1]);
        assert!(memory.is_zero(3, 1000), "adjacent bytes do not count");
    }

    #[test]
    fn bytes_are_copied_between_mappings_at_any_alignment() {
        let (from, to) = (Mapping::anonymous(PAGE).unwrap(), Mapping::anonymous(PAGE).unwrap());
        let bytes: Vec<u8> = (0..4096_u32).map(|byte| u8::try_from(byte % 251).unwrap() + 1).collect();
        from.write(0, &bytes);
        for (at, to_at, length) in [(0, 0, 4096), (3, 11, 100), (3, 4, 100), (8, 0, 7), (5, 13, 2), (0, 9, 0)]
        {
            to.fill32(0, 1024, 0);
            from.copy(at, &to, to_at, length);
            let mut right = vec![0; 4096];
            let (at, to_at) = (usize::try_from(at).unwrap(), usize::try_from(to_at).unwrap());
            right[to_at..to_at + length].copy_from_slice(&bytes[at..at + length]);
            let mut read = vec![0; 4096];
            to.read(0, &mut read);
            assert!(read == right, "{length} bytes from {at} to {to_at}");
        }
    }

    #[test]
    #[should_panic(expected = "8 bytes at 0xff9 of a mapping of 0x1000")]
    fn a_read_beyond_the_end_panics() {
        Mapping::anonymous(PAGE).unwrap().read(PAGE - 7, &mut [0; 8]);
    }

    #[test]
    #[should_panic(expected = "no access")]
    fn a_reservation_cannot_be_read() {
        let _ = Mapping::reserve(PAGE).unwrap().load64(0);
    }
}
