// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gives a descriptor to a process, whatever confines it. The process continues unchanged.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::thread;

use crate::support::memory::{FREE, Scene, content};
use crate::support::{STOP_TIMEOUT, Shared, Target, sys, within};
use rewake_ptrace_inject::{Error, with_stopped};

const RESULT: usize = FREE;
const GO: usize = FREE + 1;
const END: usize = FREE + 2;
const CHILD: usize = FREE + 3;
const COUNTS: usize = FREE + 8;
/// `MAX_NUMBER` of `src/give.rs`.
const BOUND: u64 = 4096;

fn word(value: i32) -> usize {
    usize::try_from(value).unwrap()
}

/// Returns the two ends of a socket: one to keep, one to give.
fn ends() -> (UnixStream, UnixStream) {
    UnixStream::pair().unwrap()
}

fn give(pid: i32, end: &UnixStream) -> Result<RawFd, Error> {
    with_stopped(pid, STOP_TIMEOUT, |stopped| stopped.give(end.as_fd()))?
}

fn close(pid: i32, number: RawFd) -> Result<(), Error> {
    with_stopped(pid, STOP_TIMEOUT, |stopped| stopped.close(number))?
}

fn descriptors(pid: i32) -> Vec<RawFd> {
    let names = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut numbers: Vec<RawFd> =
        names.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    numbers.sort_unstable();
    numbers
}

fn limit(pid: i32) -> u64 {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Gives a socket to a process. Checks that `number` is that socket, the only new descriptor, and closed on
/// exec.
#[track_caller]
fn given(pid: i32) -> RawFd {
    let before = descriptors(pid);
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let (mut kept, end) = ends();
    let number = give(pid, &end).unwrap();
    drop(end);
    let mut after = descriptors(pid);
    after.retain(|there| *there != number);
    assert_eq!(after, before, "the other descriptors are unchanged");
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/maps")).unwrap(), maps, "the mappings are unchanged");
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
    let flags = i32::from_str_radix(flags.trim(), 8).unwrap();
    assert!(flags & libc::O_CLOEXEC != 0, "{info}");
    let mut copy = UnixStream::from(sys::take_descriptor(pid, number));
    copy.write_all(b"it").unwrap();
    let mut said = [0; 2];
    kept.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"it");
    number
}

/// Closes a given descriptor, and checks that it is closed.
#[track_caller]
fn closed(pid: i32, number: RawFd) {
    close(pid, number).unwrap();
    assert!(!descriptors(pid).contains(&number));
}

/// Counts until END is set.
fn count(shared: Shared, at: usize) {
    while shared.get(END) == 0 {
        shared.add(at);
    }
}

#[track_caller]
fn ends_with_seven(target: &Target) {
    target.shared.set(END, 1);
    let status = target.ended();
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
}

#[test]
fn a_given_descriptor_has_the_highest_number_and_can_be_closed() {
    let target = Target::start(|shared| {
        count(shared, COUNTS);
        7
    });
    target.shared.wait(COUNTS, |count| count > 0);
    let highest = RawFd::try_from(limit(target.pid).min(BOUND)).unwrap() - 1;
    let (first, second) = (given(target.pid), given(target.pid));
    assert_eq!((first, second), (highest, highest - 1));
    closed(target.pid, first);
    let gone = close(target.pid, first).unwrap_err();
    assert!(
        matches!(&gone, Error::Call { source, .. } if source.raw_os_error() == Some(libc::EBADF)),
        "{gone}"
    );
    ends_with_seven(&target);
}

#[test]
fn a_given_descriptor_survives_fork_and_not_exec() {
    let target = Target::start(|shared| {
        shared.wait(GO, |go| go == 1);
        let child = sys::fork(|| {
            count(shared, COUNTS);
            7
        });
        shared.set(CHILD, u64::try_from(child).unwrap());
        shared.wait(GO, |go| go == 2);
        let (sleep, time) = (c"/bin/sleep", c"1000");
        let arguments = [sleep.as_ptr(), time.as_ptr(), std::ptr::null()];
        let arguments = arguments.as_ptr().expose_provenance();
        sys::call(libc::SYS_execve, [sleep.as_ptr().expose_provenance(), arguments, 0, 0, 0, 0]).unwrap();
        unreachable!()
    });
    let number = given(target.pid);
    target.shared.set(GO, 1);
    let child = i32::try_from(target.shared.wait(CHILD, |child| child != 0)).unwrap();
    assert!(descriptors(child).contains(&number));
    target.shared.set(GO, 2);
    within(
        || (!descriptors(target.pid).contains(&number)).then_some(()),
        || format!("process {} has {:?}", target.pid, descriptors(target.pid)),
    );
    closed(child, number);
}

