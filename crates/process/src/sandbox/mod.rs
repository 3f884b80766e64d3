// SPDX-License-Identifier: MIT OR Apache-2.0
//! What keeps a process that reads what others wrote: limits, a [user](leave_user) of its own,
//! [Landlock](allow_reading), and [system calls](SystemCalls) (seccomp).
//!
//! The system calls are the wall: a call that is not permitted ends the process. The user and Landlock are a
//! second one, for a filter with a gap. A kernel, or a container, may have less of these two.

mod landlock;
mod user;

use std::collections::BTreeMap;
use std::io;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

pub use self::landlock::{Readable, allow_reading};
pub use self::user::leave_user;

/// System calls that every such process may make with any arguments.
const BASIC: &[libc::c_long] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_getrandom,
    // What it has open.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_fstat,
    libc::SYS_close,
    // Time, and the end, also by a panic.
    libc::SYS_clock_gettime,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// System calls of a process that reads files, with any arguments.
const READING: &[libc::c_long] = &[
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_lseek,
    libc::SYS_fadvise64,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    // Whose symbolic links are followed depends on it.
    libc::SYS_geteuid,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
];

/// System calls of a process that starts threads. The arguments of `clone3` are in its memory, where no
/// filter looks: it may start processes, which are confined as it is and can execute no program.
const THREADS: &[libc::c_long] = &[
    libc::SYS_clone3,
    libc::SYS_clone,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
];

/// The system calls that a process may make.
#[derive(Debug)]
pub struct SystemCalls(BTreeMap<libc::c_long, Vec<SeccompRule>>);

/// What an argument of a call must be.
#[derive(Debug, Clone, Copy)]
pub struct Argument {
    index: u8,
    len: Width,
    /// The bits that count.
    mask: u64,
    value: u64,
}

/// How much of an argument counts.
#[derive(Debug, Clone, Copy)]
enum Width {
    Int,
    Pointer,
}

impl SystemCalls {
    /// Permits the calls that every such process needs, and `more` with any arguments. Memory may not become
    /// executable. Signals go to this process alone: `abort` sends one. A message has no option, such as the
    /// one that opens a connection.
    ///
    /// # Errors
    /// None that a caller could mend.
    pub fn new(more: &[libc::c_long]) -> io::Result<Self> {
        let mut calls = Self(BASIC.iter().chain(more).map(|call| (*call, Vec::new())).collect());
        for call in [libc::SYS_mmap, libc::SYS_mprotect] {
            calls.permit(call, &[&[has_none_of(2, libc::PROT_EXEC)]])?;
        }
        calls.permit(libc::SYS_tgkill, &[&[is(0, std::process::id().cast_signed())]])?;
        calls.permit(libc::SYS_sendmsg, &[&[is(2, libc::MSG_NOSIGNAL)]])?;
        Ok(calls)
    }

    /// [`SystemCalls::new`] for a process that opens files and reads them: it may write to none.
    ///
    /// # Errors
    /// None that a caller could mend.
    pub fn for_reading(more: &[libc::c_long]) -> io::Result<Self> {
        let mut calls = Self::new(&[READING, more].concat())?;
        let writes = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC;
        calls.permit(libc::SYS_openat, &[&[has_none_of(2, writes)]])?;
        let copies = [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_GETFL].map(|command| [is(1, command)]);
        calls.permit(libc::SYS_fcntl, &copies.each_ref().map(|command| command.as_slice()))?;
        Ok(calls)
    }

    /// Permits threads.
    #[must_use]
    pub fn with_threads(mut self) -> Self {
        self.0.extend(THREADS.iter().map(|call| (*call, Vec::new())));
        self
    }

    /// Permits a call whose arguments are all that one of these rules has.
    ///
    /// # Errors
    /// A call has no argument of that number.
    pub fn permit(&mut self, call: libc::c_long, rules: &[&[Argument]]) -> io::Result<()> {
        let rule = |arguments: &&[Argument]| {
            let conditions: Result<_, _> = arguments.iter().copied().map(Argument::condition).collect();
            conditions.and_then(SeccompRule::new)
        };
        let rules: Result<_, _> = rules.iter().map(rule).collect();
        self.0.insert(call, rules.map_err(failed)?);
        Ok(())
    }

    /// Confines this thread, and the threads that it starts, for good. None of them gets new privileges.
    ///
    /// # Errors
    /// The kernel has no seccomp filters.
    pub fn confine(self) -> io::Result<()> {
        let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(failed)?;
        let filter = SeccompFilter::new(self.0, SeccompAction::KillProcess, SeccompAction::Allow, arch);
        let filter = filter.and_then(BpfProgram::try_from).map_err(failed)?;
        seccompiler::apply_filter(&filter).map_err(|error| io::Error::other(format!("seccomp: {error}")))
    }
}

impl Argument {
    fn condition(self) -> Result<SeccompCondition, BackendError> {
        let len = match self.len {
            Width::Int => SeccompCmpArgLen::Dword,
            Width::Pointer => SeccompCmpArgLen::Qword,
        };
        SeccompCondition::new(self.index, len, SeccompCmpOp::MaskedEq(self.mask), self.value)
    }
}

/// Argument `index` of a call is `value`.
#[must_use]
pub fn is(index: u8, value: libc::c_int) -> Argument {
    Argument { index, len: Width::Int, mask: u32::MAX.into(), value: value.cast_unsigned().into() }
}

/// Argument `index` of a call has no bit of `mask`.
#[must_use]
pub fn has_none_of(index: u8, mask: libc::c_int) -> Argument {
    Argument { index, len: Width::Int, mask: mask.cast_unsigned().into(), value: 0 }
}

/// Argument `index` of a call is no address.
#[must_use]
pub fn is_null(index: u8) -> Argument {
    Argument { index, len: Width::Pointer, mask: u64::MAX, value: 0 }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn failed(error: BackendError) -> io::Error {
    io::Error::other(format!("seccomp: {error}"))
}

/// Sets a limit of this process, unless it has a lower one already.
///
/// # Errors
/// The kernel refuses the limit.
pub fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let set = getrlimit(resource).and_then(|(_, most)| setrlimit(resource, value.min(most), value.min(most)));
    set.map_err(|errno| io::Error::other(format!("{resource:?}: {errno}")))
}

#[cfg(test)]
#[allow(unsafe_code, reason = "the probes are system calls")]
mod tests;
