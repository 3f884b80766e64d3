// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pages that threads wait for.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rewake_image_io::{Acquire, BLOCK, Done, PagesFile, Read, read_now};
use rewake_pager::{Locate, PAGE_SIZE, Place};

use super::reactor::Reactor;
use super::space::{AddressSpace, Filled};

/// A thread waits for the page at `address`.
#[derive(Debug)]
pub(super) struct Demand {
    pub(super) space: Arc<AddressSpace>,
    pub(super) address: u64,
    /// When its message was read.
    pub(super) since: Instant,
    /// File and offset of the read that is under way for it.
    pub(super) reading: Option<(u32, u64)>,
}

/// Where a page's bytes are.
enum Bytes {
    /// In the reactor's page buffer.
    Here,
    /// In a block that some reactor is reading.
    Coming,
    /// Nowhere in memory.
    OnDisk,
}

/// Marks tickets of demand reads; the rest is the index of the [`Demand`].
pub(super) const DEMAND_TICKET: u64 = 1 << 63;

impl Reactor {
    /// Serves a fault now if its bytes are in memory, otherwise asks the disk for its block, ahead of what is
    /// read in the background: for the page alone when the block is claimed already and not being read yet.
    pub(super) fn serve(&mut self, demand: Demand) {
        if demand.space.is_gone() || demand.space.session.has_failed() {
            return;
        }
        let space = Arc::clone(&demand.space);
        let layout = space.layout();
        let place = match layout.locate(demand.address) {
            // A page that we filled and that faults again was never touched by the program (its loss would
            // have been an event): a fork does not copy zero pages, for one. Its bytes are the image's.
            Locate::Missing(place) | Locate::Resident(place) => place,
            Locate::Unbacked => {
                let filled = space.fill_demand(&layout, demand.address, None, None);
                if filled == Filled::All {
                    space.prefault_zero_run(&layout, demand.address);
                }
                drop(layout);
                return self.served(demand, filled);
            }
        };
        let Some(file) = space.files.get(place.file as usize) else {
            unreachable!("the plan was made with these files")
        };
        layout.promote(place.block);
        match self.bytes_at_hand(file, place) {
            Bytes::Here => {
                let filled =
                    space.fill_demand(&layout, demand.address, Some(place.page), Some(&self.page[..]));
                drop(layout);
                self.served(demand, filled);
            }
            Bytes::Coming => self.blocked.push(demand),
            Bytes::OnDisk => {
                drop(layout);
                self.shared.pace.note_demand();
                if self.load_wanted(&space, place.block) {
                    self.blocked.push(demand);
                } else {
                    self.read_page(demand, file, place);
                }
            }
        }
    }

    /// Copies the page's bytes into `self.page` if they are in the page cache or in the block cache.
    fn bytes_at_hand(&mut self, file: &Arc<PagesFile>, place: Place) -> Bytes {
        // A failure to read is found again, and reported, by the read that follows.
        if file.is_cached(place.file_offset, self.page.len())
            && read_now(file, place.file_offset, &mut self.page[..]).is_ok()
        {
            return Bytes::Here;
        }
        match self.shared.cache.acquire(file, place.file_offset / BLOCK as u64, &self.waker) {
            Acquire::Hit(block) => {
                let start = in_block(place.file_offset);
                let Some(bytes) = block.get(start..start + self.page.len()) else { return Bytes::OnDisk };
                self.page.copy_from_slice(bytes);
                Bytes::Here
            }
            // Its read was begun before this one could be.
            Acquire::Pending => Bytes::Coming,
            // The guard of a load is dropped here: nobody waits for the whole block.
            Acquire::Load(_) | Acquire::Full => Bytes::OnDisk,
        }
    }

    fn read_page(&mut self, mut demand: Demand, file: &Arc<PagesFile>, place: Place) {
        let page = Some((place.file, place.file_offset));
        let same = |other: &Demand| {
            other.reading == page
                && other.address == demand.address
                && Arc::ptr_eq(&other.space, &demand.space)
        };
        if self.demands.iter().any(|(_, other)| same(other)) {
            return; // on its way already; the fill wakes every thread that waits for the page
        }
        let Some(dst) = self.shared.cache.demand_buffer() else {
            self.deferred.push(demand);
            return;
        };
        let entry = self.demands.vacant_entry();
        let ticket = DEMAND_TICKET | entry.key() as u64;
        let how = file.how(place.file_offset, dst.len());
        let read = Read { ticket, file: Arc::clone(file), offset: place.file_offset, dst, how };
        match self.engine.submit(read) {
            Ok(()) => {
                demand.reading = page;
                entry.insert(demand);
            }
            Err(_full) => self.deferred.push(demand),
        }
    }

    /// A demand read is back.
    pub(super) fn page_read(&mut self, done: Done) {
        let Ok(key) = usize::try_from(done.ticket & !DEMAND_TICKET) else { return };
        let Some(demand) = self.demands.try_remove(key) else { return };
        if let Err(error) = done.result {
            demand.space.session.fail(&error.to_string());
            self.shared.attention_all();
            return;
        }
        let space = Arc::clone(&demand.space);
        let layout = space.layout();
        let place = match layout.locate(demand.address) {
            Locate::Missing(place) | Locate::Resident(place) => Some(place),
            Locate::Unbacked => None,
        };
        let Some(place) = place.filter(|place| demand.reading == Some((place.file, place.file_offset)))
        else {
            // The program moved or dropped the page while it was read.
            drop(layout);
            return self.serve(demand);
        };
        let filled = space.fill_demand(&layout, demand.address, Some(place.page), Some(&done.dst));
        drop(layout);
        self.served(demand, filled);
    }

    /// Serves what waited for a block to arrive.
    pub(super) fn retry_blocked(&mut self) {
        for demand in std::mem::take(&mut self.blocked) {
            self.serve(demand);
        }
    }

    fn served(&mut self, demand: Demand, filled: Filled) {
        match filled {
            Filled::All => {
                self.shared.served.fetch_add(1, Ordering::Relaxed);
                demand.space.note_fault(demand.since.elapsed());
                self.shared.check_finished(&demand.space);
            }
            Filled::Later(_) => self.deferred.push(demand),
            Filled::Gone => self.gone(&demand.space),
            Filled::Failed(errno) => self.refused(&demand.space, errno),
        }
    }

    /// Tries again what had to wait for the program or for a buffer. True when some still waits.
    pub(super) fn retry_deferred(&mut self) -> bool {
        for demand in std::mem::take(&mut self.deferred) {
            self.serve(demand);
        }
        !self.deferred.is_empty()
    }
}

fn in_block(offset: u64) -> usize {
    usize::try_from(offset % BLOCK as u64).unwrap_or(0)
}

const _: () = assert!(BLOCK as u64 == rewake_pager::BLOCK_PAGES * PAGE_SIZE);
