// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocks calls of a process while its memory is missing: `docs/decisions/0011-registered-memory.md`.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use anyhow::Context as _;
use rewake_ioctl_filter::{ACCESS, BlockList, CREATE_PROCESS, CROSS_COPY, CallClass, EXPORT};
use tracing::warn;

/// The block list's key for calls that concern no GPU in particular.
const PROCESS: u32 = 0;
/// The block list's key for the mappings of a render node's file.
const MAPPINGS: u32 = 0;
/// The calls that no process may make before all gates of the restore are open. CREATE_PROCESS would replace
/// the marked record. CROSS_COPY copies memory of which the kernel knows only the process.
const UNTIL_THE_END: CallClass = CREATE_PROCESS.and(CROSS_COPY);

/// A process's marks in the block list, which are removed on drop. By then the process has ended, is being
/// killed, or may make all calls.
#[derive(Debug)]
pub(super) struct BlockedCalls<'a> {
    marks: BlockList,
    /// Open as long as marks exist: otherwise another process could get the same record.
    kfd: BorrowedFd<'a>,
    /// The GPU ids by which the process or the driver names its GPUs.
    gpus: BTreeSet<u32>,
    /// The process's render node files. After a restore all its buffers are mapped through these, also by
    /// other processes.
    renders: &'a [(u32, OwnedFd)],
}

impl<'a> BlockedCalls<'a> {
    /// Blocks the export of these GPUs' buffers, and the access to mapped ones by CPUs that have none.
    pub(super) fn new(
        marks: &BlockList,
        kfd: BorrowedFd<'a>,
        gpus: BTreeSet<u32>,
        renders: &'a [(u32, OwnedFd)],
    ) -> anyhow::Result<Self> {
        // Built first: if one mark fails, dropping it removes the others.
        let blocked = Self { marks: marks.clone(), kfd, gpus, renders };
        blocked.block(PROCESS, UNTIL_THE_END)?;
        blocked.gpus.iter().try_for_each(|gpu| blocked.block(*gpu, EXPORT))?;
        for (_, render) in renders {
            let block = blocked.marks.block(render.as_fd(), MAPPINGS, ACCESS);
            block.context("blocking access of CPUs to GPU memory")?;
        }
        Ok(blocked)
    }

    fn block(&self, key: u32, kinds: CallClass) -> anyhow::Result<()> {
        self.marks.block(self.kfd, key, kinds).context("blocking calls of a process")
    }

    /// Unblocks the process's calls when all of its own memory is resident. Memory of other processes may be
    /// missing, so the calls that can reach it stay blocked.
    pub(super) fn unblock_process(&self) {
        self.gpus.iter().for_each(|gpu| self.unblock_key(*gpu));
        self.unblock_renders();
    }

    fn unblock_renders(&self) {
        self.renders.iter().for_each(|(_, render)| self.unblock_key_of(render.as_fd(), MAPPINGS));
    }

    fn unblock_key(&self, key: u32) {
        self.unblock_key_of(self.kfd, key);
    }

    fn unblock_key_of(&self, file: BorrowedFd<'_>, key: u32) {
        if let Err(error) = self.marks.unblock(file, key) {
            warn!("calls of a process stay blocked until this process ends: {error}");
        }
    }
}

impl Drop for BlockedCalls<'_> {
    fn drop(&mut self) {
        // The process's key last: CREATE_PROCESS would replace the marked record.
        self.unblock_renders();
        self.gpus.iter().chain([&PROCESS]).for_each(|key| self.unblock_key(*key));
    }
}
