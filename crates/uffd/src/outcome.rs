// SPDX-License-Identifier: MIT OR Apache-2.0
//! How many bytes a fill did and why it stopped.

use std::io;

/// Result of one COPY, ZEROPAGE or POISON: the first `bytes` are done; `stop` is why the rest is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes done, a multiple of the page size. These pages are resident and their waiting threads are woken.
    pub bytes: u64,
    /// Why the kernel stopped at `bytes`; None when all was done.
    pub stop: Option<Stop>,
}

/// Why a fill stopped (`mm/userfaultfd.c: mfill_atomic`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// EEXIST: the next page is resident already. Its waiting threads are not woken: wake them.
    Present,
    /// EAGAIN: a fork, remap, unmap or remove is in progress. Read the events first, then try again.
    Changing,
    /// ENOENT: the next page is not in a registered mapping (any more).
    NotMapped,
    /// ESRCH: the address space has ended.
    Gone,
    /// EFAULT: the source memory could not be read.
    BadSource,
    /// Any other errno; ENOMEM is the likely one.
    Failed(i32),
}

impl Outcome {
    /// Makes an outcome. `done` is the struct's result field, `wanted` the requested length.
    pub(crate) fn new(result: io::Result<()>, done: i64, wanted: u64) -> Self {
        let Err(error) = result else { return Self { bytes: wanted, stop: None } };
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        // A negative count is an errno, never progress. With partial progress ioctl() fails with EAGAIN, and
        // the reason is lost (it may be EEXIST, ENOENT, ...). The next call on the rest returns it.
        let bytes = u64::try_from(done).unwrap_or(0).min(wanted);
        if bytes > 0 && errno == libc::EAGAIN {
            return Self { bytes, stop: None };
        }
        Self { bytes, stop: Some(Stop::from_errno(errno)) }
    }

    /// Returns true when all `wanted` bytes were done.
    #[must_use]
    pub fn complete(&self, wanted: u64) -> bool {
        self.bytes == wanted
    }
}

impl Stop {
    fn from_errno(errno: i32) -> Self {
        match errno {
            libc::EEXIST => Self::Present,
            libc::EAGAIN => Self::Changing,
            libc::ENOENT => Self::NotMapped,
            libc::ESRCH => Self::Gone,
            libc::EFAULT => Self::BadSource,
            other => Self::Failed(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(errno: i32, done: i64) -> Outcome {
        Outcome::new(Err(io::Error::from_raw_os_error(errno)), done, 8 * 4096)
    }

    #[test]
    fn nothing_copied_while_changing_is_not_progress() {
        // The kernel writes -EAGAIN into the count here; read as unsigned it would be 2^64-11 bytes.
        assert_eq!(
            failed(libc::EAGAIN, -i64::from(libc::EAGAIN)),
            Outcome { bytes: 0, stop: Some(Stop::Changing) }
        );
    }

    #[test]
    fn partial_progress_is_reported_without_a_reason() {
        assert_eq!(failed(libc::EAGAIN, 4096), Outcome { bytes: 4096, stop: None });
    }

    #[test]
    fn errnos_have_names() {
        assert_eq!(failed(libc::EEXIST, -17).stop, Some(Stop::Present));
        assert_eq!(failed(libc::ENOENT, -2).stop, Some(Stop::NotMapped));
        assert_eq!(failed(libc::ESRCH, -3).stop, Some(Stop::Gone));
        assert_eq!(failed(libc::EFAULT, -14).stop, Some(Stop::BadSource));
        assert_eq!(failed(libc::ENOMEM, -12).stop, Some(Stop::Failed(libc::ENOMEM)));
    }
}
