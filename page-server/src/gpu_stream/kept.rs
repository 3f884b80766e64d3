// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that a process is kept from making as long as its memory is not there: `docs/decisions/0011-registered-memory.md`.

use std::os::fd::BorrowedFd;

use anyhow::Context as _;
use rewake_kfd::held::{CREATE_PROCESS, CREATE_QUEUE, EXPORT, Kinds, MAP, Marks, UPDATE_QUEUE};
use rewake_kfd::topology::Topology;
use tracing::debug;

/// For what is of no GPU in particular.
const PROCESS: u32 = 0;
/// What is not made meanwhile.
const CREATED: Kinds = CREATE_PROCESS.and(CREATE_QUEUE);

/// A process's marks; taken away when dropped. By then the process has ended, is being killed, or may do all it likes.
#[derive(Debug)]
pub(super) struct Kept<'a> {
    marks: Marks,
    /// Open as long as there are marks: another process could be taken for it.
    kfd: BorrowedFd<'a>,
    /// Each with the GPU that it is of, by its name in the image; [`PROCESS`] if of none.
    parts: Vec<(u32, u32)>,
}

impl<'a> Kept<'a> {
    /// Its buffers on these GPUs, by their names in the image and N of `/dev/dri/renderDN`, are not handed to another process. Where GPUs
    /// go on one by one they are not mapped on more GPUs either, and queues stay as they are.
    pub(super) fn from_handing_over(
        marks: &Marks,
        kfd: BorrowedFd<'a>,
        gpus: &[(u32, u32)],
        one_by_one: bool,
    ) -> anyhow::Result<Self> {
        let mut kept = Self { marks: marks.clone(), kfd, parts: Vec::new() };
        let (of_all, of_gpu) =
            if one_by_one { (CREATED | UPDATE_QUEUE, EXPORT | MAP) } else { (CREATE_PROCESS, EXPORT) };
        kept.from(PROCESS, PROCESS, of_all)?;
        let machine = Topology::read()?;
        for (name, minor) in gpus {
            // The driver goes by the process's name for a GPU, or by its own.
            let own = machine.gpus().find(|gpu| gpu.render_minor() == *minor).map(|gpu| gpu.gpu_id);
            kept.from(*name, *name, of_gpu)?;
            own.filter(|own| own != name).map_or(Ok(()), |own| kept.from(*name, own, of_gpu))?;
        }
        Ok(kept)
    }

    fn from(&mut self, gpu: u32, part: u32, kinds: Kinds) -> anyhow::Result<()> {
        self.shut(part, kinds)?;
        self.parts.push((gpu, part));
        Ok(())
    }

    fn shut(&self, part: u32, kinds: Kinds) -> anyhow::Result<()> {
        self.marks.shut(self.kfd, part, kinds).context("keeping calls of a process away")
    }

    /// While the process stands still, where GPUs go on one by one: we have it make such a call.
    ///
    /// # Errors
    /// Its own would not be kept away afterwards.
    pub(super) fn while_updating<T>(&self, act: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        self.shut(PROCESS, CREATED)?;
        let done = act();
        self.shut(PROCESS, CREATED | UPDATE_QUEUE)?;
        done
    }

    /// Nothing of this GPU's own is kept away any more.
    pub(super) fn end_of_gpu(&self, name: u32) {
        self.open(|gpu| gpu == name);
    }

    /// No call is kept away any more.
    pub(super) fn end(&self) {
        self.open(|_| true);
    }

    fn open(&self, which: impl Fn(u32) -> bool) {
        for (_, part) in self.parts.iter().filter(|(gpu, _)| which(*gpu)) {
            if let Err(error) = self.marks.open(self.kfd, *part) {
                debug!("calls of a process are kept away for longer: {error}");
            }
        }
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.end();
    }
}
