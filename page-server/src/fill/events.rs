// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reading an address space's events and doing what they say.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rewake_pager::{Change, Space};
use rewake_uffd::{Message, Uffd};
use tracing::{debug, warn};

use super::space::AddressSpace;
use super::stats::add;
use crate::ledger::{Journal, Ledger, MAX_SPACES};
use crate::sys;

/// An address space with what only its home reactor has.
#[derive(Debug)]
pub(super) struct Home {
    pub(super) space: Arc<AddressSpace>,
    journal: Journal,
    messages: Vec<(usize, Message)>,
}

/// What one reading brought.
#[derive(Debug, Default)]
pub(super) struct News {
    /// Pages that threads wait for.
    pub(super) faults: Vec<u64>,
    /// Address spaces of forked children, to be served from now on.
    pub(super) children: Vec<Home>,
}

impl Home {
    pub(super) fn new(space: Arc<AddressSpace>, journal: Journal) -> Self {
        Self { space, journal, messages: Vec::new() }
    }

    /// Does what messages say that a dead predecessor received and did not deal with.
    /// `known` are the userfaultfds that had a slot when it died: a fork whose child is among them is done but
    /// for the note that it is.
    pub(super) fn finish_pending(
        &mut self,
        ledger: Ledger,
        known: &BTreeSet<i32>,
        news: &mut News,
    ) -> io::Result<()> {
        let space = Arc::clone(&self.space);
        let mut layout = space.layout_mut();
        let done = |message: Message| matches!(message, Message::Fork { uffd } if known.contains(&uffd));
        self.messages = self.journal.pending();
        let last = self.messages.last().map(|(index, _)| *index);
        self.messages.retain(|(_, message)| !done(*message));
        self.apply(&mut layout, ledger, news)?;
        if let Some(last) = last {
            self.journal.dealt_with(last);
        }
        Ok(())
    }

    /// Reads events until none waits. Everything but faults is done at once, in order, before any fill can
    /// look an address up again.
    pub(super) fn read_events(&mut self, ledger: Ledger, news: &mut News) -> io::Result<()> {
        let space = Arc::clone(&self.space);
        let mut layout = space.layout_mut();
        // Bounded: a thread has one fault or event at a time, so what waits is at most what runs there.
        while self.journal.receive(&space.uffd, &mut self.messages)? {
            self.apply(&mut layout, ledger, news)?;
        }
        self.apply(&mut layout, ledger, news)
    }

    fn apply(&mut self, layout: &mut Space, ledger: Ledger, news: &mut News) -> io::Result<()> {
        let messages = std::mem::take(&mut self.messages);
        for &(index, message) in &messages {
            match message {
                Message::Fault { address } => {
                    news.faults.push(address);
                    continue;
                }
                Message::Remove { start, end } => self.change(layout, index, Change::Remove { start, end }),
                Message::Unmap { start, end } => self.change(layout, index, Change::Unmap { start, end }),
                Message::Remap { from, to, len } => {
                    self.change(layout, index, Change::Remap { from, to, len });
                }
                Message::Fork { uffd } => {
                    news.children.push(self.fork(layout, ledger, uffd)?);
                    self.journal.dealt_with(index);
                }
                Message::Unknown(event) => warn!(event, "unknown userfaultfd event ignored"),
            }
            add(&self.space.session.stats.events, 1);
        }
        if let Some((index, _)) = messages.last() {
            // Faults need nothing noted: a successor wakes every waiting thread, which then faults again.
            self.journal.dealt_with(*index);
        }
        self.messages = messages;
        self.messages.clear();
        Ok(())
    }

    fn change(&mut self, layout: &mut Space, index: usize, change: Change) {
        let before = layout.missing();
        if let Err(error) = layout.apply(&change) {
            // The kernel gives whole pages; anything else is not an address of ours.
            warn!(%error, ?change, "layout change ignored");
        }
        self.journal.record_change(index, &change, || layout.snapshot());
        add(&self.space.session.stats.pages_dropped, before.saturating_sub(layout.missing()));
        debug!(image_pid = self.space.slot.image_pid.load(Ordering::Relaxed), ?change, "layout");
    }

    /// Takes over the address space of a child that was just forked. On failure its descriptor stays open, and
    /// the child waits rather than read zeros until it is killed with its tree.
    fn fork(&mut self, layout: &Space, ledger: Ledger, number: i32) -> io::Result<Self> {
        let parent = &self.space;
        let Some(slot) = ledger.take_space().and_then(|index| ledger.spaces().get(index)) else {
            let what = format!("more than {MAX_SPACES} address spaces at once: run a second daemon");
            return Err(io::Error::other(what));
        };
        slot.session.store(parent.slot.session.load(Ordering::Relaxed), Ordering::Relaxed);
        slot.image_pid.store(parent.slot.image_pid.load(Ordering::Relaxed), Ordering::Relaxed);
        slot.uffd.store(number, Ordering::Relaxed);
        let child = layout.fork();
        let mut journal = Journal::create(slot)?;
        // SAFETY: the kernel opened this descriptor for the message, and it is dealt with once: nobody owns it.
        let uffd = Uffd::adopt(unsafe { sys::take_over(number) })?;
        journal.rewrite(&child.snapshot(), 0);
        slot.publish();
        add(&parent.session.stats.pages_total, child.missing());
        parent.session.space_opened();
        let files = Arc::clone(&parent.files);
        let space = AddressSpace::new(Arc::clone(&parent.session), slot, uffd, files, child, parent.home);
        debug!(missing = space.layout().missing(), "child forked");
        Ok(Self::new(Arc::new(space), journal))
    }
}
