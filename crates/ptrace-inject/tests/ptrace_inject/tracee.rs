// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gives a descriptor to a process that the calling thread traces already, as CRIU's main thread traces a
//! restored task. The process stays in its stop.

use std::fs;
use std::os::fd::{AsFd as _, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::support::{STOP_TIMEOUT, Shared, Target, sys, within};
use rewake_ptrace_inject::{Error, Stopped, with_stopped, with_tracee};

const END: usize = 0;
const STARTED: usize = 1;
const WRONG: usize = 2;
const SIGNALS: usize = 3;
const COUNTS: usize = 16;
/// `PTRACE_EVENTMSG_SYSCALL_EXIT`
const SYSCALL_EXIT: u64 = 2;
/// `PTRACE_O_SUSPEND_SECCOMP`
const SUSPEND_SECCOMP: usize = 0x20_0000;

fn word(value: i32) -> usize {
    usize::try_from(value).unwrap()
}

fn ptrace(request: libc::c_uint, tid: i32, address: usize, data: usize) {
    let request = usize::try_from(request).unwrap();
    sys::call(libc::SYS_ptrace, [request, word(tid), address, data, 0, 0]).unwrap();
}

/// Waits for a stop of a tracee of this thread.
#[track_caller]
fn stops(tid: i32) {
    let stop = || {
        let mut status = 0_i32;
        let status = (&raw mut status).expose_provenance();
        let options = word(libc::__WALL | libc::WNOHANG);
        let waited = sys::call(libc::SYS_wait4, [word(tid), status, options, 0, 0, 0]).unwrap();
        (waited != 0).then_some(())
    };
    within(stop, || format!("thread {tid} runs"));
}

/// Seizes all threads of a process, and stops each at the end of a system call, as CRIU does, though of
/// another call.
fn seize(target: &Target, more_options: usize) -> Vec<i32> {
    let threads = target.threads();
    for tid in &threads {
        ptrace(libc::PTRACE_SEIZE, *tid, 0, 0);
        ptrace(libc::PTRACE_INTERRUPT, *tid, 0, 0);
        stops(*tid);
        ptrace(libc::PTRACE_SETOPTIONS, *tid, 0, word(libc::PTRACE_O_TRACESYSGOOD) | more_options);
        while message(*tid) != SYSCALL_EXIT {
            ptrace(libc::PTRACE_SYSCALL, *tid, 0, 0);
            stops(*tid);
        }
    }
    threads
}

fn detach(threads: &[i32]) {
    threads.iter().for_each(|tid| ptrace(libc::PTRACE_DETACH, *tid, 0, 0));
}

fn message(tid: i32) -> u64 {
    let mut message = 0_u64;
    ptrace(libc::PTRACE_GETEVENTMSG, tid, 0, (&raw mut message).expose_provenance());
    message
}

/// Returns what a stop must not change: its kind, the signal mask and the registers.
fn state(tid: i32) -> (u64, u64, Vec<u64>) {
    let (mut mask, mut registers) = (0_u64, vec![0_u64; 27]);
    ptrace(libc::PTRACE_GETSIGMASK, tid, 8, (&raw mut mask).expose_provenance());
    let buffer = libc::iovec { iov_base: registers.as_mut_ptr().cast(), iov_len: 27 * 8 };
    ptrace(libc::PTRACE_GETREGSET, tid, 1, (&raw const buffer).expose_provenance());
    (message(tid), mask, registers)
}

/// Makes calls until END is set, and notes wrong results.
fn call_on(shared: Shared, at: usize, call: i64, expected: i64) {
    shared.add(STARTED);
    while shared.get(END) == 0 {
        if sys::call(call, [0; 6]).ok() != Some(expected) {
            shared.add(WRONG);
        }
        shared.add(COUNTS + at);
    }
}

fn give_and_keep(pid: i32) -> RawFd {
    let (_kept, end) = UnixStream::pair().unwrap();
    with_tracee(pid, |stopped| stopped.give(end.as_fd())).unwrap().unwrap()
}

fn has(pid: i32, number: RawFd) -> bool {
    fs::symlink_metadata(format!("/proc/{pid}/fd/{number}")).is_ok()
}

#[track_caller]
fn ends_well(target: &Target) {
    target.shared.set(END, 1);
    let status = target.ended();
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
    assert_eq!(target.shared.get(WRONG), 0);
}

/// Makes calls in `threads` threads of the target, including the first.
fn call_in(shared: Shared, threads: usize) -> i32 {
    let own = i64::from(std::process::id());
    let call = move |at| call_on(shared, at, libc::SYS_getpid, own);
    let others: Vec<_> = (1..threads).map(|at| thread::spawn(move || call(at))).collect();
    call(0);
    others.into_iter().for_each(|thread| thread.join().unwrap());
    7
}

#[test]
fn threads_stay_in_their_stops_and_resume_unchanged() {
    const THREADS: usize = 4;
    let target = Target::start(|shared| call_in(shared, THREADS));
    target.shared.wait(STARTED, |started| started == THREADS as u64);
    for _ in 0..20 {
        let threads = seize(&target, 0);
        assert_eq!(threads.len(), THREADS);
        let before: Vec<_> = threads.iter().map(|tid| state(*tid)).collect();
        let number = give_and_keep(target.pid);
        assert!(has(target.pid, number));
        with_tracee(target.pid, |stopped| stopped.close(number)).unwrap().unwrap();
        assert!(!has(target.pid, number));
        assert_eq!(threads.iter().map(|tid| state(*tid)).collect::<Vec<_>>(), before);
        detach(&threads);
        let then: Vec<u64> = (0..THREADS).map(|at| target.shared.get(COUNTS + at)).collect();
        for (at, then) in then.into_iter().enumerate() {
            target.shared.wait(COUNTS + at, |count| count > then);
        }
    }
    ends_well(&target);
}

static SIGNALLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn note(_: i32) {
    SIGNALLED.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn a_signal_during_the_stop_is_delivered_once_after_it() {
    let target = Target::start(|shared| {
        sys::on_signal(libc::SIGUSR1, note, 0);
        shared.add(STARTED);
        while shared.get(END) == 0 {
            sys::call(libc::SYS_getpid, [0; 6]).unwrap();
            shared.set(SIGNALS, SIGNALLED.load(Ordering::SeqCst));
        }
        7
    });
    target.shared.wait(STARTED, |started| started == 1);
    for round in 1..=10 {
        let threads = seize(&target, 0);
        target.signal(libc::SIGUSR1);
        give_and_keep(target.pid);
        assert_eq!(target.shared.get(SIGNALS), round - 1);
        detach(&threads);
        target.shared.wait(SIGNALS, |signals| signals == round);
    }
    ends_well(&target);
}

/// Starts a target with a strict filter, which permits read, write, exit and sigreturn, and kills on other
/// calls. It makes another call when END is set. Returns it and its stopped threads, after it was given a
/// descriptor.
fn strict() -> (Target, Vec<i32>) {
    let target = Target::start(|shared| {
        sys::call(libc::SYS_prctl, [word(libc::PR_SET_SECCOMP), 1, 0, 0, 0, 0]).unwrap();
        call_on(shared, 0, libc::SYS_write, 0);
        sys::call(libc::SYS_getpid, [0; 6]).map_or(8, |_| 7)
    });
    target.shared.wait(COUNTS, |count| count > 0);
    let threads = seize(&target, SUSPEND_SECCOMP);
    let number = give_and_keep(target.pid);
    assert!(has(target.pid, number));
    (target, threads)
}

#[test]
fn a_filter_suspended_by_the_tracer_stays_suspended() {
    let (target, threads) = strict();
    target.shared.set(END, 1);
    threads.iter().for_each(|tid| ptrace(libc::PTRACE_CONT, *tid, 0, 0));
    let status = target.ended();
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
}

#[test]
fn a_filter_works_again_after_the_detach() {
    let (target, threads) = strict();
    detach(&threads);
    let then = target.shared.get(COUNTS);
    target.shared.wait(COUNTS, |count| count > then);
    target.shared.set(END, 1);
    let status = target.ended();
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
}

#[test]
fn a_process_in_another_kind_of_stop_is_refused_unchanged() {
    let target = Target::start(|shared| call_in(shared, 2));
    target.shared.wait(STARTED, |started| started == 2);
    let refused = |pid| with_tracee(pid, |_| unreachable!()).unwrap_err();
    // The process has no tracer.
    let error = refused(target.pid);
    assert!(matches!(error, Error::NotHeld { .. }), "{error}");
    // Another call than CRIU's last one stopped it.
    let threads = target.threads();
    for tid in &threads {
        ptrace(libc::PTRACE_SEIZE, *tid, 0, 0);
        ptrace(libc::PTRACE_INTERRUPT, *tid, 0, 0);
        stops(*tid);
    }
    let error = refused(target.pid);
    assert!(matches!(error, Error::NotHeld { tid } if threads.contains(&tid)), "{error}");
    detach(&threads);
    // A tracee of another thread is refused.
    let elsewhere = |stopped: &mut Stopped<'_>| {
        assert_eq!(stopped.threads().len(), 2);
        thread::scope(|scope| scope.spawn(|| refused(target.pid)).join().unwrap())
    };
    let error = with_stopped(target.pid, STOP_TIMEOUT, elsewhere).unwrap();
    assert!(matches!(error, Error::NotHeld { .. }), "{error}");
    ends_well(&target);
    drop(target);
    let error = refused(i32::MAX);
    assert!(matches!(error, Error::Ended { pid: i32::MAX }), "{error}");
}
