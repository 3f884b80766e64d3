// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process that waits for CRIU's death: what only CRIU undoes would otherwise stay for ever. It is a fork without a
//! program of its own and makes plain system calls only: CRIU's memory is in no known state in it.

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

/// Looks at a task that something else traces still, and tries of an unpause; time between them: five seconds in all.
const LOOKS: u32 = 5000;
const LOOK: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// Descriptors that the guard keeps: CRIU's end, where to say it, and behind them those of its duty.
const END: i32 = 0;
const LOG: i32 = 1;
const OWN: i32 = 2;
/// Looks at a task that is to stand still: a tenth of a second. One that sleeps in the kernel for longer does not fork.
const STOPS: u32 = 100;
/// Tasks of one restored tree.
const TREE: usize = 1 << 16;
const WENT_ON: &[u8] =
    b"Warn  (amdgpu_plugin): CRIU ended in the middle of the dump: the queues of a process go on\n";
const PAUSED: &[u8] =
    b"Error (amdgpu_plugin): CRIU ended in the middle of the dump: the queues of a process stay paused\n";
const KILLED: &[u8] =
    b"Warn  (amdgpu_plugin): CRIU ended before all GPU state was restored: the restored tasks are killed\n";

/// What is done when CRIU has died.
#[derive(Debug)]
pub(crate) enum OnCriuDeath<'a> {
    /// The queues behind a process's own `/dev/kfd` go on; it is one of these tasks'.
    GoOn(BorrowedFd<'a>, &'a [i32]),
    /// These tasks, which have not been waited for, are killed with all their descendants.
    Kill(&'a [(i32, OwnedFd)]),
}

/// Forks a process that does its duty when this process has died, and says so in `log`, on standard error if none. No
/// signal tells of the guard's end, and only `__WALL` waits for it.
pub(crate) fn fork(duty: &OnCriuDeath<'_>, log: Option<BorrowedFd<'_>>) -> io::Result<Pid> {
    let own: Vec<BorrowedFd<'_>> = match duty {
        OnCriuDeath::GoOn(kfd, _) => vec![*kfd],
        OnCriuDeath::Kill(roots) => roots.iter().map(|(_, task)| task.as_fd()).collect(),
    };
    // The fork has the room, and does not allocate.
    let found = Vec::with_capacity(if let OnCriuDeath::Kill(_) = duty { TREE } else { 0 });
    // Copies above the numbers that the guard's go to.
    let first = OWN + i32::try_from(own.len()).map_err(io::Error::other)?;
    let copy = |fd: BorrowedFd<'_>| above(fd, first);
    let end = copy(task(std::process::id().cast_signed())?.as_fd())?;
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
    let forked = among_own_pids(|| {
        // SAFETY: a fork: no flags, no stack, and no signal to the parent at its end. The child does nothing but `watch`.
        let pid = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
        if pid == 0 {
            let log = log.as_ref().map_or(libc::STDERR_FILENO, |log| log.as_raw_fd());
            watch(duty, end.as_raw_fd(), log, &own, found);
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

/// Forks in this thread's own PID namespace. CRIU may have moved the children that it forks to another one (an external PID
/// namespace), where the numbers that the guard knows are nobody's or a stranger's.
fn among_own_pids(fork: impl FnOnce() -> io::Result<Pid>) -> io::Result<Pid> {
    let (own, children) = ("/proc/thread-self/ns/pid", "/proc/thread-self/ns/pid_for_children");
    // There is none to read before its first process: one that was unshared just now.
    let elsewhere =
        std::fs::read_link(children).is_ok_and(|there| std::fs::read_link(own).ok() != Some(there));
    if !elsewhere {
        return fork();
    }
    let there = File::open(children)?;
    setns(File::open(own)?, CloneFlags::CLONE_NEWPID)?;
    let forked = fork();
    if_back(forked, setns(there, CloneFlags::CLONE_NEWPID).map_err(io::Error::from))
}

/// The guard, if CRIU's children go where they went before. Otherwise nobody would know of it.
fn if_back(forked: io::Result<Pid>, back: io::Result<()>) -> io::Result<Pid> {
    if let (Ok(guard), Err(_)) = (&forked, &back) {
        // A child that was not waited for: neither can fail.
        let _ = kill(*guard, Signal::SIGKILL);
        let _ = waitpid(*guard, Some(WaitPidFlag::__WALL));
    }
    back.and(forked)
}

/// A descriptor of a task: its number may be another's when it has ended, and this is not. It can be read then.
pub(crate) fn task(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap_or(-1)) })
}

