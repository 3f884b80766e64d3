// SPDX-License-Identifier: MIT OR Apache-2.0
//! Our ABI module against the `userfaultfd` crate and against the kernel: what one side does, the other sees.

use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use rewake_uffd::{FillPort as _, Message, PAGE_SIZE, RawMessage, Stop, Uffd, abi, memory_is_gone};
use userfaultfd::{Event, FeatureFlags, UffdBuilder};

const PAGE: usize = 4096;

/// One test at a time: a fork in one is an event, and a second owner of descriptors, in the others.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Anonymous memory that is never unmapped: test threads may still wait in it.
fn map(pages: usize) -> *mut u8 {
    // SAFETY: a new private mapping.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            pages * PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(start, libc::MAP_FAILED);
    start.cast()
}

/// A watched range of `pages` pages, opened and registered by the other crate.
fn watched(pages: usize) -> (Uffd, u64) {
    let features = FeatureFlags::EVENT_REMOVE | FeatureFlags::EVENT_UNMAP | FeatureFlags::EVENT_REMAP;
    let theirs = UffdBuilder::new()
        .close_on_exec(true)
        .non_blocking(true)
        .user_mode_only(false)
        .require_features(features)
        .create()
        .expect("root, or vm.unprivileged_userfaultfd=1");
    let start = map(pages);
    theirs.register(start.cast(), pages * PAGE).unwrap();
    // Not into_raw_fd: in 0.9.0 that closes the descriptor which it returns.
    let theirs = std::mem::ManuallyDrop::new(theirs);
    // SAFETY: never dropped there, so owned here alone.
    let ours = Uffd::adopt(unsafe { OwnedFd::from_raw_fd(theirs.as_raw_fd()) }).unwrap();
    (ours, start as u64)
}

fn read_byte(address: u64) -> u8 {
    // SAFETY: inside a mapping that is never unmapped; may wait for the page.
    unsafe { (address as *const u8).read_volatile() }
}

fn next(uffd: &Uffd) -> Message {
    let mut slots = [RawMessage::default(); 4];
    loop {
        if uffd.read(&mut slots).unwrap() > 0 {
            return slots[0].decode().unwrap();
        }
        thread::yield_now();
    }
}

#[test]
fn a_fault_on_a_range_registered_by_the_crate_is_read_and_served_by_us() {
    let _alone = alone();
    let (uffd, start) = watched(4);
    let reader = thread::spawn(move || read_byte(start + PAGE_SIZE + 5));
    assert_eq!(next(&uffd), Message::Fault { address: start + PAGE_SIZE });
    let outcome = uffd.copy(start + PAGE_SIZE, &[0x5a; PAGE]);
    assert!(outcome.complete(PAGE_SIZE) && outcome.stop.is_none());
    assert_eq!(reader.join().unwrap(), 0x5a);
}

#[test]
fn a_fault_on_a_range_registered_by_us_is_read_and_served_by_the_crate() {
    let _alone = alone();
    let ours = Uffd::open(abi::FEATURES_CRIU).unwrap();
    let start = map(2) as u64;
    ours.register_missing(start, 2 * PAGE_SIZE).unwrap();
    // SAFETY: into_raw_fd gave the descriptor up.
    let theirs = unsafe { userfaultfd::Uffd::from_raw_fd(ours.into_raw_fd()) };
    let reader = thread::spawn(move || read_byte(start));
    let event = loop {
        if let Some(event) = theirs.read_event().unwrap() {
            break event;
        }
    };
    let Event::Pagefault { addr, .. } = event else { panic!("{event:?}") };
    assert_eq!(addr as u64 & !(PAGE_SIZE - 1), start);
    let page = [7_u8; PAGE];
    // SAFETY: the page is watched and missing; the source is a whole page.
    unsafe { theirs.copy(page.as_ptr().cast(), start as *mut _, PAGE, true) }.unwrap();
    assert_eq!(reader.join().unwrap(), 7);
}

#[test]
fn a_fill_over_a_present_page_stops_there_and_says_so() {
    let _alone = alone();
    let (uffd, start) = watched(4);
    assert!(uffd.copy(start + 2 * PAGE_SIZE, &[1; PAGE]).complete(PAGE_SIZE));
    let first = uffd.copy(start, &[2; 4 * PAGE]);
    assert_eq!((first.bytes, first.stop), (2 * PAGE_SIZE, None));
    let second = uffd.copy(start + 2 * PAGE_SIZE, &[2; 2 * PAGE]);
    assert_eq!((second.bytes, second.stop), (0, Some(Stop::Present)));
    assert_eq!(read_byte(start + 2 * PAGE_SIZE), 1);
}

#[test]
fn zero_pages_are_zero_and_a_range_that_is_not_watched_is_told() {
    let _alone = alone();
    let (uffd, start) = watched(2);
    assert!(uffd.zero(start, 2 * PAGE_SIZE).complete(2 * PAGE_SIZE));
    assert_eq!(read_byte(start + PAGE_SIZE), 0);
    let elsewhere = map(1) as u64;
    assert_eq!(uffd.copy(elsewhere, &[0; PAGE]).stop, Some(Stop::NotMapped));
}

#[test]
fn while_the_program_drops_memory_fills_are_put_off_until_the_event_is_read() {
    let _alone = alone();
    let (uffd, start) = watched(4);
    assert!(!uffd.changing());
    let dropper = thread::spawn(move || {
        // SAFETY: drops pages of a mapping that holds nothing of ours.
        unsafe { libc::madvise(start as *mut _, 2 * PAGE, libc::MADV_DONTNEED) }
    });
    while !uffd.changing() {
        thread::yield_now();
    }
    assert_eq!(uffd.copy(start, &[1; PAGE]).stop, Some(Stop::Changing));
    assert_eq!(next(&uffd), Message::Remove { start, end: start + 2 * PAGE_SIZE });
    assert_eq!(dropper.join().unwrap(), 0);
    assert!(!uffd.changing());
    assert!(uffd.copy(start, &[1; PAGE]).complete(PAGE_SIZE));
}

#[test]
fn a_poisoned_page_stays_poisoned_after_the_descriptor_is_closed() {
    let _alone = alone();
    let (uffd, start) = watched(1);
    assert!(uffd.poison(start, PAGE_SIZE).complete(PAGE_SIZE));
    drop(uffd);
    let status = in_child(|| {
        read_byte(start);
        0
    });
    assert_eq!(status, libc::SIGBUS);
}

#[test]
fn asking_whether_memory_is_gone_changes_nothing() {
    let _alone = alone();
    let (uffd, start) = watched(1);
    assert!(!memory_is_gone(uffd.as_fd()));
    assert!(uffd.copy(start, &[1; PAGE]).complete(PAGE_SIZE));
    assert!(!memory_is_gone(uffd.as_fd()));
}

#[test]
fn closing_the_last_descriptor_gives_zeros_which_is_why_it_must_not_happen() {
    let _alone = alone();
    let (uffd, start) = watched(1);
    drop(uffd);
    assert_eq!(read_byte(start), 0);
}

/// Runs in a forked child; gives the signal that ended it, or its exit code.
fn in_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child touches memory and exits: no lock, no allocation.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = body();
        // SAFETY: ends the child without destructors.
        unsafe { libc::_exit(code) }
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
}
