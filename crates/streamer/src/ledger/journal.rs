// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records how one address space's layout differs from its image, in memory that outlives the worker.
//!
//! A memory file has two halves. Records are appended to one; when it is full, the current layout is written
//! to the other, which then takes its place. One 64-bit word in the slot commits each step: `half << 63 |
//! records << 8 | applied`, where `applied` counts the received messages that are processed. A worker that
//! dies between two instructions leaves either the old word or the new one.

use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::Ordering;

use memmap2::MmapRaw;
use rewake_pager::{Change, PageIx, Segment};
use rewake_uffd::abi::EVENT_FORK;
use rewake_uffd::{Message, RawMessage, Uffd};

use super::{MAX_MESSAGES, SpaceSlot};
use crate::sys;

/// Records in a half: 512 KiB of 32-byte records. The kernel allocates pages as records are written.
const HALF: usize = 16 * 1024;
const RECORD: usize = 32;

const SNAPSHOT: u64 = 1;
const SEGMENT: u64 = 2;
const REMOVE: u64 = 3;
const UNMAP: u64 = 4;
const REMAP: u64 = 5;

type Record = [u64; 4];

/// The contents of a journal.
#[derive(Debug, Default)]
pub struct Replay {
    /// The layout to start from; none if it is the image's own.
    pub snapshot: Option<Vec<Segment>>,
    /// The changes since then.
    pub changes: Vec<Change>,
}

/// The owner of one slot's journal and message area.
#[derive(Debug)]
pub struct Journal {
    slot: &'static SpaceSlot,
    map: MmapRaw,
}

impl std::fmt::Debug for SpaceSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SpaceSlot").field("image_pid", &self.image_pid).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy)]
struct Commit {
    half: usize,
    records: usize,
    applied: usize,
}

impl Commit {
    fn decode(word: u64) -> Self {
        let [half, records, applied] =
            [(word >> 63) as usize, (word >> 8 & 0xff_ffff) as usize, (word & 0xff) as usize];
        Self { half, records: records.min(HALF), applied: applied.min(MAX_MESSAGES) }
    }

    fn encode(self) -> u64 {
        (self.half as u64) << 63 | (self.records as u64) << 8 | self.applied as u64
    }
}

