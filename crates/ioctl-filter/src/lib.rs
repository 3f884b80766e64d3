// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes calls that pass missing memory to KFD or a render node wait, and blocks calls on buffers that are
//! not resident.
//!
//! A driver that accesses a program's pages does not wait for a userfaultfd (`mm/hmm.c` faults without
//! FAULT_FLAG_ALLOW_RETRY). So an ioctl that names missing memory fails. [`attach`] runs a small sleepable
//! program at the kernel's `file_ioctl` hook (BPF LSM). Before such an ioctl begins, the program looks at
//! each mapping that the ioctl names. Where a userfaultfd watches one, it reads a byte of each page, which
//! waits as the caller's own access would. The ioctl is not changed, and the caller does not matter.
//!
//! Where no memory is missing, the same program makes an ioctl fail with EAGAIN while the file is blocked
//! ([`BlockList`]). libhsakmt's `kmtIoctl` and libdrm's `drmIoctl` repeat a call at once after EINTR or
//! EAGAIN. The driver does not see the call. A second program, at `file_mprotect`, does the same when a
//! caller adds access to an inaccessible mapping of a blocked file: that memory may be missing. (mmap(2) is
//! not blocked, because its hook does not get the offset.)
//!
//! This needs CAP_BPF and CAP_PERFMON (or root), and Linux 6.2 or newer with `CONFIG_BPF_LSM` and `bpf` among
//! its security modules (`/sys/kernel/security/lsm`). Without that word the kernel accepts the program and
//! never runs it, so [`attach`] checks that it runs. The kernel removes it when its last descriptor is
//! closed. [`check`] attaches nothing.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod abi;
mod amd;
mod block_list;
mod code;
mod deny_rules;
mod kernel;
mod offsets;
mod program;
mod protect;
mod range_walk;
mod types;
mod wait_rules;

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

pub use amd::{AttachError, attach, check};
use block_list::DenyRule;
pub use block_list::{BlockList, CallClass, MAX_BLOCKS};
pub use deny_rules::{ACCESS, CREATE_PROCESS, CROSS_COPY, EXPORT};
use program::ProgramRules;

/// An ioctl of some devices that passes a range of the caller's memory to the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WaitRule {
    /// The devices, by `st_rdev`.
    pub(crate) devices: Vec<libc::dev_t>,
    /// The `_IOC_NR` of the ioctl.
    pub(crate) number: u8,
    /// Bytes of its argument, at most [`MAX_ARGUMENT`].
    pub(crate) bytes: u8,
    /// The offset of the range's address in the argument, 8 bytes.
    pub(crate) address: u8,
    /// The offset of the range's length in bytes, 8 bytes.
    pub(crate) length: u8,
    /// The ioctls that pass memory. None: all.
    pub(crate) only: Option<ArgMatch>,
}

/// Matches ioctls whose argument has `wanted` under `mask` in 4 bytes at `at`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ArgMatch {
    /// The offset in the argument.
    pub(crate) at: u8,
    /// The bits to compare.
    pub(crate) mask: i32,
    /// The expected bits.
    pub(crate) wanted: i32,
}

/// The purposes of the programs, for errors.
const IOCTL: &str = "a program at file_ioctl";
const MPROTECT: &str = "a program at file_mprotect";

/// The most bytes of an argument.
pub(crate) const MAX_ARGUMENT: u8 = 64;

