// SPDX-License-Identifier: MIT OR Apache-2.0
//! One image of the cache, and how far it is. One thread at a time makes it; the others that want it wait for
//! that.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::bail;
use rewake_criu_images::Digest;
use rewake_image_store::PinnedImage;

use crate::arriving::ArrivingMemory;
use crate::folder::CacheFolder;

/// Why an image is not fetched any more.
const WRONG_BLOCK: &str = "a restore has found a wrong block, and all blocks are compared again: try again";

/// An image of the cache.
#[derive(Debug)]
pub(crate) struct CacheEntry {
    pub(crate) id: Digest,
    state: Mutex<EntryState>,
    changed: Condvar,
}

#[derive(Debug)]
struct EntryState {
    phase: EntryPhase,
    /// Restores that are about to lease it.
    pins: usize,
    /// How often it could not be made, and why not the last time.
    failures: u64,
    reason: String,
    /// Where it is in its store, while it may be read there.
    pinned: Option<Arc<PinnedImage>>,
    /// Bytes that it may have when it is complete; 0: those that it has.
    reserved: u64,
    /// A restore has found a wrong block, or a chunk is wrong: all bytes are compared before the next
    /// restore.
    doubted: bool,
    /// When what it had was compared; none: an earlier agent has done so.
    compared: Option<Instant>,
}

/// How far an image is.
#[derive(Debug, Clone)]
pub(crate) enum EntryPhase {
    /// It is not here, or has been left as a partial copy.
    Idle,
    /// A thread copies what CRIU reads itself.
    Making,
    /// A thread ends its fetcher.
    Ending,
    /// A fetcher brings the rest.
    Partial(Arc<ArrivingMemory>),
    /// All of it is here.
    Complete,
}

/// Which images are made anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remake {
    /// Those that a restore cannot use: whose memory has stopped to arrive, or that have a wrong block.
    Unusable,
    /// Those whose fetcher another agent had: restores that run need a new one.
    Left,
}

impl EntryState {
    fn is_removable(&self) -> bool {
        let is_busy = match &self.phase {
            EntryPhase::Making | EntryPhase::Ending => true,
            // All its bytes are being compared.
            EntryPhase::Partial(memory) => memory.has_arrived() && memory.failure().is_none(),
            EntryPhase::Idle | EntryPhase::Complete => false,
        };
        !is_busy && self.pins == 0
    }
}

