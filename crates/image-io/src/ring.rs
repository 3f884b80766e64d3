// SPDX-License-Identifier: MIT OR Apache-2.0
//! Setting an io_uring up: the best kind that this kernel has, with an eventfd that tells when to look; and looking.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use io_uring::{EnterFlags, IoUring, opcode, squeue, types};

use crate::notifier::Notifier;

/// How long set-up waits for a ring that should wake a poller after [`PROBE_DELAY`].
const PROBE_PATIENCE: Duration = Duration::from_millis(200);

/// When the set-up probe's timer fires: late enough that the poller sleeps by then.
const PROBE_DELAY: Duration = Duration::from_millis(2);

/// Times that the kernel is asked to take what is queued before it is left to the next call. Only memory pressure makes it refuse.
const MAX_ENTERS: u32 = 8;

/// So long is a ring believed that tells of nothing while calls are under way; what it does not tell of is found after twice that at most. Disks
/// end a call more often, so that hardly anybody looks in vain: a look costs a processor some 15 microseconds.
pub(crate) const TRUST_FLAG_FOR: Duration = Duration::from_millis(5);

/// And one that tells of something that is not there: it is about to come.
const RECHECK_AFTER: Duration = Duration::from_millis(1);

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

/// Gives the kernel what is queued, and has it run what is over, even if no flag tells of that: `submit` does not.
fn enter(ring: &mut IoUring) {
    for _ in 0..MAX_ENTERS {
        let queued = u32::try_from(ring.submission().len()).unwrap_or(0);
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no more than is queued, whose pointers are valid by the promise of `push`; it waits for nothing and has no argument.
        let entered = unsafe { ring.submitter().enter::<libc::sigset_t>(queued, 0, flags, None) };
        // Errors mean "not now": interrupted, or no memory. What stays queued goes with the next call.
        if entered.is_ok() && ring.submission().is_empty() {
            return;
        }
    }
}

/// Gives the kernel what is queued, if anything is.
pub(crate) fn flush(ring: &mut IoUring) {
    if !ring.submission().is_empty() {
        enter(ring);
    }
}

/// When to ask the kernel for what is over, and when to believe a ring that tells of nothing.
///
/// **The flag that tells of it can be there with nothing to take:** the kernel queues a completion before it sets the flag
/// (`io_req_local_work_add`), and when this thread has run it in between, the flag stays, until the next one. So whoever has found nothing must
/// not look again at once. **And it can be away with something to take:** Linux 7.2's queue seems empty while a producer is in the middle of it
/// (`io_uring/mpscq.h`), and later ones do not signal. So as long as anything is under way the kernel is asked each [`TRUST_FLAG_FOR`], whatever
/// the flag says: its users have to look that often ([`CompletionPoller::patience`]).
#[derive(Debug, Default)]
pub(crate) struct CompletionPoller {
    /// When the kernel was last asked, or a ring with calls under way first believed. None: none are.
    asked: Option<Instant>,
    /// The ring told of something, and there was nothing.
    is_doubtful: bool,
}

impl CompletionPoller {
    /// Has the kernel run what is over. Whether there is something to take: then take it, and look again.
    pub(crate) fn look(&mut self, ring: &mut IoUring, event: &Notifier, under_way: usize) -> bool {
        self.look_at(ring, event, under_way, Instant::now())
    }

    fn look_at(&mut self, ring: &mut IoUring, event: &Notifier, under_way: usize, now: Instant) -> bool {
        // Before it looks, not after: what comes later signals it again. Running completions signals it too, hence each time.
        event.drain();
        let asked = *self.asked.get_or_insert(now);
        if may_have_work(ring) || now.saturating_duration_since(asked) >= TRUST_FLAG_FOR {
            self.asked = Some(now);
            enter(ring);
        }
        let any = !ring.completion().is_empty();
        self.is_doubtful = !any && may_have_work(ring);
        if !any && under_way == 0 {
            self.asked = None;
        }
        any
    }

    /// How long to wait for the eventfd at most before the next look.
    pub(crate) fn patience(&self, under_way: usize) -> Duration {
        match under_way {
            0 => Duration::MAX,
            _ if self.is_doubtful => RECHECK_AFTER,
            _ => TRUST_FLAG_FOR,
        }
    }
}

