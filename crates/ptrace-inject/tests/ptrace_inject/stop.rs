// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that a stopped process that made injected calls resumes unchanged.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{STOP_TIMEOUT, Shared, Target, sys, within};
use rewake_ptrace_inject::{Error, Reason, Stopped, with_stopped, with_tracer};
use rewake_testkit::Random;

const RESULT: usize = 0;
const GO: usize = 1;
const END: usize = 2;
const FIRST: usize = 16;

fn word(value: i32) -> usize {
    usize::try_from(value).unwrap()
}

/// Stops a process, and makes it return its own number.
fn ask(target: &Target) -> Result<u64, Error> {
    let getpid = |stopped: &mut Stopped<'_>| stopped.syscall("getpid", libc::SYS_getpid, [0; 6]);
    with_stopped(target.pid, STOP_TIMEOUT, getpid)?
}

#[track_caller]
fn stop_and_call(target: &Target) {
    assert_eq!(ask(target).unwrap(), u64::try_from(target.pid).unwrap());
}

fn counting(shared: Shared, threads: usize) -> i32 {
    let count = |thread: usize| {
        move || {
            while shared.get(END) == 0 {
                shared.add(FIRST + thread);
            }
        }
    };
    let handles: Vec<_> = (0..threads).map(|thread| thread::spawn(count(thread))).collect();
    handles.into_iter().for_each(|handle| handle.join().unwrap());
    7
}

#[test]
fn all_threads_stop_and_resume() {
    const THREADS: usize = 16;
    let target = Target::start(|shared| counting(shared, THREADS));
    let counts = || (0..THREADS).map(|thread| target.shared.get(FIRST + thread)).collect::<Vec<_>>();
    within(
        || counts().iter().all(|count| *count > 0).then_some(()),
        || "some threads do not count".to_owned(),
    );
    for _ in 0..4 {
        let (before, after, stopped) = with_stopped(target.pid, STOP_TIMEOUT, |stopped| {
            let before = counts();
            thread::sleep(Duration::from_millis(3));
            assert_eq!(stopped.stuck(), []);
            (before, counts(), stopped.threads().len())
        })
        .unwrap();
        assert_eq!((before, stopped), (after.clone(), THREADS + 1));
        assert_eq!(target.tracer(), "0");
        within(
            || counts().iter().zip(&after).all(|(now, then)| now > then).then_some(()),
            || "some threads do not resume".to_owned(),
        );
    }
    target.shared.set(END, 1);
    assert_eq!(libc::WEXITSTATUS(target.ended()), 7);
}

#[test]
fn threads_created_during_the_stop_are_stopped_too() {
    let target = Target::start(|shared| {
        let family = move || {
            while shared.get(END) == 0 {
                thread::spawn(move || thread::spawn(move || shared.add(RESULT)).join().unwrap())
                    .join()
                    .unwrap();
            }
        };
        let handles: Vec<_> = (0..4).map(|_| thread::spawn(family)).collect();
        handles.into_iter().for_each(|handle| handle.join().unwrap());
        7
    });
    target.shared.wait(RESULT, |count| count > 10);
    for _ in 0..100 {
        let (listed, stopped, counts) = with_stopped(target.pid, STOP_TIMEOUT, |stopped| {
            let before = target.shared.get(RESULT);
            let threads: BTreeSet<i32> = stopped.threads().iter().copied().collect();
            // A thread without a state has ended.
            let runs = |tid: &i32| target.state_of_any(*tid).is_some_and(|state| !"tZX".contains(state));
            let running: Vec<i32> = target.threads().into_iter().filter(runs).collect();
            thread::sleep(Duration::from_millis(1));
            (running, threads.len(), (before, target.shared.get(RESULT)))
        })
        .unwrap();
        assert!(listed.is_empty(), "{listed:?} run, {stopped} are stopped");
        assert_eq!(counts.0, counts.1);
    }
    target.shared.set(END, 1);
    assert_eq!(libc::WEXITSTATUS(target.ended()), 7);
}

/// A call that sleeps, its wakeup, and its result.
struct Sleeper {
    name: &'static str,
    number: i64,
    call: fn(Shared, [i32; 2]) -> std::io::Result<i64>,
    expected: Result<i64, i32>,
    in_full: bool,
    wake: fn(&Target, i32),
}