impl CacheEntry {
    /// An image that an earlier agent may have left.
    pub(crate) fn new(id: Digest, folder: &CacheFolder) -> Self {
        let phase = if folder.is_complete(id) { EntryPhase::Complete } else { EntryPhase::Idle };
        let state = EntryState {
            phase,
            pins: 0,
            failures: 0,
            reason: String::new(),
            pinned: None,
            reserved: 0,
            doubted: folder.is_doubted(id),
            compared: None,
        };
        Self { id, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, EntryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, EntryState>) -> MutexGuard<'a, EntryState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how far it is.
    pub(crate) fn phase(&self) -> EntryPhase {
        self.lock().phase.clone()
    }

    /// Whether a restore can use it without its store.
    pub(crate) fn is_usable(&self) -> bool {
        let state = self.lock();
        match &state.phase {
            EntryPhase::Complete => !state.doubted,
            EntryPhase::Partial(memory) => memory.failure().is_none(),
            EntryPhase::Idle | EntryPhase::Making | EntryPhase::Ending => false,
        }
    }

    /// Keeps it from being removed.
    pub(crate) fn pin(&self) {
        self.lock().pins += 1;
    }

    /// Ends one [`CacheEntry::pin`].
    pub(crate) fn unpin(&self) {
        self.lock().pins -= 1;
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.lock().pins > 0
    }

    /// Returns where it is in its store, while it may be read there.
    pub(crate) fn pinned(&self) -> Option<Arc<PinnedImage>> {
        self.lock().pinned.clone()
    }

    pub(crate) fn set_pinned(&self, pinned: Arc<PinnedImage>) {
        self.lock().pinned = Some(pinned);
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.lock().reserved
    }

    pub(crate) fn reserve(&self, bytes: u64) {
        self.lock().reserved = bytes;
    }

    /// Has `make` bring it, unless it is here already, or another thread brings it. `make` gets whether all
    /// bytes must be compared.
    ///
    /// # Errors
    /// `make` has failed, in this thread or in the one that was waited for.
    pub(crate) fn ensure(
        &self,
        remake: Remake,
        make: impl FnOnce(bool) -> anyhow::Result<EntryPhase>,
    ) -> anyhow::Result<()> {
        let mut state = self.lock();
        let failures = state.failures;
        loop {
            match &state.phase {
                EntryPhase::Making | EntryPhase::Ending => state = self.wait(state),
                EntryPhase::Complete if !state.doubted || remake == Remake::Left => return Ok(()),
                EntryPhase::Partial(memory) if remake == Remake::Left || memory.failure().is_none() => {
                    return Ok(());
                }
                _ if state.failures > failures => bail!("{}", state.reason),
                _ => break,
            }
        }
        let doubted = state.doubted;
        let before = std::mem::replace(&mut state.phase, EntryPhase::Making);
        drop(state);
        // Also if `make` panics, the others do not wait for ever.
        let mut made =
            MakingGuard { entry: self, result: Err((before, "a thread has ended early".to_owned())) };
        let result = make(doubted);
        match (&mut made.result, result) {
            (made, Ok(phase)) => {
                *made = Ok(phase);
                Ok(())
            }
            (Err((_, reason)), Err(error)) => {
                *reason = format!("{error:#}");
                Err(error)
            }
            (Ok(_), Err(error)) => Err(error),
        }
    }

    /// Returns whether all of it is here.
    ///
    /// # Errors
    /// Its memory has stopped to arrive.
    pub(crate) fn is_complete(&self) -> anyhow::Result<bool> {
        let state = self.lock();
        match &state.phase {
            EntryPhase::Complete => return Ok(true),
            EntryPhase::Idle => bail!("{}", state.reason),
            EntryPhase::Partial(memory) => {
                if let Some(reason) = memory.failure() {
                    bail!("{reason}");
                }
            }
            EntryPhase::Making | EntryPhase::Ending => {}
        }
        Ok(false)
    }

    /// Returns whether it has this memory, which has arrived.
    pub(crate) fn has(&self, memory: &Arc<ArrivingMemory>) -> bool {
        let mut state = self.lock();
        while matches!(state.phase, EntryPhase::Making) {
            state = self.wait(state);
        }
        is_of(&state.phase, memory)
    }

    /// Notes that its last bytes are here, and are right, or why not.
    pub(crate) fn completed(&self, memory: &Arc<ArrivingMemory>, result: anyhow::Result<()>) {
        let mut state = self.lock();
        if is_of(&state.phase, memory) {
            state.reserved = 0;
            state.pinned = None;
            match result {
                Ok(()) => state.phase = EntryPhase::Complete,
                Err(error) => {
                    (state.phase, state.doubted) = (EntryPhase::Idle, true);
                    state.reason = format!("{error:#}");
                }
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Notes that no more of this memory arrives: it is not read in the store any more.
    pub(crate) fn lost(&self, memory: &Arc<ArrivingMemory>) {
        let mut state = self.lock();
        if is_of(&state.phase, memory) {
            state.pinned = None;
        }
    }

    /// Notes that a restore, which has begun at a time, has found a wrong block. What has arrived is compared
    /// again before the next restore, and for those that run. Returns false if that was done since then:
    /// several restores report the same block.
    pub(crate) fn doubt(&self, began: Instant) -> bool {
        let mut state = self.lock();
        if state.compared.is_some_and(|compared| compared > began) {
            return false;
        }
        match state.phase.clone() {
            EntryPhase::Complete => state.doubted = true,
            EntryPhase::Partial(memory) => {
                WRONG_BLOCK.clone_into(&mut state.reason);
                (state.phase, state.pinned) = (EntryPhase::Ending, None);
                drop(state);
                memory.stop();
                self.lock().phase = EntryPhase::Idle;
                self.changed.notify_all();
            }
            EntryPhase::Idle | EntryPhase::Making | EntryPhase::Ending => return false,
        }
        true
    }

    /// Whether it may be removed now: no restore uses it, and no thread copies or compares it.
    pub(crate) fn is_removable(&self, folder: &CacheFolder) -> bool {
        self.lock().is_removable() && !folder.is_leased(self.id)
    }

    /// Removes it. Returns false, and leaves it, if a restore uses it.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub(crate) fn evict(&self, folder: &CacheFolder) -> anyhow::Result<bool> {
        let mut state = self.lock();
        if !state.is_removable() || folder.is_leased(self.id) {
            return Ok(false);
        }
        let before = std::mem::replace(&mut state.phase, EntryPhase::Ending);
        drop(state);
        if let EntryPhase::Partial(memory) = &before {
            memory.stop();
        }
        let removed = folder.remove(self.id);
        let mut state = self.lock();
        state.phase = if folder.is_complete(self.id) { EntryPhase::Complete } else { EntryPhase::Idle };
        (state.reserved, state.pinned) = (0, None);
        state.doubted &= !matches!(removed, Ok(true));
        drop(state);
        self.changed.notify_all();
        removed
    }
}

/// Ends [`EntryPhase::Making`].
struct MakingGuard<'a> {
    entry: &'a CacheEntry,
    /// The next phase; or the one before, and why it could not be made.
    result: Result<EntryPhase, (EntryPhase, String)>,
}

impl Drop for MakingGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.entry.lock();
        match std::mem::replace(&mut self.result, Ok(EntryPhase::Idle)) {
            Ok(phase) => {
                if matches!(phase, EntryPhase::Complete) {
                    (state.reserved, state.pinned) = (0, None);
                }
                (state.phase, state.doubted, state.compared) = (phase, false, Some(Instant::now()));
            }
            Err((before, reason)) => {
                (state.phase, state.reason, state.reserved) = (before, reason, 0);
                (state.failures, state.pinned) = (state.failures + 1, None);
            }
        }
        drop(state);
        self.entry.changed.notify_all();
    }
}

