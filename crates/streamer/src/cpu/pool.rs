// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts the reactor threads and assigns address spaces to them.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::Context as _;
use rewake_image_io::BlockCache;
use rewake_image_io::io_budget::IoBudget;
use rewake_process::Notifier;
use rewake_process::wake_socket::WakeSocket;

use super::huge_pages::HugePages;
use super::reactor::run;
use super::shared::{Handle, MAX_REACTORS, ReactorRequest, Shared};
use crate::ledger::Ledger;
use crate::session::Session;

/// Returns the number of reactors: one for each processor, [`MAX_REACTORS`] at most.
fn reactors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MAX_REACTORS)
}

/// The reactor threads of a worker.
#[derive(Debug)]
pub struct ReactorPool {
    shared: Arc<Shared>,
    next_home: AtomicUsize,
    _threads: Vec<JoinHandle<()>>,
}

impl ReactorPool {
    /// Starts the reactor threads: one for each processor, 8 at most.
    ///
    /// # Errors
    /// Fails when the kernel refuses descriptors, memory or threads.
    pub fn start(cache: &Arc<BlockCache>, ledger: Ledger) -> anyhow::Result<Self> {
        let count = reactors();
        let handle = || {
            anyhow::Ok(Handle {
                waker: Notifier::new().context("making an eventfd")?,
                arrived: WakeSocket::new().context("making sockets")?,
                inbox: Mutex::default(),
                attention: AtomicBool::new(false),
            })
        };
        let handles: Vec<Handle> = (0..count).map(|_| handle()).collect::<Result<_, _>>()?;
        let budget = IoBudget::new(handles.iter().map(|handle| handle.waker.clone()).collect())?;
        let shared = Arc::new(Shared {
            cache: Arc::clone(cache),
            ledger,
            spaces: Mutex::default(),
            version: AtomicUsize::new(0),
            budget: Arc::new(budget),
            huge_pages: HugePages::new(),
            handles,
        });
        let start = |index: usize| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("fill-{index}"));
            thread.spawn(move || run(index, shared)).context("starting a reactor thread")
        };
        let threads = (0..count).map(start).collect::<Result<_, _>>()?;
        Ok(Self { shared, next_home: AtomicUsize::new(0), _threads: threads })
    }

    /// Chooses the home reactor of the next address space.
    #[must_use]
    pub fn choose_home(&self) -> usize {
        self.next_home.fetch_add(1, Ordering::Relaxed) % self.shared.handles.len()
    }

    /// Hands a request to the reactor of its address space.
    pub fn submit(&self, request: ReactorRequest) {
        let ReactorRequest::Adopt { space, .. } = &request;
        let Some(handle) = self.shared.handles.get(space.home) else { return };
        handle.inbox.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        handle.waker.wake();
    }

    /// Returns the sockets by which a fetcher wakes the reactors, by their numbers.
    ///
    /// # Errors
    /// EMFILE.
    pub fn wakers(&self) -> std::io::Result<Vec<OwnedFd>> {
        self.shared.handles.iter().map(|handle| handle.arrived.sender().try_clone_to_owned()).collect()
    }

    /// Returns the I/O budget of the reactors, which other readers of the same disk share.
    #[must_use]
    pub fn pace(&self) -> Arc<IoBudget> {
        Arc::clone(&self.shared.budget)
    }

    /// Makes huge pages of resident memory, for seconds at most. No userfaultfd of the session is open any
    /// more.
    pub fn collapse_huge_pages(&self) {
        self.shared.huge_pages.collapse();
    }

    /// Returns whether all memory that the session loads first is resident. Its processes must run.
    #[must_use]
    pub fn is_first_resident(&self, session: &Session) -> bool {
        // Reactors add and remove address spaces meanwhile.
        let spaces = self.shared.spaces.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // A reactor may not have adopted all yet.
        spaces.len() >= session.open_spaces()
            && spaces.iter().all(|space| space.layout().is_priority_resident())
    }

    /// Wakes all reactors, because the session was released or has failed, or loads in the background from
    /// now on.
    pub fn look_again(&self) {
        self.shared.attention_all();
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use rewake_image_io::DEFAULT_BUDGET;

    use super::*;
    use crate::ledger::Journal;
    use crate::uffd_child::{self, UffdChild};
    use crate::working_set::LoadingOptions;

    #[test]
    fn a_fork_without_room_ends_the_time_on_demand() {
        let parent = UffdChild::start(uffd_child::fork_and_access);
        let ledger = Ledger::new().unwrap();
        let pool = ReactorPool::start(&BlockCache::new(DEFAULT_BUDGET).unwrap(), ledger).unwrap();
        let options =
            LoadingOptions { on_demand_only: Some(Duration::from_secs(3600)), ..Default::default() };
        let session = Arc::new(Session::new(PathBuf::new()).with_options(options));
        let slot = parent.slot(ledger, true);
        let (space, journal) = (parent.address_space(&session, slot), Journal::create(ledger, slot).unwrap());
        while ledger.take_space().is_some() {}
        assert!(session.is_on_demand());
        pool.submit(ReactorRequest::Adopt { space, journal, inherited: None });
        uffd_child::until(|| !session.is_on_demand());
        assert!(!session.has_failed() && parent.lives());
    }
}
