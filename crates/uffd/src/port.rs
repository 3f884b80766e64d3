// SPDX-License-Identifier: MIT OR Apache-2.0
//! One userfaultfd and its operations.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use crate::abi;
use crate::message::RawMessage;
use crate::outcome::{Outcome, Stop};

/// Fills pages of a registered address space. Real descriptors and simulations implement it.
///
/// [`Stop::NotMapped`] is final only if no thread reads the descriptor's messages meanwhile.
pub trait FillPort {
    /// Copies `src` (whole pages) to `dst` and wakes threads that wait there.
    fn copy(&self, dst: u64, src: &[u8]) -> Outcome;
    /// Maps the zero page over `len` bytes at `dst` and wakes threads that wait there.
    fn zero(&self, dst: u64, len: u64) -> Outcome;
    /// Makes later accesses to `len` missing bytes at `dst` raise SIGBUS, and wakes threads that wait there.
    fn poison(&self, dst: u64, len: u64) -> Outcome;
    /// Wakes threads that wait in the range.
    ///
    /// # Errors
    /// The kernel's errno; ESRCH when the address space has ended.
    fn wake(&self, start: u64, len: u64) -> io::Result<()>;
}

/// An owned userfaultfd.
///
/// Closing the last descriptor of a userfaultfd turns every page still missing into zeros
/// (`fs/userfaultfd.c: userfaultfd_release`), so the owner decides when it drops.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl Uffd {
    /// Takes a descriptor on which UFFDIO_API is done (CRIU's, or one from a fork event) and makes it
    /// non-blocking: a blocking one reports POLLERR instead of readiness.
    ///
    /// # Errors
    /// `fcntl` refused the descriptor.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: F_GETFL and F_SETFL take and return plain integers.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(fd))
    }

    /// Opens a userfaultfd for this process, kernel-mode faults included, and negotiates `features`.
    ///
    /// # Errors
    /// EPERM without root or `vm.unprivileged_userfaultfd=1`; EINVAL when a feature is missing.
    pub fn open(features: u64) -> io::Result<Self> {
        Self::negotiate(open_unnegotiated()?, features)
    }

    /// Takes a descriptor from [`open_unnegotiated`], of the memory of this process or another one, and
    /// negotiates `features`.
    ///
    /// # Errors
    /// EINVAL when a feature is missing, or when features were negotiated before.
    pub fn negotiate(fd: OwnedFd, features: u64) -> io::Result<Self> {
        abi::api(fd.as_fd(), &mut abi::Api { api: abi::UFFD_API, features, ioctls: 0 })?;
        Ok(Self(fd))
    }

    /// Registers `len` bytes at `start` for missing pages.
    ///
    /// # Errors
    /// EINVAL for a mapping that cannot be registered, EBUSY when another userfaultfd has it.
    pub fn register_missing(&self, start: u64, len: u64) -> io::Result<()> {
        let range = abi::Range { start, len };
        abi::register(self.as_fd(), &mut abi::Register { range, mode: abi::REGISTER_MODE_MISSING, ioctls: 0 })
    }

    /// Reads the waiting messages, as many as `slots` holds; returns 0 when none waits. The kernel fills
    /// slots in order, so zeroed slots show what was delivered, even if the reader dies.
    ///
    /// # Errors
    /// The kernel's errno other than EAGAIN.
    pub fn read(&self, slots: &mut [RawMessage]) -> io::Result<usize> {
        // SAFETY: the slots are exclusively ours, and any bytes make a valid RawMessage (integers only).
        let read = unsafe {
            libc::read(self.0.as_raw_fd(), slots.as_mut_ptr().cast(), std::mem::size_of_val(slots))
        };
        match usize::try_from(read) {
            Ok(bytes) => Ok(bytes / size_of::<RawMessage>()),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                error => Err(error),
            },
        }
    }

    /// Returns true while a fork, remap, unmap or remove of the target waits to be read or to take effect. A
    /// copy of zero bytes is refused with EINVAL, but only after this check (`fs/userfaultfd.c:
    /// userfaultfd_copy`).
    #[must_use]
    pub fn changing(&self) -> bool {
        let result = abi::copy(self.as_fd(), &mut abi::Copy::default());
        result.is_err_and(|error| error.raw_os_error() == Some(libc::EAGAIN))
    }

    /// Corrects ENOENT for memory that is being moved. The kernel finds the mapping before it checks again
    /// for a change (Linux 6.18, `mm/userfaultfd.c: mfill_atomic`). So a change that began in between gives
    /// ENOENT for moved memory. [`Uffd::changing`] shows the change until its event is read, and callers do
    /// not read events during a fill.
    fn settle(&self, outcome: Outcome) -> Outcome {
        if outcome.stop == Some(Stop::NotMapped) && self.changing() {
            return Outcome { stop: Some(Stop::Changing), ..outcome };
        }
        outcome
    }
}

