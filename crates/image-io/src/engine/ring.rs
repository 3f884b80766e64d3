// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sets up the best io_uring that this kernel has, with an eventfd, and finds its completions.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use io_uring::{EnterFlags, IoUring, opcode, squeue, types};

use rewake_process::Notifier;

/// How long set-up waits for a ring that should wake a poller after [`PROBE_DELAY`].
const PROBE_LIMIT: Duration = Duration::from_millis(200);

/// When the set-up probe's timer fires: late enough that the poller sleeps by then.
const PROBE_DELAY: Duration = Duration::from_millis(2);

/// Times that the kernel is entered to take queued calls before they are left to the next flush. It refuses
/// only under memory pressure.
const MAX_ENTERS: u32 = 8;

/// How long a clear flag is trusted while calls are in flight. A completion without the flag is found after
/// at most twice this time. Disks complete calls more often than that, so that few checks are in vain: one
/// costs about 15 µs of CPU time.
pub(crate) const CLEAR_FLAG_INTERVAL: Duration = Duration::from_millis(5);

/// How long a set flag without a completion is trusted: the completion is expected soon.
const SET_FLAG_INTERVAL: Duration = Duration::from_millis(1);

/// Kinds of rings, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// Completions run when this thread enters the kernel for them (Linux 6.1).
    Deferred,
    /// Completions run at this thread's next system call, without interrupting it (5.19).
    Cooperative,
    Plain,
}

/// Makes the best ring for `depth` calls at once that the kernel accepts and whose eventfd wakes a poller.
pub(crate) fn build(depth: usize) -> io::Result<(IoUring, Notifier, Flavour)> {
    for flavour in [Flavour::Deferred, Flavour::Cooperative] {
        let Ok((mut ring, finished)) = build_as(flavour, depth) else { continue };
        if flavour != Flavour::Deferred || wakes_poller(&mut ring, &finished) {
            return Ok((ring, finished, flavour));
        }
    }
    let (ring, finished) = build_as(Flavour::Plain, depth)?;
    Ok((ring, finished, Flavour::Plain))
}

pub(crate) fn build_as(flavour: Flavour, depth: usize) -> io::Result<(IoUring, Notifier)> {
    let mut builder = IoUring::builder();
    builder.dontfork();
    if flavour != Flavour::Plain {
        builder.setup_coop_taskrun().setup_taskrun_flag();
    }
    if flavour == Flavour::Deferred {
        builder.setup_single_issuer().setup_defer_taskrun();
    }
    let ring = builder.build(u32::try_from(depth.next_power_of_two()).unwrap_or(u32::MAX))?;
    let finished = Notifier::new()?;
    ring.submitter().register_eventfd(finished.as_raw_fd())?;
    Ok((ring, finished))
}

/// Whether a completion that happens while this thread sleeps in poll on the eventfd ends that sleep.
fn wakes_poller(ring: &mut IoUring, finished: &Notifier) -> bool {
    let delay = types::Timespec::from(PROBE_DELAY);
    // SAFETY: the kernel has copied `delay` when submit returns.
    unsafe { push(ring, &opcode::Timeout::new(&raw const delay).build()) };
    if ring.submit().is_err() {
        return false;
    }
    let woken = wait_readable(finished.as_raw_fd(), PROBE_LIMIT);
    let completed = woken && ring.submit_and_wait(1).is_ok() && ring.completion().next().is_some();
    finished.drain();
    completed
}

/// Queues a call.
///
/// # Safety
/// The entry's pointers stay valid until its completion has been taken.
pub(crate) unsafe fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: the caller's contract.
    let pushed = unsafe { ring.submission().push(entry) };
    // Every user has a slot for each call, and a ring is as long as the number of slots.
    pushed.unwrap_or_else(|_| unreachable!("the submission queue is shorter than the number of slots"));
}

/// Gives queued calls to the kernel and has it run completions, also while the flag is clear: `submit` does
/// not.
fn enter(ring: &mut IoUring) {
    for _ in 0..MAX_ENTERS {
        let queued = u32::try_from(ring.submission().len()).unwrap_or(0);
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no more calls than are queued, whose pointers are valid by the contract of `push`. The call
        // does not wait and has no argument.
        let entered = unsafe { ring.submitter().enter::<libc::sigset_t>(queued, 0, flags, None) };
        // Errors are temporary: interrupted, or no memory. What stays queued is submitted with the next call.
        if entered.is_ok() && ring.submission().is_empty() {
            return;
        }
    }
}

/// Gives queued calls to the kernel, if any.
pub(crate) fn flush(ring: &mut IoUring) {
    if !ring.submission().is_empty() {
        enter(ring);
    }
}

