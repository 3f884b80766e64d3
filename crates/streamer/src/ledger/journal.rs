// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records how one address space's layout differs from its image, in a file that outlives every process.
//!
//! The file is in the session's folder below `/run`, where root alone can open it. It has two halves. Records
//! are appended to one; when it is full, the current layout is written to the other, which then takes its
//! place. One 64-bit word in the slot commits each step: `half << 63 | records << 8 | applied`, where
//! `applied` counts the received messages that are processed. A worker that dies between two instructions
//! leaves either the old word or the new one.
//!
//! Records are written by system calls and not through a mapping, because a write that a full file system
//! refuses is then an error, and not a SIGBUS.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{IntoRawFd as _, RawFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;

use nix::fcntl::{FallocateFlags, fallocate};
use rewake_pager::{Change, PageIx, Segment};
use rewake_uffd::abi::EVENT_FORK;
use rewake_uffd::{Message, RawMessage, Uffd};
use tracing::warn;

use super::{Ledger, MAX_MESSAGES, SpaceSlot};
use crate::sys;

/// Records in a half: 512 KiB of 32-byte records.
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
    /// The layout to start from, or `None` if it is the image's own.
    pub snapshot: Option<Vec<Segment>>,
    /// The changes since then.
    pub changes: Vec<Change>,
}

/// The owner of one slot's journal and message area.
#[derive(Debug)]
pub struct Journal {
    slot: &'static SpaceSlot,
    /// The slot owns the descriptor, and closes it when it is retired.
    file: ManuallyDrop<File>,
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
    /// EMFILE, ENOSPC.
    pub fn create(ledger: Ledger, slot: &'static SpaceSlot) -> io::Result<Self> {
        let file = ledger.new_journal_file(slot)?;
        slot.commit.store(0, Ordering::Relaxed);
        slot.journal.store(file.into_raw_fd(), Ordering::Release);
        let mut journal = Self::open(slot);
        journal.messages().fill(RawMessage::default());
        Ok(journal)
    }

    /// Opens the journal of `slot`: the one that a dead worker has left in it.
    #[must_use]
    pub fn open(slot: &'static SpaceSlot) -> Self {
        let number: RawFd = slot.journal.load(Ordering::Acquire);
        // SAFETY: the slot owns the descriptor, and this file is never dropped. The reactor that has the
        // journal drops it before it retires the slot, which closes the descriptor.
        let file = unsafe { sys::take_over(number) };
        Self { slot, file: ManuallyDrop::new(file.into()) }
    }

    /// Reads the journal. Messages that are received and not processed stay in the message area.
    ///
    /// # Errors
    /// The file is shorter than what was noted, or the kernel's.
    pub fn replay(&self) -> io::Result<Replay> {
        let commit = self.commit();
        let mut replay = Replay::default();
        let mut bytes = vec![0; commit.records * RECORD];
        self.file.read_exact_at(&mut bytes, offset(commit.half, 0))?;
        for record in bytes.as_chunks().0 {
            match decode(record) {
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
        Ok(replay)
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
        let records = match self.file.write_all_at(&encode(&record), offset(commit.half, commit.records)) {
            Ok(()) => commit.records + 1,
            Err(error) => self.is_lost(&error),
        };
        self.store(Commit { half: commit.half, records, applied: index + 1 });
    }

    /// Notes that message `index` is processed: a successor ignores it.
    pub fn dealt_with(&mut self, index: usize) {
        self.store(Commit { applied: index + 1, ..self.commit() });
    }

    /// Starts the journal again with the whole layout, and notes that `applied` messages are processed.
    pub fn rewrite(&mut self, layout: &[Segment], applied: usize) {
        let commit = self.commit();
        let half = 1 - commit.half;
        if let Err(error) = self.write_layout(half, layout) {
            return self.store(Commit { half: commit.half, records: self.is_lost(&error), applied });
        }
        self.store(Commit { half, records: layout.len() + 1, applied });
        // The other half is not needed any more; its memory counts as that of `/run`.
        let (at, bytes) = (offset(commit.half, 0).cast_signed(), (HALF * RECORD) as i64);
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let _ = fallocate(&*self.file, punch, at, bytes);
    }

    fn write_layout(&self, half: usize, layout: &[Segment]) -> io::Result<()> {
        if layout.len() >= HALF {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let segments = layout.iter().map(|of| [SEGMENT, of.target, of.page.0, of.pages]);
        let records: Vec<u8> =
            [[SNAPSHOT, 0, 0, 0]].into_iter().chain(segments).flat_map(|record| encode(&record)).collect();
        self.file.write_all_at(&records, offset(half, 0))
    }

    /// Notes that the layout is too fragmented to hold, or that the file system is full: this worker serves
    /// the process as before, and a successor may only kill it. Returns that there are no records.
    fn is_lost(&self, error: &io::Error) -> usize {
        if self.slot.lossy.swap(1, Ordering::AcqRel) == 0 {
            warn!(%error, "a process's journal is lost: if this worker dies, the process is killed");
        }
        0
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
}

/// Where a record is in the file.
fn offset(half: usize, index: usize) -> u64 {
    ((half * HALF + index) * RECORD) as u64
}

fn encode(record: &Record) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    for (place, number) in bytes.as_chunks_mut().0.iter_mut().zip(record) {
        *place = number.to_ne_bytes();
    }
    bytes
}

fn decode(bytes: &[u8; RECORD]) -> Record {
    let mut record = [0; 4];
    for (place, number) in record.iter_mut().zip(bytes.as_chunks().0) {
        *place = u64::from_ne_bytes(*number);
    }
    record
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
        Journal::create(ledger, &ledger.spaces()[index]).unwrap()
    }

    fn change(page: u64) -> Change {
        Change::Remove { start: page * 4096, end: (page + 1) * 4096 }
    }

    #[test]
    fn changes_are_replayed_in_order() {
        let mut journal = journal();
        journal.record_change(0, &change(1), Vec::new);
        journal.record_change(1, &Change::Remap { from: 4096, to: 8192, len: 4096 }, Vec::new);
        let replay = Journal::open(journal.slot).replay().unwrap();
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
        let replay = journal.replay().unwrap();
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
        let mut successor = Journal::open(journal.slot);
        assert_eq!(successor.replay().unwrap().changes, [change(1)]);
        assert_eq!(successor.pending(), [(1, Message::Remove { start: 8192, end: 12288 })]);
    }
}
