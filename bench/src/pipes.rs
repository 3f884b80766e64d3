// SPDX-License-Identifier: MIT OR Apache-2.0
//! Room for pipes: CRIU's page server fails with short ones, and its lazy dump takes twice as long.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::Context as _;

const LIMIT: &str = "/proc/sys/fs/pipe-max-size";
/// Bytes of a pipe that CRIU needs for them. With CAP_SYS_RESOURCE it takes as many in spite of the limit.
const ENOUGH: u64 = 4 << 20;

/// Other programs set the limit, too: it is checked as often as this.
const PERIOD: Duration = Duration::from_millis(5);

/// The raised limit of this machine. Dropping it sets the limit that was before.
#[derive(Debug)]
pub(crate) struct PipeRoom {
    before: String,
    is_over: Arc<AtomicBool>,
}

impl PipeRoom {
    pub(crate) fn made() -> anyhow::Result<Self> {
        let before = fs::read_to_string(LIMIT).context(LIMIT)?;
        raise().with_context(|| format!("raising {LIMIT}"))?;
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        spawn(move || {
            while !over.load(Ordering::Relaxed) {
                // CRIU reports it where it fails for that.
                let _ = raise();
                sleep(PERIOD);
            }
        });
        Ok(Self { before, is_over })
    }
}

/// Raises the limit if it is too low.
fn raise() -> anyhow::Result<()> {
    let bytes: u64 = fs::read_to_string(LIMIT)?.trim().parse()?;
    if bytes < ENOUGH {
        fs::write(LIMIT, ENOUGH.to_string())?;
    }
    Ok(())
}

impl Drop for PipeRoom {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        sleep(PERIOD * 2);
        // It could be raised, so it can be lowered.
        let _ = fs::write(LIMIT, &self.before);
    }
}
