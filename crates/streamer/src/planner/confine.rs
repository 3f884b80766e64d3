// SPDX-License-Identifier: MIT OR Apache-2.0
//! Confines the planner before it reads the first byte of an image (decision 16).
//!
//! * Limits ([`super`]): address space, CPU time, length of the plan; no core file.
//! * Landlock, where the kernel has it: it may read files below the image's directories, the files that symbolic
//!   links there lead to, and nothing else.
//! * seccomp: it may open files for reading, read, write to what it has open, and use memory.
//!
//! Both also forbid new privileges.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;

use landlock::{
    ABI, Access as _, AccessFs, CompatLevel, Compatible as _, PathBeneath, RestrictionStatus, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetError,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rewake_criu_images::ImageDir;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use super::{MEMORY, PLAN, TIME, failed};

/// System calls that a planner may make with any arguments.
///
/// It has no descriptor that they could harm: the socket, the memory files, and files of the image that are
/// open for reading.
const ALLOWED: &[libc::c_long] = &[
    // Files.
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_close,
    libc::SYS_flock,
    // The plan, the reports, and the last words.
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_sendmsg,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_getrandom,
    // The end, also by a panic.
    libc::SYS_clock_gettime,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_geteuid,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
];

/// Confines this process, for good.
///
/// # Errors
/// The kernel refuses a limit or has no seccomp filters: then no image is parsed.
pub(super) fn confine(directories: &[&ImageDir]) -> io::Result<()> {
    limit(Resource::RLIMIT_AS, MEMORY)?;
    limit(Resource::RLIMIT_CPU, TIME.as_secs())?;
    limit(Resource::RLIMIT_FSIZE, PLAN)?;
    limit(Resource::RLIMIT_CORE, 0)?;
    // A kernel without Landlock does not enforce it. The streamer's check of the pages files remains.
    let linked = directories.iter().map(|directory| directory.linked_files());
    let linked = linked.collect::<Result<Vec<_>, _>>().map_err(|error| failed("symbolic links", error))?;
    allow_reading(directories, linked.into_iter().flatten()).map_err(|error| failed("Landlock", error))?;
    let filter = filter().map_err(|error| failed("seccomp", error))?;
    seccompiler::apply_filter(&filter).map_err(|error| failed("seccomp", error))
}

/// Sets a limit, unless this process has a lower one already.
fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let set = getrlimit(resource).and_then(|(_, most)| setrlimit(resource, value.min(most), value.min(most)));
    set.map_err(|errno| failed(&format!("{resource:?}"), errno))
}