/// Decides when to enter the kernel for completions, and how long to trust a clear flag.
///
/// **The flag can be set without a completion.** The kernel queues a completion before it sets the flag
/// (`io_req_local_work_add`). If this thread runs the completion in between, the flag stays set until the
/// next one. So a caller that found nothing must not check again at once.
///
/// **The flag can be clear with a completion waiting.** Linux 7.2's queue seems empty while a producer is
/// adding to it (`io_uring/mpscq.h`). Later producers do not signal. So while calls are in flight, the kernel
/// is entered each [`CLEAR_FLAG_INTERVAL`], also with a clear flag. Users have to check that often
/// ([`CompletionPoller::patience`]).
#[derive(Debug, Default)]
pub(crate) struct CompletionPoller {
    /// When the kernel was last entered, or a ring with calls in flight was first trusted. None: no calls are
    /// in flight.
    entered_at: Option<Instant>,
    /// The flag was set without a completion.
    found_nothing: bool,
}

impl CompletionPoller {
    /// Has the kernel run completions. Returns whether the ring has some: then take them, and call again.
    pub(crate) fn look(&mut self, ring: &mut IoUring, event: &Notifier, in_flight: usize) -> bool {
        self.look_at(ring, event, in_flight, Instant::now())
    }

    fn look_at(&mut self, ring: &mut IoUring, event: &Notifier, in_flight: usize, now: Instant) -> bool {
        // Drained before the check, not after: a later completion signals it again. Running completions
        // signals it too, so this happens each time.
        event.drain();
        let entered_at = *self.entered_at.get_or_insert(now);
        if may_have_work(ring) || now.saturating_duration_since(entered_at) >= CLEAR_FLAG_INTERVAL {
            self.entered_at = Some(now);
            enter(ring);
        }
        let any = !ring.completion().is_empty();
        self.found_nothing = !any && may_have_work(ring);
        if !any && in_flight == 0 {
            self.entered_at = None;
        }
        any
    }

    /// How long to wait for the eventfd at most before the next check.
    pub(crate) fn patience(&self, in_flight: usize) -> Duration {
        match in_flight {
            0 => Duration::MAX,
            _ if self.found_nothing => SET_FLAG_INTERVAL,
            _ => CLEAR_FLAG_INTERVAL,
        }
    }
}

/// Whether the ring has completions to take or to run, or calls that the kernel has not taken yet.
fn may_have_work(ring: &mut IoUring) -> bool {
    if !ring.completion().is_empty() {
        return true;
    }
    let queue = ring.submission();
    queue.taskrun() || queue.cq_overflow() || !queue.is_empty()
}

