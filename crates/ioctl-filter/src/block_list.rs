// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which files' calls are kept away.

use std::fmt;
use std::io;
use std::ops::BitOr;
use std::os::fd::BorrowedFd;

use crate::{Error, abi, program};

/// How many marks there can be at once: of a restore, one for each process, and for each of its GPUs one and one of its render node, and one more where
/// it has another id than in the image. 120 processes with 16 GPUs each need 5,880. Memory for all is taken when a program is attached: 705 KiB (`memlock` of
/// the table, Linux 6.12 and 7.2).
pub const MARKS: u32 = 8192;

/// An ioctl of some devices that is answered with EAGAIN while a mark of its file has its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DenyRule {
    /// The devices, as `st_rdev` tells them.
    pub devices: Vec<libc::dev_t>,
    /// `_IOC_NR` of the ioctl.
    pub number: u8,
    /// Where the argument says, in 4 bytes, which part of what the file stands for it concerns. None: part 0, and nothing of the
    /// argument is looked at.
    pub part: Option<u8>,
    /// What a mark calls it, one kind. Ioctls may share one.
    pub kind: CallClass,
}

/// Kinds of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallClass(pub(crate) u32);

impl CallClass {
    /// One of 31.
    ///
    /// # Panics
    /// `number` is more than 30.
    #[must_use]
    pub const fn one(number: u8) -> Self {
        assert!(number < 31, "there are 31 kinds");
        Self(1 << number)
    }
}

impl CallClass {
    /// Those of both.
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

/// Marks files, so that some of their calls are kept away ([`crate::attach`]).
///
/// A mark is of what the file's driver has put into `private_data` of the kernel's `struct file`, so that it is of all open files that
/// have the same there. For `/dev/kfd` that is the driver's record of a process: each `/dev/kfd` that the process has opened, and no
/// other process's; for a render node's, that open file's own. **Whoever marks keeps the file open until it has opened the mark:** the file holds that record, and without it another
/// process's may come to be at its address, and have its calls kept away. (A driver may have
/// a call that puts another record there: it is to be kept away, too.) So the owner of a mark opens it when it sees the process end, too.
///
/// It is told by an ioctl of the file itself with a random number of 64 bits, which nobody else has. Calls that had begun before are
/// not kept away, nor do marks stay when the [`crate::Attached`] is gone.
#[derive(Clone)]
pub struct BlockList {
    secret: u64,
}

impl BlockList {
    pub(crate) fn new(secret: u64) -> Self {
        Self { secret }
    }

    /// From now on calls of these kinds, and of no others, that concern this part are kept away. A call for which no part is told is of part 0,
    /// and only that: the parts are not looked at for it, nor part 0 for the others.
    ///
    /// # Errors
    /// [`Error::Full`]; [`Error::NotMarked`] without a hold.
    pub fn shut(&self, file: BorrowedFd<'_>, part: u32, kinds: CallClass) -> Result<(), Error> {
        let request = abi::Request { secret: self.secret, part, kinds: kinds.0 };
        match abi::ask(file, program::CONTROL_IOCTL, &request) {
            program::CONTROL_ACK => Ok(()),
            program::FULL => Err(Error::Full),
            other => Err(Error::NotMarked(io::Error::from_raw_os_error(other))),
        }
    }

    /// No call that concerns this part is kept away any more. None need have been.
    ///
    /// # Errors
    /// [`Error::NotMarked`] without a hold: no call is kept away then either.
    pub fn open(&self, file: BorrowedFd<'_>, part: u32) -> Result<(), Error> {
        self.shut(file, part, CallClass::default())
    }
}

impl fmt::Debug for BlockList {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The number is nobody else's business.
        to.debug_struct("Marks").finish_non_exhaustive()
    }
}