impl Journal {
    /// Makes an empty journal for a slot that is taken and not yet live.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub fn create(slot: &'static SpaceSlot) -> io::Result<Self> {
        let file = sys::memory_file(c"rewake-journal", (2 * HALF * RECORD) as u64)?;
        let map = MmapRaw::map_raw(file.as_raw_fd())?;
        slot.commit.store(0, Ordering::Relaxed);
        slot.journal.store(std::os::fd::IntoRawFd::into_raw_fd(file), Ordering::Release);
        let mut journal = Self { slot, map };
        journal.messages().fill(RawMessage::default());
        Ok(journal)
    }

    /// Opens the journal that a dead worker left in `slot`.
    ///
    /// # Errors
    /// The journal file cannot be mapped.
    pub fn open(slot: &'static SpaceSlot) -> io::Result<Self> {
        let fd: RawFd = slot.journal.load(Ordering::Acquire);
        Ok(Self { slot, map: MmapRaw::map_raw(fd)? })
    }

    /// Reads the journal. Messages that are received and not processed stay in the message area.
    #[must_use]
    pub fn replay(&self) -> Replay {
        let commit = self.commit();
        let mut replay = Replay::default();
        for index in 0..commit.records {
            match self.record(commit.half, index) {
                [SNAPSHOT, ..] => replay.snapshot = Some(Vec::new()),
                [SEGMENT, target, page, pages] => {
                    let segment = Segment { target, page: PageIx(page), pages };
                    replay.snapshot.get_or_insert_default().push(segment);
                }
                [REMOVE, start, end, _] => replay.changes.push(Change::Remove { start, end }),
                [UNMAP, start, end, _] => replay.changes.push(Change::Unmap { start, end }),
                [REMAP, from, to, len] => replay.changes.push(Change::Remap { from, to, len }),
                // Only the functions below write records.
                _ => {}
            }
        }
        replay
    }

    /// Returns the messages that are received and not yet processed, with their index.
    pub fn pending(&mut self) -> Vec<(usize, Message)> {
        let applied = self.commit().applied;
        let messages = self.messages().iter().enumerate().skip(applied);
        messages.map_while(|(index, raw)| Some((index, raw.decode()?))).collect()
    }

    /// Receives at most `limit` messages into the ledger, and appends them to `out` with their index. Returns
    /// true if more may wait.
    ///
    /// Before the next call, [`Journal::record_change`] or [`Journal::dealt_with`] must process each of them.
    ///
    /// # Errors
    /// The read failed.
    pub fn receive(
        &mut self,
        uffd: &Uffd,
        limit: usize,
        out: &mut Vec<(usize, Message)>,
    ) -> io::Result<bool> {
        // Zeroed slots first, then the count: a message beyond the count is not processed.
        self.messages().fill(RawMessage::default());
        self.store(Commit { applied: 0, ..self.commit() });
        let limit = limit.min(MAX_MESSAGES);
        let count = uffd.read(&mut self.messages()[..limit])?;
        let messages = self.messages().iter().take(count).enumerate();
        out.extend(messages.filter_map(|(index, raw)| Some((index, raw.decode()?))));
        Ok(count == limit)
    }

    /// Records the layout change of message `index`. `layout` gives the layout after the change, and is
    /// called if the journal is full.
    pub fn record_change(&mut self, index: usize, change: &Change, layout: impl FnOnce() -> Vec<Segment>) {
        let commit = self.commit();
        if commit.records == HALF {
            self.rewrite(&layout(), index + 1);
            return;
        }
        let record = match *change {
            Change::Remove { start, end } => [REMOVE, start, end, 0],
            Change::Unmap { start, end } => [UNMAP, start, end, 0],
            Change::Remap { from, to, len } => [REMAP, from, to, len],
        };
        self.write(commit.half, commit.records, record);
        self.store(Commit { half: commit.half, records: commit.records + 1, applied: index + 1 });
    }

    /// Notes that message `index` is processed: a successor ignores it.
    pub fn dealt_with(&mut self, index: usize) {
        self.store(Commit { applied: index + 1, ..self.commit() });
    }

    /// Starts the journal again with the whole layout, and notes that `applied` messages are processed.
    pub fn rewrite(&mut self, layout: &[Segment], applied: usize) {
        let commit = self.commit();
        if layout.len() >= HALF {
            // Too fragmented to hold: this worker serves it as before, and a successor may only kill the
            // process.
            self.slot.lossy.store(1, Ordering::Release);
            self.store(Commit { half: commit.half, records: 0, applied });
            return;
        }
        let half = 1 - commit.half;
        self.write(half, 0, [SNAPSHOT, 0, 0, 0]);
        for (index, segment) in layout.iter().enumerate() {
            self.write(half, index + 1, [SEGMENT, segment.target, segment.page.0, segment.pages]);
        }
        self.store(Commit { half, records: layout.len() + 1, applied });
    }

    fn commit(&self) -> Commit {
        Commit::decode(self.slot.commit.load(Ordering::Acquire))
    }

    fn store(&self, commit: Commit) {
        self.slot.commit.store(commit.encode(), Ordering::Release);
    }

    fn messages(&mut self) -> &mut [RawMessage; MAX_MESSAGES] {
        // SAFETY: one Journal exists for a slot (made when the slot is taken, or once by a successor), and it
        // is borrowed exclusively here; no other process accesses the area.
        unsafe { &mut *self.slot.messages.get() }
    }

    fn at(&self, half: usize, index: usize) -> *mut Record {
        assert!(half < 2 && index < HALF);
        // SAFETY: inside the mapping of 2 * HALF records, by the assertion above.
        unsafe { self.map.as_mut_ptr().cast::<Record>().add(half * HALF + index) }
    }

    fn record(&self, half: usize, index: usize) -> Record {
        // SAFETY: `at` is in bounds and aligned (page-aligned mapping); only this process uses the file.
        unsafe { self.at(half, index).read() }
    }

    fn write(&mut self, half: usize, index: usize, record: Record) {
        // SAFETY: as in `record`; exclusive by &mut self.
        unsafe { self.at(half, index).write(record) }
    }
}

