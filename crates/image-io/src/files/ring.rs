// SPDX-License-Identifier: MIT OR Apache-2.0
//! The transfers under way.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};

use super::Memory;
use super::request::{Direction, Finished, Progress, Request, Step};
use crate::error::StoreError;
use crate::notifier::Notifier;
use crate::ring::{CompletionPoller, build, flush, push, wait_readable};

/// How long a dropped ring waits for the kernel to finish its transfers before it leaks their memory.
const DROP_PATIENCE: Duration = Duration::from_secs(10);
/// Reads of so many bytes in the page cache are left to the kernel's threads, so that several copy at once: one of them copies
/// less than a GPU takes. Less is copied sooner than another thread is woken.
const ASIDE: usize = 128 << 10;
/// Of them at most: more than memory has bandwidth for.
const WORKERS: usize = 8;

/// The kernel's threads that copy from the page cache.
fn workers() -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(processors.min(WORKERS)).unwrap_or(1)
}

/// Transfers between files and `M`. Belongs to the thread that made it.
pub struct FileRing<M: Memory> {
    way: Way,
    /// By slot; as many as may be under way. Leaked rather than dropped under a transfer: the kernel may write to its memory until then.
    flights: Vec<Option<Flight<M>>>,
    vacant: Vec<usize>,
    event: Notifier,
    lookout: CompletionPoller,
    /// Ended without the ring: plain calls end at once.
    over: Vec<Finished>,
    one_thread: PhantomData<*mut ()>,
}

#[derive(Debug)]
struct Flight<M> {
    progress: Progress<M>,
    direct: bool,
    /// The page cache had it: one of the kernel's threads copies it.
    aside: bool,
}

enum Way {
    Uring(Box<IoUring>),
    Plain(io::Error),
}

impl<M: Memory> FileRing<M> {
    /// A ring for at most `depth` transfers at once. Without io_uring ([`FileRing::note`]) each is done when it is submitted.
    ///
    /// # Errors
    /// [`StoreError::Setup`] when descriptors are out.
    pub fn new(depth: usize) -> Result<Self, StoreError> {
        let (way, event) = match build(depth) {
            Ok((ring, event, _)) => {
                // An older kernel has as many as it likes.
                let _ = ring.submitter().register_iowq_max_workers(&mut [workers(), 0]);
                (Way::Uring(Box::new(ring)), event)
            }
            Err(error) => {
                let event = Notifier::new();
                let event = event.map_err(|error| StoreError::Setup { act: "making an eventfd", error })?;
                (Way::Plain(error), event)
            }
        };
        let (flights, vacant) = ((0..depth).map(|_| None).collect(), (0..depth).rev().collect());
        let (lookout, over) = (CompletionPoller::default(), Vec::new());
        Ok(Self { way, flights, vacant, event, lookout, over, one_thread: PhantomData })
    }

    /// For the log: why transfers are one at a time, if they are.
    pub fn note(&self) -> Option<String> {
        match &self.way {
            Way::Uring(_) => None,
            Way::Plain(error) => {
                Some(format!("no io_uring ({error}): files are read and written one piece at a time"))
            }
        }
    }

    /// Transfers under way.
    pub fn in_flight(&self) -> usize {
        self.flights.len() - self.vacant.len()
    }

    /// Readable when a transfer may have ended.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Starts a transfer; the kernel gets it with [`FileRing::flush`]. What is read and in the page cache comes from there,
    /// now if it is little. Given back when as many as possible are under way.
    ///
    /// # Errors
    /// The request.
    ///
    /// # Panics
    /// It goes beyond the memory, or is of no bytes: a mistake of the program.
    pub fn submit(&mut self, request: Request<M>) -> Result<(), Request<M>> {
        let end = request.at.checked_add(request.bytes);
        let inside = end.is_some_and(|end| end <= request.memory.bytes());
        let few = request.bytes > 0 && request.needed <= request.bytes;
        assert!(inside && few, "{} at {}, {} needed", request.bytes, request.at, request.needed);
        let Some(slot) = self.vacant.pop() else { return Err(request) };
        let mut progress = Progress::new(request);
        let Request { file, direction, offset, bytes, .. } = &progress.request;
        // Asked for before: on its own RWF_NOWAIT would start reads ahead of what is not there.
        let cached = *direction == Direction::Read && file.is_cached(*offset, *bytes);
        let aside = cached && *bytes >= ASIDE && matches!(self.way, Way::Uring(_));
        if cached
            && !aside
            && let Some(finished) = read_cached(&mut progress)
        {
            self.vacant.push(slot);
            self.over.push(finished);
            self.event.wake();
            return Ok(());
        }
        self.flights[slot] = Some(Flight { progress, direct: false, aside });
        match self.way {
            Way::Uring(_) => self.queue(slot),
            Way::Plain(_) => self.do_now(slot),
        }
        Ok(())
    }