fn above(fd: BorrowedFd<'_>, first: i32) -> io::Result<OwnedFd> {
    let copy = fcntl(fd, FcntlArg::F_DUPFD_CLOEXEC(first))?;
    // SAFETY: the kernel has just made it for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// The guard's life.
fn watch(duty: &OnCriuDeath<'_>, end: i32, log: i32, own: &[OwnedFd], found: Vec<i32>) -> ! {
    let placed = |fd: i32, number: i32| {
        // SAFETY: numbers only. What is open at that number is a copy of CRIU's, which nobody here uses.
        unsafe { libc::dup2(fd, number) == number }
    };
    // Standard error may be where its own number goes to: first of all.
    let mut ready = placed(log, LOG) && placed(end, END);
    let mut next = OWN;
    for fd in own {
        ready &= placed(fd.as_raw_fd(), next);
        next += 1;
    }
    // SAFETY: numbers, and a name that is terminated. Whatever else was open is closed: CRIU's parasite in a task goes
    // when the last copy of its socket is closed.
    ready &= unsafe {
        libc::prctl(libc::PR_SET_NAME, c"rewake-guard".as_ptr());
        libc::syscall(libc::SYS_close_range, next.unsigned_abs(), libc::c_uint::MAX, 0) == 0
    };
    if ready
        && ended()
        && let Some(said) = done(duty, found)
    {
        // SAFETY: the bytes are static. Nobody is there to be told of a failure.
        unsafe { libc::write(LOG, said.as_ptr().cast(), said.len()) };
    }
    // SAFETY: ends the process at once, without what the fork has inherited.
    unsafe { libc::_exit(0) }
}

/// What there is to say; nothing if there was nothing to do.
fn done(duty: &OnCriuDeath<'_>, mut found: Vec<i32>) -> Option<&'static [u8]> {
    match duty {
        OnCriuDeath::GoOn(_, tasks) => Some(if go_on(tasks)? { WENT_ON } else { PAUSED }),
        OnCriuDeath::Kill(roots) => {
            let none = std::ptr::null::<libc::siginfo_t>();
            for (fd, (root, _)) in (OWN..).zip(*roots) {
                // SAFETY: numbers only. One that has ended is no root of anything.
                let signalled =
                    unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGSTOP, none, 0) };
                if signalled == 0 {
                    found.push(*root);
                }
            }
            let any = !found.is_empty();
            kill_with_descendants(&mut found);
            any.then_some(KILLED)
        }
    }
}

