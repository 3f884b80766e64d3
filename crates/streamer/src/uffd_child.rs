// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process with a userfaultfd and missing memory, for tests.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rewake_pager::{Extent, PAGE_SIZE, Plan, ResidencyMap};
use rewake_uffd::Uffd;

use crate::cpu::AddressSpace;
use crate::ledger::{Ledger, NO_FD, SpaceSlot};
use crate::session::Session;
use crate::sys;

pub(crate) const PAGES: u64 = 4;
#[expect(clippy::cast_possible_truncation, reason = "16 KiB")]
const LEN: usize = (PAGES * PAGE_SIZE) as usize;
/// Fork, remap, remove and unmap events, as CRIU asks for.
const FEATURES: u64 = 0x2 | 0x4 | 0x8 | 0x40;

/// A child of this process. Dropping it kills and collects it.
pub(crate) struct UffdChild {
    pub(crate) pid: i32,
    /// This process's descriptor for the child's userfaultfd; the child has closed its own.
    pub(crate) uffd: RawFd,
    /// Where its missing pages are.
    pub(crate) start: u64,
}

impl UffdChild {
    /// Forks it. `act` gets the address of the missing pages; it may only make system calls and read memory.
    pub(crate) fn start(act: fn(u64)) -> Self {
        // SAFETY: a new private mapping, never unmapped.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(start, libc::MAP_FAILED);
        let (input, output) = nix::unistd::pipe().unwrap();
        let (taken, take) = nix::unistd::pipe().unwrap();
        // SAFETY: the child makes system calls only: see `child`.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            // With its own copy of this end it would outlast a test that fails before it writes to it.
            // SAFETY: this process's own copy, not used again.
            unsafe { libc::close(take.as_raw_fd()) };
            child(start as u64, output.as_raw_fd(), taken.as_raw_fd(), act);
        }
        drop((output, taken));
        let mut number = [0; 4];
        File::from(input).read_exact(&mut number).expect("the child opens a userfaultfd: needs root");
        let pidfd = sys::pidfd_open(pid).unwrap();
        // SAFETY: integers in, a descriptor out.
        let uffd =
            unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), i32::from_ne_bytes(number), 0) };
        let uffd = RawFd::try_from(uffd).unwrap();
        assert!(uffd >= 0);
        // Lets the child close its own descriptor and continue. It waits for a byte, since children of other
        // tests may have copies of this end.
        File::from(take).write_all(&[0]).unwrap();
        Self { pid, uffd, start: start as u64 }
    }

    /// A published slot for it, with a process descriptor if its pid is `known`.
    pub(crate) fn slot(&self, ledger: Ledger, known: bool) -> &'static SpaceSlot {
        let index = ledger.take_space().unwrap();
        let slot = &ledger.spaces()[index];
        slot.image_pid.store(self.pid, Ordering::Relaxed);
        slot.uffd.store(self.uffd, Ordering::Relaxed);
        if known {
            slot.host_pid.store(self.pid, Ordering::Relaxed);
            slot.pidfd.store(sys::pidfd_open(self.pid).unwrap().into_raw_fd(), Ordering::Relaxed);
        }
        slot.publish();
        slot
    }

    /// The reactor's address space for it: all pages missing.
    pub(crate) fn address_space(
        &self,
        session: &Arc<Session>,
        slot: &'static SpaceSlot,
    ) -> Arc<AddressSpace> {
        let extent = Extent { target: self.start, file: 0, file_offset: 0, pages: PAGES };
        let space = ResidencyMap::new(Arc::new(Plan::new(vec![extent]).unwrap()));
        // SAFETY: this process's own descriptor; the tests use `self.uffd` as a number from here on.
        let uffd = Uffd::adopt(unsafe { OwnedFd::from_raw_fd(self.uffd) }).unwrap();
        let counts = session.task_arrived(slot.host_pid.load(Ordering::Relaxed), PAGES);
        Arc::new(AddressSpace::new(Arc::clone(session), counts, slot, uffd, Arc::default(), space, 0))
    }

    /// One more descriptor for its userfaultfd, which is still open.
    pub(crate) fn copy(&self) -> OwnedFd {
        // SAFETY: tests call this before the descriptor can be closed.
        unsafe { BorrowedFd::borrow_raw(self.uffd) }.try_clone_to_owned().unwrap()
    }

    /// True while it can run.
    pub(crate) fn lives(&self) -> bool {
        !sys::has_ended(sys::pidfd_open(self.pid).unwrap().as_raw_fd())
    }
}

impl Drop for UffdChild {
    fn drop(&mut self) {
        kill(self.pid);
        // SAFETY: waits for a child of this process; no status is asked for.
        unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
    }
}

/// In a forked child of a process with threads: only system calls.
fn child(start: u64, tell: RawFd, taken: RawFd, act: fn(u64)) -> ! {
    let open = || {
        let uffd = Uffd::open(FEATURES).ok()?;
        uffd.register_missing(start, LEN as u64).ok()?;
        let number = uffd.as_fd().as_raw_fd().to_ne_bytes();
        // SAFETY: writes from and reads into live buffers of the lengths given, and closes what is not used
        // again.
        unsafe {
            libc::write(tell, number.as_ptr().cast(), number.len());
            libc::close(tell);
            libc::read(taken, [0_u8; 1].as_mut_ptr().cast(), 1);
        }
        Some(())
    };
    if open().is_some() {
        act(start);
    }
    // SAFETY: ends the child without running the test process's destructors.
    unsafe { libc::_exit(0) }
}

/// Sleeps until it is killed.
pub(crate) fn sleep(_: u64) {
    loop {
        // SAFETY: no pointers.
        unsafe { libc::pause() };
    }
}

/// Reads the first missing page.
pub(crate) fn access(start: u64) {
    // SAFETY: inside a mapping that is never unmapped; waits for the page.
    unsafe { (start as *const u8).read_volatile() };
}

/// Forks a child that reads the first missing page.
pub(crate) fn fork_and_access(start: u64) {
    // SAFETY: a process with one thread; the child only reads memory and ends.
    if unsafe { libc::fork() } == 0 {
        access(start);
    } else {
        sleep(start);
    }
}

/// True when descriptor `number` is open.
pub(crate) fn is_open(number: RawFd) -> bool {
    assert_ne!(number, NO_FD);
    // SAFETY: integers only.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

/// True when descriptor `number` is open and for the same file as `copy`: other tests may have got the number
/// since.
pub(crate) fn is_open_for(number: RawFd, copy: &OwnedFd) -> bool {
    let own = std::process::id().cast_signed();
    match rewake_process::kcmp::same_file(copy.as_raw_fd(), own, number) {
        Err(error) if error.raw_os_error() == Some(libc::EBADF) => false,
        same => same.expect("kcmp"),
    }
}

/// Waits up to a minute until `what` is true.
pub(crate) fn until(mut what: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !what() {
        assert!(Instant::now() < end, "the condition is still false after a minute");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends SIGKILL to a child of this process, which may have ended.
pub(crate) fn kill(pid: i32) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
}
