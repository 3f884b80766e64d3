// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that hand memory to a driver wait until it is there; calls that concern what is not ready are kept away.
//!
//! A driver that looks at a program's pages does not wait for a userfaultfd (`mm/hmm.c` faults without FAULT_FLAG_ALLOW_RETRY), so
//! that an ioctl which names memory that is still missing fails. A [`Attached`] is a small program at the kernel's `file_ioctl` hook
//! (BPF LSM, sleepable): before such an ioctl begins, it reads a byte of each page that the ioctl names, and each of these reads
//! waits as the program's own would. The ioctl is not changed, and who makes it does not matter.
//!
//! Where there is no memory to wait for, the same program answers an ioctl with EAGAIN, for as long as the file is marked ([`BlockList`]):
//! libhsakmt's `kmtIoctl` and libdrm's `drmIoctl` make a call again that gave EINTR or EAGAIN, without a pause. The driver does not
//! hear of it. A second program, at `file_mprotect`, answers so whoever gives access to a mapping of a marked file that has none: the memory behind
//! it may not be there. (mmap(2) is let be: its hook is not told the offset.)
//!
//! It needs CAP_BPF and CAP_PERFMON (or root), and Linux 6.2 or newer with `CONFIG_BPF_LSM` and `bpf` among its security modules
//! (`/sys/kernel/security/lsm`): without that word the kernel takes the program and never runs it, so it is asked whether it runs.
//! The kernel takes it away when its last descriptor is closed.

mod abi;
mod block_list;
mod code;
mod kernel;
mod program;
mod protect;
mod types;

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

pub use block_list::{BlockList, CallClass, DenyRule, MARKS};
use program::Plan;

/// An ioctl of some devices that hands a range of the caller's memory over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitRule {
    /// The devices, as `st_rdev` tells them.
    pub devices: Vec<libc::dev_t>,
    /// `_IOC_NR` of the ioctl.
    pub number: u8,
    /// Bytes of its argument, [`MAX_ARGUMENT`] at most.
    pub bytes: u8,
    /// Where the argument has the range's address, 8 bytes.
    pub address: u8,
    /// Where it has the range's length in bytes, 8 bytes.
    pub length: u8,
    /// Which of these ioctls hand memory over; none: all.
    pub only: Option<ArgMatch>,
}

/// Ioctls whose argument has `wanted` under `mask`, in 4 bytes at `at`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArgMatch {
    /// Bytes into the argument.
    pub at: u8,
    /// The bits that matter.
    pub mask: i32,
    /// What they are.
    pub wanted: i32,
}

/// Bytes that an argument may have.
pub const MAX_ARGUMENT: u8 = 64;