/// Whether the ring tells of completions to take or to run, or of calls that the kernel has not taken yet.
fn may_have_work(ring: &mut IoUring) -> bool {
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
    use std::os::fd::{FromRawFd as _, OwnedFd};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;
    use crate::PAGE;

    /// `IORING_SQ_TASKRUN` of `sq_flags`, `IORING_OFF_SQ_RING`, and where `struct io_uring_params` has `sq_off.flags` (`include/uapi/linux/io_uring.h`).
    const TASKRUN: u32 = 4;
    const SQ_RING: libc::off_t = 0;
    const FLAGS_AT: usize = 56 / 4;

    /// The flag by which a ring tells that there is something to run: a second view of it.
    pub(crate) struct Flag {
        view: *mut libc::c_void,
        at: usize,
    }

    // SAFETY: the view is used atomically only, until it is dropped.
    unsafe impl Sync for Flag {}

    impl Flag {
        pub(crate) fn of(ring: &IoUring) -> Self {
            let mut parameters = [0_u32; 30];
            // SAFETY: as many bytes as the struct has, which the kernel fills in.
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
            // SAFETY: an aligned word of the view, which others use atomically, too.
            unsafe { AtomicU32::from_ptr(self.view.cast::<u8>().add(self.at).cast()) }
        }

        /// As when the kernel has told of something too early.
        pub(crate) fn is_lost(&self) {
            self.word().fetch_and(!TASKRUN, Ordering::SeqCst);
        }

        /// As when the kernel tells of something too late: as long as `act` needs, and again if that takes it away.
        pub(crate) fn is_left_behind(&self, act: impl FnOnce()) {
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

    /// The flag is left alone again, also where `act` panics.
    struct Over<'a>(&'a AtomicBool);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    impl Drop for Flag {
        fn drop(&mut self) {
            // SAFETY: nobody uses this view any more.
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
        is_done.recv_timeout(Duration::from_secs(60)).expect("it does not end");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, PipeWriter, Write as _, pipe};

    use super::testing::Flag;
    use super::*;

    /// A ring with a read of a pipe under way.
    struct Reading {
        ring: IoUring,
        event: Notifier,
        writer: PipeWriter,
        // The kernel has them until the ring is closed.
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

        /// It is over, and nothing tells of it.
        fn is_over_unseen(&mut self) {
            self.writer.write_all(&[1]).unwrap();
            assert!(wait_readable(self.event.as_raw_fd(), Duration::from_secs(60)));
            Flag::of(&self.ring).is_lost();
        }
    }

    #[test]
    fn what_a_ring_does_not_tell_of_is_found_after_a_while() {
        let (mut reading, mut lookout, start) = (Reading::new(), CompletionPoller::default(), Instant::now());
        let mut look = |reading: &mut Reading, at| {
            let Reading { ring, event, .. } = reading;
            lookout.look_at(ring, event, 1, start + at)
        };
        assert!(!look(&mut reading, Duration::ZERO));
        reading.is_over_unseen();
        assert!(!look(&mut reading, TRUST_FLAG_FOR / 2), "asked too often");
        assert!(look(&mut reading, TRUST_FLAG_FOR));
        assert_eq!(reading.ring.completion().next().unwrap().result(), 1);
        // The kernel has just been asked.
        assert!(!look(&mut reading, TRUST_FLAG_FOR));
    }

    #[test]
    fn a_look_is_due_soon_while_calls_are_under_way_and_sooner_where_the_ring_tells_of_nothing() {
        let (mut reading, mut lookout) = (Reading::new(), CompletionPoller::default());
        assert_eq!(lookout.patience(0), Duration::MAX);
        assert_eq!(lookout.patience(1), TRUST_FLAG_FOR);
        let flag = Flag::of(&reading.ring);
        let Reading { ring, event, .. } = &mut reading;
        // The kernel may take the flag away just then.
        let mut doubts = || !lookout.look(ring, event, 1) && lookout.patience(1) == RECHECK_AFTER;
        flag.is_left_behind(|| assert!((0..100_000).any(|_| doubts())));
    }

    #[test]
    fn a_ring_with_nothing_under_way_is_left_alone() {
        let (mut reading, mut lookout, start) = (Reading::new(), CompletionPoller::default(), Instant::now());
        reading.is_over_unseen();
        let Reading { ring, event, .. } = &mut reading;
        let mut look = |under_way, at| lookout.look_at(ring, event, under_way, start + at);
        assert!(!look(0, Duration::ZERO) && !look(0, 100 * TRUST_FLAG_FOR), "as if nothing were");
        assert!(!look(1, 200 * TRUST_FLAG_FOR), "what has just begun is believed");
        assert!(look(1, 201 * TRUST_FLAG_FOR));
    }

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
