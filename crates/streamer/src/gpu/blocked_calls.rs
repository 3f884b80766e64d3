// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that a process is kept from making as long as its memory is not there: `docs/decisions/0011-registered-memory.md`.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use anyhow::Context as _;
use rewake_amdgpu_uapi::call_filter::{
    ACCESS, BlockList, CREATE_PROCESS, CREATE_QUEUE, CROSS_COPY, CallClass, EXPORT, MAP, UPDATE_QUEUE,
};
use tracing::warn;

/// For what is of no GPU in particular.
const PROCESS: u32 = 0;
/// Of a render node's file.
const MAPPINGS: u32 = 0;
/// What no process of the restore may do before all GPUs of all run: change the record that is marked, and have memory copied of which it
/// knows the process only.
const UNTIL_THE_END: CallClass = CREATE_PROCESS.and(CROSS_COPY);
/// And one whose GPUs go on one by one, but for updates of queues.
const BY_GPU: CallClass = UNTIL_THE_END.and(CREATE_QUEUE);

/// A process's marks; taken away when dropped. By then the process has ended, is being killed, or may do all it likes.
#[derive(Debug)]
pub(super) struct BlockedCalls<'a> {
    marks: BlockList,
    /// Open as long as there are marks: another process could be taken for it.
    kfd: BorrowedFd<'a>,
    /// By the names that the process or the driver has for them.
    gpus: Vec<u32>,
    /// Its files of render nodes: as it was restored, its buffers are mapped by these, whoever maps them.
    renders: &'a [(u32, OwnedFd)],
}

impl<'a> BlockedCalls<'a> {
    /// Buffers of these GPUs are not handed to another process, nor mapped ones to CPUs that have no access to them. Where GPUs go on one by one they
    /// are not mapped on more GPUs either, and queues stay as they are.
    pub(super) fn new(
        marks: &BlockList,
        kfd: BorrowedFd<'a>,
        gpus: Vec<u32>,
        renders: &'a [(u32, OwnedFd)],
        by_gpu: bool,
    ) -> anyhow::Result<Self> {
        // Where one cannot be marked those that are there are taken away.
        let kept = Self { marks: marks.clone(), kfd, gpus, renders };
        let (of_all, of_gpu) =
            if by_gpu { (BY_GPU | UPDATE_QUEUE, EXPORT | MAP) } else { (UNTIL_THE_END, EXPORT) };
        kept.shut(PROCESS, of_all)?;
        kept.gpus.iter().try_for_each(|gpu| kept.shut(*gpu, of_gpu))?;
        for (_, render) in renders {
            let shut = kept.marks.block(render.as_fd(), MAPPINGS, ACCESS);
            shut.context("keeping CPUs away from memory of GPUs")?;
        }
        Ok(kept)
    }

    fn shut(&self, part: u32, kinds: CallClass) -> anyhow::Result<()> {
        self.marks.block(self.kfd, part, kinds).context("keeping calls of a process away")
    }

    /// While the process stands still, where GPUs go on one by one: we have it make such a call.
    ///
    /// # Errors
    /// Those of `act`; or its own would not be kept away afterwards.
    pub(super) fn with_update_queue_allowed<T>(
        &self,
        act: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.shut(PROCESS, BY_GPU)?;
        let done = catch_unwind(AssertUnwindSafe(act));
        self.shut(PROCESS, BY_GPU | UPDATE_QUEUE)?;
        done.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// What is of this GPU's own is there.
    pub(super) fn unblock_gpu(&self, gpu: u32) {
        self.open(gpu);
    }

    /// All of its own memory is there; that of others may not be.
    pub(super) fn process_goes_on(&self) {
        self.gpus.iter().for_each(|gpu| self.open(*gpu));
        self.open_renders();
        if let Err(error) = self.shut(PROCESS, UNTIL_THE_END) {
            warn!("{error:#}");
        }
    }

    fn open_renders(&self) {
        self.renders.iter().for_each(|(_, render)| self.open_of(render.as_fd(), MAPPINGS));
    }

    fn open(&self, part: u32) {
        self.open_of(self.kfd, part);
    }

    fn open_of(&self, file: BorrowedFd<'_>, part: u32) {
        if let Err(error) = self.marks.unblock(file, part) {
            warn!("calls of a process are kept away for as long as this runs: {error}");
        }
    }
}

impl Drop for BlockedCalls<'_> {
    fn drop(&mut self) {
        // The process last: CREATE_PROCESS would put another record in the place of the one that is marked.
        self.open_renders();
        self.gpus.iter().chain([&PROCESS]).for_each(|part| self.open(*part));
    }
}
