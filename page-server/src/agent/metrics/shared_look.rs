// SPDX-License-Identifier: MIT OR Apache-2.0
//! A look at a disk, for all clients of the metrics: one at a time, so that a disk that hangs holds one
//! thread.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::{spawn_blocking, spawn_local};
use tokio::time::{Instant, timeout};
use tracing::warn;

/// Age up to which clients get what was found last, so that several clients cost one look.
const KEEP_LIMIT: Duration = Duration::from_secs(5);
/// Time for a request and its answer.
pub(super) const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// Time that a client waits for a look. It is shorter than [`REQUEST_LIMIT`], so
/// that a client gets all other metrics when the disk does not answer.
const LOOK_LIMIT: Duration = Duration::from_secs(3);
const _: () = assert!(LOOK_LIMIT.as_millis() < REQUEST_LIMIT.as_millis());

/// What looks, and what it has found last.
pub(super) struct SharedLook<T> {
    look: Arc<dyn Fn() -> T + Send + Sync>,
    latest: RefCell<Option<(Instant, T)>>,
    is_looking: Cell<bool>,
    ended: Notify,
}

impl<T: Copy + Send + 'static> SharedLook<T> {
    pub(super) fn new(look: impl Fn() -> T + Send + Sync + 'static) -> Rc<Self> {
        Rc::new(Self {
            look: Arc::new(look),
            latest: RefCell::new(None),
            is_looking: Cell::new(false),
            ended: Notify::new(),
        })
    }

    /// Returns what was found a few seconds ago at most; none: the disk does not answer.
    pub(super) async fn latest(self: &Rc<Self>) -> Option<T> {
        let found = self.kept();
        if found.is_some() {
            return found;
        }
        let ended = self.ended.notified();
        let begins = !self.is_looking.replace(true);
        if begins {
            spawn_local(Rc::clone(self).begin());
        }
        if timeout(LOOK_LIMIT, ended).await.is_err() && begins {
            warn!(
                "the cache's disk does not answer within {LOOK_LIMIT:?}: metrics of its images are missing"
            );
        }
        self.kept()
    }

    async fn begin(self: Rc<Self>) {
        let look = Arc::clone(&self.look);
        match spawn_blocking(move || look()).await {
            Ok(found) => drop(self.latest.replace(Some((Instant::now(), found)))),
            Err(error) => warn!("metrics of the cache's images are missing: {error}"),
        }
        self.is_looking.set(false);
        self.ended.notify_waiters();
    }

    fn kept(&self) -> Option<T> {
        self.latest.borrow().filter(|(at, _)| at.elapsed() < KEEP_LIMIT).map(|(_, found)| found)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Mutex, mpsc};

    use tokio::task::LocalSet;

    use super::*;

    #[tokio::test]
    async fn clients_share_a_look_for_some_seconds() {
        let looks = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&looks);
        let shared = SharedLook::new(move || {
            std::thread::sleep(Duration::from_millis(50));
            counted.fetch_add(1, Ordering::SeqCst)
        });
        let clients = async {
            let both = tokio::join!(shared.latest(), shared.latest());
            (both, shared.latest().await)
        };
        let found = LocalSet::new().run_until(clients).await;
        assert_eq!(found, ((Some(0), Some(0)), Some(0)));
        assert_eq!(looks.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_disk_that_hangs_holds_one_thread_and_no_client() {
        let (release, hangs) = mpsc::channel::<()>();
        let (hangs, looks) = (Mutex::new(hangs), Arc::new(AtomicU32::new(0)));
        let counted = Arc::clone(&looks);
        let shared = SharedLook::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            // An error: it was released.
            let _ = hangs.lock().unwrap().recv();
            7
        });
        let clients = async {
            let late = tokio::join!(shared.latest(), shared.latest(), shared.latest());
            assert_eq!((late, looks.load(Ordering::SeqCst)), ((None, None, None), 1));
            drop(release);
            assert_eq!(shared.latest().await, Some(7));
        };
        LocalSet::new().run_until(clients).await;
        assert_eq!(looks.load(Ordering::SeqCst), 1, "the look that hung has ended");
    }
}