/// Opens a non-blocking userfaultfd for this process's memory, kernel-mode faults included. It has no effect
/// before [`Uffd::negotiate`], which another process may call.
///
/// # Errors
/// EPERM without root or `vm.unprivileged_userfaultfd=1`.
pub fn open_unnegotiated() -> io::Result<OwnedFd> {
    // SAFETY: the syscall takes flags only and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    let fd = RawFd::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the features that were negotiated for a userfaultfd of this process's table of descriptors
/// (`fs/userfaultfd.c: userfaultfd_show_fdinfo`): 0 before that.
///
/// # Errors
/// `/proc` cannot be read, or the descriptor is another file.
pub fn negotiated_features(uffd: BorrowedFd<'_>) -> io::Result<u64> {
    let path = format!("/proc/self/fdinfo/{}", uffd.as_raw_fd());
    // `API:<tab>VERSION:FEATURES:IOCTLS`, all hexadecimal.
    let features = |text: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("API:"))?;
        u64::from_str_radix(line.split(':').nth(1)?, 16).ok()
    };
    let info = std::fs::read(&path)?;
    let text = String::from_utf8_lossy(&info);
    // The kernel's own bits (`UFFD_FEATURE_INITIALIZED`) are above the interface's bits.
    let features = features(&text).map(|features| features & !abi::FEATURE_INITIALIZED);
    features.ok_or_else(|| io::Error::other(format!("{path}: no userfaultfd: {text:?}")))
}

/// Whether the registered memory has ended with its last process. It is one system call, a request that
/// anonymous memory refuses (UFFDIO_CONTINUE), so that it changes nothing.
#[must_use]
pub fn address_space_ended(uffd: BorrowedFd<'_>) -> bool {
    let range = abi::Range { start: 0x1_0000, len: crate::PAGE_SIZE };
    let result = abi::continue_minor(uffd, &mut abi::Fill { range, mode: 0, done: 0 });
    result.is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
}

impl FillPort for Uffd {
    fn copy(&self, dst: u64, src: &[u8]) -> Outcome {
        let len = src.len() as u64;
        let mut arg = abi::Copy { dst, src: src.as_ptr() as u64, len, mode: 0, copy: 0 };
        let result = abi::copy(self.as_fd(), &mut arg);
        self.settle(Outcome::new(result, arg.copy, len))
    }

    fn zero(&self, dst: u64, len: u64) -> Outcome {
        let mut arg = abi::Fill { range: abi::Range { start: dst, len }, mode: 0, done: 0 };
        let result = abi::zeropage(self.as_fd(), &mut arg);
        self.settle(Outcome::new(result, arg.done, len))
    }

    fn poison(&self, dst: u64, len: u64) -> Outcome {
        let mut arg = abi::Fill { range: abi::Range { start: dst, len }, mode: 0, done: 0 };
        let result = abi::poison(self.as_fd(), &mut arg);
        self.settle(Outcome::new(result, arg.done, len))
    }

    fn wake(&self, start: u64, len: u64) -> io::Result<()> {
        abi::wake(self.as_fd(), &mut abi::Range { start, len })
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Uffd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl IntoRawFd for Uffd {
    fn into_raw_fd(self) -> RawFd {
        self.0.into_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_negotiated_features_are_those_that_were_requested() {
        let fd = open_unnegotiated().expect("needs root");
        assert_eq!(negotiated_features(fd.as_fd()).unwrap(), 0);
        let uffd = Uffd::negotiate(fd, abi::FEATURE_FORK | abi::FEATURE_REMAP).unwrap();
        assert_eq!(negotiated_features(uffd.as_fd()).unwrap(), abi::FEATURE_FORK | abi::FEATURE_REMAP);
        let other = std::fs::File::open("/dev/null").unwrap();
        assert!(negotiated_features(other.as_fd()).is_err());
    }

    /// The race itself lasts microseconds in the kernel, so the outcome is made up.
    #[test]
    fn memory_that_is_not_mapped_while_the_layout_changes_is_not_gone() {
        const LEN: u64 = 2 * crate::PAGE_SIZE;
        let uffd = Uffd::open(abi::FEATURES_CRIU & !abi::FEATURE_FORK).expect("needs root");
        // SAFETY: a new private mapping, never unmapped.
        let start = unsafe {
            let (access, kind) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(std::ptr::null_mut(), 2 * 4096, access, kind, -1, 0)
        };
        assert_ne!(start, libc::MAP_FAILED);
        let start = start as u64;
        uffd.register_missing(start, LEN).unwrap();
        let not_mapped = Outcome { bytes: 0, stop: Some(Stop::NotMapped) };
        assert_eq!(uffd.settle(not_mapped).stop, Some(Stop::NotMapped));
        std::thread::scope(|scope| {
            // SAFETY: drops pages of a mapping without Rust values; returns when the event was read.
            scope.spawn(move || unsafe { libc::madvise(start as *mut _, 2 * 4096, libc::MADV_DONTNEED) });
            while !uffd.changing() {
                std::thread::yield_now();
            }
            let settled = uffd.settle(not_mapped);
            let mut slots = [RawMessage::default()];
            assert_eq!(uffd.read(&mut slots).unwrap(), 1);
            assert_eq!(settled.stop, Some(Stop::Changing));
        });
    }
}