/// The timeout of timed calls, in milliseconds. All targets must be stopped before it ends.
static SLEEP: AtomicU64 = AtomicU64::new(0);
/// The timeouts that are tried, if the stops took too long.
const SLEEPS: [u64; 4] = [3000, 6000, 12_000, 24_000];

fn address<T>(value: &T) -> usize {
    (&raw const *value).expose_provenance()
}

fn sleep() -> Duration {
    Duration::from_millis(SLEEP.load(Ordering::SeqCst))
}

fn sleep_time() -> libc::timespec {
    libc::timespec { tv_sec: sleep().as_secs().try_into().unwrap(), tv_nsec: sleep().subsec_nanos().into() }
}

fn write_to(_: &Target, pipe: i32) {
    sys::call(libc::SYS_write, [word(pipe), b"x".as_ptr().expose_provenance(), 1, 0, 0, 0]).unwrap();
}

fn nothing(_: &Target, _: i32) {}

fn epoll(pipe: i32) -> usize {
    let epoll = usize::try_from(sys::call(libc::SYS_epoll_create1, [0; 6]).unwrap()).unwrap();
    let mut event = libc::epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: 5 };
    let event = (&raw mut event).expose_provenance();
    sys::call(libc::SYS_epoll_ctl, [epoll, word(libc::EPOLL_CTL_ADD), word(pipe), event, 0, 0]).unwrap();
    epoll
}

fn read_one(_: Shared, [reader, _]: [i32; 2]) -> std::io::Result<i64> {
    let mut byte = 0_u8;
    sys::call(libc::SYS_read, [word(reader), (&raw mut byte).expose_provenance(), 1, 0, 0, 0])
}

fn nanosleep(_: Shared, _: [i32; 2]) -> std::io::Result<i64> {
    sys::call(libc::SYS_nanosleep, [address(&sleep_time()), 0, 0, 0, 0, 0])
}

fn poll_for_time(_: Shared, [reader, _]: [i32; 2]) -> std::io::Result<i64> {
    let poll = libc::pollfd { fd: reader, events: libc::POLLIN, revents: 0 };
    sys::call(libc::SYS_poll, [address(&poll), 1, usize::try_from(sleep().as_millis()).unwrap(), 0, 0, 0])
}

fn poll_without_end(_: Shared, [reader, _]: [i32; 2]) -> std::io::Result<i64> {
    let poll = libc::pollfd { fd: reader, events: libc::POLLIN, revents: 0 };
    sys::call(libc::SYS_poll, [address(&poll), 1, usize::MAX, 0, 0, 0])
}

fn futex_for_time(_: Shared, _: [i32; 2]) -> std::io::Result<i64> {
    let futex = AtomicU64::new(0);
    sys::call(libc::SYS_futex, [address(&futex), word(libc::FUTEX_WAIT), 0, address(&sleep_time()), 0, 0])
}

fn futex_without_end(shared: Shared, _: [i32; 2]) -> std::io::Result<i64> {
    sys::call(libc::SYS_futex, [address(shared.word(FIRST)), word(libc::FUTEX_WAIT), 0, 0, 0, 0])
}

fn wake_futex(target: &Target, _: i32) {
    let woken = [address(target.shared.word(FIRST)), word(libc::FUTEX_WAKE), 1, 0, 0, 0];
    // The target may not be in its call yet.
    within(
        || (sys::call(libc::SYS_futex, woken).unwrap() == 1).then_some(()),
        || "no thread waits".to_owned(),
    );
}

fn epoll_without_end(_: Shared, [reader, _]: [i32; 2]) -> std::io::Result<i64> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    let event = (&raw mut event).expose_provenance();
    sys::call(libc::SYS_epoll_wait, [epoll(reader), event, 1, usize::MAX, 0, 0])
}

fn epoll_for_time(_: Shared, [reader, _]: [i32; 2]) -> std::io::Result<i64> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    let event = (&raw mut event).expose_provenance();
    sys::call(libc::SYS_epoll_wait, [epoll(reader), event, 1, 60_000, 0, 0])
}

