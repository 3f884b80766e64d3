// SPDX-License-Identifier: MIT OR Apache-2.0
//! The blocks that a destination has stored: candidates, and bytes of the frozen program. They are in one
//! file.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, bail, ensure};
use rewake_image_io::block_checksum;
use rewake_migration::blocks::{
    BLOCK, BLOCK_LEN, BlockDigest, BlockPlace, BlockSlot, DestinationBlocks, PageMask,
};
use rewake_page_protocol::PageRun;

use crate::tree_memory::digest;

const PAGE_LEN: usize = 4096;
const PAGE: u64 = PAGE_LEN as u64;
/// The digest of a block of zeros.
static ZEROS: LazyLock<BlockDigest> = LazyLock::new(|| digest(&[0; BLOCK_LEN]));

/// The stored blocks of one migration.
#[derive(Debug)]
pub(crate) struct CandidateStore {
    file: File,
    /// A checksum of each page that was written, because a disk may lose what was written to it.
    checksums: Mutex<Vec<u64>>,
    /// Locked while the file is written.
    blocks: Mutex<DestinationBlocks>,
}

impl CandidateStore {
    pub(crate) fn make(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join("candidates");
        let file = File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(&path);
        let file = file.with_context(|| format!("making {}", path.display()))?;
        Ok(Self { file, checksums: Mutex::default(), blocks: Mutex::default() })
    }

    /// Stores a candidate: the bytes of these pages, one after the other. Its other pages are zeros.
    pub(crate) fn candidate(
        &self,
        task: u32,
        vaddr: u64,
        pages: PageMask,
        bytes: &[u8],
    ) -> anyhow::Result<()> {
        let is_block = vaddr.is_multiple_of(BLOCK) && bytes.len() == pages.count_ones() as usize * PAGE_LEN;
        ensure!(
            is_block,
            "a candidate of {} bytes at {vaddr:#x} for pages {pages:#x} of a block",
            bytes.len()
        );
        let mut block = [0; BLOCK_LEN];
        for (number, page) in page_numbers(pages).zip(bytes.chunks_exact(PAGE_LEN)) {
            block[number * PAGE_LEN..][..PAGE_LEN].copy_from_slice(page);
        }
        // A source may send many blocks of zeros, which have no bytes.
        let digest = if pages == 0 { *ZEROS } else { digest(&block) };
        let mut blocks = self.blocks();
        let Some(slot) = blocks.candidate(BlockPlace { task, vaddr }, digest, pages) else {
            return Ok(());
        };
        // Pages that had bytes before are zeros now.
        page_runs(pages | slot.written).try_for_each(|run| {
            let offset = slot.number * BLOCK + (run.start * PAGE_LEN) as u64;
            self.write(&block[run.start * PAGE_LEN..run.end * PAGE_LEN], offset)
        })
    }

    /// The number of blocks, and of pages that have a place in the file.
    pub(crate) fn size(&self) -> (u64, u64) {
        let blocks = self.blocks();
        (blocks.len(), blocks.pages())
    }

    /// Compares a block with its digest after the freeze. If they match, the block's pages are the frozen
    /// program's. Returns false if the block that is stored has another digest.
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

    /// Whether all pages of a run are known to be the frozen program's.
    pub(crate) fn has(&self, task: u32, run: PageRun) -> bool {
        let blocks = self.blocks();
        pieces(task, run).all(|(place, pages)| blocks.resident(place, pages).is_some())
    }

    /// Returns the pages of a run, if all of them are known to be the frozen program's.
    pub(crate) fn resident(&self, task: u32, run: PageRun) -> anyhow::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        for (place, pages) in pieces(task, run) {
            let slot = self.blocks().resident(place, pages.clone());
            let Some(slot) = slot else { return Ok(None) };
            bytes.extend(self.read(slot, &pages)?);
        }
        Ok(Some(bytes))
    }

    fn read(&self, slot: BlockSlot, pages: &Range<u64>) -> anyhow::Result<Vec<u8>> {
        let (first, end) = (usize::try_from(pages.start)?, usize::try_from(pages.end)?);
        let mut bytes = vec![0; (end - first) * PAGE_LEN];
        for run in page_runs(slot.written) {
            let run = run.start.max(first)..run.end.min(end);
            if !run.is_empty() {
                let target = &mut bytes[(run.start - first) * PAGE_LEN..(run.end - first) * PAGE_LEN];
                let offset = slot.number * BLOCK + (run.start * PAGE_LEN) as u64;
                self.file.read_exact_at(target, offset).context("reading the candidates")?;
                self.check(offset, target)?;
            }
        }
        Ok(bytes)
    }

    fn write(&self, bytes: &[u8], offset: u64) -> anyhow::Result<()> {
        let first = usize::try_from(offset / PAGE)?;
        let pages = bytes.chunks(PAGE_LEN);
        {
            let mut checksums = self.checksums.lock().unwrap_or_else(PoisonError::into_inner);
            let end = checksums.len().max(first + pages.len());
            checksums.resize(end, 0);
            checksums[first..].iter_mut().zip(pages).for_each(|(of, page)| *of = block_checksum(page));
        }
        self.file.write_all_at(bytes, offset).context("writing the candidates in the work directory")
    }

    /// Compares what was read with what was written.
    fn check(&self, offset: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let first = usize::try_from(offset / PAGE)?;
        let checksums = self.checksums.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pages = (first..).zip(bytes.chunks(PAGE_LEN));
        let wrong = pages.find(|(number, page)| checksums.get(*number) != Some(&block_checksum(page)));
        wrong.map_or(Ok(()), |(number, _)| {
            bail!(
                "the disk of the work directory has other bytes than were stored, in page {number} of \
                 `candidates`: migrate again, with another work directory"
            )
        })
    }

    fn blocks(&self) -> MutexGuard<'_, DestinationBlocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The numbers of pages, in ascending order.