/// Returns the descriptors of forked children that are received and have no slot of their own yet.
pub(super) fn forked_descriptors(slot: &'static SpaceSlot) -> Vec<i32> {
    forks(slot).into_iter().map(|(_, number)| number).collect()
}

/// Returns the fork messages that are received and not processed: the index and the descriptor of each.
///
/// It is for a takeover only: the worker that owned the area is dead, and no [`Journal`] was made since.
#[must_use]
pub fn forks(slot: &'static SpaceSlot) -> Vec<(usize, RawFd)> {
    // SAFETY: as the caller promises, no process writes the area.
    let messages = unsafe { &*slot.messages.get() };
    let applied = Commit::decode(slot.commit.load(Ordering::Acquire)).applied;
    let fork = |(index, raw): (usize, &RawMessage)| match raw.decode() {
        Some(Message::Fork { uffd }) => Some((index, uffd)),
        _ => None,
    };
    messages.iter().enumerate().skip(applied).filter_map(fork).collect()
}

/// Gives one of [`forks`] another descriptor: after a recovery, the child's descriptor in this process's
/// table.
pub fn set_fork(slot: &'static SpaceSlot, index: usize, number: RawFd) {
    // SAFETY: as for `forks`.
    let messages = unsafe { &mut *slot.messages.get() };
    if let Some(message) = messages.get_mut(index) {
        *message = RawMessage::encode(EVENT_FORK, [u64::from(number.cast_unsigned()), 0, 0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;

    fn journal() -> Journal {
        let ledger = Ledger::new().unwrap();
        let index = ledger.take_space().unwrap();
        Journal::create(&ledger.spaces()[index]).unwrap()
    }

    fn change(page: u64) -> Change {
        Change::Remove { start: page * 4096, end: (page + 1) * 4096 }
    }

    #[test]
    fn changes_are_replayed_in_order() {
        let mut journal = journal();
        journal.record_change(0, &change(1), Vec::new);
        journal.record_change(1, &Change::Remap { from: 4096, to: 8192, len: 4096 }, Vec::new);
        let replay = Journal::open(journal.slot).unwrap().replay();
        assert!(replay.snapshot.is_none());
        assert_eq!(replay.changes, [change(1), Change::Remap { from: 4096, to: 8192, len: 4096 }]);
    }

    #[test]
    fn a_full_journal_starts_again_from_the_layout() {
        let mut journal = journal();
        let layout = vec![Segment { target: 4096, page: PageIx(7), pages: 3 }];
        for _ in 0..=HALF {
            journal.record_change(0, &change(1), || layout.clone());
        }
        journal.record_change(0, &change(2), Vec::new);
        let replay = journal.replay();
        assert_eq!(replay.snapshot.as_deref(), Some(layout.as_slice()));
        assert_eq!(replay.changes, [change(2)]);
    }

    #[test]
    fn a_layout_with_too_many_segments_is_marked_lossy() {
        let mut journal = journal();
        let segment = |page| Segment { target: page * 8192, page: PageIx(page), pages: 1 };
        journal.rewrite(&(0..HALF as u64).map(segment).collect::<Vec<_>>(), 0);
        assert_eq!(journal.slot.lossy.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_message_that_is_not_processed_is_pending_again() {
        let mut journal = journal();
        let raw = |page: u64| {
            RawMessage::encode(rewake_uffd::abi::EVENT_REMOVE, [page * 4096, (page + 1) * 4096, 0])
        };
        journal.messages()[0] = raw(1);
        journal.messages()[1] = raw(2);
        journal.record_change(0, &change(1), Vec::new);
        let mut successor = Journal::open(journal.slot).unwrap();
        assert_eq!(successor.replay().changes, [change(1)]);
        assert_eq!(successor.pending(), [(1, Message::Remove { start: 8192, end: 12288 })]);
    }
}
