// SPDX-License-Identifier: MIT OR Apache-2.0
//! Looks at a program's files, in threads. A file system that does not answer holds such a thread, and no
//! agent.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::{anyhow, ensure};

use crate::file_hasher::HASH_LIMIT;

/// Time in which file systems must answer.
pub(crate) const FILES_LIMIT: Duration = HASH_LIMIT.saturating_add(Duration::from_secs(10));
/// Threads at once: a file system that does not answer keeps them.
const MAX_LOOKS: usize = 16;

/// Looks at files in a thread: a file system that does not answer holds that thread only.
///
/// # Errors
/// It has not answered within [`FILES_LIMIT`], or holds too many threads already.
pub(crate) fn looked_at<T: Send + 'static>(
    look: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    look_within(FILES_LIMIT, &LOOKS, look)
}

/// How many there are.
static LOOKS: AtomicUsize = AtomicUsize::new(0);

/// One of them.
struct Look(&'static AtomicUsize);

impl Look {
    fn begin(looks: &'static AtomicUsize) -> anyhow::Result<Self> {
        let look = Self(looks);
        let before = looks.fetch_add(1, Ordering::Relaxed);
        ensure!(before < MAX_LOOKS, "{MAX_LOOKS} programs are compared at this time: try again later");
        Ok(look)
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn look_within<T: Send + 'static>(
    limit: Duration,
    looks: &'static AtomicUsize,
    look: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let counted = Look::begin(looks)?;
    let (sender, result) = sync_channel(1);
    thread::spawn(move || {
        let found = look();
        drop(counted);
        // The caller may not wait any more.
        let _ = sender.send(found);
    });
    result.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => {
            let limit = limit.as_secs();
            anyhow!("the program's files were not looked at within {limit} s: a file system does not answer")
        }
        RecvTimeoutError::Disconnected => anyhow!("the comparison panicked: this host's log says where"),
    })?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_answer_is_not_waited_for() {
        static LOOKS: AtomicUsize = AtomicUsize::new(0);
        let limit = Duration::from_millis(10);
        let mut held = Vec::new();
        for _ in 0..MAX_LOOKS {
            let (sender, never) = sync_channel::<()>(1);
            held.push(sender);
            let look = move || {
                // Until the test ends it.
                let _ = never.recv();
                Ok(())
            };
            let error = look_within(limit, &LOOKS, look).unwrap_err().to_string();
            assert!(error.ends_with("a file system does not answer"), "{error}");
        }
        let error = look_within(limit, &LOOKS, || Ok(7)).unwrap_err().to_string();
        assert_eq!(error, "16 programs are compared at this time: try again later");
        drop(held);
        let is_free = |_| {
            thread::sleep(limit);
            LOOKS.load(Ordering::Relaxed) == 0
        };
        assert!((0..1000).any(is_free), "threads that have ended count");
        assert_eq!(looked_at(|| Ok(7)).unwrap(), 7);
        let error = looked_at(|| -> anyhow::Result<()> { panic!("a bug") }).unwrap_err().to_string();
        assert_eq!(error, "the comparison panicked: this host's log says where");
    }
}
