// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measures stops, calls and swaps. `cargo test --release -p rewake-ptrace-inject measure -- --ignored
//! --nocapture`

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::memory::{FREE, PAGE, Scene};
use crate::support::{STOP_TIMEOUT, sys};
use rewake_ptrace_inject::{Stopped, with_stopped};

const ROUNDS: usize = 300;
const READY: usize = FREE;

/// A target with `threads` threads that sleep, or compute if `busy`.
fn scene(threads: usize, pages: usize, busy: bool) -> Scene {
    let scene = Scene::start(pages, |hand| {
        let one = move || {
            hand.shared.add(READY);
            loop {
                match busy {
                    true => drop(hand.shared.word(READY + 1).fetch_add(1, Ordering::Relaxed)),
                    false => thread::sleep(Duration::from_secs(1)),
                }
            }
        };
        for _ in 1..threads {
            thread::spawn(one);
        }
        one()
    });
    scene.shared().wait(READY, |count| count == threads as u64);
    scene
}

/// Starts a target with `count` placeholders of a page, which are separate mappings and not adjacent.
fn apart(count: usize) -> Scene {
    let scene = Scene::start(2 * count, |hand| {
        for gap in (PAGE..2 * count * PAGE).step_by(2 * PAGE) {
            sys::call(libc::SYS_munmap, [hand.address + gap, PAGE, 0, 0, 0, 0]).unwrap();
        }
        hand.shared.set(READY, 1);
        loop {
            thread::sleep(Duration::from_secs(1));
        }
    });
    scene.shared().wait(READY, |ready| ready == 1);
    scene
}

fn tell(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |part: usize| times[times.len() * part / 100].as_secs_f64() * 1e6;
    println!("{what:<44} median {:8.1} us   90 % {:8.1} us", at(50), at(90));
}

fn measure(what: &str, mut once: impl FnMut(usize) -> Duration) {
    tell(what, (0..ROUNDS).map(&mut once).collect());
}

#[test]
#[ignore = "a measurement"]
fn stops_calls_and_swaps() {
    for (threads, busy) in [(1, false), (16, false), (1, true), (16, true)] {
        let target = scene(threads, 1, busy);
        let pid = target.target.pid;
        let kind = if busy { "that compute" } else { "that sleep" };
        measure(&format!("stopped and resumed, {threads} threads {kind}"), |_| {
            let start = Instant::now();
            with_stopped(pid, STOP_TIMEOUT, |_| ()).unwrap();
            start.elapsed()
        });
    }
    let target = scene(1, 1, false);
    with_stopped(target.target.pid, STOP_TIMEOUT, |stopped| {
        measure("one injected call", |_| {
            let start = Instant::now();
            stopped.syscall("getpid", libc::SYS_getpid, [0; 6]).unwrap();
            start.elapsed()
        });
    })
    .unwrap();
    for threads in [1, 16] {
        let scene = scene(threads, ROUNDS, false);
        measure(&format!("one swap inside a stop, {threads} threads"), |page| {
            let swap = [scene.request(page * PAGE, PAGE)];
            scene
                .stopped(|stopped| {
                    let start = Instant::now();
                    assert_eq!(scene.swap_in(stopped, &swap).unwrap().len(), 1);
                    start.elapsed()
                })
                .unwrap()
        });
    }
    for threads in [1, 16] {
        let scene = scene(threads, ROUNDS, false);
        measure(&format!("stop, swap, resume, wake, {threads} threads"), |page| {
            let start = Instant::now();
            assert_eq!(scene.swap_part(page * PAGE, PAGE).unwrap().len(), 1);
            start.elapsed()
        });
    }
}

#[test]
#[ignore = "a measurement"]
fn many_swaps_in_one_stop() {
    for (there, swapped) in [(1, 1), (100, 100), (2000, 2000), (64, 64), (2000, 64), (10_000, 64)] {
        let rounds = (1000 / swapped).clamp(5, 100);
        let once = |_| {
            let scene = apart(there);
            let swaps: Vec<_> = (0..swapped).map(|page| scene.request(2 * page * PAGE, PAGE)).collect();
            let in_stop = |stopped: &mut Stopped<'_>| {
                assert_eq!(scene.swap_in(stopped, &swaps).unwrap().len(), swapped);
                stopped.since().elapsed()
            };
            scene.stopped(in_stop).unwrap()
        };
        let (count, times) = (u32::try_from(swapped).unwrap(), (0..rounds).map(once).collect::<Vec<_>>());
        let each = times.iter().map(|time| *time / count).collect();
        tell(&format!("a stop of {swapped} swaps, {there} placeholders there"), times);
        tell("of it each swap", each);
    }
}
