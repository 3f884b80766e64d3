// SPDX-License-Identifier: MIT OR Apache-2.0
//! A report of a save or load, for the log.

use std::fmt;
use std::time::Duration;

/// Counts of the bytes that were moved.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moved {
    /// Bytes of buffers, including zeros.
    pub bytes: u64,
    /// Zero bytes: holes of files.
    pub zero: u64,
    /// Bytes of buffers that were copied from a duplicate.
    pub same: u64,
    /// Bytes read from files, in whole pages.
    pub read: u64,
    /// Submissions to GPUs.
    pub submissions: u64,
    /// The number of buffers.
    pub buffers: u64,
}

/// The result of a save or load.
#[derive(Debug, Clone)]
pub struct Report {
    pub(crate) done: &'static str,
    /// The path of the bytes, a line for each GPU.
    pub paths: Vec<String>,
    /// The amount.
    pub moved: Moved,
    /// The time from opening the first engine to the last byte.
    pub time: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { done, moved, time, .. } = self;
        let seconds = time.as_secs_f64();
        write!(
            f,
            "contents {done}: {} bytes, {} of them zero, {} submissions for {} buffers, {seconds:.3} s, \
             {:.1} MiB/s",
            moved.bytes,
            moved.zero,
            moved.submissions,
            moved.buffers,
            mib(moved.bytes) / seconds.max(1e-6),
        )?;
        match moved.same {
            0 => Ok(()),
            same => write!(f, ", {same} of the bytes read for other buffers"),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "for users")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
