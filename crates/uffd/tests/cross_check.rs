// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks the ABI module against the `userfaultfd` crate and the kernel: each side sees what the other does.

use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rewake_uffd::{FillPort as _, Message, PAGE_SIZE, RawMessage, Stop, Uffd, abi, address_space_ended};
use userfaultfd::{Event, FeatureFlags, UffdBuilder};

const PAGE: usize = 4096;

/// Runs one test at a time: a fork in one is an event in the others, and a second owner of their descriptors.
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

/// Opens and registers a range of `pages` pages with the other crate.
fn registered(pages: usize) -> (Uffd, u64) {
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
    // Not into_raw_fd: in 0.9.0 it closes the descriptor that it returns.
    let theirs = std::mem::ManuallyDrop::new(theirs);
    // SAFETY: `theirs` is never dropped, so this is the only owner.
    let ours = Uffd::adopt(unsafe { OwnedFd::from_raw_fd(theirs.as_raw_fd()) }).unwrap();
    (ours, start as u64)
}

fn read_byte(address: u64) -> u8 {
    // SAFETY: inside a mapping that is never unmapped; the read may wait for the page.
    unsafe { (address as *const u8).read_volatile() }
}

fn next(uffd: &Uffd) -> Message {
    let mut slots = [RawMessage::default()];
    let end = Instant::now() + Duration::from_secs(60);
    while uffd.read(&mut slots).unwrap() == 0 {
        assert!(Instant::now() < end, "no message within a minute");
        thread::yield_now();
    }
    slots[0].decode().unwrap()
}

#[test]
fn a_fault_on_the_crate_s_range_is_served_by_rewake() {
    let _alone = alone();
    let (uffd, start) = registered(4);
    let reader = thread::spawn(move || read_byte(start + PAGE_SIZE + 5));
    assert_eq!(next(&uffd), Message::Fault { address: start + PAGE_SIZE });
    let outcome = uffd.copy(start + PAGE_SIZE, &[0x5a; PAGE]);
    assert!(outcome.complete(PAGE_SIZE) && outcome.stop.is_none());
    assert_eq!(reader.join().unwrap(), 0x5a);
}

#[test]
fn a_fault_on_rewake_s_range_is_served_by_the_crate() {
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
    // SAFETY: the page is registered and missing; the source is a whole page.
    unsafe { theirs.copy(page.as_ptr().cast(), start as *mut _, PAGE, true) }.unwrap();
    assert_eq!(reader.join().unwrap(), 7);
}

#[test]
fn a_fill_stops_at_a_resident_page() {
    let _alone = alone();
    let (uffd, start) = registered(4);
    assert!(uffd.copy(start + 2 * PAGE_SIZE, &[1; PAGE]).complete(PAGE_SIZE));
    let first = uffd.copy(start, &[2; 4 * PAGE]);
    assert_eq!((first.bytes, first.stop), (2 * PAGE_SIZE, None));
    let second = uffd.copy(start + 2 * PAGE_SIZE, &[2; 2 * PAGE]);
    assert_eq!((second.bytes, second.stop), (0, Some(Stop::Present)));
    assert_eq!(read_byte(start + 2 * PAGE_SIZE), 1);
}

#[test]
fn zero_pages_are_zero_and_unregistered_ranges_are_refused() {
    let _alone = alone();
    let (uffd, start) = registered(2);
    assert!(uffd.zero(start, 2 * PAGE_SIZE).complete(2 * PAGE_SIZE));
    assert_eq!(read_byte(start + PAGE_SIZE), 0);
    let elsewhere = map(1) as u64;
    assert_eq!(uffd.copy(elsewhere, &[0; PAGE]).stop, Some(Stop::NotMapped));
}

#[test]
fn fills_are_refused_until_the_event_of_dropped_memory_is_read() {
    let _alone = alone();
    let (uffd, start) = registered(4);
    assert!(!uffd.changing());
    let dropper = thread::spawn(move || {
        // SAFETY: drops pages of a mapping without Rust values.
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

/// A successor wakes threads whose messages a killed worker had read: the kernel sends a message a thread
/// only once.
#[test]
fn a_wake_of_a_range_has_each_of_its_waiting_threads_report_its_page_again() {
    let _alone = alone();
    let (uffd, start) = registered(4);
    let pages = [1, 3].map(|page| start + page * PAGE_SIZE);
    let readers = pages.map(|address| {
        let reader = thread::spawn(move || read_byte(address));
        assert_eq!(next(&uffd), Message::Fault { address });
        reader
    });
    uffd.wake(start, 4 * PAGE_SIZE).unwrap();
    for _ in pages {
        let Message::Fault { address } = next(&uffd) else { panic!("only page faults") };
        assert!(uffd.copy(address, &[9; PAGE]).complete(PAGE_SIZE), "each page once");
    }
    assert_eq!(readers.map(|reader| reader.join().unwrap()), [9, 9]);
}

#[test]
fn a_poisoned_page_stays_poisoned_after_the_last_close() {
    let _alone = alone();
    let (uffd, start) = registered(1);
    assert!(uffd.poison(start, PAGE_SIZE).complete(PAGE_SIZE));
    drop(uffd);
    let status = in_child(|| {
        read_byte(start);
        0
    });
    assert_eq!(status, libc::SIGBUS);
}

#[test]
fn the_query_for_ended_memory_changes_nothing() {
    let _alone = alone();
    let (uffd, start) = registered(1);
    assert!(!address_space_ended(uffd.as_fd()));
    assert!(uffd.copy(start, &[1; PAGE]).complete(PAGE_SIZE));
    assert!(!address_space_ended(uffd.as_fd()));
}

#[test]
fn closing_the_last_descriptor_turns_missing_pages_into_zeros() {
    let _alone = alone();
    let (uffd, start) = registered(1);
    drop(uffd);
    assert_eq!(read_byte(start), 0);
}

/// Runs `body` in a forked child. Returns the signal that ended it, or its exit code.
fn in_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child accesses memory and exits: no lock, no allocation.
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