/// The programs could not be attached, or a file could not be blocked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel's types do not exist, or cannot be read.
    #[error("the kernel's types cannot be read: is it built with CONFIG_DEBUG_INFO_BTF?")]
    NoTypes(#[source] io::Error),
    /// The kernel's types are not valid.
    #[error("{path}: {0}", path = kernel::PATH)]
    Types(&'static str),
    /// A hook's function does not exist.
    #[error("the kernel has no function {0}: it needs CONFIG_BPF_LSM")]
    NoHook(&'static str),
    /// A field of a struct does not exist, in any configuration of this kernel.
    #[error("the kernel has no {field} in struct {of}, as Linux 6.2 to 7.2 have: is it a newer one?")]
    NoField {
        /// The field.
        field: &'static str,
        /// The struct.
        of: &'static str,
    },
    /// Before 6.2, the kernel skipped such a program for a second caller on a CPU while it slept for a first
    /// one (`prog->active`).
    #[error("Linux {0} runs such programs for one caller at a time: 6.2 or newer is needed")]
    TooOld(String),
    /// The program is attached, and the kernel does not run it.
    #[error("the kernel does not run programs at file_ioctl: add bpf to its list of security modules (lsm=)")]
    NotRun,
    /// The list of security modules cannot be read.
    #[error("lsm_list_modules(2) does not name the active security modules: Linux 6.8 is needed")]
    NoModules(#[source] io::Error),
    /// A call of bpf(2) failed.
    #[error(
        "the kernel refuses {what}: it needs CAP_BPF and CAP_PERFMON, and at most 38 such programs{said}"
    )]
    Refused {
        /// The purpose of the call.
        what: &'static str,
        /// The last lines of the verifier's log.
        said: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The table has [`MAX_BLOCKS`] entries.
    #[error("cannot block calls on more than {MAX_BLOCKS} files and parts")]
    Full,
    /// The [`Attached`] was dropped, or another security module refuses the ioctl.
    #[error("no program at file_ioctl answers")]
    NotAttached(#[source] io::Error),
}

/// The attached programs, which run until this and all copies of its descriptors are closed.
#[derive(Debug)]
pub struct Attached([OwnedFd; 2]);

/// The rules of the programs.
#[derive(Debug)]
struct Rules {
    /// Calls that wait, for every caller.
    wait: [WaitRule; 3],
    /// Calls that a [`BlockList`] blocks.
    deny: [DenyRule; 4],
    /// The class of an mprotect(2) that adds access to an inaccessible mapping of the file, in part 0.
    access: CallClass,
}

/// Programs in the kernel, which do not run before they are attached.
#[derive(Debug)]
struct Loaded {
    calls: OwnedFd,
    rights: OwnedFd,
    secret: u64,
}

impl Loaded {
    /// Makes the programs for this kernel, and has its verifier check them.
    fn new(rules: &Rules) -> Result<Self, Error> {
        let release = abi::release();
        if !is_new_enough(&release) {
            return Err(Error::TooOld(release));
        }
        let found = kernel::find(&std::fs::read(kernel::PATH).map_err(Error::NoTypes)?)?;
        let secret = abi::random().map_err(refused("random bytes"))?;
        // The programs hold the table.
        let table = abi::table(program::KEY_BYTES, MAX_BLOCKS).map_err(refused("a table for a program"))?;
        let plan = ProgramRules {
            wait_rules: &rules.wait,
            deny_rules: &rules.deny,
            offsets: found.offsets,
            secret,
            block_table: abi::number(&table),
        };
        let (code, places) = program::code(&plan);
        let types = abi::load_types(&types::btf()).map_err(refused("types of a program"))?;
        let functions = places.map(|at| abi::Function { at, type_id: types::FUNCTION });
        let load = |what, (loaded, said): (io::Result<OwnedFd>, String)| {
            loaded.map_err(|source| Error::Refused { what, said, source })
        };
        let calls = abi::load(&code, Some((&types, &functions)), found.ioctl_hook);
        let rights = protect::code(&found.offsets, plan.block_table, rules.access);
        let rights = abi::load(&rights, None, found.protect_hook);
        Ok(Self { calls: load(IOCTL, calls)?, rights: load(MPROTECT, rights)?, secret })
    }

    /// Attaches the programs until the [`Attached`] is dropped. The [`BlockList`] is empty at first.
    fn attach(&self) -> Result<(Attached, BlockList), Error> {
        // Links hold the programs.
        let calls = abi::attach(&self.calls).map_err(refused(IOCTL))?;
        let rights = abi::attach(&self.rights).map_err(refused(MPROTECT))?;
        let block_list = BlockList::new(self.secret);
        let null = std::fs::File::open("/dev/null").map_err(refused("/dev/null"))?;
        // This request only checks that the program runs. /dev/null has no entry.
        block_list.unblock(null.as_fd(), 0).map_err(|_| Error::NotRun)?;
        Ok((Attached([calls, rights]), block_list))
    }
}

/// Returns whether the release is 6.2 or newer. A release without a version counts as newer.
fn is_new_enough(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (6, 2),
        _ => true,
    }
}

impl Attached {
    /// Returns the descriptors, which keep the programs attached while they are open.
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
    fn releases_before_6_2_are_too_old() {
        let old = ["5.15.0-119-generic", "6.1.0-28-amd64", "6.1"];
        assert!(!old.into_iter().any(is_new_enough));
        assert!(["6.2.0", "6.12.107+deb13-amd64", "7.2.13", "next"].into_iter().all(is_new_enough));
    }
}