#[test]
fn all_threads_of_a_process_run_on() {
    const THREADS: usize = 7;
    let target = Target::start(|shared| {
        let counters: Vec<_> =
            (0..THREADS).map(|thread| thread::spawn(move || count(shared, COUNTS + thread))).collect();
        counters.into_iter().for_each(|counter| counter.join().unwrap());
        7
    });
    let counts = || (0..THREADS).map(|thread| target.shared.get(COUNTS + thread)).collect::<Vec<_>>();
    within(
        || counts().iter().all(|count| *count > 0).then_some(()),
        || "some threads do not count".to_owned(),
    );
    for _ in 0..20 {
        let number = given(target.pid);
        let then = counts();
        within(
            || counts().iter().zip(&then).all(|(now, then)| now > then).then_some(()),
            || "some threads do not resume".to_owned(),
        );
        closed(target.pid, number);
    }
    ends_with_seven(&target);
}

#[test]
fn a_strict_seccomp_filter_does_not_see_the_calls() {
    let target = Target::start(|shared| {
        // A strict filter permits read, write, exit and sigreturn, and kills on other calls.
        sys::call(libc::SYS_prctl, [word(libc::PR_SET_SECCOMP), 1, 0, 0, 0, 0]).unwrap();
        shared.set(RESULT, 1);
        count(shared, COUNTS);
        sys::call(libc::SYS_exit, [7, 0, 0, 0, 0, 0]).map_or(8, |_| 9)
    });
    target.shared.wait(RESULT, |result| result == 1);
    let number = given(target.pid);
    closed(target.pid, number);
    ends_with_seven(&target);
}

#[test]
fn a_process_of_another_user_gets_the_descriptor() {
    let target = Target::start(|shared| {
        const OTHER: usize = 65534;
        sys::call(libc::SYS_setgid, [OTHER, 0, 0, 0, 0, 0]).unwrap();
        sys::call(libc::SYS_setuid, [OTHER, 0, 0, 0, 0, 0]).unwrap();
        shared.set(RESULT, 1);
        count(shared, COUNTS);
        7
    });
    target.shared.wait(RESULT, |result| result == 1);
    let number = given(target.pid);
    closed(target.pid, number);
    ends_with_seven(&target);
}

#[test]
fn a_process_in_other_namespaces_without_proc_gets_the_descriptor() {
    let target = Target::start(|shared| {
        let spaces = libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWNET;
        let child = sys::call(libc::SYS_clone, [word(spaces | libc::SIGCHLD), 0, 0, 0, 0, 0]).unwrap();
        if child == 0 {
            sys::call(libc::SYS_prctl, [word(libc::PR_SET_PDEATHSIG), word(libc::SIGKILL), 0, 0, 0, 0])
                .unwrap();
            let (tmpfs, proc) =
                (c"tmpfs".as_ptr().expose_provenance(), c"/proc".as_ptr().expose_provenance());
            sys::call(libc::SYS_mount, [tmpfs, proc, tmpfs, 0, 0, 0]).unwrap();
            assert!(fs::read_dir("/proc").unwrap().next().is_none() && std::process::id() == 1);
            shared.set(RESULT, 1);
            count(shared, COUNTS);
            return 7;
        }
        shared.set(CHILD, u64::try_from(child).unwrap());
        within(|| sys::reap(i32::try_from(child).unwrap()), || "the child runs".to_owned());
        7
    });
    target.shared.wait(RESULT, |result| result == 1);
    let child = i32::try_from(target.shared.wait(CHILD, |child| child != 0)).unwrap();
    let number = given(child);
    closed(child, number);
    let then = target.shared.get(COUNTS);
    target.shared.wait(COUNTS, |count| count > then);
    ends_with_seven(&target);
}

