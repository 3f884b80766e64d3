// SPDX-License-Identifier: MIT OR Apache-2.0
//! What was moved, for people.

use std::fmt;
use std::time::Duration;

/// What was moved.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moved {
    /// Bytes of buffers, those that are zero among them.
    pub bytes: u64,
    /// Bytes that are zero: holes of files.
    pub zero: u64,
    /// Bytes of buffers that were given those of another one.
    pub same: u64,
    /// Bytes that were asked of files: whole pages.
    pub read: u64,
    /// Pieces of work that GPUs were given.
    pub submissions: u64,
    /// Buffers.
    pub buffers: u64,
}

/// One direction, done.
#[derive(Debug, Clone)]
pub struct Report {
    pub(crate) done: &'static str,
    /// The ways that bytes went, a line for each GPU.
    pub ways: Vec<String>,
    /// How much.
    pub moved: Moved,
    /// From the first engine's opening to the last byte.
    pub time: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { done, moved, time, .. } = self;
        let seconds = time.as_secs_f64();
        write!(
            f,
            "contents {done}: {} bytes, {} of them zero, {} submissions for {} buffers, {seconds:.3} s, {:.1} MiB/s",
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

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