/// Why calls are not held.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There are none, or they cannot be read.
    #[error("the kernel does not tell its types: is it built with CONFIG_DEBUG_INFO_BTF?")]
    NoTypes(#[source] io::Error),
    /// They are not as they should be.
    #[error("{path}: {0}", path = kernel::PATH)]
    Types(&'static str),
    /// A hook's function.
    #[error("the kernel has no function {0}: it needs CONFIG_BPF_LSM")]
    NoHook(&'static str),
    /// A field of a struct: no configuration brings it.
    #[error("the kernel has no {field} in struct {of}, as Linux 6.2 to 7.2 have: is it a newer one?")]
    NoField {
        /// Its name.
        field: &'static str,
        /// The struct's.
        of: &'static str,
    },
    /// Until 6.2 such a program was left out for a second caller on a processor while a first one slept in it (`prog->active`).
    #[error("Linux {0} runs such programs for one caller at a time: 6.2 or newer is needed")]
    TooOld(String),
    /// It was attached, and is not run.
    #[error("the kernel does not run programs at file_ioctl: add bpf to its list of security modules (lsm=)")]
    NotRun,
    /// A call of bpf(2).
    #[error(
        "the kernel refuses {what}: it needs CAP_BPF and CAP_PERFMON, and at most 38 such programs{said}"
    )]
    Refused {
        /// What it was asked for.
        what: &'static str,
        /// What its verifier said last.
        said: String,
        /// Its errno.
        #[source]
        source: io::Error,
    },
    /// [`MARKS`] are there.
    #[error("calls of more than {MARKS} files and parts cannot be kept away at once")]
    Full,
    /// The [`Attached`] is gone, or another security module does not let the file be asked.
    #[error("no program at file_ioctl keeps calls away")]
    NotMarked(#[source] io::Error),
}

/// Calls are held as long as this, or copies of its descriptors, are open.
#[derive(Debug)]
pub struct Attached([OwnedFd; 2]);

/// From now on and for as long as the [`Attached`] is there, the first calls wait, whoever makes them, and the others are kept away by
/// [`BlockList`], of which there are none yet; `access` is what a mark calls mprotect(2) that gives access to a mapping of the file that has none, of part 0.
///
/// # Errors
/// The kernel cannot, or does not allow it.
///
/// # Panics
/// The fields of a call that waits lie outside its argument.
pub fn attach(
    waits: &[WaitRule],
    again: &[DenyRule],
    access: CallClass,
) -> Result<(Attached, BlockList), Error> {
    let release = abi::release();
    if !is_new_enough(&release) {
        return Err(Error::TooOld(release));
    }
    let kernel = std::fs::read(kernel::PATH).map_err(Error::NoTypes)?;
    let found = kernel::find(&kernel)?;
    let secret = abi::random().map_err(refused("random bytes"))?;
    let table = abi::table(program::KEY_BYTES, MARKS).map_err(refused("a table for a program"))?;
    let plan = Plan { waits, again, offsets: found.offsets, secret, marks: abi::number(&table) };
    // Programs keep the table, and links the programs.
    let calls = attached("a program at file_ioctl", load(&plan, found.ioctl_hook)?)?;
    let code = protect::code(&found.offsets, plan.marks, access);
    let rights = attached("a program at file_mprotect", abi::load(&code, None, found.protect_hook))?;
    let marks = BlockList::new(secret);
    let null = std::fs::File::open("/dev/null").map_err(refused("/dev/null"))?;
    // It has nothing of its own, and is marked by nobody.
    marks.open(null.as_fd(), 0).map_err(|_| Error::NotRun)?;
    Ok((Attached([calls, rights]), marks))
}

/// Gives the program of calls to the kernel.
fn load(plan: &Plan<'_>, hook: u32) -> Result<(io::Result<OwnedFd>, String), Error> {
    let (code, [round, touch]) = program::code(plan);
    let types = abi::load_types(&types::TYPES).map_err(refused("types of a program"))?;
    let functions = [
        abi::Function { at: 0, type_id: types::HOLD },
        abi::Function { at: round, type_id: types::ROUND },
        abi::Function { at: touch, type_id: types::TOUCH },
    ];
    Ok(abi::load(&code, Some((&types, &functions)), hook))
}

/// Has a program run; `said` is the verifier's.
fn attached(what: &'static str, (loaded, said): (io::Result<OwnedFd>, String)) -> Result<OwnedFd, Error> {
    let program = loaded.map_err(|source| Error::Refused { what, said, source })?;
    abi::attach(&program).map_err(refused(what))
}

/// Whether it is Linux 6.2 or newer; what is no version is taken for one.
fn is_new_enough(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (6, 2),
        _ => true,
    }
}

impl Attached {
    /// Calls are held as long as these are open.
    #[must_use]
    pub fn into_descriptors(self) -> [OwnedFd; 2] {
        self.0
    }
}

fn refused(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Refused { what, said: String::new(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_apart_by_their_release() {
        let old = ["5.15.0-119-generic", "6.1.0-28-amd64", "6.1"];
        assert!(!old.into_iter().any(is_new_enough));
        assert!(["6.2.0", "6.12.107+deb13-amd64", "7.2.13", "next"].into_iter().all(is_new_enough));
    }
}
