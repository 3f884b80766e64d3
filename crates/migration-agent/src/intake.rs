// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much a source may send before its program is restored: candidates and files, after this host has accepted its
//! offer, and as many as the offer says.

use anyhow::{bail, ensure};

use crate::room::TreeSize;

const PAGE: u64 = 4096;
/// A program may grow to so many times the size of its offer while it is copied.
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
    },
}

impl Intake {
    /// For a tree of this size. Files of GPU memory are bounded by their file system only.
    pub(crate) fn open(size: TreeSize, has_gpus: bool) -> Self {
        let pages = (size.anonymous / PAGE).saturating_mul(GROWTH).saturating_add(MORE_PAGES);
        let files = size.resident.saturating_mul(GROWTH).saturating_add(MORE_FILES);
        Self::Open { pages, files: if has_gpus { u64::MAX } else { files }, arrived: 0 }
    }

    /// A new connection: all files are sent again.
    pub(crate) fn restart(&mut self) {
        if let Self::Open { arrived, .. } = self {
            *arrived = 0;
        }
    }

    /// The image is complete.
    pub(crate) fn close(&mut self) {
        *self = Self::Closed;
    }

    /// Takes a candidate, where so many blocks and pages are stored.
    ///
    /// # Errors
    /// None may be stored now, or no more.
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
    /// None may be stored now, or not so many.
    pub(crate) fn file(&mut self, bytes: u64) -> anyhow::Result<()> {
        let Self::Open { files, arrived, .. } = self else { bail!("the source sent a file at a wrong time") };
        *arrived = arrived.saturating_add(bytes);
        ensure!(*arrived <= *files, "the source sent more than {files} bytes of files: its program has less");
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
        let size = TreeSize { resident: 1 << 20, anonymous: 1 << 20, shared: 0 };
        intake = Intake::open(size, false);
        let most = (1 << 14) + 512;
        intake.candidate((most, most)).unwrap();
        assert!(intake.candidate((0, most + 1)).is_err() && intake.candidate((most + 1, 0)).is_err());
        intake.file((1 << 30) + (2 << 20)).unwrap();
        assert!(intake.file(1).is_err());
        intake.restart();
        intake.file(1 << 30).unwrap();
        intake.close();
        assert!(intake.file(0).is_err() && intake.candidate((0, 0)).is_err());
        let mut with_gpus = Intake::open(size, true);
        with_gpus.file(1 << 40).unwrap();
    }
}