/// Timed calls are first, so that they are stopped in time.
const SLEEPERS: [Sleeper; 8] = [
    Sleeper {
        name: "nanosleep",
        number: libc::SYS_nanosleep,
        call: nanosleep,
        expected: Ok(0),
        in_full: true,
        wake: nothing,
    },
    Sleeper {
        name: "poll, timed",
        number: libc::SYS_poll,
        call: poll_for_time,
        expected: Ok(0),
        in_full: true,
        wake: nothing,
    },
    Sleeper {
        name: "futex, timed",
        number: libc::SYS_futex,
        call: futex_for_time,
        expected: Err(libc::ETIMEDOUT),
        in_full: true,
        wake: nothing,
    },
    Sleeper {
        name: "read",
        number: libc::SYS_read,
        call: read_one,
        expected: Ok(1),
        in_full: false,
        wake: write_to,
    },
    Sleeper {
        name: "poll",
        number: libc::SYS_poll,
        call: poll_without_end,
        expected: Ok(1),
        in_full: false,
        wake: write_to,
    },
    Sleeper {
        name: "futex",
        number: libc::SYS_futex,
        call: futex_without_end,
        expected: Ok(0),
        in_full: false,
        wake: wake_futex,
    },
    Sleeper {
        name: "epoll_wait",
        number: libc::SYS_epoll_wait,
        call: epoll_without_end,
        expected: Ok(1),
        in_full: false,
        wake: write_to,
    },
    // The result is the same as after any stop: see `restart.rs`.
    Sleeper {
        name: "epoll_wait, timed",
        number: libc::SYS_epoll_wait,
        call: epoll_for_time,
        expected: Err(libc::EINTR),
        in_full: false,
        wake: nothing,
    },
];

#[test]
fn sleeping_calls_return_the_same_results() {
    let stopped_in_time = |sleep| {
        SLEEP.store(sleep, Ordering::SeqCst);
        sleeping_calls_return_as_without_a_stop()
    };
    assert!(SLEEPS.into_iter().any(stopped_in_time), "with each timeout, a call ended before its stop");
}

/// Returns false if a call ended before its stop.
fn sleeping_calls_return_as_without_a_stop() -> bool {
    let start = |sleeper: &'static Sleeper| {
        let (reader, writer) = sys::pipe();
        let ends = [reader.as_raw_fd(), writer.as_raw_fd()];
        let target = Target::start(|shared| {
            let start = Instant::now();
            let result = match (sleeper.call)(shared, ends) {
                Ok(result) => result,
                Err(error) => -i64::from(error.raw_os_error().unwrap()),
            };
            let early = sleeper.in_full && start.elapsed() < sleep();
            shared.set(GO, u64::from(early));
            shared.set(RESULT, result.cast_unsigned().wrapping_add(1 << 32));
            0
        });
        (sleeper, target, [reader, writer])
    };
    // All targets sleep at the same time.
    let targets: Vec<_> = SLEEPERS.iter().map(start).collect();
    for (sleeper, target, _) in &targets {
        let is_over = || target.shared.get(RESULT) != 0;
        within(
            || (is_over() || target.is_in(target.pid, sleeper.number)).then_some(()),
            || format!("{} does not sleep", sleeper.name),
        );
        // The injected call uses the only thread, whose own call is interrupted and restarted each time.
        let times = if sleeper.expected == Err(libc::EINTR) { 1 } else { 3 };
        for _ in 0..times {
            match ask(target) {
                // The call may have ended before the stop.
                _ if sleeper.in_full && is_over() => return false,
                answer => assert_eq!(answer.unwrap(), u64::try_from(target.pid).unwrap()),
            }
        }
    }
    for (sleeper, target, [_, writer]) in &targets {
        (sleeper.wake)(target, writer.as_raw_fd());
        let result = target.shared.wait(RESULT, |result| result != 0).wrapping_sub(1 << 32).cast_signed();
        let result = if result < 0 { Err(i32::try_from(-result).unwrap()) } else { Ok(result) };
        assert_eq!(result, sleeper.expected, "{}", sleeper.name);
        assert_eq!(target.shared.get(GO), 0, "{} returned early", sleeper.name);
    }
    true
}