    /// Whether transfers have ended that [`FileRing::finished`] has not told of: reads of what was in the page cache.
    pub fn has_finished(&self) -> bool {
        !self.over.is_empty()
    }

    /// Gives the kernel what was submitted.
    pub fn flush(&mut self) {
        if let Way::Uring(ring) = &mut self.way {
            flush(ring);
        }
    }

    /// Takes the transfers that are over, without waiting.
    pub fn finished(&mut self, into: &mut Vec<Finished>) {
        into.append(&mut self.over);
        // Ends: every round takes a completion, and each transfer has a bounded number of them.
        while self.look() {
            self.collect(into);
        }
    }

    /// How long to wait for [`FileRing::event`] at most before the next look: a transfer may be over of which it does not tell.
    pub fn patience(&self) -> Duration {
        self.lookout.patience(self.in_flight())
    }

    /// Whether there is something to collect.
    fn look(&mut self) -> bool {
        let under_way = self.in_flight();
        match &mut self.way {
            Way::Uring(ring) => self.lookout.look(ring, &self.event, under_way),
            Way::Plain(_) => {
                self.event.drain();
                false
            }
        }
    }

    /// Takes completions from the ring; transfers that are not over yet are queued again.
    fn collect(&mut self, into: &mut Vec<Finished>) {
        loop {
            let Way::Uring(ring) = &mut self.way else { return };
            let Some(completion) = ring.completion().next() else { return };
            let Ok(slot) = usize::try_from(completion.user_data()) else { continue };
            let got = usize::try_from(completion.result())
                .map_err(|_| io::Error::from_raw_os_error(-completion.result()));
            let Some(flight) = self.flights.get_mut(slot).and_then(Option::as_mut) else { continue };
            match flight.progress.step(flight.direct, got) {
                Step::Again => self.queue(slot),
                Step::Over(finished) => {
                    self.flights[slot] = None;
                    self.vacant.push(slot);
                    into.push(finished);
                }
            }
        }
    }

