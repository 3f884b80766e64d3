// SPDX-License-Identifier: MIT OR Apache-2.0
//! System calls of the tests.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;

/// Forks. The child runs `body` and exits with its result, or with 101 if it panics. It dies with the test's
/// thread.
pub fn fork(body: impl FnOnce() -> i32) -> i32 {
    let parent = std::process::id();
    // SAFETY: the child allocates, which glibc allows after a fork, and takes no lock that tests hold while
    // forking.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", io::Error::last_os_error());
    if pid > 0 {
        return pid;
    }
    // SAFETY: integers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if std::os::unix::process::parent_id() != parent {
        // SAFETY: the parent has ended before it could have ended this process.
        unsafe { libc::_exit(0) }
    }
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or(101);
    // SAFETY: ends this process, all threads.
    unsafe { libc::_exit(result) }
}

/// Maps a page of words that forks share. It is never unmapped.
pub fn shared_words() -> &'static [AtomicU64] {
    let page =
        map(0, 4096, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0);
    let words: *const AtomicU64 = std::ptr::with_exposed_provenance(page);
    // SAFETY: a mapping of 512 words that is never unmapped, only used as atomics.
    unsafe { std::slice::from_raw_parts(words, 512) }
}

/// Calls `mmap(2)`, and panics if it fails.
#[track_caller]
pub fn map(address: usize, length: usize, protection: i32, flags: i32, file: RawFd, offset: i64) -> usize {
    let hint = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: tests map with MAP_FIXED only over what they have mapped for it.
    let mapped = unsafe { libc::mmap(hint, length, protection, flags, file, offset) };
    assert!(mapped != libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
    mapped.expose_provenance()
}

/// Makes any system call. Tests pass addresses of their own mapped memory.
pub fn call(number: i64, arguments: [usize; 6]) -> io::Result<i64> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: as above.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

pub fn kill(pid: i32, signal: i32) {
    // SAFETY: integers only.
    unsafe { libc::kill(pid, signal) };
}

/// Queues a real-time signal.
pub fn queue(pid: i32, signal: i32) -> io::Result<()> {
    let value = libc::sigval { sival_ptr: std::ptr::null_mut() };
    // SAFETY: integers only.
    if unsafe { libc::sigqueue(pid, signal, value) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub fn exists(pid: i32) -> bool {
    // SAFETY: integers only; no signal.
    unsafe { libc::kill(pid, 0) == 0 }
}

/// Returns the wait status of a child that has ended.
pub fn reap(pid: i32) -> Option<i32> {
    let mut status = 0;
    // SAFETY: the kernel writes one int.
    let result = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    (result == pid).then_some(status)
}

pub fn gettid() -> i32 {
    // SAFETY: nothing in, an integer out.
    unsafe { libc::gettid() }
}

/// Installs `handler` for `signal`.
pub fn on_signal(signal: i32, handler: extern "C" fn(i32), flags: i32) {
    // SAFETY: zeros are a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = (handler as *const ()).expose_provenance();
    action.sa_flags = flags;
    // SAFETY: a live sigaction; handlers only use atomics.
    assert_eq!(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
}

/// Creates a memfd.
pub fn memory_file(length: u64) -> File {
    // SAFETY: a live C string; a new descriptor comes out.
    let file = unsafe { libc::memfd_create(c"test".as_ptr(), 0) };
    let file = File::from(owned(file));
    file.set_len(length).unwrap();
    file
}

/// Creates a pipe, and returns its read end and its write end.
pub fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [-1; 2];
    // SAFETY: the kernel writes two ints.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    (owned(ends[0]), owned(ends[1]))
}

/// Copies descriptor `number` of process `pid` into this process.
pub fn take_descriptor(pid: i32, number: RawFd) -> OwnedFd {
    let word = |value: i32| usize::try_from(value).unwrap();
    let pidfd = call(libc::SYS_pidfd_open, [word(pid), 0, 0, 0, 0, 0]).unwrap();
    let pidfd = owned(i32::try_from(pidfd).unwrap());
    let number = [word(std::os::fd::AsRawFd::as_raw_fd(&pidfd)), word(number), 0, 0, 0, 0];
    owned(i32::try_from(call(libc::SYS_pidfd_getfd, number).unwrap()).unwrap())
}

#[track_caller]
fn owned(number: RawFd) -> OwnedFd {
    assert!(number >= 0, "{}", io::Error::last_os_error());
    // SAFETY: callers pass what a system call has just opened.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Starts a child that shares this process's memory, as vfork does. It sleeps until the word is set. Returns
/// when it has ended.
pub fn share_memory(until: &'static AtomicU64) {
    extern "C" fn sleep_until(until: *mut libc::c_void) -> i32 {
        let time = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        // SAFETY: integers only.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        // SAFETY: the word given below; lives for ever.
        while unsafe { &*until.cast::<AtomicU64>() }.load(std::sync::atomic::Ordering::SeqCst) == 0 {
            // SAFETY: a live timespec.
            unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0) };
        }
        0
    }
    let mut stack = vec![0_u8; 64 << 10];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let until = std::ptr::from_ref(until).cast_mut().cast();
    // SAFETY: the child has a stack of its own, which lives until it has ended, and makes system calls only.
    let child = unsafe { libc::clone(sleep_until, stack.as_mut_ptr_range().end.cast(), flags, until) };
    assert!(child > 0, "clone: {}", io::Error::last_os_error());
}

/// Spins in a restartable sequence until the word is set. Returns 1 if it reached the end, and 2 if it was
/// aborted.
pub fn spin(until: &'static AtomicU64) -> u64 {
    unsafe extern "C" {
        static __rseq_offset: libc::ptrdiff_t;
        fn rewake_spin(until: *const AtomicU64, present: usize) -> u64;
    }
    let thread: usize;
    // SAFETY: reads the thread pointer, which x86-64 keeps at its own address.
    unsafe { std::arch::asm!("mov {}, fs:[0]", out(reg) thread, options(nostack, readonly)) };
    // SAFETY: glibc sets it when it starts.
    let offset = unsafe { __rseq_offset };
    // SAFETY: the word lives for ever, the address is that of `rseq_cs` in this thread's area, which glibc
    // registered.
    unsafe { rewake_spin(until, thread.wrapping_add_signed(offset) + 8) }
}
