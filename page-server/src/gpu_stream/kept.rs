// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that a process is kept from making as long as its memory is not there: `docs/decisions/0011-registered-memory.md`.

use std::os::fd::BorrowedFd;

use anyhow::Context as _;
use rewake_kfd::held::{CREATE_PROCESS, EXPORT, Kinds, Marks};
use rewake_kfd::topology::Topology;
use tracing::debug;

/// For what is of no GPU in particular.
const PROCESS: u32 = 0;

/// A process's marks; taken away when dropped. By then the process has ended, is being killed, or may do all it likes.
#[derive(Debug)]
pub(super) struct Kept<'a> {
    marks: Marks,
    /// Open as long as there are marks: another process could be taken for it.
    kfd: BorrowedFd<'a>,
    parts: Vec<u32>,
}

impl<'a> Kept<'a> {
    /// Its buffers on these GPUs, by their names in the image and N of `/dev/dri/renderDN`, are not handed to another process.
    pub(super) fn from_handing_over(
        marks: &Marks,
        kfd: BorrowedFd<'a>,
        gpus: &[(u32, u32)],
    ) -> anyhow::Result<Self> {
        let mut kept = Self { marks: marks.clone(), kfd, parts: Vec::new() };
        kept.from(PROCESS, CREATE_PROCESS)?;
        let machine = Topology::read()?;
        for (name, minor) in gpus {
            // The driver goes by the process's name for a GPU, or by its own.
            let own = machine.gpus().find(|gpu| gpu.render_minor() == *minor).map(|gpu| gpu.gpu_id);
            kept.from(*name, EXPORT)?;
            own.filter(|own| own != name).map_or(Ok(()), |own| kept.from(own, EXPORT))?;
        }
        Ok(kept)
    }

    fn from(&mut self, part: u32, kinds: Kinds) -> anyhow::Result<()> {
        self.marks.shut(self.kfd, part, kinds).context("keeping calls of a process away")?;
        self.parts.push(part);
        Ok(())
    }

    /// No call is kept away any more.
    pub(super) fn end(&self) {
        for part in &self.parts {
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
