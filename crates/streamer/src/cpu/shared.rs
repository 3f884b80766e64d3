// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state that all reactors share.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rewake_image_io::BlockCache;
use rewake_image_io::io_budget::IoBudget;
use rewake_process::Notifier;
use rewake_process::wake_socket::WakeSocket;

use super::huge_pages::HugePages;
use super::space::AddressSpace;
use crate::ledger::{Journal, Ledger};

/// The most reactors. Memory bandwidth bounds the filling: more threads would only compete for it.
pub(super) const MAX_REACTORS: usize = 8;

/// A request of another thread to a reactor.
#[derive(Debug)]
pub enum ReactorRequest {
    /// Become the home reactor of an address space.
    Adopt {
        /// The address space, which the ledger has already.
        space: Arc<AddressSpace>,
        /// Its journal.
        journal: Journal,
        /// At a takeover, the userfaultfds that had slots then. Messages may be pending, and threads may wait
        /// whose faults the dead worker has read.
        inherited: Option<Arc<BTreeSet<i32>>>,
    },
}

/// How other threads reach one reactor.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) waker: Notifier,
    /// Wakes it when bytes have arrived from another host.
    pub(super) arrived: WakeSocket,
    pub(super) inbox: Mutex<Vec<ReactorRequest>>,
    /// Whether an address space of this reactor may have failed, be finished or have lost its process.
    pub(super) attention: AtomicBool,
}

/// The state that all reactors share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) cache: Arc<BlockCache>,
    pub(super) ledger: Ledger,
    pub(super) spaces: Mutex<Vec<Arc<AddressSpace>>>,
    pub(super) version: AtomicUsize,
    pub(super) budget: Arc<IoBudget>,
    pub(super) huge_pages: HugePages,
    pub(super) handles: Vec<Handle>,
}

impl Shared {
    /// Makes every reactor check its address spaces.
    pub(super) fn attention_all(&self) {
        for handle in &self.handles {
            handle.attention.store(true, Ordering::Release);
            handle.waker.wake();
        }
    }

    /// Makes the home reactor of `space` check its address spaces.
    pub(super) fn attention(&self, space: &AddressSpace) {
        if let Some(handle) = self.handles.get(space.home) {
            handle.attention.store(true, Ordering::Release);
            handle.waker.wake();
        }
    }

    /// Wakes the home reactor of an address space where no page is missing any more.
    pub(super) fn check_finished(&self, space: &AddressSpace) {
        if space.session.is_released() && space.layout().missing() == 0 {
            self.attention(space);
        }
    }

    /// Adds an address space to those that all reactors fill.
    pub(super) fn add(&self, space: &Arc<AddressSpace>) {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(space));
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Removes an address space and wakes every reactor to drop its reference. No reactor reads its events
    /// any more: until the last reference closes the userfaultfd, the program waits at each event.
    pub(super) fn remove(&self, space: &Arc<AddressSpace>) {
        let mut spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
        spaces.retain(|other| !Arc::ptr_eq(other, space));
        drop(spaces);
        self.version.fetch_add(1, Ordering::Release);
        self.handles.iter().for_each(|handle| handle.waker.wake());
    }
}
