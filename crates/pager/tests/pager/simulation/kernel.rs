// SPDX-License-Identifier: MIT OR Apache-2.0
//! A model of Linux for memory that is registered with a userfaultfd.
//!
//! From `fs/userfaultfd.c` and `mm/userfaultfd.c`: a program that begins `madvise`, `munmap`, `mremap` or
//! `fork` makes every fill fail with EAGAIN until its event was read. `madvise` drops its pages after that;
//! the others change the memory before their event is queued. Waiting faults are read before waiting events.
//! A fill of several pages stops at the first page that it cannot fill. When the last descriptor is closed,
//! missing pages become zero pages.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// The contents of a page as one number. Zero is a zero page.
pub(crate) type Value = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Page {
    Missing,
    /// `shared_zero`: the kernel's one zero page, which fork does not always copy.
    Present {
        value: Value,
        shared_zero: bool,
    },
}

/// The messages that the handler reads. Ranges are page numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    Fault(u64),
    Remove(Range<u64>),
    Unmap(Range<u64>),
    Remap {
        from: u64,
        to: u64,
        len: u64,
    },
    /// Index of the child.
    Fork(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    Present,
    Changing,
    NotMapped,
}

/// One address space.
#[derive(Debug, Default)]
pub(crate) struct Mm {
    /// The pages of registered mappings, by page number.
    pub(crate) pages: BTreeMap<u64, Page>,
    /// Changes that began and whose thread has not resumed.
    changing: u32,
    /// (page, thread) of waiting faults; also in `unread` until the handler reads them.
    waiting: BTreeSet<(u64, usize)>,
    unread: VecDeque<(u64, usize)>,
    events: VecDeque<(u64, Message)>,
    tickets: u64,
    closed: bool,
}

impl Mm {
    pub(crate) fn new(pages: impl Iterator<Item = u64>) -> Self {
        Self { pages: pages.map(|page| (page, Page::Missing)).collect(), ..Self::default() }
    }

    /// Accesses a page from a thread. Returns None when the thread waits.
    pub(crate) fn access(&mut self, page: u64, thread: usize) -> Option<Value> {
        match self.pages[&page] {
            Page::Present { value, .. } => Some(value),
            Page::Missing if self.closed => Some(0),
            Page::Missing => {
                self.waiting.insert((page, thread));
                self.unread.push_back((page, thread));
                None
            }
        }
    }

    pub(crate) fn store(&mut self, page: u64, value: Value) {
        self.pages.insert(page, Page::Present { value, shared_zero: false });
    }

    pub(crate) fn is_waiting(&self, thread: usize) -> bool {
        self.waiting.iter().any(|(_, other)| *other == thread)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Makes every fill fail with EAGAIN until the change ends.
    pub(crate) fn begin_change(&mut self) {
        self.changing += 1;
    }

    pub(crate) fn end_change(&mut self) {
        self.changing -= 1;
    }

    pub(crate) fn queue(&mut self, message: Message) -> u64 {
        self.tickets += 1;
        self.events.push_back((self.tickets, message));
        self.tickets
    }

    /// Returns true when the event was read, or never will be.
    pub(crate) fn was_read(&self, ticket: u64) -> bool {
        self.events.iter().all(|(other, _)| *other != ticket)
    }

    pub(crate) fn read(&mut self) -> Option<Message> {
        let fault = self.unread.pop_front().map(|(page, _)| Message::Fault(page));
        fault.or_else(|| Some(self.events.pop_front()?.1))
    }

    /// Fills pages as COPY or ZEROPAGE does. Returns the number of filled pages, and why the fill stopped.
    pub(crate) fn fill(&mut self, start: u64, values: &[Value]) -> (u64, Option<Stop>) {
        assert!(!self.closed, "filled through a closed descriptor");
        if self.changing > 0 {
            return (0, Some(Stop::Changing));
        }
        for (page, value) in (start..).zip(values) {
            let stop = match self.pages.get(&page) {
                None => Stop::NotMapped,
                Some(Page::Present { .. }) => Stop::Present,
                Some(Page::Missing) => {
                    self.pages.insert(page, Page::Present { value: *value, shared_zero: *value == 0 });
                    self.wake(page);
                    continue;
                }
            };
            return (page - start, Some(stop));
        }
        (values.len() as u64, None)
    }

    pub(crate) fn wake(&mut self, page: u64) {
        self.waiting.retain(|(other, _)| *other != page);
        self.unread.retain(|(other, _)| *other != page);
    }

    pub(crate) fn wake_all(&mut self) {
        self.waiting.clear();
        self.unread.clear();
    }

    /// Closes the last descriptor. Returns children that are not served.
    pub(crate) fn close(&mut self) -> Vec<usize> {
        self.closed = true;
        self.wake_all();
        let orphan = |(_, message)| if let Message::Fork(child) = message { Some(child) } else { None };
        self.events.drain(..).filter_map(orphan).collect()
    }

    /// Copies the memory for a child. `lost` returns true for shared zero pages that are not copied.
    pub(crate) fn fork(&self, mut lost: impl FnMut() -> bool) -> Self {
        let mut copy = |page: Page| match page {
            Page::Present { shared_zero: true, .. } if lost() => Page::Missing,
            other => other,
        };
        let pages = self.pages.iter().map(|(number, page)| (*number, copy(*page))).collect();
        Self { pages, closed: self.closed, ..Self::default() }
    }

    /// Unmaps the pages and returns them.
    pub(crate) fn take(&mut self, range: Range<u64>) -> Vec<(u64, Page)> {
        let numbers: Vec<u64> = self.pages.range(range).map(|(number, _)| *number).collect();
        numbers.into_iter().filter_map(|number| self.pages.remove_entry(&number)).collect()
    }

    pub(crate) fn zap(&mut self, range: Range<u64>) {
        self.pages.range_mut(range).for_each(|(_, page)| *page = Page::Missing);
    }

    pub(crate) fn has_messages(&self) -> bool {
        !self.unread.is_empty() || !self.events.is_empty()
    }
}
