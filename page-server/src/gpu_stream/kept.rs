// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that a process is kept from making as long as its memory is not there: `docs/decisions/0011-registered-memory.md`.

use std::os::fd::BorrowedFd;

use anyhow::Context as _;
use rewake_kfd::held::{CREATE_PROCESS, CROSS_COPY, EXPORT, Kinds, Marks};
use tracing::warn;

/// For what is of no GPU in particular.
const PROCESS: u32 = 0;

/// A process's marks; taken away when dropped. By then the process has ended, is being killed, or may do all it likes.
#[derive(Debug)]
pub(super) struct Kept<'a> {
    marks: Marks,
    /// Open as long as there are marks: another process could be taken for it.
    kfd: BorrowedFd<'a>,
    /// The first is [`PROCESS`].
    parts: Vec<u32>,
}

impl<'a> Kept<'a> {
    /// Buffers of these GPUs, by the names that the process or the driver has for them, are not handed to another process, and no other
    /// process's memory is copied.
    pub(super) fn from_handing_over(
        marks: &Marks,
        kfd: BorrowedFd<'a>,
        gpus: impl Iterator<Item = u32>,
    ) -> anyhow::Result<Self> {
        let mut kept = Self { marks: marks.clone(), kfd, parts: Vec::new() };
        kept.shut(PROCESS, CREATE_PROCESS | CROSS_COPY)?;
        for gpu in gpus {
            kept.shut(gpu, EXPORT)?;
        }
        Ok(kept)
    }

    fn shut(&mut self, part: u32, kinds: Kinds) -> anyhow::Result<()> {
        self.marks.shut(self.kfd, part, kinds).context("keeping calls of a process away")?;
        self.parts.push(part);
        Ok(())
    }

    /// Its own memory is there; that of others, which it could have copied by their numbers, may not be.
    pub(super) fn may_hand_over(&self) {
        self.open(&self.parts[1..]);
    }

    /// Last what was first: CREATE_PROCESS would put another record in the place of the one that is marked.
    fn open(&self, parts: &[u32]) {
        for part in parts.iter().rev() {
            if let Err(error) = self.marks.open(self.kfd, *part) {
                warn!("calls of a process are kept away for as long as this runs: {error}");
            }
        }
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.open(&self.parts);
    }
}
