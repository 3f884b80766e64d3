// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocks calls on files.

use std::fmt;
use std::io;
use std::ops::BitOr;
use std::os::fd::BorrowedFd;

use crate::{Error, abi, program};

/// The most entries of the table. A restore needs one for each process. For each GPU of a process it needs
/// one, one for the render node, and one more if the GPU's id differs from the image. 120 processes with 16
/// GPUs each need 5,880. An attached program allocates memory for all: 705 KiB (`memlock` of the table, Linux
/// 6.12 and 7.2).
pub const MAX_BLOCKS: u32 = 8192;

/// An ioctl of some devices that fails with EAGAIN while its class is blocked on the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DenyRule {
    /// The devices, by `st_rdev`.
    pub(crate) devices: Vec<libc::dev_t>,
    /// The `_IOC_NR` of the ioctl.
    pub(crate) number: u8,
    /// The offset of 4 bytes in the argument that name the part of the file's object. None: the ioctl
    /// concerns part 0, and the argument is not read.
    pub(crate) part: Option<u8>,
    /// The ioctl's class, which ioctls may share.
    pub(crate) class: CallClass,
}

/// A set of classes of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallClass(pub(crate) u32);

impl CallClass {
    /// Returns one of 31 classes.
    ///
    /// # Panics
    /// `number` exceeds 30.
    #[must_use]
    pub const fn one(number: u8) -> Self {
        assert!(number < 31, "there are 31 classes");
        Self(1 << number)
    }
}

impl CallClass {
    /// Returns the union of two sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOr for CallClass {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.and(other)
    }
}

/// Blocks calls on files ([`crate::attach`]).
///
/// An entry refers to the file's `private_data` in the kernel's `struct file`, so it covers all open files
/// with the same value. For `/dev/kfd` that is the driver's record of a process: it covers each `/dev/kfd` of
/// the process, and no other process's. For a render node it is that open file alone.
///
/// **The caller keeps the file open until it has unblocked it.** The file holds the record; without it,
/// another process's record may get the same address, and its calls would be blocked. A driver's call that
/// replaces the record must be blocked too. So the caller also unblocks a file when its process has ended.
///
/// Requests are ioctls on the file itself, with a secret random number of 64 bits. Calls that began before
/// are not blocked, and the entries end with the [`crate::Attached`].
#[derive(Clone)]
pub struct BlockList {
    secret: u64,
}

impl BlockList {
    pub(crate) fn new(secret: u64) -> Self {
        Self { secret }
    }

    /// Blocks calls of exactly these classes that concern this part. A call without a part concerns part 0
    /// only: entries of other parts do not affect it, and part 0 does not affect calls with other parts.
    ///
    /// # Errors
    /// [`Error::Full`]; [`Error::NotAttached`] without a program.
    pub fn block(&self, file: BorrowedFd<'_>, part: u32, classes: CallClass) -> Result<(), Error> {
        let request = abi::ControlRequest { secret: self.secret, part, classes: classes.0 };
        match abi::control(file, program::CONTROL_IOCTL, &request) {
            program::CONTROL_ACK => Ok(()),
            program::FULL => Err(Error::Full),
            other => Err(Error::NotAttached(io::Error::from_raw_os_error(other))),
        }
    }

    /// Unblocks all calls that concern this part. It need not be blocked.
    ///
    /// # Errors
    /// [`Error::NotAttached`] without a program: then no call is blocked either.
    pub fn unblock(&self, file: BorrowedFd<'_>, part: u32) -> Result<(), Error> {
        self.block(file, part, CallClass::default())
    }
}

impl fmt::Debug for BlockList {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret must not appear in logs.
        to.debug_struct("BlockList").finish_non_exhaustive()
    }
}
