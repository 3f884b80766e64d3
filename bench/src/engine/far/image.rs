// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image whose last buffer is demanded, and memory to load it into.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use memmap2::MmapMut;
use rewake_bo_contents::{GpuPagesFile, MemoryDevice};
use rewake_criu_images::amdgpu::pages_name;

use super::super::image::{GPU, HEADER, ID, MIB, MINOR, PIECE, Words, kfd, memory, view};

/// The largest size of the last buffer.
pub(super) const LARGEST_MIB: u64 = 64;
/// Memory for all buffers but the last: they are loaded into it one over the other, and never checked.
const SHARED_MIB: u64 = 1024;

/// The bytes before the last [`LARGEST_MIB`] of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Front {
    Random,
    Hole,
}

/// A file of the buffers of one GPU, for buffers of any size that its own is a multiple of.
pub(super) struct Pages {
    folder: PathBuf,
    mib: u64,
    /// Its last bytes.
    tail: Vec<u8>,
}

impl Pages {
    /// Writes one of this size at least to a new folder. All of it is on the disk then.
    pub(super) fn make(folder: PathBuf, mib: u64, front: Front) -> anyhow::Result<Self> {
        let mib = mib.next_multiple_of(LARGEST_MIB);
        let mut pages = Self { folder, mib, tail: vec![0; usize::try_from(LARGEST_MIB * MIB)?] };
        std::fs::create_dir(&pages.folder).context("make a folder")?;
        pages.write(front).context("write the buffers' memory")?;
        Ok(pages)
    }

    fn write(&mut self, front: Front) -> anyhow::Result<()> {
        let mut file = File::create(self.path())?;
        let (mut words, mut piece) = (Words::new(), vec![0; PIECE]);
        file.write_all(&(self.mib * MIB).to_le_bytes())?;
        if front == Front::Random {
            for _ in 0..(self.mib - LARGEST_MIB) * MIB / PIECE as u64 {
                words.fill(&mut piece);
                file.write_all(&piece)?;
            }
        }
        words.fill(&mut self.tail);
        file.write_all_at(&self.tail, HEADER + (self.mib - LARGEST_MIB) * MIB)?;
        file.sync_all().context("sync")
    }

    /// Removes it from the disk and the page cache.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        let folder = self.folder.display();
        std::fs::remove_dir_all(&self.folder).with_context(|| format!("remove {folder}"))
    }

    pub(super) fn path(&self) -> PathBuf {
        self.folder.join(pages_name(ID, GPU))
    }
}

/// A file with buffers of one size, and memory for them.
pub(super) struct Image<'a> {
    tail: &'a [u8],
    pub(super) files: Vec<GpuPagesFile>,
    /// Memory files of all buffers, and of the last alone.
    pub(super) all: Vec<Option<OwnedFd>>,
    pub(super) alone: Vec<Option<OwnedFd>>,
    pub(super) device: Arc<MemoryDevice>,
    /// The last buffer's memory.
    pub(super) last: MmapMut,
}

impl<'a> Image<'a> {
    pub(super) fn open(pages: &'a Pages, buffer_mib: u64) -> anyhow::Result<Self> {
        let (size, count) = (buffer_mib * MIB, usize::try_from(pages.mib / buffer_mib)?);
        let kfd = kfd(std::iter::repeat_n(size, count));
        let folder = File::open(&pages.folder).context("open the image directory")?;
        let files = vec![GpuPagesFile::open(folder.as_fd(), ID, &kfd, GPU, MINOR)?];
        let shared = usize::try_from(SHARED_MIB / buffer_mib)?.min(count - 1);
        let memfds: Vec<OwnedFd> = (0..=shared).map(|_| memory(size)).collect::<anyhow::Result<_>>()?;
        let device = MemoryDevice::new(memfds.iter().map(|memfd| memfd.as_fd())).context("map the memory")?;
        let last = &memfds[shared];
        let of = |number| if number + 1 == count { last } else { &memfds[number % shared] };
        let all: std::io::Result<Vec<_>> =
            (0..count).map(|number| of(number).try_clone().map(Some)).collect();
        let mut alone: Vec<Option<OwnedFd>> = (1..count).map(|_| None).collect();
        alone.push(Some(last.try_clone()?));
        let last = view(last)?;
        let tail = &pages.tail[pages.tail.len() - last.len()..];
        Ok(Self { tail, files, all: all.context("a descriptor for each buffer")?, alone, device, last })
    }

    /// Compares the last buffer with what was written to the image.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(self.last[..] == *self.tail, "the loaded bytes differ from the image");
        Ok(())
    }
}