fn page_numbers(pages: PageMask) -> impl Iterator<Item = usize> {
    (0..BLOCK_LEN / PAGE_LEN).filter(move |number| pages & 1 << number != 0)
}

/// The runs of neighbouring pages.
fn page_runs(pages: PageMask) -> impl Iterator<Item = Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for number in page_numbers(pages) {
        match runs.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs.into_iter()
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
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn run(first: u64, pages: u64) -> PageRun {
        PageRun::new(first * PAGE, pages).unwrap()
    }

    #[test]
    fn a_candidate_s_bytes_are_given_after_a_comparison_only() {
        let folder = tempfile::tempdir().unwrap();
        let store = CandidateStore::make(folder.path()).unwrap();
        let bytes: Vec<u8> = (0..16).flat_map(|page| [page; 4096]).collect();
        store.candidate(3, 0, PageMask::MAX, &bytes).unwrap();
        store.candidate(3, BLOCK, 0, &[]).unwrap();
        assert_eq!(store.resident(3, run(0, 1)).unwrap(), None);
        assert!(!store.confirm(3, run(2, 1), digest(&[0; BLOCK_LEN])).unwrap());
        assert_eq!(store.resident(3, run(2, 1)).unwrap(), None);
        assert!(store.confirm(3, run(2, 2), digest(&bytes)).unwrap());
        assert_eq!(store.resident(3, run(2, 2)).unwrap().unwrap(), bytes[2 * 4096..4 * 4096]);
        assert!(store.has(3, run(2, 2)) && !store.has(3, run(1, 2)) && !store.has(4, run(2, 1)));
        assert!(store.confirm(3, run(16, 1), digest(&[0; BLOCK_LEN])).unwrap());
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
        assert!(store.candidate(3, 4096, PageMask::MAX, &[0; BLOCK_LEN]).is_err());
        assert!(store.candidate(3, 0, 0b11, &[1; 4096]).is_err());
        assert!(store.candidate(3, 0, 0b1, &[1; 8192]).is_err());
    }

    #[test]
    fn a_candidate_without_bytes_is_a_block_of_zeros() {
        let folder = tempfile::tempdir().unwrap();
        let store = CandidateStore::make(folder.path()).unwrap();
        store.candidate(3, 0, 0, &[]).unwrap();
        assert!(store.confirm(3, run(0, 16), digest(&[0; BLOCK_LEN])).unwrap());
        assert_eq!(store.resident(3, run(0, 16)).unwrap().unwrap(), [0; BLOCK_LEN]);
    }

    #[test]
    fn a_page_of_a_block_needs_the_room_of_a_page() {
        let folder = tempfile::tempdir().unwrap();
        let store = CandidateStore::make(folder.path()).unwrap();
        for number in 0..256 {
            store.candidate(3, number * BLOCK, 0b100, &[7; PAGE_LEN]).unwrap();
        }
        assert_eq!(store.size(), (256, 256));
        let used = store.file.metadata().unwrap().blocks() * 512;
        assert!((256 * PAGE..512 * PAGE).contains(&used), "{used} bytes of disk space");
        let block = [vec![0; 2 * PAGE_LEN], vec![7; PAGE_LEN], vec![0; 13 * PAGE_LEN]].concat();
        assert!(store.confirm(3, run(16, 16), digest(&block)).unwrap());
        assert_eq!(store.resident(3, run(16, 16)).unwrap().unwrap(), block);
    }

    #[test]
    fn a_page_that_is_zeros_again_reads_as_zeros() {
        let folder = tempfile::tempdir().unwrap();
        let store = CandidateStore::make(folder.path()).unwrap();
        store.candidate(3, 0, 0b11, &[7; 2 * PAGE_LEN]).unwrap();
        store.candidate(3, 0, 0b10, &[8; PAGE_LEN]).unwrap();
        let block = [vec![0; PAGE_LEN], vec![8; PAGE_LEN], vec![0; 14 * PAGE_LEN]].concat();
        assert!(store.confirm(3, run(0, 16), digest(&block)).unwrap());
        assert_eq!(store.resident(3, run(0, 16)).unwrap().unwrap(), block);
        assert_eq!(store.size(), (1, 2));
    }

    /// The disk loses what was written, or another program writes to the file.
    #[test]
    fn bytes_that_the_disk_has_lost_are_found() {
        for keeps in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let store = CandidateStore::make(folder.path()).unwrap();
            let bytes = [7; 3 * PAGE_LEN];
            if keeps {
                store.keep(3, 14 * PAGE, &bytes).unwrap();
            } else {
                let whole = [&[0; 14 * PAGE_LEN][..], &[7; 2 * PAGE_LEN]].concat();
                store.candidate(3, 0, 0b11 << 14, &whole[14 * PAGE_LEN..]).unwrap();
                assert!(store.confirm(3, run(14, 2), digest(&whole)).unwrap());
            }
            assert_eq!(store.resident(3, run(14, 2)).unwrap().unwrap(), bytes[..2 * PAGE_LEN]);
            let disk = File::options().write(true).open(folder.path().join("candidates")).unwrap();
            disk.write_all_at(&[0; PAGE_LEN], 15 * PAGE).unwrap();
            let error = store.resident(3, run(14, 2)).unwrap_err().to_string();
            assert!(error.contains("other bytes than were stored, in page 15"), "{error}");
        }
    }
}
