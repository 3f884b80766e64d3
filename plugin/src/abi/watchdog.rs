// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CRIU watchdog: a process that waits for CRIU's death and then resumes queues or kills tasks. It is a
//! fork that executes no program. CRIU's memory is in no known state in it, so it makes plain system calls
//! only.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::fcntl::{FcntlArg, fcntl};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::abi::call::{self, Argument as _};
use rewake_amdgpu_uapi::abi::{KFD_CRIU_OP_UNPAUSE, kfd_ioctl_criu_args};
use rewake_process::pidfd::{pidfd_open, pidfd_signal};

/// Attempts to trace a task that another process still traces, and to resume queues. With the interval: five
/// seconds.
const ATTEMPTS: u32 = 5000;
const RETRY_INTERVAL: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// Descriptors of the watchdog: CRIU's pidfd, the log, and then the descriptors of its action.
const CRIU_FD: i32 = 0;
const LOG_FD: i32 = 1;
const FIRST_FD: i32 = 2;
/// Checks of whether a task has stopped: a tenth of a second. A task that sleeps in the kernel for longer
/// does not fork.
const STOP_CHECKS: u32 = 100;
/// Most tasks of one restored tree.
const MAX_TASKS: usize = 1 << 16;
const RESUMED: &[u8] =
    b"Warn  (amdgpu_plugin): CRIU ended during the dump: the queues of a process are resumed\n";
const STILL_EVICTED: &[u8] =
    b"Error (amdgpu_plugin): CRIU ended during the dump, and the queues of a process could not be resumed: \
      kill it\n";
const KILLED: &[u8] =
    b"Warn  (amdgpu_plugin): CRIU ended before all GPU state was restored: the restored tasks are killed\n";

/// What the watchdog does when CRIU has died.
#[derive(Debug)]
pub(crate) enum OnCriuDeath<'a> {
    /// Resumes the queues of the process that opened this `/dev/kfd`: one of these tasks.
    ResumeQueues(BorrowedFd<'a>, &'a [i32]),
    /// Kills these tasks, which CRIU has not reaped, with all their descendants.
    KillTrees(&'a [(i32, OwnedFd)]),
}

/// Forks a process that runs `action` when this process has died, and reports it to `log` or to standard
/// error.
///
/// Its end sends no signal, and only a wait with `__WALL` reaps it.
pub(crate) fn fork(action: &OnCriuDeath<'_>, log: Option<BorrowedFd<'_>>) -> io::Result<Pid> {
    let own: Vec<BorrowedFd<'_>> = match action {
        OnCriuDeath::ResumeQueues(kfd, _) => vec![*kfd],
        OnCriuDeath::KillTrees(roots) => roots.iter().map(|(_, task)| task.as_fd()).collect(),
    };
    // Allocated here: the fork must not allocate.
    let found = Vec::with_capacity(if let OnCriuDeath::KillTrees(_) = action { MAX_TASKS } else { 0 });
    // Copies with higher numbers than those that the watchdog's descriptors get.
    let first = FIRST_FD + i32::try_from(own.len()).map_err(io::Error::other)?;
    let copy = |fd: BorrowedFd<'_>| duplicate_above(fd, first);
    let end = copy(pidfd_open(std::process::id().cast_signed())?.as_fd())?;
    let log = log.map(copy).transpose()?;
    let own = own.into_iter().map(copy).collect::<io::Result<Vec<OwnedFd>>>()?;
    let mut all = std::mem::MaybeUninit::uninit();
    let mut before = std::mem::MaybeUninit::uninit();
    // SAFETY: the first call fills `all`, the second reads it and fills `before`.
    let blocked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
    };
    if blocked != 0 {
        return Err(io::Error::last_os_error());
    }
    let forked = fork_in_own_pid_namespace(|| {
        // SAFETY: a fork: no flags, no stack, and no signal to the parent at its end. The child only executes
        // `run`.
        let pid = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
        if pid == 0 {
            let log = log.as_ref().map_or(libc::STDERR_FILENO, |log| log.as_raw_fd());
            run(action, end.as_raw_fd(), log, &own, found);
        }
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Pid::from_raw(i32::try_from(pid).unwrap_or(i32::MAX)))
    });
    // SAFETY: `before` was filled above.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    forked
}