static HANDLED: AtomicU64 = AtomicU64::new(0);
extern "C" fn count_signal(_: i32) {
    let counter: *const AtomicU64 =
        std::ptr::with_exposed_provenance(usize::try_from(HANDLED.load(Ordering::SeqCst)).unwrap());
    // SAFETY: the address of a shared word, set before the handler.
    unsafe { &*counter }.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn each_signal_is_delivered_once() {
    const SENT: u64 = 4000;
    let signal = libc::SIGRTMIN() + 3;
    let target = Target::start(|shared| {
        HANDLED.store(address(shared.word(RESULT)) as u64, Ordering::SeqCst);
        sys::on_signal(signal, count_signal, libc::SA_RESTART);
        let sleeper = thread::spawn(move || {
            while shared.get(END) == 0 {
                thread::sleep(Duration::from_micros(200));
            }
        });
        shared.set(GO, 1);
        while shared.get(END) == 0 {
            shared.add(FIRST);
        }
        sleeper.join().unwrap();
        7
    });
    target.shared.wait(GO, |go| go == 1);
    let pid = target.pid;
    let sender = thread::spawn(move || {
        let mut random = Random::new(3);
        for _ in 0..SENT {
            while sys::queue(pid, signal).is_err() {
                thread::sleep(Duration::from_millis(1));
            }
            if random.below(8) == 0 {
                thread::sleep(Duration::from_micros(random.below(100)));
            }
        }
    });
    let mut stops = 0;
    while !sender.is_finished() || stops < 20 {
        stop_and_call(&target);
        stops += 1;
    }
    sender.join().unwrap();
    target.shared.wait(RESULT, |count| count >= SENT);
    target.shared.set(END, 1);
    assert_eq!(libc::WEXITSTATUS(target.ended()), 7);
    assert_eq!(target.shared.get(RESULT), SENT, "after {stops} stops");
}

#[test]
fn a_signal_still_ends_a_restarted_call() {
    let signal = libc::SIGUSR1;
    let (reader, writer) = sys::pipe();
    let target = Target::start(|shared| {
        HANDLED.store(address(shared.word(END)) as u64, Ordering::SeqCst);
        sys::on_signal(signal, count_signal, 0);
        let result = epoll_without_end(shared, [reader.as_raw_fd(), writer.as_raw_fd()]);
        shared.set(RESULT, u64::try_from(result.unwrap_err().raw_os_error().unwrap()).unwrap());
        0
    });
    target.sleeps_in(target.pid, libc::SYS_epoll_wait);
    with_stopped(target.pid, STOP_TIMEOUT, |stopped| {
        target.signal(signal);
        stopped.syscall("getpid", libc::SYS_getpid, [0; 6]).unwrap();
    })
    .unwrap();
    assert_eq!(target.shared.wait(RESULT, |result| result != 0), u64::try_from(libc::EINTR).unwrap());
    assert_eq!(target.shared.get(END), 1);
}

#[test]
fn job_control_stops_before_and_during_a_stop_are_kept() {
    let target = Target::start(|shared| counting(shared, 3));
    target.shared.wait(FIRST + 2, |count| count > 0);
    let all = |state: char| {
        let states = || target.threads().into_iter().map(|tid| target.state(tid)).collect::<String>();
        within(|| states().chars().all(|other| other == state).then_some(()), states);
    };
    target.signal(libc::SIGSTOP);
    all('T');
    stop_and_call(&target);
    all('T');
    let count = target.shared.get(FIRST);
    thread::sleep(Duration::from_millis(20));
    assert_eq!(target.shared.get(FIRST), count);
    target.signal(libc::SIGCONT);
    target.shared.wait(FIRST, |now| now > count);

    with_stopped(target.pid, STOP_TIMEOUT, |stopped| {
        target.signal(libc::SIGSTOP);
        stopped.syscall("getpid", libc::SYS_getpid, [0; 6]).unwrap();
    })
    .unwrap();
    all('T');
    target.signal(libc::SIGCONT);
    target.shared.set(END, 1);
    assert_eq!(libc::WEXITSTATUS(target.ended()), 7);
}

#[test]
fn another_tracer_is_named_and_waited_for() {
    let target = Target::start(|shared| counting(shared, 1));
    let pid = target.pid;
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let (sender, receiver) = std::sync::mpsc::channel();
    let other = thread::spawn(move || {
        with_tracer(pid, STOP_TIMEOUT, move || {
            sender.send(sys::gettid()).unwrap();
            held.recv_timeout(Duration::from_secs(20)).unwrap();
        })
    });
    let tid = receiver.recv().unwrap();
    let refused = with_stopped(pid, Duration::from_millis(30), |_| ()).unwrap_err();
    assert!(matches!(refused, Error::Traced { by, .. } if by == tid), "{refused}");
    assert!(refused.to_string().contains("rewake-tracer"), "{refused}");
    let release = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        hold.send(()).unwrap();
    });
    stop_and_call(&target);
    release.join().unwrap();
    other.join().unwrap().unwrap();
    // It runs while it is traced, and has no tracer afterwards.
    let (before, tracer) =
        with_tracer(pid, STOP_TIMEOUT, || (target.shared.get(FIRST), target.tracer())).unwrap();
    assert_ne!(tracer, "0");
    assert_eq!(target.tracer(), "0");
    target.shared.wait(FIRST, |count| count > before);
}