/// Waits until the descriptor is readable; returns false after `patience`. An interruption does not count:
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
    use std::os::fd::{FromRawFd as _, OwnedFd};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;
    use crate::units::PAGE;

    /// `IORING_SQ_TASKRUN` of `sq_flags`, `IORING_OFF_SQ_RING`, and the place of `sq_off.flags` in `struct
    /// io_uring_params` (`include/uapi/linux/io_uring.h`).
    const TASKRUN: u32 = 4;
    const SQ_RING: libc::off_t = 0;
    const FLAGS_AT: usize = 56 / 4;

    /// The flag for completions that wait to be run, in a second mapping of the ring.
    pub(crate) struct Flag {
        view: *mut libc::c_void,
        at: usize,
    }

    // SAFETY: the view is only used atomically, until it is dropped.
    unsafe impl Sync for Flag {}

    impl Flag {
        pub(crate) fn of(ring: &IoUring) -> Self {
            let mut parameters = [0_u32; 30];
            // SAFETY: the array has the size of the struct, which the kernel fills in.
            let other = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
            assert!(other >= 0);
            // SAFETY: just opened.
            drop(unsafe { OwnedFd::from_raw_fd(RawFd::try_from(other).unwrap()) });
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a second view of the ring's first page, anywhere.
            let view = unsafe {
                libc::mmap(std::ptr::null_mut(), PAGE, rights, libc::MAP_SHARED, ring.as_raw_fd(), SQ_RING)
            };
            assert_ne!(view, libc::MAP_FAILED);
            let at = parameters[FLAGS_AT] as usize;
            assert!(at < PAGE);
            Self { view, at }
        }

        fn word(&self) -> &AtomicU32 {
            // SAFETY: an aligned word of the view, which the kernel uses atomically, too.
            unsafe { AtomicU32::from_ptr(self.view.cast::<u8>().add(self.at).cast()) }
        }

        /// Clears the flag, like a kernel that set it too early.
        pub(crate) fn clear(&self) {
            self.word().fetch_and(!TASKRUN, Ordering::SeqCst);
        }

        /// Keeps the flag set while `act` runs, like a kernel that sets it too late.
        pub(crate) fn keep_set_during(&self, act: impl FnOnce()) {
            let (is_over, first) = (AtomicBool::new(false), Barrier::new(2));
            let leave = || self.word().fetch_or(TASKRUN, Ordering::SeqCst);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    leave();
                    first.wait();
                    while !is_over.load(Ordering::SeqCst) {
                        leave();
                    }
                });
                first.wait();
                let _ends = Over(&is_over);
                act();
            });
        }
    }

    /// Stops setting the flag, also where `act` panics.
    struct Over<'a>(&'a AtomicBool);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    impl Drop for Flag {
        fn drop(&mut self) {
            // SAFETY: nothing uses this view any more.
            unsafe { libc::munmap(self.view, PAGE) };
        }
    }

    /// Fails where `act` does not end.
    pub(crate) fn ends(act: impl FnOnce() + Send + 'static) {
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            act();
            done.send(()).unwrap();
        });
        is_done.recv_timeout(Duration::from_secs(60)).expect("`act` does not end");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, PipeWriter, Write as _, pipe};

    use super::testing::Flag;
    use super::*;

    /// A ring with a read of a pipe in flight.
    struct Reading {
        ring: IoUring,
        event: Notifier,
        writer: PipeWriter,
        // The kernel uses them until the ring is closed.
        _reader: PipeReader,
        _byte: Box<u8>,
    }

    impl Reading {
        fn new() -> Self {
            let (mut ring, event) =
                build_as(Flavour::Deferred, 8).expect("this kernel has every kind of ring");
            let (reader, writer) = pipe().unwrap();
            let mut byte = Box::new(0);
            let read = opcode::Read::new(types::Fd(reader.as_raw_fd()), &raw mut *byte, 1);
            // SAFETY: the byte lives longer than the ring.
            unsafe { push(&mut ring, &read.build()) };
            flush(&mut ring);
            Self { ring, event, writer, _reader: reader, _byte: byte }
        }

        /// Completes the read and clears the flag.
        fn complete_unseen(&mut self) {
            self.writer.write_all(&[1]).unwrap();
            assert!(wait_readable(self.event.as_raw_fd(), Duration::from_secs(60)));
            Flag::of(&self.ring).clear();
        }
    }

    #[test]
    fn a_completion_without_the_flag_is_found_after_a_while() {
        let (mut reading, mut poller, start) = (Reading::new(), CompletionPoller::default(), Instant::now());
        let mut look = |reading: &mut Reading, at| {
            let Reading { ring, event, .. } = reading;
            poller.look_at(ring, event, 1, start + at)
        };
        assert!(!look(&mut reading, Duration::ZERO));
        reading.complete_unseen();
        assert!(!look(&mut reading, CLEAR_FLAG_INTERVAL / 2), "the kernel was entered too often");
        assert!(look(&mut reading, CLEAR_FLAG_INTERVAL));
        assert_eq!(reading.ring.completion().next().unwrap().result(), 1);
        // The kernel has just been entered.
        assert!(!look(&mut reading, CLEAR_FLAG_INTERVAL));
    }

    #[test]
    fn the_wait_is_bounded_and_shorter_after_a_flag_in_vain() {
        let (mut reading, mut poller) = (Reading::new(), CompletionPoller::default());
        assert_eq!(poller.patience(0), Duration::MAX);
        assert_eq!(poller.patience(1), CLEAR_FLAG_INTERVAL);
        let flag = Flag::of(&reading.ring);
        let Reading { ring, event, .. } = &mut reading;
        // The kernel may clear the flag just then.
        let mut doubts = || !poller.look(ring, event, 1) && poller.patience(1) == SET_FLAG_INTERVAL;
        flag.keep_set_during(|| assert!((0..100_000).any(|_| doubts())));
    }

    #[test]
    fn a_ring_with_nothing_in_flight_is_not_entered() {
        let (mut reading, mut poller, start) = (Reading::new(), CompletionPoller::default(), Instant::now());
        reading.complete_unseen();
        let Reading { ring, event, .. } = &mut reading;
        let mut look = |in_flight, at| poller.look_at(ring, event, in_flight, start + at);
        assert!(!look(0, Duration::ZERO) && !look(0, 100 * CLEAR_FLAG_INTERVAL), "nothing is in flight");
        assert!(!look(1, 200 * CLEAR_FLAG_INTERVAL), "the flag is trusted for a new call");
        assert!(look(1, 201 * CLEAR_FLAG_INTERVAL));
    }

    #[test]
    fn every_kind_of_ring_wakes_a_sleeping_poller() {
        for flavour in [Flavour::Deferred, Flavour::Cooperative, Flavour::Plain] {
            let (mut ring, finished) = build_as(flavour, 8).expect("this kernel has every kind of ring");
            for _ in 0..20 {
                assert!(wakes_poller(&mut ring, &finished), "{flavour:?}");
                assert!(!wait_readable(finished.as_raw_fd(), Duration::ZERO), "{flavour:?} stays readable");
            }
        }
    }
}
