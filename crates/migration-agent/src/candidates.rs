// SPDX-License-Identifier: MIT OR Apache-2.0
//! The blocks that a destination has stored: candidates, and bytes of the frozen program. They are in one file.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, ensure};
use rewake_migration::blocks::{BLOCK, BLOCK_LEN, BlockDigest, BlockPlace, DestinationBlocks};
use rewake_page_protocol::PageRun;

use crate::tree_memory::digest;

const PAGE: u64 = 4096;
static ZEROS: [u8; BLOCK_LEN] = [0; BLOCK_LEN];

/// The stored blocks of one migration.
#[derive(Debug)]
pub(crate) struct CandidateStore {
    file: File,
    /// Locked while the file is written.
    blocks: Mutex<DestinationBlocks>,
}

impl CandidateStore {
    pub(crate) fn make(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join("candidates");
        let file = File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(&path);
        let file = file.with_context(|| format!("making {}", path.display()))?;
        Ok(Self { file, blocks: Mutex::default() })
    }

    /// Stores a candidate; no bytes stand for zeros.
    pub(crate) fn candidate(&self, task: u32, vaddr: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let bytes = if bytes.is_empty() { &ZEROS[..] } else { bytes };
        let is_block = vaddr.is_multiple_of(BLOCK) && bytes.len() as u64 == BLOCK;
        ensure!(is_block, "a candidate of {} bytes at {vaddr:#x}: expected a block of {BLOCK}", bytes.len());
        let mut blocks = self.blocks();
        let slot = blocks.candidate(BlockPlace { task, vaddr }, digest(bytes));
        slot.map_or(Ok(()), |slot| self.write(bytes, slot * BLOCK))
    }

    /// The number of blocks.
    pub(crate) fn len(&self) -> u64 {
        self.blocks().len()
    }

    /// Compares a block with its digest after the freeze: its pages are those of the frozen program then. Returns false
    /// if the block that is stored has another digest.
    pub(crate) fn confirm(&self, task: u32, run: PageRun, digest: BlockDigest) -> anyhow::Result<bool> {
        let (place, pages) = block_of(task, run.vaddr(), run.end());
        ensure!(pages.end - pages.start == run.pages(), "a digest for pages of more than one block");
        Ok(self.blocks().confirm(place, digest, pages).is_some())
    }

    /// Stores bytes that were read after the freeze.
    pub(crate) fn keep(&self, task: u32, vaddr: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let mut blocks = self.blocks();
        let mut rest = bytes;
        for (place, pages) in pieces(task, PageRun::new(vaddr, bytes.len() as u64 / PAGE)?) {
            let (piece, after) = rest.split_at(usize::try_from((pages.end - pages.start) * PAGE)?);
            rest = after;
            let slot = blocks.arrived(place, pages.clone());
            self.write(piece, slot * BLOCK + pages.start * PAGE)?;
        }
        Ok(())
    }

    /// Whether all pages of a run are those of the frozen program.
    pub(crate) fn has(&self, task: u32, run: PageRun) -> bool {
        let blocks = self.blocks();
        pieces(task, run).all(|(place, pages)| blocks.resident(place, pages).is_some())
    }

    /// Gives pages of a run, if all of them are those of the frozen program.
    pub(crate) fn resident(&self, task: u32, run: PageRun) -> anyhow::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        for (place, pages) in pieces(task, run) {
            let slot = self.blocks().resident(place, pages.clone());
            let Some(slot) = slot else { return Ok(None) };
            bytes.extend(self.read(slot, &pages)?);
        }
        Ok(Some(bytes))
    }

    fn read(&self, slot: u64, pages: &Range<u64>) -> anyhow::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from((pages.end - pages.start) * PAGE)?];
        self.file
            .read_exact_at(&mut bytes, slot * BLOCK + pages.start * PAGE)
            .context("reading the candidates")?;
        Ok(bytes)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> anyhow::Result<()> {
        self.file.write_all_at(bytes, offset).context("writing the candidates in the work directory")
    }

    fn blocks(&self) -> MutexGuard<'_, DestinationBlocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The block of an address, and its pages up to an end.
fn block_of(task: u32, vaddr: u64, end: u64) -> (BlockPlace, Range<u64>) {
    let place = BlockPlace { task, vaddr: vaddr / BLOCK * BLOCK };
    (place, (vaddr - place.vaddr) / PAGE..(end.min(place.vaddr + BLOCK) - place.vaddr) / PAGE)
}

fn pieces(task: u32, run: PageRun) -> impl Iterator<Item = (BlockPlace, Range<u64>)> {
    let blocks = (run.vaddr() / BLOCK * BLOCK..run.end()).step_by(BLOCK_LEN);
    blocks.map(move |start| block_of(task, start.max(run.vaddr()), run.end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, pages: u64) -> PageRun {
        PageRun::new(first * PAGE, pages).unwrap()
    }

    #[test]
    fn a_candidate_s_bytes_are_given_after_a_comparison_only() {
        let folder = tempfile::tempdir().unwrap();
        let store = CandidateStore::make(folder.path()).unwrap();
        let bytes: Vec<u8> = (0..16).flat_map(|page| [page; 4096]).collect();
        store.candidate(3, 0, &bytes).unwrap();
        store.candidate(3, BLOCK, &[]).unwrap();
        assert_eq!(store.resident(3, run(0, 1)).unwrap(), None);
        assert!(!store.confirm(3, run(2, 1), digest(&ZEROS)).unwrap());
        assert_eq!(store.resident(3, run(2, 1)).unwrap(), None);
        assert!(store.confirm(3, run(2, 2), digest(&bytes)).unwrap());
        assert_eq!(store.resident(3, run(2, 2)).unwrap().unwrap(), bytes[2 * 4096..4 * 4096]);
        assert!(store.has(3, run(2, 2)) && !store.has(3, run(1, 2)) && !store.has(4, run(2, 1)));
        assert!(store.confirm(3, run(16, 1), digest(&ZEROS)).unwrap());
        assert_eq!(store.resident(3, run(16, 1)).unwrap().unwrap(), [0; 4096]);
        assert!(store.confirm(3, run(15, 1), digest(&bytes)).unwrap());
        let both = store.resident(3, run(15, 2)).unwrap().unwrap();
        assert_eq!((both.len(), both[0], both[4096]), (8192, 15, 0));
    }

    #[test]
    fn bytes_after_the_freeze_are_kept_over_blocks() {
        let folder = tempfile::tempdir().unwrap();
        let store = CandidateStore::make(folder.path()).unwrap();
        let bytes: Vec<u8> = (1..5).flat_map(|page| [page; 4096]).collect();
        store.keep(3, 14 * PAGE, &bytes).unwrap();
        assert_eq!(store.resident(3, run(14, 4)).unwrap().unwrap(), bytes);
        assert_eq!(store.resident(3, run(13, 2)).unwrap(), None);
    }

    #[test]
    fn candidates_that_are_no_blocks_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = CandidateStore::make(folder.path()).unwrap();
        assert!(store.candidate(3, 4096, &ZEROS).is_err());
        assert!(store.candidate(3, 0, &[1; 4096]).is_err());
    }
}