/// Ends stopped tasks and their descendants. One that is stopped before its children are read has no more of them later. Their
/// numbers are nobody else's meanwhile, but for one that is killed and waited for by somebody else in these microseconds.
fn kill_with_descendants(found: &mut Vec<i32>) {
    let mut next = 0;
    while let Some(task) = found.get(next).copied() {
        let before = found.len();
        until_it_stands(task);
        children(task, found);
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

/// A file by its path and a zero, to be read; -1, which nothing can be read from, if it is not there.
fn open(path: std::fmt::Arguments<'_>) -> i32 {
    let mut bytes = [0_u8; 64];
    if (&mut bytes[..63]).write_fmt(path).is_err() {
        return -1;
    }
    // SAFETY: the last byte is a zero, if none before is.
    unsafe { libc::open(bytes.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC) }
}

/// A task that was sent SIGSTOP may be in the middle of a fork.
fn until_it_stands(task: i32) {
    for _ in 0..STOPS {
        let file = open(format_args!("/proc/{task}/stat\0"));
        let mut bytes = [0_u8; 128];
        // SAFETY: the buffer is live and as long as is said.
        let read = unsafe { libc::read(file, bytes.as_mut_ptr().cast(), bytes.len()) };
        // SAFETY: opened above; an error of that is one of this, and harmless.
        unsafe { libc::close(file) };
        let read = &bytes[..usize::try_from(read).unwrap_or(0)];
        // `pid (name) state`: a name may have anything in it.
        let name = read.iter().rposition(|byte| *byte == b')');
        match name.and_then(|end| read.get(end + 2)) {
            Some(b'R' | b'S' | b'D') => pause(),
            _ => return,
        }
    }
}

/// Adds the children of a task's first thread, which is the one that forks while a tree is restored. None if it has ended.
fn children(task: i32, found: &mut Vec<i32>) {
    let file = open(format_args!("/proc/{task}/task/{task}/children\0"));
    let (mut bytes, mut number) = ([0_u8; 4096], 0_i32);
    loop {
        // SAFETY: the buffer is live and as long as is said.
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
    // SAFETY: opened above; an error of that is one of this, and harmless.
    unsafe { libc::close(file) };
}

/// Waits for CRIU's end; no if that cannot be waited for.
fn ended() -> bool {
    let mut end = libc::pollfd { fd: END, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live entry. No signal interrupts: all are blocked.
    unsafe { libc::poll(&raw mut end, 1, -1) == 1 && end.revents & libc::POLLIN != 0 }
}

/// Traces the task whose file it is, which may be running, and lets its queues go on. The trace ends with this process.
/// None if no such task is left.
fn go_on(tasks: &[i32]) -> Option<bool> {
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
        for _ in 0..LOOKS {
            match unpause() {
                // Not paused: CRIU died just before it was, or when it had been.
                Ok(()) | Err(libc::EINVAL) => return Some(true),
                // Another task's file.
                Err(libc::EBADF) => break,
                Err(_) => pause(),
            }
        }
    }
    any
}

fn unpause() -> Result<(), i32> {
    // SAFETY: open until this process ends.
    let kfd = unsafe { BorrowedFd::borrow_raw(OWN) };
    let mut argument = kfd_ioctl_criu_args { op: KFD_CRIU_OP_UNPAUSE, ..kfd_ioctl_criu_args::zeroed() };
    match call::criu(kfd, &mut argument, &mut [], &mut [], &mut []) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

fn seize(task: i32) -> Result<(), i32> {
    let none = std::ptr::null_mut::<libc::c_void>();
    for _ in 0..LOOKS {
        // SAFETY: neither address nor data is used by this request.
        if unsafe { libc::ptrace(libc::PTRACE_SEIZE, task, none, none) } == 0 {
            return Ok(());
        }
        match io::Error::last_os_error().raw_os_error() {
            // Traced still, by CRIU or whoever came after it.
            Some(libc::EPERM) => pause(),
            other => return Err(other.unwrap_or(libc::EIO)),
        }
    }
    Err(libc::EPERM)
}

fn pause() {
    let look = LOOK;
    // SAFETY: reads one live struct.
    unsafe { libc::nanosleep(&raw const look, std::ptr::null_mut()) };
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
    fn a_guard_keeps_nothing_else_open_and_is_nobody_s_ordinary_child() {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let null = File::open("/dev/null").unwrap();
        let guard = fork(&OnCriuDeath::GoOn(null.as_fd(), &[]), None).unwrap();
        drop(near);
        assert_eq!(far.read(&mut [0]).unwrap(), 0, "the guard has let go of the other end");
        assert_eq!(fs::read_to_string(format!("/proc/{guard}/comm")).unwrap(), "rewake-guard\n");
        assert_eq!(waitpid(guard, Some(WaitPidFlag::WNOHANG)), Err(nix::errno::Errno::ECHILD));
        kill(guard, Signal::SIGTERM).unwrap();
        kill(guard, Signal::SIGINT).unwrap();
        let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
        assert_eq!(
            waitpid(guard, Some(flags)),
            Ok(WaitStatus::StillAlive),
            "signals to a whole group end CRIU only"
        );
        kill(guard, Signal::SIGKILL).unwrap();
        let ended = waitpid(guard, Some(WaitPidFlag::__WALL)).unwrap();
        assert_eq!(ended, WaitStatus::Signaled(guard, Signal::SIGKILL, false));
    }

    #[test]
    fn a_guard_has_its_parent_s_namespace_wherever_other_children_go() {
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
        let guard = fork(&OnCriuDeath::Kill(&[]), None).unwrap();
        let its = fs::read_link(format!("/proc/{guard}/ns/pid"));
        kill(guard, Signal::SIGKILL).unwrap();
        waitpid(guard, Some(WaitPidFlag::__WALL)).unwrap();
        let own = fs::read_link("/proc/self/ns/pid").unwrap();
        assert_eq!((its.unwrap(), children()), (own.clone(), before.clone()));
        assert_ne!(own, before);
        drop(other.stdin.take());
        other.wait().unwrap();
    }

    #[test]
    fn a_guard_that_leaves_criu_s_children_elsewhere_is_none() {
        let forked = || fork(&OnCriuDeath::Kill(&[]), None);
        let guard = if_back(forked(), Ok(())).unwrap();
        kill(guard, Signal::SIGKILL).unwrap();
        waitpid(guard, Some(WaitPidFlag::__WALL)).unwrap();
        let guard = forked().unwrap();
        let refused = || Err(io::Error::from_raw_os_error(libc::EPERM));
        let error = if_back(Ok(guard), refused()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        assert_eq!(kill(guard, None), Err(nix::errno::Errno::ESRCH), "it was killed, and waited for");
        let unforked = || Err(io::Error::from_raw_os_error(libc::EAGAIN));
        assert_eq!(if_back(unforked(), Ok(())).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        assert_eq!(if_back(unforked(), refused()).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn a_task_is_killed_with_all_its_descendants() {
        let script = "sh -c 'sleep 100 & echo $!; wait' & echo $!; sleep 100 & echo $!; wait";
        let mut shell = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        let numbers: Vec<i32> = lines.take(3).map(|line| line.unwrap().parse().unwrap()).collect();
        let mut found = Vec::with_capacity(TREE);
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
