// SPDX-License-Identifier: MIT OR Apache-2.0
//! Setting an io_uring up: the best kind that this kernel has, with an eventfd that tells when to look.

use std::io;
#[cfg(test)]
use std::os::fd::FromRawFd as _;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};

use crate::waker::Waker;

/// How long set-up waits for a ring that should wake a poller after [`PROBE_DELAY`].
const PROBE_PATIENCE: Duration = Duration::from_millis(200);

/// When the set-up probe's timer fires: late enough that the poller sleeps by then.
const PROBE_DELAY: Duration = Duration::from_millis(2);

/// Ring flavours, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// Completions run when this thread asks for them (Linux 6.1).
    Deferred,
    /// Completions run at this thread's next system call, without interrupting it (5.19).
    Cooperative,
    Plain,
}

/// Makes the best ring for `depth` calls at once that the kernel accepts and that wakes who waits for its eventfd.
pub(crate) fn build(depth: usize) -> io::Result<(IoUring, Waker, Flavour)> {
    for flavour in [Flavour::Deferred, Flavour::Cooperative] {
        let Ok((mut ring, finished)) = build_as(flavour, depth) else { continue };
        if flavour != Flavour::Deferred || wakes_poller(&mut ring, &finished) {
            return Ok((ring, finished, flavour));
        }
    }
    let (ring, finished) = build_as(Flavour::Plain, depth)?;
    Ok((ring, finished, Flavour::Plain))
}

pub(crate) fn build_as(flavour: Flavour, depth: usize) -> io::Result<(IoUring, Waker)> {
    let mut builder = IoUring::builder();
    builder.dontfork();
    if flavour != Flavour::Plain {
        builder.setup_coop_taskrun().setup_taskrun_flag();
    }
    if flavour == Flavour::Deferred {
        builder.setup_single_issuer().setup_defer_taskrun();
    }
    let ring = builder.build(u32::try_from(depth.next_power_of_two()).unwrap_or(u32::MAX))?;
    let finished = Waker::new()?;
    ring.submitter().register_eventfd(finished.as_raw_fd())?;
    Ok((ring, finished))
}

/// Whether a completion that happens while this thread sleeps in poll on the eventfd ends that sleep.
fn wakes_poller(ring: &mut IoUring, finished: &Waker) -> bool {
    let delay = types::Timespec::from(PROBE_DELAY);
    // SAFETY: the kernel has copied `delay` when submit returns.
    unsafe { push(ring, &opcode::Timeout::new(&raw const delay).build()) };
    if ring.submit().is_err() {
        return false;
    }
    let woken = wait_readable(finished.as_raw_fd(), PROBE_PATIENCE);
    let completed = woken && ring.submit_and_wait(1).is_ok() && ring.completion().next().is_some();
    finished.drain();
    completed
}

/// Queues a call.
///
/// # Safety
/// The entry's pointers stay valid until its completion has been taken.
pub(crate) unsafe fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: the caller's promise.
    let pushed = unsafe { ring.submission().push(entry) };
    // Every user has a slot for each call, and rings are as long as there are slots.
    pushed.unwrap_or_else(|_| unreachable!("the submission queue is shorter than the number of slots"));
}

/// Whether there may be completions to take or to run, or calls that the kernel has not taken yet. **It can be wrong for as long as nothing else
/// happens:** the kernel queues a completion before it sets the flag that tells of it (`io_req_local_work_add`), and when this thread has run it
/// in between, the flag stays, until the next one. **Or right where there is nothing to take yet, and nobody will tell:** Linux 7.2's queue seems empty
/// while a producer is in the middle of it (`io_uring/mpscq.h`), and later ones do not signal. So whoever has found nothing must neither look again
/// at once nor wait for the eventfd alone, but look again soon.
pub(crate) fn may_have_work(ring: &mut IoUring) -> bool {
    if !ring.completion().is_empty() {
        return true;
    }
    let queue = ring.submission();
    queue.taskrun() || queue.cq_overflow() || !queue.is_empty()
}

/// Waits until the descriptor is readable; false when the time is up first. An interruption does not count:
/// the teardown of another ring of this thread causes them.
pub(crate) fn wait_readable(fd: RawFd, patience: Duration) -> bool {
    let give_up = Instant::now() + patience;
    loop {
        let left = give_up.saturating_duration_since(Instant::now());
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd that lives across the call.
        let ready =
            unsafe { libc::poll(&raw mut poll, 1, i32::try_from(left.as_millis()).unwrap_or(i32::MAX)) };
        let interrupted = ready < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        if !interrupted {
            return ready > 0;
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// `IORING_SQ_TASKRUN` of `sq_flags`, `IORING_OFF_SQ_RING`, and where `struct io_uring_params` has `sq_off.flags` (`include/uapi/linux/io_uring.h`).
    const TASKRUN: u32 = 4;
    const SQ_RING: libc::off_t = 0;
    const FLAGS_AT: usize = 56 / 4;

    /// Has the ring say that there is something to run, as the kernel does when it comes too late.
    pub(crate) fn leave_a_flag(ring: &IoUring) {
        let mut parameters = [0_u32; 30];
        // SAFETY: as many bytes as the struct has, which the kernel fills in.
        let other = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        assert!(other >= 0);
        // SAFETY: just opened.
        drop(unsafe { std::os::fd::OwnedFd::from_raw_fd(RawFd::try_from(other).unwrap()) });
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a second view of the ring's first page, anywhere.
        let view = unsafe {
            libc::mmap(std::ptr::null_mut(), 4096, rights, libc::MAP_SHARED, ring.as_raw_fd(), SQ_RING)
        };
        assert_ne!(view, libc::MAP_FAILED);
        let at = parameters[FLAGS_AT] as usize;
        assert!(at < 4096);
        // SAFETY: an aligned word of that page, which others use atomically, too.
        let flags = unsafe { std::sync::atomic::AtomicU32::from_ptr(view.cast::<u8>().add(at).cast()) };
        flags.fetch_or(TASKRUN, std::sync::atomic::Ordering::SeqCst);
        // SAFETY: nobody uses this view any more.
        unsafe { libc::munmap(view, 4096) };
    }

    /// Fails where `act` does not end.
    pub(crate) fn ends(act: impl FnOnce() + Send + 'static) {
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            act();
            done.send(()).unwrap();
        });
        is_done.recv_timeout(Duration::from_secs(60)).expect("it does not end");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeping_poller_is_woken_by_every_kind_of_ring() {
        for flavour in [Flavour::Deferred, Flavour::Cooperative, Flavour::Plain] {
            let (mut ring, finished) = build_as(flavour, 8).expect("this kernel has every kind of ring");
            for _ in 0..20 {
                assert!(wakes_poller(&mut ring, &finished), "{flavour:?}");
                assert!(!wait_readable(finished.as_raw_fd(), Duration::ZERO), "{flavour:?} is never silent");
            }
        }
    }
}
