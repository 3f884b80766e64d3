// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocks calls of a process while its memory is missing: `docs/decisions/0011-registered-memory.md`.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use anyhow::Context as _;
use rewake_amdgpu_uapi::call_filter::{
    ACCESS, BlockList, CREATE_PROCESS, CREATE_QUEUE, CROSS_COPY, CallClass, EXPORT, MAP, UPDATE_QUEUE,
};
use tracing::warn;

/// The block list's key for calls that concern no GPU in particular.
const PROCESS: u32 = 0;
/// The block list's key for the mappings of a render node's file.
const MAPPINGS: u32 = 0;
/// The calls that no process may make before all GPUs of the restore run. CREATE_PROCESS would replace the
/// marked record. CROSS_COPY copies memory of which the kernel knows only the process.
const UNTIL_THE_END: CallClass = CREATE_PROCESS.and(CROSS_COPY);
/// The calls, besides UPDATE_QUEUE, that are also blocked for a process whose GPUs are resumed one by one.
const BY_GPU: CallClass = UNTIL_THE_END.and(CREATE_QUEUE);

/// A process's marks in the block list, which are removed on drop. By then the process has ended, is being
/// killed, or may make all calls.
#[derive(Debug)]
pub(super) struct BlockedCalls<'a> {
    marks: BlockList,
    /// Open as long as marks exist: otherwise another process could get the same record.
    kfd: BorrowedFd<'a>,
    /// The GPU ids by which the process or the driver names its GPUs.
    gpus: Vec<u32>,
    /// The process's render node files. After a restore all its buffers are mapped through these, also by
    /// other processes.
    renders: &'a [(u32, OwnedFd)],
}

impl<'a> BlockedCalls<'a> {
    /// Blocks the export of these GPUs' buffers, and the access to mapped ones by CPUs that have none. With
    /// `by_gpu`, also blocks mapping them on more GPUs and changes of queues.
    pub(super) fn new(
        marks: &BlockList,
        kfd: BorrowedFd<'a>,
        gpus: Vec<u32>,
        renders: &'a [(u32, OwnedFd)],
        by_gpu: bool,
    ) -> anyhow::Result<Self> {
        // Built first: if one mark fails, dropping it removes the others.
        let blocked = Self { marks: marks.clone(), kfd, gpus, renders };
        let (of_all, of_gpu) =
            if by_gpu { (BY_GPU | UPDATE_QUEUE, EXPORT | MAP) } else { (UNTIL_THE_END, EXPORT) };
        blocked.block(PROCESS, of_all)?;
        blocked.gpus.iter().try_for_each(|gpu| blocked.block(*gpu, of_gpu))?;
        for (_, render) in renders {
            let block = blocked.marks.block(render.as_fd(), MAPPINGS, ACCESS);
            block.context("keeping CPUs away from memory of GPUs")?;
        }
        Ok(blocked)
    }

    fn block(&self, key: u32, kinds: CallClass) -> anyhow::Result<()> {
        self.marks.block(self.kfd, key, kinds).context("keeping calls of a process away")
    }

    /// Runs `act`, which makes the stopped process call UPDATE_QUEUE where its GPUs are resumed one by one.
    ///
    /// # Errors
    /// `act` fails, or UPDATE_QUEUE cannot be blocked again afterwards.
    pub(super) fn with_update_queue_allowed<T>(
        &self,
        act: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.block(PROCESS, BY_GPU)?;
        let done = catch_unwind(AssertUnwindSafe(act));
        self.block(PROCESS, BY_GPU | UPDATE_QUEUE)?;
        done.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Unblocks the calls for one GPU, whose own buffers are resident.
    pub(super) fn unblock_gpu(&self, gpu: u32) {
        self.unblock_key(gpu);
    }

    /// Unblocks the process's calls when all of its own memory is resident; memory of other processes may be
    /// missing.
    pub(super) fn unblock_process(&self) {
        self.gpus.iter().for_each(|gpu| self.unblock_key(*gpu));
        self.unblock_renders();
        if let Err(error) = self.block(PROCESS, UNTIL_THE_END) {
            warn!("{error:#}");
        }
    }

    fn unblock_renders(&self) {
        self.renders.iter().for_each(|(_, render)| self.unblock_key_of(render.as_fd(), MAPPINGS));
    }

    fn unblock_key(&self, key: u32) {
        self.unblock_key_of(self.kfd, key);
    }

    fn unblock_key_of(&self, file: BorrowedFd<'_>, key: u32) {
        if let Err(error) = self.marks.unblock(file, key) {
            warn!("calls of a process are kept away for as long as this runs: {error}");
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
