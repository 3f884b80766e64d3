// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments that are the number of an open descriptor. They are looked at while the command line is read,
//! when this program has opened nothing of its own: a number that is free then might be one of ours later.

use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use anyhow::{Context as _, bail};
use nix::fcntl::{FcntlArg, fcntl};

/// The standard descriptors stay open: others of the program's would get their numbers.
const STANDARD: std::ops::RangeInclusive<RawFd> = 0..=2;

/// A descriptor that an option names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GivenDescriptor {
    number: RawFd,
    is_open: bool,
}

impl GivenDescriptor {
    /// Reads a number.
    pub(super) fn of(given: &str) -> Result<Self, String> {
        let number =
            given.trim().parse().map_err(|_| "expected the number of an open descriptor".to_owned())?;
        // SAFETY: it is not used as a descriptor unless it is one, and for one call.
        let is_open =
            number >= 0 && fcntl(unsafe { BorrowedFd::borrow_raw(number) }, FcntlArg::F_GETFD).is_ok();
        Ok(Self { number, is_open })
    }

    /// Its number, or `None` if it is negative, by which CRIU means no descriptor.
    #[must_use]
    pub fn number(self) -> Option<RawFd> {
        (self.number >= 0).then_some(self.number)
    }

    /// Takes it from the process: to be called once for a number. A standard descriptor is copied.
    ///
    /// # Errors
    /// It is not open.
    pub fn take(self, option: &str) -> anyhow::Result<OwnedFd> {
        let number = self.number;
        if !self.is_open {
            bail!(
                "{option} {number}: this descriptor is not open: expected one that the caller has opened for \
                 this command, as a shell does with `{number}>FILE`"
            );
        }
        if STANDARD.contains(&number) {
            // SAFETY: it was open when the program started, and standard descriptors stay open.
            let standard = unsafe { BorrowedFd::borrow_raw(number) };
            return standard.try_clone_to_owned().with_context(|| format!("{option} {number}"));
        }
        // SAFETY: it was open before this program opened anything, so it is the caller's, who gave it to us
        // to use and to close; the commands refuse two options that name one descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd as _, IntoRawFd as _};

    use super::*;

    fn read(given: &str) -> GivenDescriptor {
        GivenDescriptor::of(given).unwrap()
    }

    #[test]
    fn a_negative_number_is_none() {
        for given in ["-1", "-2147483648", " -7"] {
            assert_eq!(read(given).number(), None, "{given}");
        }
    }

    #[test]
    fn an_open_descriptor_is_taken_and_another_one_refused() {
        let number = std::fs::File::open("/dev/null").unwrap().into_raw_fd();
        assert_eq!(read(&number.to_string()).take("--status-fd").unwrap().as_raw_fd(), number);
        let closed = read("999999");
        assert_eq!(closed.number(), Some(999_999));
        let refused = closed.take("--status-fd").unwrap_err().to_string();
        assert!(
            refused.starts_with("--status-fd 999999: this descriptor is not open: expected one"),
            "{refused}"
        );
    }

    #[test]
    fn a_standard_descriptor_is_copied() {
        let taken = read("2").take("--status-fd").unwrap();
        assert!(!STANDARD.contains(&taken.as_raw_fd()));
        drop(taken);
        assert!(read("2").is_open);
    }

    #[test]
    fn what_is_no_number_is_refused() {
        for given in ["", "x", "1x", "99999999999", "1.0", "-"] {
            assert!(GivenDescriptor::of(given).is_err(), "{given:?}");
        }
    }
}