/// Restricts this thread to the files below these directories, and to these other files.
fn allow_reading(
    directories: &[&ImageDir],
    files: impl Iterator<Item = File>,
) -> Result<RestrictionStatus, RulesetError> {
    let below = directories.iter().map(|directory| {
        Ok::<_, RulesetError>(PathBeneath::new(directory, AccessFs::ReadFile | AccessFs::ReadDir))
    });
    let files = files.map(|file| Ok::<_, RulesetError>(PathBeneath::new(file, AccessFs::ReadFile)));
    // On an older kernel, what it does not know is not restricted.
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .create()?
        .add_rules(below)?
        .add_rules(files)?
        .restrict_self()
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().map(|number| (*number, Vec::new())).collect();
    // Argument `index` has no bit of `mask`.
    let none_of = |index: u8, mask: u64| {
        let is = SeccompCmpOp::MaskedEq(mask);
        SeccompRule::new(vec![SeccompCondition::new(index, SeccompCmpArgLen::Dword, is, 0)?])
    };
    let is = |index: u8, value: libc::c_int| {
        let value = u64::from(value.cast_unsigned());
        let equal = SeccompCmpOp::Eq;
        SeccompRule::new(vec![SeccompCondition::new(index, SeccompCmpArgLen::Dword, equal, value)?])
    };
    let bits = |flags: libc::c_int| u64::from(flags.cast_unsigned());
    let writing = bits(libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC);
    rules.insert(libc::SYS_openat, vec![none_of(2, writing)?]);
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![none_of(2, bits(libc::PROT_EXEC))?]);
    }
    let copies = [is(1, libc::F_DUPFD_CLOEXEC)?, is(1, libc::F_GETFD)?, is(1, libc::F_GETFL)?];
    rules.insert(libc::SYS_fcntl, copies.into());
    // `abort` signals a thread of this process.
    rules.insert(libc::SYS_tgkill, vec![is(0, std::process::id().cast_signed())?]);
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::thread;

    use landlock::RulesetStatus;
    use nix::sys::signal::Signal;
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};
    use rewake_skip::skip;

    use super::*;

    #[test]
    fn files_below_the_directories_can_be_read_and_no_others() {
        let [own, parent, store] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        for name in ["pages-1.img", "linked"] {
            [&own, &parent, &store].iter().for_each(|it| fs::write(it.path().join(name), "pages").unwrap());
        }
        symlink(store.path().join("linked"), own.path().join("pages-2.img")).unwrap();
        let read = |folder: &tempfile::TempDir, name| fs::read_to_string(folder.path().join(name));
        let open = [&own, &parent].map(|folder| ImageDir::open(folder.path()).unwrap());
        let linked: Vec<File> = open[0].linked_files().unwrap().collect();
        // Landlock restricts the thread that asks for it.
        let confined = || {
            let status = allow_reading(&open.each_ref(), linked.into_iter()).unwrap().ruleset;
            let linked = open[0].file("pages-2.img").map(|found| found.is_some());
            let pages = [&own, &parent, &store].map(|folder| read(folder, "pages-1.img"));
            (status, pages, linked, fs::write(own.path().join("new"), ""))
        };
        let (status, [of_own, of_parent, of_store], linked, written) =
            thread::scope(|scope| scope.spawn(confined).join()).unwrap();
        if status == RulesetStatus::NotEnforced {
            skip!("this kernel has no Landlock");
        }
        assert_eq!([of_own.unwrap(), of_parent.unwrap()], ["pages", "pages"]);
        assert!(linked.unwrap(), "the file that a link leads to");
        assert_eq!(of_store.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    /// Makes a system call in a child process with the filter. Returns the signal that ended it; none if it exited.
    fn signal_of(call: impl Fn() -> i64) -> Option<Signal> {
        // SAFETY: the child makes system calls and allocates, which glibc permits after a fork.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                // The filter permits signals to this process only, so it is made here.
                let filter = filter().unwrap_or_default();
                let _ = seccompiler::apply_filter(&filter);
                call();
                // SAFETY: it ends this process.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
                WaitStatus::Signaled(_, signal, _) => Some(signal),
                WaitStatus::Exited(_, 0) => None,
                other => panic!("{other:?}"),
            },
        }
    }

    #[test]
    fn a_call_that_no_planner_needs_ends_it() {
        let other = nix::unistd::getppid().as_raw();
        // SAFETY: no call has an effect on memory.
        let calls: [(&str, &dyn Fn() -> i64); 8] = unsafe {
            [
                ("socket", &|| libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0).into()),
                ("kill", &|| libc::kill(other, 0).into()),
                ("tgkill", &|| libc::syscall(libc::SYS_tgkill, other, other, 0)),
                ("fork", &|| libc::syscall(libc::SYS_fork)),
                ("unlink", &|| libc::unlink(c"/nowhere".as_ptr()).into()),
                ("open for writing", &|| libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY).into()),
                ("F_SETFL", &|| libc::fcntl(0, libc::F_SETFL, 0).into()),
                ("ptrace", &|| libc::ptrace(libc::PTRACE_TRACEME)),
            ]
        };
        for (what, call) in calls {
            assert_eq!(signal_of(call), Some(Signal::SIGSYS), "{what}");
        }
        let itself = || {
            // SAFETY: signal 0 has no effect.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::getpid(), 0) }
        };
        assert_eq!(signal_of(itself), None);
    }
}