    /// Queues the next call of the transfer in `slot`. There is room: one call for each slot.
    fn queue(&mut self, slot: usize) {
        let (Some(flight), Way::Uring(ring)) = (self.flights[slot].as_mut(), &mut self.way) else { return };
        let (offset, _, bytes) = flight.progress.next();
        let request = &flight.progress.request;
        let (file, direct) = if flight.aside { (request.file.file(), false) } else { flight.progress.file() };
        flight.direct = direct;
        let start = flight.progress.start();
        // More than a transfer ever has: the kernel does less, and it is continued.
        let length = u32::try_from(bytes).unwrap_or(1 << 30);
        let fd = types::Fd(file.as_raw_fd());
        let entry = match request.direction {
            Direction::Read => opcode::Read::new(fd, start, length).offset(offset).build(),
            Direction::Write => opcode::Write::new(fd, start, length).offset(offset).build(),
        };
        let flags = if flight.aside { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        // SAFETY: `submit` has checked that the bytes are the memory's; memory and file are this ring's until the call is
        // over (see Drop).
        unsafe { push(ring, &entry.flags(flags).user_data(slot as u64)) };
    }

    /// Without io_uring: all of it, now.
    fn do_now(&mut self, slot: usize) {
        let Some(mut flight) = self.flights[slot].take() else { return };
        self.vacant.push(slot);
        loop {
            let (file, direct) = flight.progress.file();
            let got = plain(&flight.progress, file.as_raw_fd());
            if let Step::Over(finished) = flight.progress.step(direct, got) {
                self.over.push(finished);
                break;
            }
        }
        self.event.wake();
    }
}

/// Reads from the page cache, without waiting. None if it has not all of it any more; then what is left goes the ordinary way.
fn read_cached<M: Memory>(progress: &mut Progress<M>) -> Option<Finished> {
    let (offset, _, bytes) = progress.next();
    let part = libc::iovec { iov_base: progress.start().cast(), iov_len: bytes };
    let fd = progress.request.file.file().as_raw_fd();
    // SAFETY: `submit` has checked that the bytes are the memory's, which is writable and borrowed by nobody.
    let got = unsafe { libc::preadv2(fd, &raw const part, 1, offset.cast_signed(), libc::RWF_NOWAIT) };
    let got = usize::try_from(got).ok().filter(|got| *got > 0)?;
    match progress.step(false, Ok(got)) {
        Step::Over(finished) => Some(finished),
        Step::Again => None,
    }
}

/// One positioned call.
fn plain<M: Memory>(progress: &Progress<M>, fd: i32) -> io::Result<usize> {
    let (offset, _, bytes) = progress.next();
    let (start, offset) = (progress.start(), offset.cast_signed());
    let got = match progress.request.direction {
        // SAFETY: `submit` has checked that the bytes are the memory's, which is writable and borrowed by nobody.
        Direction::Read => unsafe { libc::pread(fd, start.cast(), bytes, offset) },
        // SAFETY: as above; only read.
        Direction::Write => unsafe { libc::pwrite(fd, start.cast(), bytes, offset) },
    };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

impl<M: Memory> Drop for FileRing<M> {
    fn drop(&mut self) {
        let give_up = Instant::now() + DROP_PATIENCE;
        let mut over = Vec::new();
        while self.in_flight() > 0 && Instant::now() < give_up {
            self.finished(&mut over);
            over.clear();
            if self.in_flight() > 0 {
                wait_readable(self.event.as_raw_fd(), Duration::from_millis(100));
            }
        }
        if self.in_flight() > 0 {
            // Storage that does not answer: better to lose the memory than to have it written to after reuse.
            std::mem::forget(std::mem::take(&mut self.flights));
        }
    }
}

impl<M: Memory> std::fmt::Debug for FileRing<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileRing")
            .field("in_flight", &self.in_flight())
            .field("note", &self.note())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::io::Write as _;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::PAGE;
    use crate::files::TransferFile;
    use crate::files::testing::{Foreign, Pages};
    use crate::ring::TRUST_FLAG_FOR;
    use crate::ring::testing::{Flag, ends};

    const BYTES: usize = 64 * PAGE;

    fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
        (0..bytes).map(|index| u8::try_from((index * 7 + seed) % 251).unwrap()).collect()
    }

    fn both(path: &Path) -> Arc<TransferFile> {
        let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        TransferFile::new(path, open(0).unwrap(), open(libc::O_DIRECT).ok())
    }

    /// With io_uring, and as if there were none.
    fn rings() -> [FileRing<Arc<Pages>>; 2] {
        let mut plain = FileRing::new(4).unwrap();
        plain.way = Way::Plain(io::Error::from_raw_os_error(libc::ENOSYS));
        [FileRing::new(4).unwrap(), plain]
    }

    fn all(ring: &mut FileRing<Arc<Pages>>) -> Vec<Finished> {
        let (mut over, wanted) = (Vec::new(), ring.in_flight() + ring.over.len());
        ring.flush();
        while over.len() < wanted {
            assert!(wait_readable(ring.event().as_raw_fd(), Duration::from_secs(60)), "{ring:?} is silent");
            ring.finished(&mut over);
        }
        over
    }

    fn flag(ring: &FileRing<Arc<Pages>>) -> Flag {
        let Way::Uring(uring) = &ring.way else { panic!("no io_uring here: {:?}", ring.note()) };
        Flag::of(uring)
    }

    #[test]
    fn a_flag_that_the_kernel_has_left_behind_is_looked_at_once() {
        ends(|| {
            let [mut ring, _] = rings();
            flag(&ring).is_left_behind(|| ring.finished(&mut Vec::new()));
            assert_eq!(ring.patience(), Duration::MAX, "nothing is under way");
        });
    }

