// SPDX-License-Identifier: MIT OR Apache-2.0
//! Confines the fetcher before it makes a connection.
//!
//! * It has no capabilities, and gets no new privileges.
//! * Landlock, where the kernel has it: it may access no path, and connect to the peer's ports only.
//! * seccomp: it may use sockets, memory, and the files that the streamer sent.
//! * Limits: the length of the files; no core file. Descriptors are not limited further: a streamer that
//!   shares a fetcher sends an eventfd for each of its readers.

use std::collections::BTreeMap;
use std::io;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, NetPort, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetError,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::plan::{FetchPlan, PagePeer};

/// System calls that a fetcher may make with any arguments.
const ALLOWED: &[libc::c_long] = &[
    // The peer and the streamer.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_connect,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_ppoll,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_close,
    // The files.
    libc::SYS_pwrite64,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_getrandom,
    // Time, and the end, also by a panic.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    // A wait that a freezer, SIGSTOP or a tracer has interrupted continues by this one.
    libc::SYS_restart_syscall,
    libc::SYS_writev,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// Confines this process, for good.
///
/// # Errors
/// The kernel refuses a limit or has no seccomp filters: then no connection is made.
pub(crate) fn confine(plan: &FetchPlan) -> io::Result<()> {
    // This user may have a lower limit already.
    let (_, most) = getrlimit(Resource::RLIMIT_FSIZE)?;
    setrlimit(Resource::RLIMIT_FSIZE, plan.len.min(most), plan.len.min(most))?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    let (_, descriptors) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, descriptors, descriptors)?;
    drop_capabilities()?;
    restrict(&plan.peer).map_err(|error| io::Error::other(format!("Landlock: {error}")))?;
    let failed = |error: &dyn std::fmt::Display| io::Error::other(format!("seccomp: {error}"));
    let filter = filter().map_err(|error| failed(&error))?;
    seccompiler::apply_filter(&filter).map_err(|error| failed(&error))
}

/// Gives up all capabilities (capabilities(7)).
fn drop_capabilities() -> io::Result<()> {
    /// `_LINUX_CAPABILITY_VERSION_3` of linux/capability.h.
    const VERSION: u32 = 0x2008_0522;
    let header: [u32; 2] = [VERSION, 0];
    let none = [0u32; 6];
    // SAFETY: capset reads a header of two words, and two sets of three words each.
    let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn restrict(peer: &PagePeer) -> Result<(), RulesetError> {
    let addresses = if let PagePeer::Tcp(addresses) = peer { addresses.as_slice() } else { &[] };
    let rules = addresses
        .iter()
        .map(|address| Ok::<_, RulesetError>(NetPort::new(address.port(), AccessNet::ConnectTcp)));
    // On an older kernel, what it does not know is not restricted.
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .handle_access(AccessNet::from_all(ABI::V5))?
        .create()?
        .add_rules(rules)?
        .restrict_self()
        .map(drop)
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().map(|number| (*number, Vec::new())).collect();
    let when = |index: u8, is: SeccompCmpOp, value: libc::c_int| {
        let value = u64::from(value.cast_unsigned());
        SeccompRule::new(vec![SeccompCondition::new(index, SeccompCmpArgLen::Dword, is, value)?])
    };
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let no_code = SeccompCmpOp::MaskedEq(u64::from(libc::PROT_EXEC.cast_unsigned()));
        rules.insert(call, vec![when(2, no_code, 0)?]);
    }
    let families = [libc::AF_INET, libc::AF_INET6, libc::AF_UNIX];
    let families = families.map(|family| when(0, SeccompCmpOp::Eq, family));
    rules.insert(libc::SYS_socket, families.into_iter().collect::<Result<_, _>>()?);
    let nonblocking = when(1, SeccompCmpOp::Eq, i32::try_from(libc::FIONBIO).unwrap_or(i32::MAX))?;
    rules.insert(libc::SYS_ioctl, vec![nonblocking]);
    // `abort` signals a thread of this process.
    rules.insert(libc::SYS_tgkill, vec![when(0, SeccompCmpOp::Eq, std::process::id().cast_signed())?]);
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;
    use crate::plan::FetchedMemory;

    /// Makes a system call in a confined child. Returns the signal that ended it; none if it exited.
    fn signal_of(call: impl Fn() -> i64) -> Option<Signal> {
        // SAFETY: the child makes system calls and allocates, which glibc permits after a fork.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let layout = rewake_page_protocol::HeaderLayout::Wide;
                let memory = FetchedMemory::Pages { layout, extents: Vec::new(), files: Vec::new() };
                let plan = FetchPlan { peer: PagePeer::Connected, tls: None, len: 0, memory };
                let code = if confine(&plan).is_ok() { 0 } else { 1 };
                call();
                // SAFETY: it ends this process.
                unsafe { libc::_exit(code) }
            }
            ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
                WaitStatus::Signaled(_, signal, _) => Some(signal),
                WaitStatus::Exited(_, 0) => None,
                other => panic!("{other:?}"),
            },
        }
    }

    #[test]
    fn a_call_that_no_fetcher_needs_ends_it() {
        let other = nix::unistd::getppid().as_raw();
        // SAFETY: no call has an effect on memory.
        let calls: [(&str, &dyn Fn() -> i64); 8] = unsafe {
            [
                ("open", &|| libc::open(c"/etc/passwd".as_ptr(), libc::O_RDONLY).into()),
                ("fork", &|| libc::syscall(libc::SYS_fork)),
                ("execve", &|| {
                    libc::execve(
                        c"/bin/true".as_ptr(),
                        [std::ptr::null()].as_ptr(),
                        [std::ptr::null()].as_ptr(),
                    )
                    .into()
                }),
                ("kill", &|| libc::kill(other, 0).into()),
                ("ptrace", &|| libc::ptrace(libc::PTRACE_TRACEME)),
                ("listen", &|| libc::listen(0, 1).into()),
                ("netlink", &|| libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, 0).into()),
                ("userfaultfd", &|| libc::syscall(libc::SYS_userfaultfd, 0)),
            ]
        };
        for (what, call) in calls {
            assert_eq!(signal_of(call), Some(Signal::SIGSYS), "{what}");
        }
        // SAFETY: integers only.
        assert_eq!(signal_of(|| unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) }.into()), None);
    }
}