#[test]
fn threads_survive_the_end_of_the_first_one() {
    let target = Target::start(|shared| {
        thread::spawn(move || counting(shared, 2));
        sys::call(libc::SYS_exit, [0; 6]).unwrap();
        0
    });
    within(|| (target.state(target.pid) == 'Z').then_some(()), || "the first thread lives".to_owned());
    target.shared.wait(FIRST + 1, |count| count > 0);
    stop_and_call(&target);
    let count = target.shared.get(FIRST);
    target.shared.wait(FIRST, |now| now > count);
    assert!(matches!(with_tracer(target.pid, STOP_TIMEOUT, || ()), Err(Error::Ended { .. })));
}

#[test]
fn a_process_killed_during_a_stop_is_reported_as_ended() {
    let target = Target::start(|shared| counting(shared, 4));
    let result = with_stopped(target.pid, STOP_TIMEOUT, |stopped| {
        target.signal(libc::SIGKILL);
        // The signal may take effect after this call.
        loop {
            if let Err(error) = stopped.syscall("getpid", libc::SYS_getpid, [0; 6]) {
                return error;
            }
        }
    });
    assert!(matches!(result, Ok(Error::Ended { .. })), "{result:?}");
    assert!(libc::WIFSIGNALED(target.ended()), "the parent reads the exit status");
    assert!(matches!(ask(&target), Err(Error::Ended { .. })));

    for round in 0..60 {
        let target = Target::start(|shared| {
            let end = move || thread::sleep(Duration::from_micros(round * 50));
            thread::spawn(move || counting(shared, 3));
            end();
            7
        });
        for _ in 0..10 {
            match ask(&target) {
                Ok(pid) => assert_eq!(pid, u64::try_from(target.pid).unwrap()),
                Err(Error::Ended { .. }) => break,
                Err(error) => panic!("round {round}: {error}"),
            }
        }
        assert_eq!(libc::WEXITSTATUS(target.ended()), 7, "round {round}");
    }
}

#[test]
fn a_process_that_calls_exec_during_stops_runs_the_new_program() {
    for round in 0..40_u64 {
        let target = Target::start(|shared| {
            for _ in 0..3 {
                thread::spawn(move || counting(shared, 1));
            }
            let exec = move || {
                thread::sleep(Duration::from_micros(round * 40));
                let arguments =
                    [c"sh".as_ptr(), c"-c".as_ptr(), c"exec sh -c 'exit 9'".as_ptr(), std::ptr::null()];
                let path = c"/bin/sh".as_ptr().expose_provenance();
                sys::call(libc::SYS_execve, [path, arguments.as_ptr().expose_provenance(), 0, 0, 0, 0])
                    .unwrap();
            };
            // A thread that is not the first calls exec, and takes its number.
            thread::spawn(exec).join().unwrap();
            0
        });
        for _ in 0..8 {
            match ask(&target) {
                Ok(pid) => assert_eq!(pid, u64::try_from(target.pid).unwrap()),
                // The only thread left works long in the kernel: it loads the new program.
                Err(Error::Unstoppable { threads, .. }) => {
                    assert!(threads.iter().all(|thread| thread.reason == Reason::Spins), "{threads:?}");
                }
                Err(Error::Ended { .. }) => {}
                Err(error) => panic!("round {round}: {error}"),
            }
        }
        let status = target.ended();
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 9, "round {round}: {status:#x}");
    }
}
