// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the events of an address space and applies them to its layout.
//!
//! A FORK event carries a userfaultfd, which needs a slot of the ledger and descriptors. Without them the
//! reactor does not read the event. Then the forking thread waits in the kernel, and fills of its address
//! space get EAGAIN from UFFDIO_COPY. The reactor tries again until there is room: no session ends for want
//! of it. Other events of that address space wait too, because the kernel does not say which one is next.
//! Faults of all other address spaces are served.
//!
//! When the kernel cannot make the descriptor (EMFILE, ENFILE, ENOMEM), it queues the event again
//! (`fs/userfaultfd.c: userfaultfd_ctx_read`, Linux 4.11 and newer). So the reactor may try again in that
//! case too.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rewake_pager::{Change, ResidencyMap};
use rewake_uffd::{Message, Uffd};
use tracing::{debug, warn};

use super::space::AddressSpace;
use super::stats::add;
use crate::ledger::{Journal, Ledger, MAX_MESSAGES, MAX_SPACES, SpaceSlot};
use crate::sys;

/// Reads the events of one address space, on its home reactor only.
#[derive(Debug)]
pub(super) struct UffdReader {
    pub(super) space: Arc<AddressSpace>,
    journal: Journal,
    /// Messages received and not handled. Empty between two calls, unless a forked child found no slot.
    messages: Vec<(usize, Message)>,
    /// Children among those messages whose userfaultfds are in the fd store, each with the descriptor's
    /// number.
    kept: Vec<(RawFd, &'static SpaceSlot)>,
    /// Whether its events wait until there is room for a forked child.
    pub(super) crowded: bool,
}

/// How often one call of [`UffdReader::read_events`] reads. Other address spaces of the reactor wait
/// meanwhile.
const MAX_READS: usize = 16;

/// Reactors that may read events at once. Each may take as many slots as it reads messages.
const READERS: usize = super::shared::MAX_REACTORS;

fn no_room() -> io::Error {
    let what = format!("{MAX_SPACES} address spaces are in use: a process that forks waits for one to end");
    io::Error::new(io::ErrorKind::QuotaExceeded, what)
}

/// The page faults and children that one read of events found.
#[derive(Debug, Default)]
pub(super) struct EventBatch {
    /// Pages that threads wait for.
    pub(super) faults: Vec<u64>,
    /// Address spaces of forked children, which the reactor must serve from now on.
    pub(super) children: Vec<UffdReader>,
}

impl UffdReader {
    pub(super) fn new(space: Arc<AddressSpace>, journal: Journal) -> Self {
        Self { space, journal, messages: Vec::new(), kept: Vec::new(), crowded: false }
    }

    /// Handles the messages that a dead predecessor received and did not handle.
    ///
    /// `known` are the userfaultfds that had a slot when it died. A fork whose child is among them only lacks
    /// the entry in the journal that it is done.
    pub(super) fn finish_pending(
        &mut self,
        ledger: Ledger,
        known: &BTreeSet<i32>,
        batch: &mut EventBatch,
    ) -> io::Result<()> {
        let space = Arc::clone(&self.space);
        let mut layout = space.layout_mut();
        let done = |message: Message| matches!(message, Message::Fork { uffd } if known.contains(&uffd));
        self.messages = self.journal.pending();
        let last = self.messages.last().map(|(index, _)| *index);
        self.messages.retain(|(_, message)| !done(*message));
        self.keep_children(ledger);
        self.apply(&mut layout, ledger, batch)?;
        if let Some(last) = last {
            self.journal.dealt_with(last);
        }
        Ok(())
    }

