// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of a tree: blocks while it runs, and pages while it is frozen. Its GPU memory is then in files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::{Deref, Range};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use rewake_migration::blocks::{
    BLOCK, BLOCK_LEN, BlockAnswer, BlockDigest, BlockPlace, PageMask, SourceBlocks,
};
use rewake_page_protocol::{PageRun, file_of_task};
use rewake_process::maps::Mapping;
use rewake_process::names::lines;
use rewake_process::{pagemap, proc};

use crate::arriving_files::ArrivingFiles;
use crate::frame::{Frame, PagePart};

const PAGE: usize = 4096;
/// The most pages of one answer, because CRIU requests no more.
const MAX_PAGES: u64 = 1024;
/// Bits of an entry of `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE_OR_SHARED: u64 = 1 << 61;
const ENTRY: usize = 8;
/// Bytes of a pagemap that are read at once: 256 MiB of addresses.
const PAGEMAP_PIECE: usize = 512 << 10;

/// The bytes of a block.
pub(crate) type BlockBytes = Box<[u8; BLOCK_LEN]>;

/// Open files of the memory of each task, by the number that the image gives it.
#[derive(Debug)]
pub(crate) struct TreeMemory {
    tasks: BTreeMap<u32, TaskMemory>,
    files: ArrivingFiles,
}

/// Open files of the memory of one task.
#[derive(Debug)]
pub(crate) struct TaskMemory {
    /// The number in the innermost pid namespace, which an image has.
    pub(crate) number: u32,
    memory: File,
    pagemap: File,
}

impl TreeMemory {
    /// Opens the memory of these processes, which are frozen, and of their image.
    pub(crate) fn open(processes: &[i32], images: &Path) -> anyhow::Result<Self> {
        let open = |pid: &i32| {
            let task = TaskMemory::open(*pid).context("it was frozen")?;
            Ok((task.number, task))
        };
        let tasks = processes.iter().map(open).collect::<anyhow::Result<_>>()?;
        Ok(Self { tasks, files: ArrivingFiles::open(images)? })
    }

    /// Answers the first pages of a request. The tasks must be frozen. `blocks` locks what was sent before
    /// the freeze: files with GPU memory have no such blocks.
    pub(crate) fn answer<B: Deref<Target = SourceBlocks>>(
        &self,
        pid: u32,
        run: PageRun,
        wants_bytes: bool,
        blocks: impl FnOnce() -> B,
    ) -> Frame {
        let parts = match file_of_task(pid) {
            Some(number) => self.files.read(number, run).map(|bytes| parts_of(&bytes)),
            None => self.task(pid).and_then(|task| {
                let candidates = (!wants_bytes).then(blocks);
                task.answer(run, candidates.as_deref())
            }),
        };
        match parts {
            Ok(parts) => Frame::Pages { pid, vaddr: run.vaddr(), parts },
            Err(error) => Frame::PagesLost(format!("{error:#}")),
        }
    }

    /// Returns what names files with GPU memory to a destination that requests them.
    pub(crate) fn arriving_files(&self) -> anyhow::Result<Vec<Frame>> {
        self.files.frames()
    }

    fn task(&self, pid: u32) -> anyhow::Result<&TaskMemory> {
        self.tasks.get(&pid).with_context(|| format!("the frozen tree has no task {pid}"))
    }
}

impl TaskMemory {
    pub(crate) fn open(pid: i32) -> anyhow::Result<Self> {
        let number = proc::status(pid).and_then(|status| status.own_number);
        let number = number.with_context(|| format!("process {pid} has ended"))?;
        let open = |name| {
            let path = format!("/proc/{pid}/{name}");
            File::open(&path).with_context(|| format!("opening {path}"))
        };
        Ok(Self { number: number.cast_unsigned(), memory: open("mem")?, pagemap: open("pagemap")? })
    }

    fn answer(&self, run: PageRun, candidates: Option<&SourceBlocks>) -> anyhow::Result<Vec<PagePart>> {
        Ok(self.parts(run.vaddr(), &self.read(run)?, candidates))
    }

