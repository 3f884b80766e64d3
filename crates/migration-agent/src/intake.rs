// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much a source may send before its program is restored: candidates and files, after this host has
//! accepted its offer, and as many as the offer says.

use anyhow::{bail, ensure};

use crate::room::TreeSize;

const PAGE: u64 = 4096;
/// A program may grow to this multiple of its offered size while it is copied.
const GROWTH: u64 = 2;
/// Pages beyond that: 64 MiB.
const MORE_PAGES: u64 = 1 << 14;
/// Bytes of files beyond the program's memory. CRIU's own files are small.
const MORE_FILES: u64 = 1 << 30;

/// What may be stored.
#[derive(Debug, Default)]
pub(crate) enum Intake {
    /// No offer was accepted, or the image is complete.
    #[default]
    Closed,
    Open {
        /// Pages of candidates, and blocks of them: one may have one page, or none that is not zeros.
        pages: u64,
        /// Bytes of files on one connection.
        files: u64,
        /// How many of them have arrived.
        arrived: u64,
        /// Files with GPU memory may arrive later.
        gpu_on_demand: bool,
        /// Some do.
        has_later: bool,
    },
}

impl Intake {
    /// For a tree of this size. Files of GPU memory are bounded by their file system only.
    pub(crate) fn open(size: TreeSize, has_gpus: bool, gpu_on_demand: bool) -> Self {
        let pages = (size.anonymous / PAGE).saturating_mul(GROWTH).saturating_add(MORE_PAGES);
        let files = size.resident.saturating_mul(GROWTH).saturating_add(MORE_FILES);
        let files = if has_gpus { u64::MAX } else { files };
        Self::Open { pages, files, arrived: 0, gpu_on_demand: has_gpus && gpu_on_demand, has_later: false }
    }

    /// A new connection: all files are sent again.
    pub(crate) fn restart(&mut self) {
        if let Self::Open { arrived, has_later, .. } = self {
            (*arrived, *has_later) = (0, false);
        }
    }

    /// The image is complete. With `all_first` no file arrives later.
    ///
    /// # Errors
    /// One does.
    pub(crate) fn complete(&mut self, all_first: bool) -> anyhow::Result<()> {
        let left = std::mem::take(self);
        ensure!(
            !all_first || !matches!(left, Self::Open { has_later: true, .. }),
            "the source promised all memory before GRANT, and sent no GPU memory"
        );
        Ok(())
    }

    /// Takes a candidate. The arguments are the numbers of blocks and pages that are stored then.
    ///
    /// # Errors
    /// The source may not send candidates in this phase, or its program has grown too much.
    pub(crate) fn candidate(&self, (blocks, stored): (u64, u64)) -> anyhow::Result<()> {
        let Self::Open { pages, .. } = self else { bail!("the source sent a candidate at a wrong time") };
        ensure!(
            blocks <= *pages && stored <= *pages,
            "the source sent more than {pages} pages: its program has grown too much"
        );
        Ok(())
    }

    /// Takes bytes of a file.
    ///
    /// # Errors
    /// The source may not send files in this phase, or exceeds its announced total.
    pub(crate) fn file(&mut self, bytes: u64) -> anyhow::Result<()> {
        let Self::Open { files, arrived, .. } = self else { bail!("the source sent a file at a wrong time") };
        *arrived = arrived.saturating_add(bytes);
        ensure!(*arrived <= *files, "the source sent more than {files} bytes of files: its program has less");
        Ok(())
    }

    /// Takes a file of `bytes` bytes with GPU memory that arrives later.
    ///
    /// # Errors
    /// As for [`Intake::file`]. Or this host has not offered to wait for it.
    pub(crate) fn arriving_file(&mut self, bytes: u64) -> anyhow::Result<()> {
        self.file(bytes)?;
        if let Self::Open { gpu_on_demand, has_later, .. } = self {
            ensure!(
                *gpu_on_demand,
                "the source sent no GPU memory, and this host has not offered to wait for it"
            );
            *has_later = true;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_stored_outside_an_accepted_offer() {
        let mut intake = Intake::default();
        assert!(intake.file(1).is_err() && intake.candidate((0, 0)).is_err());
        let size = TreeSize { resident: 1 << 20, anonymous: 1 << 20 };
        intake = Intake::open(size, false, true);
        let most = (1 << 14) + 512;
        intake.candidate((most, most)).unwrap();
        assert!(intake.candidate((0, most + 1)).is_err() && intake.candidate((most + 1, 0)).is_err());
        intake.file((1 << 30) + (2 << 20)).unwrap();
        assert!(intake.file(1).is_err());
        intake.restart();
        intake.file(1 << 30).unwrap();
        assert!(intake.arriving_file(0).is_err());
        intake.complete(false).unwrap();
        assert!(intake.file(0).is_err() && intake.candidate((0, 0)).is_err());
        let mut with_gpus = Intake::open(size, true, false);
        with_gpus.file(1 << 40).unwrap();
        assert!(with_gpus.arriving_file(1).is_err());
    }

    #[test]
    fn no_gpu_memory_is_later_where_all_memory_is_first() {
        let size = TreeSize { resident: 1 << 20, anonymous: 1 << 20 };
        for (all_first, restarts, is_taken) in
            [(true, false, false), (true, true, true), (false, false, true)]
        {
            let mut intake = Intake::open(size, true, true);
            intake.arriving_file(1 << 40).unwrap();
            if restarts {
                intake.restart();
            }
            assert_eq!(intake.complete(all_first).is_ok(), is_taken, "{all_first} {restarts}");
        }
    }
}