    /// Reads events until none waits, or [`MAX_READS`] times: a process with many threads that change their
    /// mappings must not keep the reactor. Applies all but page faults at once and in order, before a fill
    /// can look up an address again.
    ///
    /// # Errors
    /// Fails with the kernel's errno, or for want of room ([`wants_room`]): then call it again.
    pub(super) fn read_events(&mut self, ledger: Ledger, batch: &mut EventBatch) -> io::Result<()> {
        let space = Arc::clone(&self.space);
        let mut layout = space.layout_mut();
        self.apply(&mut layout, ledger, batch)?;
        for _ in 0..MAX_READS {
            // Each message may be a fork. Several reactors may count on the same room: the journal keeps a
            // fork that finds none in the end.
            let room = if space.has_room_for_child() { ledger.room() } else { 0 };
            let limit = match room {
                0 if space.uffd.changing() => return Err(no_room()),
                // No event waits, and the kernel returns faults before events.
                0 => 1,
                room => (room / READERS).clamp(1, MAX_MESSAGES),
            };
            let more = self.journal.receive(&space.uffd, limit, &mut self.messages)?;
            self.keep_children(ledger);
            self.apply(&mut layout, ledger, batch)?;
            if !more {
                return Ok(());
            }
        }
        // The descriptor is still readable, so it wakes the reactor again.
        Ok(())
    }

    /// Handles the received messages. After an error call it again. Until then it receives no more, so the
    /// ledger still names the descriptors of children without a slot.
    pub(super) fn settle(&mut self, ledger: Ledger, batch: &mut EventBatch) -> io::Result<()> {
        if self.messages.is_empty() {
            return Ok(());
        }
        let space = Arc::clone(&self.space);
        self.apply(&mut space.layout_mut(), ledger, batch)
    }

    fn apply(&mut self, layout: &mut ResidencyMap, ledger: Ledger, batch: &mut EventBatch) -> io::Result<()> {
        let mut messages = std::mem::take(&mut self.messages);
        let mut handled = 0_usize;
        let mut result = Ok(());
        for &(index, message) in &messages {
            result = self.handle(index, message, layout, ledger, batch);
            if result.is_err() {
                break;
            }
            handled += 1;
        }
        if let Some((index, _)) = handled.checked_sub(1).and_then(|last| messages.get(last)) {
            // The journal needs no faults: a successor wakes every waiting thread, which then faults again.
            self.journal.dealt_with(*index);
        }
        messages.drain(..handled);
        self.messages = messages;
        self.space.hold_fills(layout, !self.messages.is_empty());
        result
    }

    /// Puts the userfaultfds of forked children into the fd store, before anything else is done. When the
    /// whole streamer is killed before that, the child runs on without a userfaultfd and reads zeros, because
    /// the kernel has let the fork return with the read of its message. What fails here is tried again by
    /// [`Self::fork`].
    fn keep_children(&mut self, ledger: Ledger) {
        for (_, message) in &self.messages {
            if let Message::Fork { uffd } = message
                && let Ok(slot) = self.keep(ledger, *uffd)
            {
                self.kept.push((*uffd, slot));
            }
        }
    }

    /// Takes a slot for a forked child, and puts the child's userfaultfd into the fd store.
    fn keep(&self, ledger: Ledger, number: RawFd) -> io::Result<&'static SpaceSlot> {
        let slot = ledger.take_space().and_then(|index| ledger.spaces().get(index)).ok_or_else(no_room)?;
        slot.image_pid.store(self.space.slot.image_pid.load(Ordering::Relaxed), Ordering::Relaxed);
        slot.uffd.store(number, Ordering::Relaxed);
        self.space.keep(slot).inspect_err(|_| self.space.forget(slot))?;
        Ok(slot)
    }

