// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pages that have not arrived from another host: they are requested, and what waits for them is kept.
//!
//! The fetcher wakes this reactor when pages that it requested have arrived.

use std::sync::Arc;

use rewake_image_io::{BLOCK, Class, ImageFile, PAGE, SentRequest};

use super::Reactor;
use super::background::{BATCH, Claim};
use super::demand::Demand;
use crate::cpu::space::AddressSpace;

/// A page fault whose page has not arrived.
#[derive(Debug)]
pub(super) struct AbsentPage {
    demand: Demand,
    file: Arc<ImageFile>,
    offset: u64,
    sent: SentRequest,
}

/// A claimed block that has not arrived.
#[derive(Debug)]
pub(super) struct AbsentBlock {
    claim: Claim,
    file: Arc<ImageFile>,
    offset: u64,
    sent: SentRequest,
}

impl AbsentBlock {
    /// Returns whether the fetcher has a request for it.
    fn is_sent(&self) -> bool {
        self.file.source().is_some_and(|source| source.source.is_sent(self.sent))
    }
}

impl Reactor {
    /// Requests a page that a thread waits for. The page fault is served when it has arrived.
    pub(super) fn await_page(&mut self, demand: Demand, file: &Arc<ImageFile>, offset: u64) {
        let mut absent = AbsentPage { demand, file: Arc::clone(file), offset, sent: SentRequest::default() };
        if self.request(file, Class::Demand, offset, PAGE, &mut absent.sent) {
            self.absent_pages.push(absent);
        } else {
            self.deferred.push(absent.demand);
        }
    }

    /// Keeps a claimed block, which is requested by [`Reactor::request_blocks`]. It is loaded when it has
    /// arrived.
    pub(super) fn await_block(&mut self, claim: Claim, file: Arc<ImageFile>, offset: u64) {
        self.absent_blocks.push(AbsentBlock { claim, file, offset, sent: SentRequest::default() });
    }

    /// Requests the claimed blocks that the fetcher has no request for, adjacent ones together. Where it has
    /// no room, they are requested in a later turn.
    pub(super) fn request_blocks(&mut self) {
        let mut at = 0;
        while let Some(first) = self.absent_blocks.get(at) {
            let follows = |(index, next): (usize, &AbsentBlock)| {
                Arc::ptr_eq(&next.file, &first.file)
                    && next.offset == first.offset + (index * BLOCK) as u64
                    && !next.is_sent()
            };
            let blocks = self.absent_blocks[at..].iter().take(BATCH).enumerate();
            let count = blocks.take_while(|block| follows(*block)).count();
            if count > 0 {
                let mut sent = SentRequest::default();
                self.request(&first.file, Class::Background, first.offset, count * BLOCK, &mut sent);
                self.absent_blocks[at..at + count].iter_mut().for_each(|block| block.sent = sent);
            }
            at += count.max(1);
        }
    }

    /// Serves the page faults whose pages have arrived. The others are requested again if another fetcher
    /// runs by now.
    pub(super) fn serve_arrived(&mut self) {
        for mut absent in std::mem::take(&mut self.absent_pages) {
            if absent.file.has(absent.offset, PAGE) {
                self.serve(absent.demand);
            } else if !is_over(&absent.demand.space) {
                let AbsentPage { file, offset, sent, .. } = &mut absent;
                if self.request(file, Class::Demand, *offset, PAGE, sent) {
                    self.absent_pages.push(absent);
                } else {
                    self.deferred.push(absent.demand);
                }
            }
        }
    }

    /// Loads a claimed block that has arrived, if no other is being filled.
    pub(super) fn load_arrived(&mut self) {
        let mut at = 0;
        while let Some(absent) = self.absent_blocks.get_mut(at) {
            if is_over(absent.claim.space()) {
                self.absent_blocks.swap_remove(at);
                continue;
            }
            if self.current.is_some() || !absent.file.has(absent.offset, BLOCK) {
                at += 1;
            } else {
                let absent = self.absent_blocks.remove(at);
                self.load(absent.claim);
            }
        }
    }

    /// Requests bytes that have not arrived. Returns false if the fetcher has no room for the request.
    fn request(
        &self,
        file: &ImageFile,
        class: Class,
        offset: u64,
        len: usize,
        sent: &mut SentRequest,
    ) -> bool {
        let Some(fetched) = file.source().filter(|_| !file.has(offset, len)) else { return false };
        // There are MAX_REACTORS at most.
        let reader = u8::try_from(self.index).unwrap_or(u8::MAX);
        fetched.request(reader, class, (offset, len), sent)
    }
}

fn is_over(space: &AddressSpace) -> bool {
    space.is_gone() || space.session.has_failed()
}