/// Forks in this thread's own PID namespace.
///
/// CRIU may have set another one for its children (an external PID namespace). There the pids that the
/// watchdog knows belong to no process or to another one.
fn fork_in_own_pid_namespace(fork: impl FnOnce() -> io::Result<Pid>) -> io::Result<Pid> {
    let (own, children) = ("/proc/thread-self/ns/pid", "/proc/thread-self/ns/pid_for_children");
    // A namespace that was just unshared and has no process cannot be read.
    let is_moved =
        std::fs::read_link(children).is_ok_and(|there| std::fs::read_link(own).ok() != Some(there));
    if !is_moved {
        return fork();
    }
    let other = File::open(children)?;
    setns(File::open(own)?, CloneFlags::CLONE_NEWPID)?;
    let forked = fork();
    kill_unless_restored(forked, setns(other, CloneFlags::CLONE_NEWPID).map_err(io::Error::from))
}

/// Returns the watchdog if the PID namespace of CRIU's children was restored. Otherwise kills it: the caller
/// gets an error and not its pid.
fn kill_unless_restored(forked: io::Result<Pid>, back: io::Result<()>) -> io::Result<Pid> {
    if let (Ok(watchdog), Err(_)) = (&forked, &back) {
        // A child that was not reaped: neither can fail.
        let _ = kill(*watchdog, Signal::SIGKILL);
        let _ = waitpid(*watchdog, Some(WaitPidFlag::__WALL));
    }
    back.and(forked)
}

fn duplicate_above(fd: BorrowedFd<'_>, first: i32) -> io::Result<OwnedFd> {
    let copy = fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(first))?;
    // SAFETY: the kernel has just opened it for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Runs the watchdog: arranges its descriptors, waits for CRIU's death, and acts.
fn run(action: &OnCriuDeath<'_>, end: i32, log: i32, own: &[OwnedFd], found: Vec<i32>) -> ! {
    let placed = |fd: i32, number: i32| {
        // SAFETY: numbers only. What is open at that number is a copy of CRIU's descriptor that this process
        // does not use.
        unsafe { libc::dup2(fd, number) == number }
    };
    // The log first: standard error may have a number that another descriptor gets.
    let mut ready = placed(log, LOG_FD) && placed(end, CRIU_FD);
    let mut next = FIRST_FD;
    for fd in own {
        ready &= placed(fd.as_raw_fd(), next);
        next += 1;
    }
    // SAFETY: numbers, and a name that ends with a zero. All other descriptors are closed: CRIU's parasite in
    // a task ends when the last copy of its socket is closed.
    ready &= unsafe {
        libc::prctl(libc::PR_SET_NAME, c"rewake-watch".as_ptr());
        libc::syscall(libc::SYS_close_range, next.unsigned_abs(), libc::c_uint::MAX, 0) == 0
    };
    if ready
        && wait_for_criu_death()
        && let Some(message) = act(action, found)
    {
        // SAFETY: the bytes are static. A failure cannot be reported anywhere.
        unsafe { libc::write(LOG_FD, message.as_ptr().cast(), message.len()) };
    }
    // SAFETY: ends the process at once, without running exit handlers that the fork inherited.
    unsafe { libc::_exit(0) }
}

