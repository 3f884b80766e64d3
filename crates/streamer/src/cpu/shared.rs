// SPDX-License-Identifier: MIT OR Apache-2.0
//! What all reactors share.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rewake_image_io::io_budget::IoBudget;
use rewake_image_io::{BlockCache, Notifier};

use super::reactor::Task;
use super::space::AddressSpace;
use crate::ledger::Ledger;

#[derive(Debug)]
pub(super) struct Handle {
    pub(super) waker: Notifier,
    pub(super) inbox: Mutex<Vec<Task>>,
    /// A home may have something to look at: failed, finished, or without a process.
    pub(super) attention: AtomicBool,
}

/// What all reactors share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) cache: Arc<BlockCache>,
    pub(super) ledger: Ledger,
    pub(super) spaces: Mutex<Vec<Arc<AddressSpace>>>,
    pub(super) version: AtomicUsize,
    pub(super) sessions: AtomicUsize,
    pub(super) pace: Arc<IoBudget>,
    /// Faults served, by all reactors: see `Reactor::yield_to_faulting_threads`.
    pub(super) served: AtomicUsize,
    pub(super) handles: Vec<Handle>,
}

impl Shared {
    /// Has every reactor look after its homes.
    pub(super) fn attention_all(&self) {
        for handle in &self.handles {
            handle.attention.store(true, Ordering::Release);
            handle.waker.wake();
        }
    }

    pub(super) fn attention(&self, space: &AddressSpace) {
        if let Some(handle) = self.handles.get(space.home) {
            handle.attention.store(true, Ordering::Release);
            handle.waker.wake();
        }
    }

    /// Tells the home of an address space in which nothing is missing any more.
    pub(super) fn check_finished(&self, space: &AddressSpace) {
        if space.session.is_released() && space.layout().missing() == 0 {
            self.attention(space);
        }
    }

    /// True when no second session could want the same blocks.
    pub(super) fn lone_session(&self) -> bool {
        self.sessions.load(Ordering::Relaxed) <= 1
    }

    pub(super) fn add(&self, space: &Arc<AddressSpace>) {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(space));
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Takes an address space out and has every reactor let go of it: its descriptor is read by nobody any
    /// more, and until the last reference closes it the program waits at each event.
    pub(super) fn remove(&self, space: &Arc<AddressSpace>) {
        let mut spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
        spaces.retain(|other| !Arc::ptr_eq(other, space));
        drop(spaces);
        self.version.fetch_add(1, Ordering::Release);
        self.handles.iter().for_each(|handle| handle.waker.wake());
    }
}
