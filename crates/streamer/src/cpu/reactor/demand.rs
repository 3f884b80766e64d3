// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves page faults: loads the pages that threads wait for.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rewake_image_io::{Acquire, BLOCK, BlockRef, BufferSlice, Class, Completion, ImageFile, PAGE, Request};
use rewake_pager::{Locate, MAX_WINDOW, PAGE_SIZE, Place, ResidencyMap};

use super::Reactor;
use super::background::BlockRead;
use crate::cpu::space::{AddressSpace, Filled};
use crate::cpu::stats::add;

/// A page fault at `address`, which a thread waits for.
#[derive(Debug)]
pub(super) struct Demand {
    pub(super) space: Arc<AddressSpace>,
    pub(super) address: u64,
    /// When the reactor read its message.
    pub(super) since: Instant,
    /// File and offset of the read that is in flight for it.
    pub(super) reading: Option<(u32, u64)>,
}

impl Demand {
    pub(super) fn new(space: &Arc<AddressSpace>, address: u64, since: Instant) -> Self {
        add(&space.session.stats.waiting, 1);
        Self { space: Arc::clone(space), address, since, reading: None }
    }
}

impl Drop for Demand {
    fn drop(&mut self) {
        self.space.session.stats.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where a page's bytes are.
enum PageSource {
    /// In the reactor's window buffer, from this byte on.
    Loaded(usize),
    /// In a block of the block cache.
    Block(BlockRef),
    /// In a block that some reactor is reading.
    InFlight,
    /// Neither in the page cache nor in the block cache.
    OnDisk,
}

/// Bytes of the longest window of a sweep.
const WINDOW: usize = 64 * PAGE;
const _: () = assert!(WINDOW as u64 == MAX_WINDOW * PAGE_SIZE);

/// Bytes of the buffer for a window and the whole blocks that it lies in.
pub(super) const WINDOW_BUFFER: usize = WINDOW + 2 * BLOCK;

/// The bit that marks tokens of demand reads. The other bits are the index of the [`Demand`].
pub(super) const DEMAND_TOKEN: u64 = 1 << 63;

impl Reactor {
    /// Serves a page fault at once if its bytes are in memory. Otherwise reads its block from the disk, ahead
    /// of background loads; the page alone where the block is claimed already and its read has not begun.
    pub(super) fn serve(&mut self, demand: Demand) {
        if demand.space.is_gone() || demand.space.session.has_failed() {
            return;
        }
        let space = Arc::clone(&demand.space);
        let layout = space.layout();
        let window = space.window(demand.address);
        if let Some(filled) = self.fill_window(&space, &layout, demand.address, &window) {
            drop(layout);
            return self.served(demand, filled);
        }
        let place = match layout.locate(demand.address) {
            // A resident page that faults again was never accessed, because its loss would have been an
            // event. One cause is a fork, which does not copy zero pages. The image's bytes are right.
            Locate::Missing(place) | Locate::Resident(place) => place,
            Locate::Unbacked => {
                let filled = space.fill_demand(&layout, demand.address, None, None);
                if filled == Filled::All {
                    space.fill_zero_window(&layout, demand.address, &window);
                }
                drop(layout);
                return self.served(demand, filled);
            }
        };
        let Some(file) = space.files.get(place.file as usize) else {
            unreachable!("the plan was made with these files")
        };
        layout.promote(place.block);
        space.note_access(&layout, place.page, 1);
        if !file.has(place.file_offset, PAGE) {
            drop(layout);
            return self.await_page(demand, file, place.file_offset);
        }
        match self.bytes_at_hand(file, place) {
            PageSource::Loaded(at) => {
                let page = &self.window[at..at + PAGE];
                let filled = space.fill_demand(&layout, demand.address, Some(place.page), Some(page));
                drop(layout);
                self.served(demand, filled);
                if file.is_sealed() {
                    self.continue_with(&space, place.block);
                }
            }
            PageSource::Block(block) => {
                let filled = fill_around(&space, &layout, demand.address, place, &block);
                drop(layout);
                self.served(demand, filled);
            }
            PageSource::InFlight => self.blocked.push(demand),
            PageSource::OnDisk => {
                drop(layout);
                // The background load is at a sweep, and reads the next blocks for it: it must not be held
                // back as for other demand reads.
                let sweeps = window.end - window.start > PAGE_SIZE;
                let in_order = sweeps && self.demand_load(&space, place.block, Class::Background);
                if in_order || self.demand_load(&space, place.block, Class::Demand) {
                    self.blocked.push(demand);
                } else if file.is_sealed() {
                    self.load_block(demand, file, place);
                } else {
                    self.read_page(demand, file, place);
                }
            }
        }
    }

    /// Fills the missing pages of a sweep's window. Returns `None` if the window is one page, or if the page
    /// cache does not have the page that the thread waits for.
    fn fill_window(
        &mut self,
        space: &AddressSpace,
        layout: &ResidencyMap,
        address: u64,
        window: &Range<u64>,
    ) -> Option<Filled> {
        if window.end - window.start <= PAGE_SIZE {
            return None;
        }
        let mut run = layout.missing_run(address, window)?;
        let file = space.files.get(run.file as usize)?;
        let range = run.file_offset..run.file_offset + run.pages * PAGE_SIZE;
        // A read error is reported by the read that follows.
        let read = file.read_verified(range, &mut self.window, true).ok()?;
        run.pages = read.len() as u64 / PAGE_SIZE;
        if address >= run.target + run.pages * PAGE_SIZE {
            // The disk is read ahead of the sweep, in long pieces.
            layout.follow(run.page, false);
            return None;
        }
        layout.follow(run.page, true);
        space.note_access(layout, run.page, run.pages);
        Some(space.fill_window(layout, &run, address, &self.window[read]))
    }

    /// Copies the page's bytes into `self.window` if they are in the page cache; else looks for their block.
    fn bytes_at_hand(&mut self, file: &Arc<ImageFile>, place: Place) -> PageSource {
        let range = place.file_offset..place.file_offset + PAGE_SIZE;
        // A read error is reported by the read that follows.
        if let Ok(read) = file.read_verified(range, &mut self.window, false)
            && read.len() == PAGE
        {
            return PageSource::Loaded(read.start);
        }
        match self.shared.cache.acquire(file, place.file_offset / BLOCK as u64, &self.waker) {
            Acquire::Hit(block) if block.len() >= in_block(place.file_offset) + PAGE => {
                PageSource::Block(block)
            }
            Acquire::Hit(_) => PageSource::OnDisk,
            // A reactor has begun to read the block: that read ends before a new one would.
            Acquire::Pending => PageSource::InFlight,
            // This drops the guard of a load: no thread waits for the whole block.
            Acquire::Load(_) | Acquire::Full => PageSource::OnDisk,
        }
    }

    /// Reads the block of a page of a sealed file, which another reactor has claimed: a page alone cannot be
    /// checked.
    fn load_block(&mut self, demand: Demand, file: &Arc<ImageFile>, place: Place) {
        let mut guard = match self.shared.cache.acquire(file, place.file_offset / BLOCK as u64, &self.waker) {
            Acquire::Load(guard) => guard,
            // A reactor has begun to read it.
            Acquire::Pending => return self.blocked.push(demand),
            // It is ready now, or no buffer is free.
            Acquire::Hit(_) | Acquire::Full => return self.deferred.push(demand),
        };
        let Some(buffer) = guard.take_slice() else { unreachable!("a fresh guard has its buffer") };
        let entry = self.loads.vacant_entry();
        match self.engine.submit(Request::fill(
            entry.key() as u64,
            file,
            guard.offset(),
            buffer,
            Class::Demand,
        )) {
            Ok(_) => {
                let space = Arc::clone(&demand.space);
                entry.insert(BlockRead { space, block: place.block, guard, is_claimed: false });
                self.blocked.push(demand);
            }
            Err(_full) => self.deferred.push(demand),
        }
    }

    fn read_page(&mut self, mut demand: Demand, file: &Arc<ImageFile>, place: Place) {
        let page = Some((place.file, place.file_offset));
        let same = |other: &Demand| {
            other.reading == page
                && other.address == demand.address
                && Arc::ptr_eq(&other.space, &demand.space)
        };
        if self.demands.iter().any(|(_, other)| same(other)) {
            return; // a read is in flight; its fill wakes every thread that waits for the page
        }
        let Some(buffer) = self.shared.cache.demand_buffer() else {
            self.deferred.push(demand);
            return;
        };
        let entry = self.demands.vacant_entry();
        let token = DEMAND_TOKEN | entry.key() as u64;
        match self.engine.submit(Request::fill(token, file, place.file_offset, buffer, Class::Demand)) {
            Ok(_) => {
                demand.reading = page;
                entry.insert(demand);
            }
            Err(_full) => self.deferred.push(demand),
        }
    }

    /// Handles a finished demand read.
    pub(super) fn page_read(&mut self, done: Completion<BufferSlice>) {
        let Ok(key) = usize::try_from(done.token & !DEMAND_TOKEN) else { return };
        let Some(demand) = self.demands.try_remove(key) else { return };
        if let Err(error) = done.result {
            return self.read_failed(&demand.space, Some(demand.address), &error);
        }
        let space = Arc::clone(&demand.space);
        let layout = space.layout();
        let place = match layout.locate(demand.address) {
            Locate::Missing(place) | Locate::Resident(place) => Some(place),
            Locate::Unbacked => None,
        };
        let Some(place) = place.filter(|place| demand.reading == Some((place.file, place.file_offset)))
        else {
            // The program has moved or dropped the page during the read.
            drop(layout);
            return self.serve(demand);
        };
        let filled = space.fill_demand(&layout, demand.address, Some(place.page), Some(&done.memory));
        drop(layout);
        self.served(demand, filled);
    }

    /// Serves again the page faults that waited for a block.
    pub(super) fn retry_blocked(&mut self) {
        for demand in std::mem::take(&mut self.blocked) {
            self.serve(demand);
        }
    }

    fn served(&mut self, demand: Demand, filled: Filled) {
        match filled {
            Filled::All => {
                demand.space.note_fault(demand.since.elapsed());
                self.shared.check_finished(&demand.space);
            }
            Filled::Later(_) => self.deferred.push(demand),
            Filled::Gone => self.gone(&demand.space),
            Filled::Failed(errno) => self.refused(&demand.space, errno),
        }
    }

    /// Serves again the page faults that were deferred, for a layout change or for want of a buffer. Returns
    /// whether some are still deferred.
    pub(super) fn retry_deferred(&mut self) -> bool {
        for demand in std::mem::take(&mut self.deferred) {
            self.serve(demand);
        }
        !self.deferred.is_empty()
    }
}

/// Fills the missing pages of a block around the one that a thread waits for: it has waited for the disk
/// already, and is likely to access the neighbours next.
fn fill_around(
    space: &AddressSpace,
    layout: &ResidencyMap,
    address: u64,
    place: Place,
    block: &BlockRef,
) -> Filled {
    let within = place.file_offset % BLOCK as u64;
    let start = address.saturating_sub(within);
    // The last block of a file may be shorter.
    let window = start..start + block.len() as u64 / PAGE_SIZE * PAGE_SIZE;
    match layout.missing_run(address, &window) {
        Some(run) => space.fill_window(layout, &run, address, &block[in_block(run.file_offset)..]),
        // The page is resident, or moved.
        None => {
            let at = in_block(place.file_offset);
            space.fill_demand(layout, address, Some(place.page), Some(&block[at..at + PAGE]))
        }
    }
}

fn in_block(offset: u64) -> usize {
    usize::try_from(offset % BLOCK as u64).unwrap_or(0)
}

const _: () = assert!(BLOCK as u64 == rewake_pager::BLOCK_PAGES * PAGE_SIZE);