/// Runs the action. Returns the line for the log, or `None` if there was nothing to do.
fn act(action: &OnCriuDeath<'_>, mut found: Vec<i32>) -> Option<&'static [u8]> {
    match action {
        OnCriuDeath::ResumeQueues(_, tasks) => {
            Some(if resume_queues(tasks)? { RESUMED } else { STILL_EVICTED })
        }
        OnCriuDeath::KillTrees(roots) => {
            for (fd, (root, _)) in (FIRST_FD..).zip(*roots) {
                // A task that has ended has no descendants here.
                if pidfd_signal(fd, libc::SIGSTOP).is_ok() {
                    found.push(*root);
                }
            }
            let any = !found.is_empty();
            kill_with_descendants(&mut found);
            any.then_some(KILLED)
        }
    }
}

/// Kills stopped tasks and their descendants. A task is stopped before its children are read, so it forks no
/// more.
///
/// The pids stay theirs, except if another process kills and reaps one of them in these microseconds.
fn kill_with_descendants(found: &mut Vec<i32>) {
    let mut next = 0;
    while let Some(task) = found.get(next).copied() {
        let before = found.len();
        wait_until_stopped(task);
        add_children(task, found);
        for child in &found[before..] {
            // SAFETY: numbers only.
            unsafe { libc::kill(*child, libc::SIGSTOP) };
        }
        next += 1;
    }
    for task in found {
        // SAFETY: numbers only.
        unsafe { libc::kill(*task, libc::SIGKILL) };
    }
}

/// Opens a file for reading, by its path with a zero at the end; returns -1 if that fails.
fn open(path: std::fmt::Arguments<'_>) -> i32 {
    let mut bytes = [0_u8; 64];
    if (&mut bytes[..63]).write_fmt(path).is_err() {
        return -1;
    }
    // SAFETY: the last byte is always zero.
    unsafe { libc::open(bytes.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC) }
}

/// Waits until a task that was sent SIGSTOP has stopped: until then it may finish a fork.
fn wait_until_stopped(task: i32) {
    for _ in 0..STOP_CHECKS {
        let file = open(format_args!("/proc/{task}/stat\0"));
        let mut bytes = [0_u8; 128];
        // SAFETY: the buffer is live and has this length.
        let read = unsafe { libc::read(file, bytes.as_mut_ptr().cast(), bytes.len()) };
        // SAFETY: opened above. If that failed, this call fails, too, without harm.
        unsafe { libc::close(file) };
        let read = &bytes[..usize::try_from(read).unwrap_or(0)];
        // `pid (name) state`: a name may contain any character.
        let name = read.iter().rposition(|byte| *byte == b')');
        match name.and_then(|end| read.get(end + 2)) {
            Some(b'R' | b'S' | b'D') => wait_briefly(),
            _ => return,
        }
    }
}

/// Adds the children of a task's first thread: only that one forks while a tree is restored. A task that has
/// ended has none.
fn add_children(task: i32, found: &mut Vec<i32>) {
    let file = open(format_args!("/proc/{task}/task/{task}/children\0"));
    let (mut bytes, mut number) = ([0_u8; 4096], 0_i32);
    loop {
        // SAFETY: the buffer is live and has this length.
        let read = unsafe { libc::read(file, bytes.as_mut_ptr().cast(), bytes.len()) };
        let Some(bytes) = usize::try_from(read).ok().filter(|read| *read > 0).map(|read| &bytes[..read])
        else {
            break;
        };
        for byte in bytes {
            if byte.is_ascii_digit() {
                number = number.saturating_mul(10).saturating_add(i32::from(byte - b'0'));
            } else if number != 0 && found.len() < found.capacity() {
                found.push(std::mem::take(&mut number));
            }
        }
    }
    // SAFETY: opened above. If that failed, this call fails, too, without harm.
    unsafe { libc::close(file) };
}

/// Waits for CRIU's death; returns false if the wait fails.
fn wait_for_criu_death() -> bool {
    let mut end = libc::pollfd { fd: CRIU_FD, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live entry. No signal interrupts: all are blocked.
    unsafe { libc::poll(&raw mut end, 1, -1) == 1 && end.revents & libc::POLLIN != 0 }
}

/// Traces the task that opened the `/dev/kfd`, which may be running, and resumes its queues. The trace ends
/// with this process. Returns `None` if no such task exists any more.
fn resume_queues(tasks: &[i32]) -> Option<bool> {
    let mut any = None;
    for task in tasks {
        match seize(*task) {
            Ok(()) => {}
            Err(libc::ESRCH) => continue,
            Err(_) => {
                any = Some(false);
                continue;
            }
        }
        any = Some(false);
        for _ in 0..ATTEMPTS {
            match resume_once() {
                // No queue is evicted: CRIU died before the eviction, or after it had resumed them.
                Ok(()) | Err(libc::EINVAL) => return Some(true),
                // Another task opened the file.
                Err(libc::EBADF) => break,
                Err(_) => wait_briefly(),
            }
        }
    }
    any
}

fn resume_once() -> Result<(), i32> {
    // SAFETY: open until this process ends.
    let kfd = unsafe { BorrowedFd::borrow_raw(FIRST_FD) };
    let mut argument = kfd_ioctl_criu_args { op: KFD_CRIU_OP_UNPAUSE, ..kfd_ioctl_criu_args::zeroed() };
    match call::criu(kfd, &mut argument, &mut [], &mut [], &mut []) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

fn seize(task: i32) -> Result<(), i32> {
    let none = std::ptr::null_mut::<libc::c_void>();
    for _ in 0..ATTEMPTS {
        // SAFETY: neither address nor data is used by this request.
        if unsafe { libc::ptrace(libc::PTRACE_SEIZE, task, none, none) } == 0 {
            return Ok(());
        }
        match io::Error::last_os_error().raw_os_error() {
            // Another process still traces it: CRIU, or one after it.
            Some(libc::EPERM) => wait_briefly(),
            other => return Err(other.unwrap_or(libc::EIO)),
        }
    }
    Err(libc::EPERM)
}

fn wait_briefly() {
    let interval = RETRY_INTERVAL;
    // SAFETY: reads one live struct.
    unsafe { libc::nanosleep(&raw const interval, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead as _, BufReader, Read as _};
    use std::os::unix::net::UnixStream;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Stdio};
    use std::thread::sleep;
    use std::time::Duration;

    use nix::sys::wait::WaitStatus;

    use super::*;

    #[test]
    fn a_watchdog_has_no_other_descriptors_and_is_no_ordinary_child() {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let null = File::open("/dev/null").unwrap();
        let watchdog = fork(&OnCriuDeath::ResumeQueues(null.as_fd(), &[]), None).unwrap();
        drop(near);
        assert_eq!(far.read(&mut [0]).unwrap(), 0, "the watchdog has closed the peer");
        assert_eq!(fs::read_to_string(format!("/proc/{watchdog}/comm")).unwrap(), "rewake-watch\n");
        assert_eq!(waitpid(watchdog, Some(WaitPidFlag::WNOHANG)), Err(nix::errno::Errno::ECHILD));
        kill(watchdog, Signal::SIGTERM).unwrap();
        kill(watchdog, Signal::SIGINT).unwrap();
        let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
        assert_eq!(
            waitpid(watchdog, Some(flags)),
            Ok(WaitStatus::StillAlive),
            "signals to a whole group end CRIU only"
        );
        kill(watchdog, Signal::SIGKILL).unwrap();
        let ended = waitpid(watchdog, Some(WaitPidFlag::__WALL)).unwrap();
        assert_eq!(ended, WaitStatus::Signaled(watchdog, Signal::SIGKILL, false));
    }

    #[test]
    fn a_watchdog_has_its_parent_s_pid_namespace() {
        if !nix::unistd::geteuid().is_root() {
            rewake_skip::skip!("PID namespaces need root");
        }
        let mut other =
            Command::new("unshare").args(["--pid", "--fork", "cat"]).stdin(Stdio::piped()).spawn().unwrap();
        let first = (0..6000).find_map(|_| {
            sleep(Duration::from_millis(10));
            let id = other.id();
            let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
            children.split_whitespace().next().map(str::to_owned)
        });
        let there = File::open(format!("/proc/{}/ns/pid", first.expect("it forks"))).unwrap();
        // Of this thread's children only.
        setns(&there, CloneFlags::CLONE_NEWPID).unwrap();
        let children = || fs::read_link("/proc/thread-self/ns/pid_for_children").unwrap();
        let before = children();
        let watchdog = fork(&OnCriuDeath::KillTrees(&[]), None).unwrap();
        let its = fs::read_link(format!("/proc/{watchdog}/ns/pid"));
        kill(watchdog, Signal::SIGKILL).unwrap();
        waitpid(watchdog, Some(WaitPidFlag::__WALL)).unwrap();
        let own = fs::read_link("/proc/self/ns/pid").unwrap();
        assert_eq!((its.unwrap(), children()), (own.clone(), before.clone()));
        assert_ne!(own, before);
        drop(other.stdin.take());
        other.wait().unwrap();
    }

    #[test]
    fn a_watchdog_that_leaves_criu_s_children_in_another_namespace_is_killed() {
        let forked = || fork(&OnCriuDeath::KillTrees(&[]), None);
        let watchdog = kill_unless_restored(forked(), Ok(())).unwrap();
        kill(watchdog, Signal::SIGKILL).unwrap();
        waitpid(watchdog, Some(WaitPidFlag::__WALL)).unwrap();
        let watchdog = forked().unwrap();
        let refused = || Err(io::Error::from_raw_os_error(libc::EPERM));
        let error = kill_unless_restored(Ok(watchdog), refused()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        assert_eq!(kill(watchdog, None), Err(nix::errno::Errno::ESRCH), "it was killed and reaped");
        let unforked = || Err(io::Error::from_raw_os_error(libc::EAGAIN));
        assert_eq!(kill_unless_restored(unforked(), Ok(())).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        assert_eq!(
            kill_unless_restored(unforked(), refused()).unwrap_err().raw_os_error(),
            Some(libc::EPERM)
        );
    }

    #[test]
    fn a_task_is_killed_with_all_its_descendants() {
        let script = "sh -c 'sleep 100 & echo $!; wait' & echo $!; sleep 100 & echo $!; wait";
        let mut shell = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        let numbers: Vec<i32> = lines.take(3).map(|line| line.unwrap().parse().unwrap()).collect();
        let mut found = Vec::with_capacity(MAX_TASKS);
        found.push(shell.id().cast_signed());
        kill_with_descendants(&mut found);
        assert_eq!(shell.wait().unwrap().signal(), Some(libc::SIGKILL));
        let runs = |pid: &i32| {
            let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            !state.is_empty() && !state.contains(") Z ")
        };
        let ended = (0..6000).any(|_| {
            sleep(Duration::from_millis(10));
            !numbers.iter().any(runs)
        });
        assert!(ended, "of {numbers:?}");
    }
}