    /// Returns the slot of a child whose userfaultfd is in the fd store, once.
    fn take_kept(&mut self, number: RawFd) -> Option<&'static SpaceSlot> {
        let place = self.kept.iter().position(|(kept, _)| *kept == number)?;
        Some(self.kept.swap_remove(place).1)
    }

    fn handle(
        &mut self,
        index: usize,
        message: Message,
        layout: &mut ResidencyMap,
        ledger: Ledger,
        batch: &mut EventBatch,
    ) -> io::Result<()> {
        match message {
            Message::Fault { address } => {
                batch.faults.push(address);
                return Ok(());
            }
            Message::Remove { start, end } => self.change(layout, index, Change::Remove { start, end }),
            Message::Unmap { start, end } => self.change(layout, index, Change::Unmap { start, end }),
            Message::Remap { from, to, len } => self.change(layout, index, Change::Remap { from, to, len }),
            Message::Fork { uffd } if Self::is_gone(uffd) => {
                // Before the close: a successor must not mistake a later descriptor of the same number for
                // it.
                self.journal.dealt_with(index);
                if let Some(slot) = self.take_kept(uffd) {
                    self.space.forget(slot);
                }
                // SAFETY: the kernel opened this descriptor for the message: it has no owner.
                drop(unsafe { sys::take_over(uffd) });
            }
            Message::Fork { uffd } => {
                batch.children.push(self.fork(layout, ledger, uffd)?);
                self.journal.dealt_with(index);
            }
            Message::Unknown(event) => warn!(event, "unknown userfaultfd event ignored"),
        }
        add(&self.space.session.stats.events, 1);
        Ok(())
    }

    fn change(&mut self, layout: &mut ResidencyMap, index: usize, change: Change) {
        let before = layout.missing();
        if let Err(error) = layout.apply(&change) {
            // The kernel reports whole pages: anything else is no address of this layout.
            warn!(%error, ?change, "layout change ignored");
        }
        self.journal.record_change(index, &change, || layout.snapshot());
        self.space.dropped(before.saturating_sub(layout.missing()));
        debug!(image_pid = self.space.slot.image_pid.load(Ordering::Relaxed), ?change, "layout");
    }

    /// Returns whether a forked child has ended before it got a slot.
    fn is_gone(child: RawFd) -> bool {
        // SAFETY: the kernel opened it for a message that is not handled yet, so it is still open.
        rewake_uffd::address_space_ended(unsafe { BorrowedFd::borrow_raw(child) })
    }

    /// Adopts the address space of a forked child. After an error its descriptor stays open and the message
    /// is handled again. Until then the child waits rather than read zeros.
    fn fork(&mut self, layout: &ResidencyMap, ledger: Ledger, number: RawFd) -> io::Result<Self> {
        // Kept once: an entry for each try would fill the store.
        let slot = self.take_kept(number).map_or_else(|| self.keep(ledger, number), Ok)?;
        let journal = Journal::create(ledger, slot);
        let mut journal = journal.inspect_err(|_| self.kept.push((number, slot)))?;
        let parent = &self.space;
        let child = layout.fork();
        journal.rewrite(&child.snapshot(), 0);
        // SAFETY: the kernel opened this descriptor for the message, and it is handled once: it has no owner.
        // `adopt` refuses no open descriptor, so it closes none here.
        let uffd = Uffd::adopt(unsafe { sys::take_over(number) })?;
        slot.publish();
        parent.forked(child.missing());
        parent.session.space_opened();
        let files = Arc::clone(&parent.files);
        let (session, counts) = (Arc::clone(&parent.session), Arc::clone(&parent.counts));
        let space = AddressSpace::new(session, counts, slot, uffd, files, child, parent.home);
        debug!(missing = space.layout().missing(), "child forked");
        Ok(Self::new(Arc::new(space), journal))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, AsRawFd as _};
    use std::path::PathBuf;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use memmap2::MmapMut;
    use rewake_pager::{Extent, PAGE_SIZE, Plan};

    use super::*;
    use crate::ledger::fd_store::{EntryKind, FdStore, StoreEntry};
    use crate::ledger::wants_room;
    use crate::session::Session;
    use crate::uffd_child::{self, UffdChild};

    fn home(parent: &UffdChild, ledger: Ledger) -> UffdReader {
        home_of(Session::new(PathBuf::new()), parent, ledger)
    }

    fn home_of(session: Session, parent: &UffdChild, ledger: Ledger) -> UffdReader {
        let session = Arc::new(session);
        session.release();
        let slot = parent.slot(ledger, true);
        let journal = Journal::create(ledger, slot).unwrap();
        UffdReader::new(parent.address_space(&session, slot), journal)
    }

    /// Receives a fork like a reactor that found room, which another reactor has taken since.
    fn receive_fork(home: &mut UffdReader) {
        uffd_child::until(|| {
            home.journal.receive(&home.space.uffd, 1, &mut home.messages).unwrap();
            !home.messages.is_empty()
        });
    }

    fn children_of(pid: i32) -> String {
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap()
    }

    #[test]
    fn a_fork_waits_in_the_kernel_until_there_is_room() {
        let parent = UffdChild::start(uffd_child::fork_and_access);
        let ledger = Ledger::new().unwrap();
        let mut home = home(&parent, ledger);
        let spare = ledger.take_space().unwrap();
        while ledger.take_space().is_some() {}
        let mut batch = EventBatch::default();
        uffd_child::until(|| home.space.uffd.changing());
        let begun = std::time::Instant::now();
        while begun.elapsed() < std::time::Duration::from_millis(200) {
            let error = home.read_events(ledger, &mut batch).unwrap_err();
            assert!(wants_room(&error), "{error}");
        }
        assert!(home.messages.is_empty() && batch.children.is_empty(), "nothing was read");
        assert!(children_of(parent.pid).is_empty(), "the fork has not returned");
        assert!(!home.space.session.has_failed() && parent.lives());

        ledger.spaces()[spare].retire();
        uffd_child::until(|| {
            // With the one slot taken there is no room for another.
            let _ = home.read_events(ledger, &mut batch);
            !batch.children.is_empty()
        });
        let child = batch.children.pop().unwrap();
        // The kernel makes the process after the read of the message.
        uffd_child::until(|| !children_of(parent.pid).is_empty());
        child.space.session.fail("a test");
        uffd_child::until(|| super::super::abort::kill_or_poison(&child.space));
        uffd_child::until(|| child.space.slot.memory_is_gone());
        assert!(parent.lives());
    }

    /// An address space of this process. Its userfaultfd reports only removed pages: forks of other tests do
    /// not wait for it.
    fn own_home(ledger: Ledger, start: u64, pages: u64) -> UffdReader {
        const FEATURE_REMOVE: u64 = 0x8;
        let uffd = Uffd::open(FEATURE_REMOVE).unwrap();
        uffd.register_missing(start, pages * PAGE_SIZE).unwrap();
        let session = Arc::new(Session::new(PathBuf::new()));
        let index = ledger.take_space().unwrap();
        let slot = &ledger.spaces()[index];
        slot.uffd.store(uffd.as_raw_fd(), Ordering::Relaxed);
        slot.publish();
        let extent = Extent { target: start, file: 0, file_offset: 0, pages };
        let map = ResidencyMap::new(Arc::new(Plan::new(vec![extent]).unwrap()));
        let counts = session.task_arrived(0, pages);
        let journal = Journal::create(ledger, slot).unwrap();
        UffdReader::new(
            Arc::new(AddressSpace::new(session, counts, slot, uffd, Arc::default(), map, 0)),
            journal,
        )
    }

    #[test]
    fn a_call_reads_no_more_messages_than_its_limit() {
        const MOST: usize = MAX_READS * MAX_MESSAGES;
        const THREADS: usize = MOST + 100;
        let memory = MmapMut::map_anon(THREADS << 12).unwrap();
        let start = memory.as_ptr() as u64;
        let ledger = Ledger::new().unwrap();
        let mut home = own_home(ledger, start, THREADS as u64);
        let changed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for page in 0..THREADS {
                let (address, changed) = (start + page as u64 * PAGE_SIZE, &changed);
                scope.spawn(move || {
                    // SAFETY: a page of its own, which no code reads.
                    unsafe { libc::madvise(address as *mut libc::c_void, 4096, libc::MADV_DONTNEED) };
                    changed.fetch_add(1, Ordering::Relaxed);
                });
            }
            // Other tests' threads may wait, too.
            let own = std::process::id().cast_signed();
            uffd_child::until(|| crate::supervise::processes::waiting_threads(own) >= THREADS);
            let mut batch = EventBatch::default();
            home.read_events(ledger, &mut batch).unwrap();
            uffd_child::until(|| changed.load(Ordering::Relaxed) >= MOST);
            std::thread::sleep(Duration::from_millis(100));
            let once = changed.load(Ordering::Relaxed);
            uffd_child::until(|| {
                home.read_events(ledger, &mut batch).unwrap();
                changed.load(Ordering::Relaxed) == THREADS
            });
            assert_eq!(once, MOST, "the other address spaces of a reactor wait meanwhile");
        });
    }

    #[test]
    fn faults_are_read_while_there_is_no_room() {
        let parent = UffdChild::start(uffd_child::access);
        let ledger = Ledger::new().unwrap();
        let mut home = home(&parent, ledger);
        while ledger.take_space().is_some() {}
        let mut batch = EventBatch::default();
        uffd_child::until(|| {
            home.read_events(ledger, &mut batch).unwrap();
            batch.faults == [parent.start]
        });
    }

    #[test]
    fn a_fork_that_was_read_is_kept_until_there_is_room() {
        let parent = UffdChild::start(uffd_child::fork_and_access);
        let ledger = Ledger::new().unwrap();
        let mut home = home(&parent, ledger);
        let spare = ledger.take_space().unwrap();
        while ledger.take_space().is_some() {}
        let mut batch = EventBatch::default();
        receive_fork(&mut home);
        assert!(wants_room(&home.read_events(ledger, &mut batch).unwrap_err()));
        assert!(home.read_events(ledger, &mut batch).is_err(), "it must be kept");
        let slot = home.space.slot;
        let own = [&slot.uffd, &slot.pidfd, &slot.journal].map(|number| number.load(Ordering::Relaxed));
        let kept: Vec<i32> = ledger.descriptors().filter(|number| !own.contains(number)).collect();
        assert!(matches!(kept[..], [number] if uffd_child::is_open(number)), "{kept:?}");
        assert!(batch.children.is_empty());

        ledger.spaces()[spare].retire();
        home.settle(ledger, &mut batch).unwrap();
        let child = batch.children.pop().expect("there is room for it now");
        assert_eq!(child.space.uffd.as_raw_fd(), kept[0]);
        child.space.session.fail("a test");
        uffd_child::until(|| super::super::abort::kill_or_poison(&child.space));
        uffd_child::until(|| child.space.slot.memory_is_gone());
        assert!(parent.lives());
    }

    #[test]
    fn no_page_is_filled_between_a_fork_and_the_copy_of_its_layout() {
        let parent = UffdChild::start(uffd_child::fork_and_access);
        let ledger = Ledger::new().unwrap();
        let mut home = home(&parent, ledger);
        let spare = ledger.take_space().unwrap();
        while ledger.take_space().is_some() {}
        let mut batch = EventBatch::default();
        receive_fork(&mut home);
        assert!(wants_room(&home.read_events(ledger, &mut batch).unwrap_err()));
        let space = Arc::clone(&home.space);
        let fill = || {
            let page = Some(&[7; 4096][..]);
            space.fill_demand(&space.layout(), parent.start, Some(rewake_pager::PageIx(0)), page)
        };
        assert!(matches!(fill(), super::super::space::Filled::Later(_)));

        ledger.spaces()[spare].retire();
        home.settle(ledger, &mut batch).unwrap();
        // The kernel refuses fills until the forking thread has run.
        uffd_child::until(|| fill() == super::super::space::Filled::All);
        let child = batch.children.pop().unwrap();
        let missing = |space: &AddressSpace| space.layout().missing();
        assert_eq!((missing(&space), missing(&child.space)), (uffd_child::PAGES - 1, uffd_child::PAGES));
    }

    #[test]
    fn a_full_fd_store_is_waited_for() {
        let parent = UffdChild::start(uffd_child::fork_and_access);
        let ledger = Ledger::new().unwrap();
        let (reader, writer) = FdStore::create().unwrap();
        nix::sys::socket::setsockopt(&writer, nix::sys::socket::sockopt::SndBuf, &(32 << 10)).unwrap();
        let (reader_number, writer_number) = (reader.as_raw_fd(), writer.as_raw_fd());
        let store = || FdStore::of(reader_number, writer_number).unwrap();
        let other = StoreEntry { kind: EntryKind::Files, index: 0, life: 0 };
        let full = std::iter::repeat_with(|| store().put(other, &[writer_number])).find_map(Result::err);
        assert_eq!(full.unwrap().raw_os_error(), Some(libc::EAGAIN));
        let mut home = home(&parent, ledger);
        Arc::get_mut(&mut home.space).unwrap().store = Some(Arc::new(store()));
        let mut batch = EventBatch::default();
        uffd_child::until(|| home.read_events(ledger, &mut batch).is_err());
        assert!(wants_room(&home.read_events(ledger, &mut batch).unwrap_err()));
        assert!(home.messages.is_empty() && batch.children.is_empty(), "nothing was read");
        assert!(children_of(parent.pid).is_empty(), "the fork has not returned");
        assert!(!home.space.session.has_failed());

        store().retain(|entry| entry.kind != EntryKind::Files).unwrap();
        uffd_child::until(|| {
            home.read_events(ledger, &mut batch).unwrap();
            !batch.children.is_empty()
        });
        let child = batch.children.pop().unwrap();
        let stored = crate::ledger::fd_store::peek_all(reader.as_fd()).unwrap();
        let of_child =
            |(entry, files): &&(StoreEntry, Vec<_>)| *entry == child.space.slot.entry() && files.len() == 1;
        assert_eq!(stored.iter().filter(of_child).count(), 1, "its userfaultfd, once, and nothing else");
    }

    #[test]
    fn a_child_is_in_the_fd_store_before_it_is_adopted() {
        let parent = UffdChild::start(uffd_child::fork_and_access);
        let ledger = Ledger::new().unwrap();
        let (reader, writer) = FdStore::create().unwrap();
        let store = FdStore::of(reader.as_raw_fd(), writer.as_raw_fd()).unwrap();
        let mut home = home(&parent, ledger);
        Arc::get_mut(&mut home.space).unwrap().store = Some(Arc::new(store));
        receive_fork(&mut home);
        home.keep_children(ledger);
        let stored = || crate::ledger::fd_store::peek_all(reader.as_fd()).unwrap();
        let [(entry, _)] = stored()[..] else { panic!("{:?}", stored()) };
        let slot = &ledger.spaces()[entry.index as usize];
        assert!(!slot.is_free() && !slot.is_live());

        let mut batch = EventBatch::default();
        home.settle(ledger, &mut batch).unwrap();
        let child = batch.children.pop().unwrap();
        assert_eq!((child.space.slot.entry(), stored().len(), home.kept.len()), (entry, 1, 0));
        assert!(slot.is_live());
    }

    #[test]
    fn a_child_that_ended_before_it_had_a_slot_needs_none() {
        let parent = UffdChild::start(uffd_child::fork_and_access);
        let ledger = Ledger::new().unwrap();
        let mut home = home(&parent, ledger);
        while ledger.take_space().is_some() {}
        let mut batch = EventBatch::default();
        receive_fork(&mut home);
        assert!(home.read_events(ledger, &mut batch).is_err());
        let slot = home.space.slot;
        uffd_child::until(|| {
            crate::supervise::processes::kill_descendants(parent.pid, slot.pidfd.load(Ordering::Relaxed));
            home.messages
                .iter()
                .all(|(_, message)| matches!(message, Message::Fork { uffd } if UffdReader::is_gone(*uffd)))
        });
        home.settle(ledger, &mut batch).unwrap();
        assert!(batch.children.is_empty());
        assert!(ledger.descriptors().count() == 3, "no descriptor of the child is left");
    }
}