    /// Reads the first pages of a run, which are lazy: they exist.
    fn read(&self, run: PageRun) -> anyhow::Result<Vec<u8>> {
        let pages = usize::try_from(run.pages().min(MAX_PAGES))?;
        let mut bytes = vec![0; pages * PAGE];
        let place = || format!("reading {pages} pages at {:#x} of task {}", run.vaddr(), self.number);
        let mut done = 0;
        while done < bytes.len() {
            // A hole after the first pages ends the answer: the destination requests the rest, and is
            // refused.
            match self.memory.read_at(&mut bytes[done..], run.vaddr() + done as u64) {
                Ok(some @ 1..) => done += some,
                Ok(0) | Err(_) if done >= PAGE => break,
                Ok(_) => ensure!(done >= PAGE, "{}: no bytes", place()),
                Err(error) => return Err(error).with_context(place),
            }
        }
        bytes.truncate(done / PAGE * PAGE);
        Ok(bytes)
    }

    /// Replaces bytes that the destination has by the digest of their block.
    fn parts(&self, vaddr: u64, bytes: &[u8], candidates: Option<&SourceBlocks>) -> Vec<PagePart> {
        let mut parts: Vec<PagePart> = Vec::new();
        let mut done = 0;
        while done < bytes.len() {
            let first = vaddr + done as u64;
            let place = BlockPlace { task: self.number, vaddr: first / BLOCK * BLOCK };
            let room = BLOCK_LEN - offset(first);
            let piece = &bytes[done..bytes.len().min(done + room)];
            done += piece.len();
            let known = candidates.filter(|blocks| blocks.has_candidate(place));
            let answer = known.map(|blocks| {
                let digest = self.digest_around(place, first, piece);
                (blocks.answer(place, digest), digest)
            });
            match answer {
                Some((BlockAnswer::Digest, digest)) => {
                    parts.push(PagePart::Unchanged { pages: (piece.len() / PAGE) as u64, digest });
                }
                _ => piece.chunks_exact(PAGE).for_each(|page| add_page(&mut parts, page)),
            }
        }
        parts
    }

    /// The digest of a block of a frozen task, some of whose bytes were read.
    fn digest_around(&self, place: BlockPlace, first: u64, piece: &[u8]) -> BlockDigest {
        if piece.len() as u64 == BLOCK {
            return digest(piece);
        }
        let mut bytes = self.block(place.vaddr).unwrap_or_else(zeros);
        let start = offset(first);
        bytes[start..start + piece.len()].copy_from_slice(piece);
        digest(&bytes[..])
    }

    /// The blocks of a range that have private pages.
    pub(crate) fn private_blocks(&self, range: Range<u64>) -> Vec<u64> {
        let mut blocks = Vec::new();
        let scanned = pagemap::private_pages(&self.pagemap, range.clone(), |pages| {
            // One block may have several runs of pages.
            let next = blocks.last().map_or(0, |last| last + BLOCK);
            blocks
                .extend((pages.start / BLOCK * BLOCK..pages.end).step_by(BLOCK_LEN).filter(|at| *at >= next));
        });
        match scanned {
            Ok(()) => blocks,
            Err(_) => self.listed_blocks(range),
        }
    }

    /// [`TaskMemory::private_blocks`] on kernels that do not search: an entry of each page is read.
    fn listed_blocks(&self, range: Range<u64>) -> Vec<u64> {
        let (mut blocks, mut entries) = (Vec::new(), vec![0; PAGEMAP_PIECE]);
        for first in range.clone().step_by(PAGEMAP_PIECE / ENTRY * PAGE) {
            let left = usize::try_from((range.end - first) / PAGE as u64).unwrap_or(usize::MAX);
            let piece = &mut entries[..left.saturating_mul(ENTRY).min(PAGEMAP_PIECE)];
            // Addresses beyond the task's have no entries.
            let len = self.pagemap.read_at(piece, first / PAGE as u64 * ENTRY as u64).unwrap_or(0);
            for (number, block) in piece[..len].chunks(BLOCK_LEN / PAGE * ENTRY).enumerate() {
                if block.as_chunks::<ENTRY>().0.iter().any(is_private) {
                    blocks.push(first + number as u64 * BLOCK);
                }
            }
        }
        blocks
    }

    /// Reads a block: its private pages, and zeros for all others. `None` if it has none. A task that runs
    /// may change it meanwhile, and parts that cannot be read are zeros: the bytes are compared before they
    /// are used.
    pub(crate) fn block(&self, vaddr: u64) -> Option<BlockBytes> {
        let mut entries = [0; BLOCK_LEN / PAGE * ENTRY];
        self.pagemap.read_exact_at(&mut entries, vaddr / PAGE as u64 * ENTRY as u64).ok()?;
        let (entries, _) = entries.as_chunks::<ENTRY>();
        let mut found = None;
        let mut page = 0;
        while page < entries.len() {
            let count = entries[page..].iter().take_while(|entry| is_private(entry)).count();
            if count > 0 {
                let bytes: &mut BlockBytes = found.get_or_insert_with(zeros);
                let target = &mut bytes[page * PAGE..(page + count) * PAGE];
                if self.memory.read_exact_at(target, vaddr + (page * PAGE) as u64).is_err() {
                    target.fill(0);
                }
            }
            page += count + 1;
        }
        found
    }
}