    #[test]
    fn a_transfer_is_found_that_is_over_and_that_nothing_tells_of() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let [mut ring, _] = rings();
        ring.submit(Request {
            file: TransferFile::new("pipe", File::from(OwnedFd::from(reader)), None),
            direction: Direction::Read,
            offset: 0,
            memory: Pages::new(BYTES),
            at: 0,
            bytes: PAGE,
            needed: PAGE,
            token: 7,
        })
        .unwrap();
        ring.flush();
        let mut over = Vec::new();
        ring.finished(&mut over);
        assert!(over.is_empty());
        writer.write_all(&[1; PAGE]).unwrap();
        assert!(wait_readable(ring.event().as_raw_fd(), Duration::from_secs(60)));
        ring.event.drain();
        flag(&ring).is_lost();
        let start = Instant::now();
        while over.is_empty() {
            let patience = ring.patience();
            assert!(
                patience <= TRUST_FLAG_FOR && start.elapsed() < Duration::from_secs(10),
                "it is never found"
            );
            wait_readable(ring.event().as_raw_fd(), patience);
            ring.finished(&mut over);
        }
        assert!(over.pop().unwrap().result.is_ok() && ring.patience() == Duration::MAX);
    }

    #[test]
    fn bytes_go_to_a_file_and_come_back_at_any_alignment() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let memory = Pages::new(BYTES);
        for mut ring in rings() {
            assert_eq!(ring.note().is_some(), matches!(ring.way, Way::Plain(_)));
            for (token, (offset, at, bytes)) in
                [(0, 0, 2 * PAGE), (8, 3 * PAGE, 100), (PAGE as u64, 5, PAGE)].into_iter().enumerate()
            {
                let (file, token) = (both(temp.path()), token as u64);
                memory.put(at, &pattern(bytes, at));
                let request = |direction, at| Request {
                    file: Arc::clone(&file),
                    direction,
                    offset,
                    memory: Arc::clone(&memory),
                    at,
                    bytes,
                    needed: bytes,
                    token,
                };
                ring.submit(request(Direction::Write, at)).unwrap();
                all(&mut ring).pop().unwrap().result.unwrap();
                ring.submit(request(Direction::Read, 32 * PAGE)).unwrap();
                let over = all(&mut ring).pop().unwrap();
                assert!(over.result.is_ok() && over.token == token);
                assert!(memory.get(32 * PAGE, bytes) == pattern(bytes, at), "{ring:?}: {offset} {at}");
            }
        }
    }

    #[test]
    fn the_last_page_of_a_file_may_be_asked_for_whole() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        temp.as_file().write_all_at(&pattern(PAGE + 10, 3), 0).unwrap();
        let memory = Pages::new(BYTES);
        for mut ring in rings() {
            let request = |needed| Request {
                file: both(temp.path()),
                direction: Direction::Read,
                offset: 0,
                memory: Arc::clone(&memory),
                at: 0,
                bytes: 2 * PAGE,
                needed,
                token: 1,
            };
            ring.submit(request(PAGE + 10)).unwrap();
            all(&mut ring).pop().unwrap().result.unwrap();
            assert!(memory.get(0, PAGE + 10) == pattern(PAGE + 10, 3));
            ring.submit(request(PAGE + 11)).unwrap();
            let error = all(&mut ring).pop().unwrap().result.unwrap_err();
            assert!(error.to_string().starts_with("read 8192 bytes at 0 of "), "{error}");
        }
    }

    #[test]
    fn no_more_are_under_way_than_agreed_and_none_is_lost() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        temp.as_file().set_len(BYTES as u64).unwrap();
        let memory = Pages::new(BYTES);
        let [mut ring, _] = rings();
        let file = both(temp.path());
        let request = |token| Request {
            file: Arc::clone(&file),
            direction: Direction::Read,
            offset: 0,
            memory: Arc::clone(&memory),
            at: 0,
            bytes: PAGE,
            needed: PAGE,
            token,
        };
        for token in 0..4 {
            ring.submit(request(token)).unwrap();
        }
        assert_eq!(ring.submit(request(4)).unwrap_err().token, 4);
        let mut tokens: Vec<u64> = all(&mut ring).iter().map(|over| over.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3]);
        ring.submit(request(4)).unwrap();
        all(&mut ring).pop().unwrap().result.unwrap();
    }

    /// How often something is put into the page cache until it is found there.
    const TRIES: u32 = 10;

    #[test]
    fn what_is_in_the_page_cache_is_there_at_once_and_what_is_not_stays_out_of_it() {
        let temp = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let bytes = pattern(8 * PAGE + 10, 5);
        temp.as_file().write_all_at(&bytes, 0).unwrap();
        temp.as_file().sync_all().unwrap();
        let file = both(temp.path());
        let memory = Pages::new(BYTES);
        for mut ring in rings() {
            let plain = ring.note().is_some();
            let mut read = || {
                let file = Arc::clone(&file);
                let (bytes, needed) = (9 * PAGE, 8 * PAGE + 10);
                let (direction, to) = (Direction::Read, Arc::clone(&memory));
                ring.submit(Request {
                    file,
                    direction,
                    offset: 0,
                    memory: to,
                    at: 0,
                    bytes,
                    needed,
                    token: 0,
                })
                .unwrap();
                let at_once = ring.in_flight() == 0 && matches!(ring.way, Way::Uring(_));
                all(&mut ring).pop().unwrap().result.unwrap();
                assert!(memory.get(0, needed) == pattern(needed, 5));
                memory.put(0, &[0; 9 * PAGE]);
                at_once
            };
            drop_cached(&file);
            for _ in 0..2 {
                assert!(!read());
                assert!(!file.is_cached(8 * PAGE as u64, 1), "a read past the page cache has filled it");
            }
            // The kernel may take memory for something else.
            let at_once = (0..TRIES).any(|_| {
                std::fs::read(temp.path()).unwrap();
                file.is_cached(0, 9 * PAGE) && (read() || plain)
            });
            assert!(at_once);
            let only_its_first_page = (0..TRIES).any(|_| {
                drop_cached(&file);
                let mut first = [0; 10];
                fadvise(&file, libc::POSIX_FADV_RANDOM);
                file.file().read_exact_at(&mut first, 0).unwrap();
                fadvise(&file, libc::POSIX_FADV_NORMAL);
                file.is_cached(0, PAGE)
            });
            assert!(only_its_first_page && !file.is_cached(0, 9 * PAGE), "only its first page");
            assert!(!read());
        }
    }

    #[test]
    fn much_of_the_page_cache_is_copied_by_other_threads_also_into_what_no_disk_may_write_to() {
        let temp = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let bytes = pattern(BYTES, 9);
        temp.as_file().write_all_at(&bytes, 0).unwrap();
        temp.as_file().sync_all().unwrap();
        let file = both(temp.path());
        for cached in [true, false] {
            let (pages, mut ring) = (Pages::new(BYTES), FileRing::new(4).unwrap());
            if !cached {
                drop_cached(&file);
            }
            let request = Request {
                file: Arc::clone(&file),
                direction: Direction::Read,
                offset: 0,
                memory: Foreign(Arc::clone(&pages)),
                at: 0,
                bytes: BYTES,
                needed: BYTES,
                token: 0,
            };
            ring.submit(request).unwrap();
            // The kernel may take memory for something else.
            let aside = ring.flights.iter().flatten().any(|flight| flight.aside);
            assert!(aside || !cached || !file.is_cached(0, BYTES));
            let mut over = Vec::new();
            while over.is_empty() {
                ring.flush();
                assert!(
                    wait_readable(ring.event().as_raw_fd(), Duration::from_secs(60)),
                    "{ring:?} is silent"
                );
                ring.finished(&mut over);
            }
            over.pop().unwrap().result.unwrap();
            assert!(pages.get(0, BYTES) == bytes);
            assert!(file.is_cached(0, PAGE), "past the page cache into memory of a device");
        }
    }

    fn fadvise(file: &TransferFile, advice: i32) {
        // SAFETY: it takes no pointers.
        assert_eq!(unsafe { libc::posix_fadvise(file.file().as_raw_fd(), 0, 0, advice) }, 0);
    }

    fn drop_cached(file: &TransferFile) {
        fadvise(file, libc::POSIX_FADV_DONTNEED);
        assert!(
            !file.is_cached(0, PAGE),
            "the file system keeps all files in the page cache: it cannot be tried here"
        );
    }

    #[test]
    fn an_error_names_the_act_the_place_and_the_file() {
        let memory = Pages::new(BYTES);
        for mut ring in rings() {
            let file = TransferFile::new("read-only.img", File::open("/dev/null").unwrap(), None);
            let (direction, memory) = (Direction::Write, Arc::clone(&memory));
            ring.submit(Request { file, direction, offset: 8, memory, at: 0, bytes: 9, needed: 9, token: 0 })
                .unwrap();
            let error = all(&mut ring).pop().unwrap().result.unwrap_err();
            assert_eq!(error.to_string(), "write 9 bytes at 8 of read-only.img");
        }
    }
}