/// Opens descriptors until no number is free, and returns them.
fn use_up() -> Vec<RawFd> {
    let mut opened = Vec::new();
    loop {
        match sys::call(libc::SYS_dup, [1, 0, 0, 0, 0, 0]) {
            Ok(number) => opened.push(RawFd::try_from(number).unwrap()),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EMFILE));
                return opened;
            }
        }
    }
}

fn set_limit(files: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
    let limit = (&raw const limit).expose_provenance();
    sys::call(libc::SYS_setrlimit, [word(libc::RLIMIT_NOFILE.cast_signed()), limit, 0, 0, 0, 0]).map(drop)
}

#[test]
fn a_process_needs_two_free_numbers() {
    const FILES: u64 = 64;
    let target = Target::start(|shared| {
        set_limit(FILES).unwrap();
        let mut opened = use_up();
        for free in 0..3 {
            shared.set(GO, free);
            shared.wait(RESULT, |value| value > free);
            // This frees a number in the middle.
            let number = opened.remove(opened.len() / 2);
            sys::call(libc::SYS_close, [word(number), 0, 0, 0, 0, 0]).unwrap();
        }
        count(shared, COUNTS);
        7
    });
    // The test may have inherited descriptors with higher numbers.
    let below = |have: &[RawFd]| have.iter().filter(|number| word(**number) < 64).count() as u64;
    for free in 0..3 {
        target.shared.wait(GO, |is| is == free);
        let before = within(
            || Some(descriptors(target.pid)).filter(|have| below(have) == FILES - free),
            || format!("{:?}", descriptors(target.pid)),
        );
        let (_kept, end) = ends();
        match give(target.pid, &end) {
            Err(error) if free < 2 => {
                assert!(matches!(error, Error::NoNumber { limit: FILES, .. }), "{error}");
                let text = error.to_string();
                assert!(text.contains("no room for two more descriptors: its limit is 64"), "{text}");
                assert_eq!(descriptors(target.pid), before);
            }
            Ok(number) if free == 2 => assert!(!before.contains(&number)),
            other => panic!("{free} free numbers: {other:?}"),
        }
        target.shared.set(RESULT, free + 1);
    }
    ends_with_seven(&target);
}

#[test]
fn a_process_without_free_numbers_below_the_bound_gets_one_above() {
    let files = limit(std::process::id().try_into().unwrap());
    if files < BOUND + 8 {
        return eprintln!("skipped: this process may have {files} open files");
    }
    let target = Target::start(|shared| {
        for _ in 0..BOUND {
            sys::call(libc::SYS_dup, [1, 0, 0, 0, 0, 0]).unwrap();
        }
        shared.set(RESULT, 1);
        count(shared, COUNTS);
        7
    });
    target.shared.wait(RESULT, |result| result == 1);
    let used = descriptors(target.pid);
    let lowest = (0..).find(|number| !used.contains(number)).unwrap();
    assert!(word(lowest) as u64 >= BOUND);
    // The temporary socket has the lowest number.
    assert_eq!(given(target.pid), lowest + 1);
    ends_with_seven(&target);
}

#[test]
fn a_process_in_a_page_fault_gets_the_descriptor() {
    let scene = Scene::start(2, |hand| {
        hand.shared.set(RESULT, hand.word(8).load(Ordering::SeqCst));
        count(hand.shared, COUNTS);
        7
    });
    scene.fault();
    let before = descriptors(scene.target.pid);
    let (_kept, end) = ends();
    let number = give(scene.target.pid, &end).unwrap();
    assert_eq!(descriptors(scene.target.pid).len(), before.len() + 1);
    close(scene.target.pid, number).unwrap();
    assert_eq!(scene.shared().get(RESULT), 0, "the page is still missing");
    scene.swap();
    assert_eq!(scene.shared().wait(RESULT, |value| value != 0), content(8));
    scene.shared().set(END, 1);
    assert_eq!(libc::WEXITSTATUS(scene.target.ended()), 7);
}