/// Whether an entry of a pagemap is that of a private page.
fn is_private(entry: &[u8; ENTRY]) -> bool {
    let entry = u64::from_ne_bytes(*entry);
    entry & (PRESENT | SWAPPED) != 0 && entry & FILE_OR_SHARED == 0
}

/// The parts of an answer without digests.
fn parts_of(pages: &[u8]) -> Vec<PagePart> {
    let mut parts = Vec::new();
    pages.chunks_exact(PAGE).for_each(|page| add_page(&mut parts, page));
    parts
}

/// Adds a page to an answer. Zeros do not travel.
fn add_page(parts: &mut Vec<PagePart>, page: &[u8]) {
    match (parts.last_mut(), is_zero(page)) {
        (Some(PagePart::Zeros(pages)), true) => *pages += 1,
        (_, true) => parts.push(PagePart::Zeros(1)),
        (Some(PagePart::Bytes(before)), false) => before.extend(page),
        (_, false) => parts.push(PagePart::Bytes(page.to_vec())),
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// The pages of a block that are not zeros, and their bytes, one after the other.
pub(crate) fn pages_with_bytes(block: &[u8; BLOCK_LEN]) -> (PageMask, Vec<u8>) {
    let (mut pages, mut bytes) = (0, Vec::new());
    for (number, page) in block.chunks_exact(PAGE).enumerate().filter(|(_, page)| !is_zero(page)) {
        pages |= 1 << number;
        bytes.extend(page);
    }
    (pages, bytes)
}

/// The offset of an address in its block.
fn offset(vaddr: u64) -> usize {
    usize::try_from(vaddr % BLOCK).unwrap_or_default()
}

fn zeros() -> BlockBytes {
    Box::new([0; BLOCK_LEN])
}

/// The digest of a block.
pub(crate) fn digest(bytes: &[u8]) -> BlockDigest {
    *blake3::hash(bytes).as_bytes()
}

/// The private anonymous memory of a process, rounded to whole blocks, in ascending order.
pub(crate) fn private_memory(pid: i32) -> anyhow::Result<Vec<Range<u64>>> {
    let path = format!("/proc/{pid}/maps");
    let maps = fs::read(&path).with_context(|| format!("reading {path}"))?;
    let mut found: Vec<Range<u64>> = Vec::new();
    for line in lines(&maps) {
        let Some(range) = private_range(line) else { continue };
        let range = range.start / BLOCK * BLOCK..range.end.next_multiple_of(BLOCK);
        match found.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => found.push(range),
        }
    }
    Ok(found)
}

/// The addresses of a line of `/proc/PID/maps`, if it is private and anonymous.
fn private_range(line: &[u8]) -> Option<Range<u64>> {
    let mapping = Mapping::parse(line)?;
    let is_kernel_s =
        [&b"[vvar"[..], b"[vdso", b"[vsyscall"].iter().any(|kind| mapping.name.starts_with(kind));
    let is_private = !mapping.is_shared() && mapping.inode == 0 && !is_kernel_s;
    is_private.then_some(mapping.start..mapping.end)
}

#[cfg(test)]
mod tests {
    use rewake_page_protocol::file_task;

    use super::*;

    #[test]
    fn blocks_of_a_process_are_read_and_answered_by_digest() {
        let mut memory = vec![7_u8; 4 * BLOCK_LEN];
        let address = memory.as_ptr().addr() as u64;
        let first = address.next_multiple_of(BLOCK);
        let pid = std::process::id().cast_signed();
        let ranges = private_memory(pid).unwrap();
        assert!(ranges.iter().any(|range| range.contains(&first)), "{ranges:x?}");
        let task = TaskMemory::open(pid).unwrap();
        let read = task.block(first).unwrap();
        assert!(read.iter().all(|byte| *byte == 7));
        assert!(task.block(0).is_none());

        let mut blocks = SourceBlocks::default();
        for number in 0..2 {
            let place = BlockPlace { task: task.number, vaddr: first + number * BLOCK };
            blocks.pre_copy(place, digest(&task.block(place.vaddr).unwrap()[..]));
        }
        let changed = usize::try_from(first - address).unwrap() + BLOCK_LEN;
        memory[changed..changed + 2].fill(8);
        let tree =
            TreeMemory { tasks: BTreeMap::from([(task.number, task)]), files: ArrivingFiles::default() };
        let number = *tree.tasks.keys().next().unwrap();
        // The last page of the first block, and the second block.
        let run = PageRun::new(first + BLOCK - PAGE as u64, 17).unwrap();
        let answer = |wants_bytes| match tree.answer(number, run, wants_bytes, || &blocks) {
            Frame::Pages { parts, .. } => parts,
            other => panic!("{other:?}"),
        };
        let [PagePart::Unchanged { pages: 1, digest: unchanged }, PagePart::Bytes(bytes)] =
            &answer(false)[..]
        else {
            panic!("{:?}", answer(false));
        };
        assert_eq!((*unchanged, bytes.len(), bytes[0]), (digest(&read[..]), BLOCK_LEN, 8));
        let [PagePart::Bytes(bytes)] = &answer(true)[..] else { panic!("{:?}", answer(true)) };
        assert_eq!((bytes.len(), bytes[0], bytes[PAGE]), (17 * PAGE, 7, 8));
        let of_file = || -> &SourceBlocks { panic!("a file has no block that was sent before the freeze") };
        let answer = tree.answer(file_task(1).unwrap(), PageRun::new(0, 1).unwrap(), false, of_file);
        assert!(matches!(answer, Frame::PagesLost(_)), "{answer:?}");
        assert_eq!(memory[changed], 8);
    }

    #[test]
    fn a_search_finds_the_blocks_that_have_entries() {
        const ENOTTY: i32 = nix::errno::Errno::ENOTTY as i32;
        let mut memory = vec![0_u8; 64 * BLOCK_LEN];
        let first = (memory.as_ptr().addr() as u64).next_multiple_of(BLOCK);
        let offset = usize::try_from(first - memory.as_ptr().addr() as u64).unwrap();
        // Two runs of pages in a block, a run across two blocks, and one page.
        let written = [(0, 1), (5, 2), (16 * 9 + 15, 2), (16 * 40 + 3, 1)];
        for page in written.iter().flat_map(|(page, count)| *page..page + count) {
            memory[offset + page * PAGE] = 1;
        }
        let task = TaskMemory::open(std::process::id().cast_signed()).unwrap();
        let range = first..first + 63 * BLOCK;
        let listed = task.listed_blocks(range.clone());
        // A huge page has more of them.
        assert!([0, 9, 10, 40].iter().all(|block| listed.contains(&(first + block * BLOCK))), "{listed:x?}");
        assert_eq!(task.private_blocks(range.clone()), listed);
        let scanned = pagemap::private_pages(&task.pagemap, range, drop);
        let code = scanned.map_err(|error| error.raw_os_error());
        assert!(matches!(code, Ok(()) | Err(Some(ENOTTY))), "{code:?}");
        assert_eq!(memory[offset], 1);
    }

    #[test]
    fn zeros_do_not_travel() {
        let mut block = [0; BLOCK_LEN];
        assert_eq!(pages_with_bytes(&block), (0, Vec::new()));
        block[2 * PAGE + 5] = 1;
        block[15 * PAGE] = 2;
        let (pages, bytes) = pages_with_bytes(&block);
        assert_eq!((pages, bytes.len(), bytes[5], bytes[PAGE]), (0x8004, 2 * PAGE, 1, 2));
        let mut parts = Vec::new();
        for byte in [0, 0, 1, 1, 0] {
            add_page(&mut parts, &[byte; PAGE]);
        }
        assert_eq!(parts, [PagePart::Zeros(2), PagePart::Bytes(vec![1; 2 * PAGE]), PagePart::Zeros(1)]);
    }

    #[test]
    fn only_private_anonymous_memory_is_pre_copied() {
        let range = |line: &str| private_range(line.as_bytes()).map(|range| (range.start, range.end));
        assert_eq!(range("7f00-8f00 rw-p 00000000 00:00 0"), Some((0x7f00, 0x8f00)));
        assert_eq!(range("7f00-8f00 rw-p 00000000 00:00 0    [heap]"), Some((0x7f00, 0x8f00)));
        assert_eq!(range("7f00-8f00 rw-s 00000000 00:01 5    /dev/zero (deleted)"), None);
        assert_eq!(range("7f00-8f00 r--p 00000000 08:01 77   /usr/bin/x"), None);
        assert_eq!(range("7f00-8f00 r--p 00000000 00:00 0    [vvar]"), None);
    }
}
