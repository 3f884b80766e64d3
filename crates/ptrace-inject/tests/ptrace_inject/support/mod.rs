// SPDX-License-Identifier: MIT OR Apache-2.0
//! Target processes: forks of the test, with a shared page.
#![allow(dead_code, unreachable_pub, reason = "each test file is a program of its own and uses a part")]

pub mod memory;
pub mod sys;

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time that threads get to stop. It is long, because test machines are busy.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// The timeout of all other waits.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Words that test and target share.
#[derive(Debug, Clone, Copy)]
pub struct Shared(&'static [AtomicU64]);

impl Shared {
    pub fn get(&self, word: usize) -> u64 {
        self.0[word].load(Ordering::SeqCst)
    }

    pub fn set(&self, word: usize, value: u64) {
        self.0[word].store(value, Ordering::SeqCst);
    }

    pub fn add(&self, word: usize) -> u64 {
        self.0[word].fetch_add(1, Ordering::SeqCst)
    }

    pub fn word(&self, word: usize) -> &'static AtomicU64 {
        &self.0[word]
    }

    /// Waits until a word satisfies `is`, and returns it.
    #[track_caller]
    pub fn wait(&self, word: usize, is: impl Fn(u64) -> bool) -> u64 {
        within(
            || Some(self.get(word)).filter(|value| is(*value)),
            || format!("word {word} is {}", self.get(word)),
        )
    }
}

/// Waits until `look` returns a value.
#[track_caller]
pub fn within<T>(look: impl Fn() -> Option<T>, or: impl Fn() -> String) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < TEST_TIMEOUT, "not in time: {}", or());
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// A process that a drop kills and reaps, and that dies with the test.
#[derive(Debug)]
pub struct Target {
    pub pid: i32,
    pub shared: Shared,
}

impl Target {
    /// Forks a process that runs `body`, and ends with its result.
    pub fn start(body: impl FnOnce(Shared) -> i32) -> Self {
        let shared = Shared(sys::shared_words());
        let pid = sys::fork(|| body(shared));
        Self { pid, shared }
    }

    /// Returns the state letter of a thread.
    pub fn state(&self, tid: i32) -> char {
        self.state_of_any(tid).expect("a thread")
    }

    /// As [`Target::state`], for a thread that may have ended.
    pub fn state_of_any(&self, tid: i32) -> Option<char> {
        status_field(self.pid, tid, "State:")?.chars().next()
    }

    pub fn tracer(&self) -> String {
        status_field(self.pid, self.pid, "TracerPid:").expect("a process")
    }

    pub fn threads(&self) -> Vec<i32> {
        let entries = fs::read_dir(format!("/proc/{}/task", self.pid)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
    }

    /// Waits until the process has ended, and returns its wait status.
    #[track_caller]
    pub fn ended(&self) -> i32 {
        within(|| sys::reap(self.pid), || format!("process {} runs: {}", self.pid, self.threads_now()))
    }

    /// What each thread is and does, for messages.
    fn threads_now(&self) -> String {
        let of = |tid: i32| {
            let file = |name: &str| {
                let text = fs::read_to_string(format!("/proc/{}/task/{tid}/{name}", self.pid));
                text.map_or_else(|error| error.to_string(), |text| text.trim().to_owned())
            };
            let [name, call, place] = ["comm", "syscall", "wchan"].map(file);
            format!("{tid} {name} is {:?} in {place}, system call {call}", self.state_of_any(tid))
        };
        self.threads().into_iter().map(of).collect::<Vec<_>>().join("; ")
    }

    pub fn signal(&self, signal: i32) {
        sys::kill(self.pid, signal);
    }

    /// Waits until a thread sleeps in system call `number`.
    #[track_caller]
    pub fn sleeps_in(&self, tid: i32, number: i64) {
        within(|| self.is_in(tid, number).then_some(()), || self.call(tid));
    }

    /// Returns whether a thread sleeps in system call `number` now.
    pub fn is_in(&self, tid: i32, number: i64) -> bool {
        self.call(tid).split_whitespace().next() == Some(&number.to_string())
    }

    fn call(&self, tid: i32) -> String {
        fs::read_to_string(format!("/proc/{}/task/{tid}/syscall", self.pid)).unwrap()
    }

    pub fn maps(&self) -> String {
        fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        sys::kill(self.pid, libc::SIGKILL);
        while !std::thread::panicking() && sys::reap(self.pid).is_none() && sys::exists(self.pid) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Returns a field of a thread's status, or `None` if it has ended.
fn status_field(pid: i32, tid: i32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned())
}