fn is_of(phase: &EntryPhase, memory: &Arc<ArrivingMemory>) -> bool {
    matches!(phase, EntryPhase::Partial(own) if Arc::ptr_eq(own, memory))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread::scope;
    use std::time::Duration;

    use rewake_criu_images::ImageLease;

    use super::*;
    use crate::folder::tests::{folder, image};

    #[test]
    fn one_thread_makes_an_image_and_the_others_wait() {
        let (_dir, folder) = folder(1 << 20);
        let entry = CacheEntry::new(Digest([1; 32]), &folder);
        let made = AtomicU32::new(0);
        let make = |_: bool| {
            made.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(50));
            Ok(EntryPhase::Complete)
        };
        scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| entry.ensure(Remake::Unusable, make).unwrap());
            }
        });
        assert_eq!(made.load(Ordering::SeqCst), 1);
        assert!(entry.is_complete().unwrap());
    }

    #[test]
    fn a_failure_is_that_of_all_who_waited_and_the_next_tries_again() {
        let (_dir, folder) = folder(1 << 20);
        let entry = CacheEntry::new(Digest([1; 32]), &folder);
        let fails = |result: anyhow::Result<()>| {
            assert_eq!(result.unwrap_err().to_string(), "the store is away");
        };
        let (begun, begins) = std::sync::mpsc::channel();
        scope(|scope| {
            scope.spawn(|| {
                fails(entry.ensure(Remake::Unusable, |_| {
                    begun.send(()).unwrap();
                    // The other thread waits by then.
                    std::thread::sleep(Duration::from_secs(1));
                    bail!("the store is away")
                }));
            });
            begins.recv().unwrap();
            fails(entry.ensure(Remake::Unusable, |_| unreachable!("another thread makes it")));
        });
        fails(entry.is_complete().map(drop));
        entry.ensure(Remake::Unusable, |_| Ok(EntryPhase::Complete)).unwrap();
    }

    #[test]
    fn an_image_with_a_wrong_block_is_compared_before_the_next_restore() {
        let (_dir, folder) = folder(1 << 20);
        let entry = CacheEntry::new(image(&folder, 1, 100), &folder);
        assert!(entry.is_usable());
        let began = Instant::now();
        assert!(entry.doubt(began) && !entry.is_usable());
        entry.ensure(Remake::Left, |_| panic!("a restore that runs reads what is right")).unwrap();
        entry
            .ensure(Remake::Unusable, |doubted| {
                assert!(doubted);
                Ok(EntryPhase::Complete)
            })
            .unwrap();
        assert!(entry.is_usable());
        assert!(!entry.doubt(began) && entry.is_usable(), "another restore has read the same block");
        assert!(entry.doubt(Instant::now()) && !entry.is_usable());
    }

    #[test]
    fn the_removal_of_an_image_in_use_changes_nothing() {
        let (_dir, folder) = folder(1 << 20);
        let entry = CacheEntry::new(image(&folder, 1, 100), &folder);
        entry.reserve(5000);
        let lease = ImageLease::shared(&folder.image(entry.id)).unwrap().unwrap();
        // Others are not removed for the space that it would leave.
        assert!(!entry.is_removable(&folder));
        // The removal of its files would be refused, but only after its fetcher and its reservation have
        // ended.
        assert!(!entry.evict(&folder).unwrap());
        assert_eq!(entry.reserved(), 5000);
        drop(lease);
        assert!(entry.is_removable(&folder) && entry.evict(&folder).unwrap());
        assert!(entry.reserved() == 0 && !folder.image(entry.id).exists());
    }

    #[test]
    fn a_thread_that_panics_leaves_the_image_to_others() {
        let (_dir, folder) = folder(1 << 20);
        let entry = CacheEntry::new(Digest([1; 32]), &folder);
        let make = || entry.ensure(Remake::Unusable, |_| panic!("a test"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(make)).is_err());
        entry.ensure(Remake::Unusable, |_| Ok(EntryPhase::Complete)).unwrap();
    }
}
