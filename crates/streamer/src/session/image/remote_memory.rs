// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of an image that another host has: a local copy of it, which a fetcher fills, and the presence map
//! of the copy.
//!
//! What a page server sends goes into a cache file. It has no name, so no other program writes it, and it
//! takes no space when the session has ended. What an image server sends goes into the image's own files,
//! whose blocks are checked. The source of a migration is a page server that has files with GPU memory, too:
//! they are written where CRIU's plugin reads them.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};
use rewake_criu_images::Digest;
use rewake_fetcher::plan::{FetchExtent, FetchPlan, FetchedMemory, PagePeer, SparseFile};
use rewake_image_io::{
    BLOCK, FetchSource, FetchedFile, ImageFile, PresenceMap, PresenceWriter, checked_presence_file,
    presence_file,
};
use rewake_page_protocol::HeaderLayout;
use rewake_pager::PAGE_SIZE;

use super::Image;
use super::draft::{DraftRemote, RemotePlace};
use crate::fetch_peer::FetchPeer;

/// Memory that arrives.
#[derive(Debug)]
pub(crate) struct RemoteMemory {
    /// The presence map's memory file.
    pub(crate) presence: OwnedFd,
    /// Where missing bytes come from.
    pub(crate) source: Arc<FetchSource>,
    /// Bytes that the presence map is for.
    pub(super) len: u64,
    /// Where they are written.
    pub(crate) copy: LocalCopy,
    /// The number at the other host of each pages file, all of which get what they lack.
    pub(super) numbers: Vec<u32>,
}

/// Where memory is written when it arrives.
#[derive(Debug)]
pub(crate) enum LocalCopy {
    /// A cache file, of a page server's memory of tasks.
    Cache {
        /// The file.
        file: Arc<ImageFile>,
        /// The headers of the CRIU that made the image.
        layout: HeaderLayout,
    },
    /// The pages files of the image.
    Files {
        /// The id of the image.
        id: Digest,
    },
}

impl RemoteMemory {
    /// Makes what a plan says: the presence map, and in the directory `work` the cache file, whose space is
    /// reserved.
    ///
    /// # Errors
    /// The file system has not enough space.
    pub(crate) fn create(work: &Path, draft: DraftRemote) -> anyhow::Result<Self> {
        let (presence, cache) = match draft.place {
            RemotePlace::Cache(_) => (checked_presence_file(draft.len), Some(cache_file(work, draft.cache)?)),
            // The manifest has the checksums.
            RemotePlace::Files(_) => (presence_file(draft.len), None),
        };
        Self::of(presence.context("making the presence map")?, cache, draft)
    }

    /// Takes over what another worker has made.
    pub(crate) fn inherit(
        presence: OwnedFd,
        cache: Option<OwnedFd>,
        draft: DraftRemote,
    ) -> anyhow::Result<Self> {
        let cache = cache.map(File::from);
        if let Some(cache) = &cache {
            let found = cache.metadata().context("the cache file")?.len();
            if found != draft.cache {
                bail!(
                    "the cache file has {found} bytes, and {} were reserved: did another program write to \
                     it?",
                    draft.cache
                );
            }
        }
        Self::of(presence, cache, draft)
    }

    /// Makes an empty presence map, when every process has been killed: the bytes that have arrived are found
    /// again ([`Image::note_arrived`]), or the agent has its own map.
    ///
    /// # Errors
    /// The memory came from a page server, which sends a page once.
    pub(crate) fn arrives_again(draft: DraftRemote) -> anyhow::Result<Self> {
        ensure!(
            !draft.is_of_page_server(),
            "the session's fd store lacks the memory that a page server has sent"
        );
        Self::of(presence_file(draft.len).context("making the presence map")?, None, draft)
    }

    fn of(presence: OwnedFd, cache: Option<File>, draft: DraftRemote) -> anyhow::Result<Self> {
        let map = PresenceMap::open(presence.as_fd(), draft.len).context("the presence map")?;
        let source = Arc::new(FetchSource::new(map));
        let copy = match draft.place {
            RemotePlace::Files(id) => LocalCopy::Files { id },
            RemotePlace::Cache(layout) => {
                let file = cache.context("a page server's memory without a cache file")?;
                let fetched = FetchedFile { source: Arc::clone(&source), first: 0 };
                LocalCopy::Cache {
                    file: ImageFile::fetched(file, "pages of the page server", fetched)?,
                    layout,
                }
            }
        };
        Ok(Self { presence, source, len: draft.len, copy, numbers: Vec::new() })
    }

    /// Notes pages that are in none of these runs as arrived.
    fn note_gaps(&self, runs: Vec<(u64, u64)>) -> io::Result<()> {
        let presence = PresenceWriter::open(self.presence.as_fd(), self.len)?;
        let mut end = 0;
        for (first, pages) in runs.into_iter().chain([(self.len.div_ceil(PAGE_SIZE), 0)]) {
            presence.no_bytes(end, first - end);
            end = first + pages;
        }
        Ok(())
    }

    /// Returns the cache file, or `None` if memory goes into files of the image.
    pub(crate) fn cache(&self) -> Option<&Arc<ImageFile>> {
        match &self.copy {
            LocalCopy::Cache { file, .. } => Some(file),
            LocalCopy::Files { .. } => None,
        }
    }

    /// Returns the descriptors that a successor needs, in the order of [`EntryKind::Remote`]: the fetcher's
    /// plan, the presence map and the cache file.
    ///
    /// [`EntryKind::Remote`]: crate::ledger::fd_store::EntryKind::Remote
    pub(crate) fn numbers(&self, plan: &File) -> Vec<RawFd> {
        let cache = self.cache().map(|file| file.as_fd().as_raw_fd());
        [plan.as_raw_fd(), self.presence.as_raw_fd()].into_iter().chain(cache).collect()
    }
}

/// Makes a cache file of `len` bytes.
fn cache_file(work: &Path, len: u64) -> anyhow::Result<File> {
    let place = || format!("{}: a file for {len} bytes that come from the page server", work.display());
    let file = tempfile::tempfile_in(work).with_context(place)?;
    let signed = i64::try_from(len).with_context(place)?;
    file.set_len(len).with_context(place)?;
    match fallocate(&file, FallocateFlags::empty(), 0, signed) {
        Ok(()) => {}
        // This file system cannot reserve space: a write may fail later, and then the session ends.
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => {}
        Err(Errno::EINVAL) if len == 0 => {}
        Err(errno) => return Err(errno).with_context(place),
    }
    Ok(file)
}

impl Image {
    /// Returns the memory that another host has, or `None` if all bytes are here.
    pub(crate) fn remote(&self) -> Option<&RemoteMemory> {
        self.remote.as_ref()
    }

    /// Returns whether a page server has memory of tasks.
    pub(crate) fn has_page_server(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.cache().is_some())
    }

    /// Makes the plan of the fetcher. Pages of the presence map that the peer does not have count as arrived
    /// from here on; the agent has noted them in its own map.
    ///
    /// # Errors
    /// The presence map cannot be mapped. Or the image has another id than the peer's.
    pub(crate) fn fetch_plan(&self, remote: &RemoteMemory, peer: &FetchPeer) -> anyhow::Result<FetchPlan> {
        let files = self.sparse_files(&remote.numbers);
        let memory = match &remote.copy {
            LocalCopy::Cache { layout, .. } => {
                FetchedMemory::Pages { layout: *layout, extents: self.cache_extents(), files }
            }
            LocalCopy::Files { id } => {
                let image = peer.image.clone().context("an image server without the name of an image")?;
                // The directory was not locked for a moment, and this is what the user has asked for.
                ensure!(
                    id.to_string() == image.id,
                    "a copy of image {id}, not of {}: did another program write into the directory?",
                    image.id
                );
                FetchedMemory::Files { image: image.name, id: *id, files }
            }
        };
        let (extents, files) = match &memory {
            FetchedMemory::Pages { extents, files, .. } => (extents.as_slice(), files),
            FetchedMemory::Files { files, .. } => (&[][..], files),
        };
        let extents = extents.iter().map(|of| (of.first, of.pages));
        let runs: Vec<(u64, u64)> = extents.chain(files.iter().map(|of| (of.first, of.pages()))).collect();
        let (peer, tls) = (peer.peer.clone(), peer.tls.clone());
        if !matches!(peer, PagePeer::Agent(_)) {
            remote.note_gaps(runs)?;
        }
        Ok(FetchPlan { peer, tls, len: remote.len, memory })
    }

    /// Returns the pages of the cache file.
    fn cache_extents(&self) -> Vec<FetchExtent> {
        let mut extents: Vec<FetchExtent> = Vec::new();
        for (pid, task) in &self.plans {
            let of = task.iter().flat_map(|task| task.plan.extents());
            extents.extend(of.map(|extent| FetchExtent {
                first: extent.file_offset / PAGE_SIZE,
                vaddr: extent.target,
                pages: extent.pages,
                pid: *pid,
            }));
        }
        extents.sort_unstable_by_key(|extent| extent.first);
        extents
    }

    /// Returns the files of the image that have holes.
    fn sparse_files(&self, numbers: &[u32]) -> Vec<SparseFile> {
        let files = self.files.iter().zip(numbers).filter_map(|(file, number)| {
            let first = file.source()?.page(0);
            Some(SparseFile { first, len: file.len(), number: *number })
        });
        files.filter(|file| file.len > 0).collect()
    }

    /// Opens for writing what the fetcher writes into: by the descriptors, since a path may lead elsewhere by
    /// now.
    ///
    /// # Errors
    /// This user may not write to a file.
    pub(crate) fn files_to_write(&self) -> io::Result<Vec<OwnedFd>> {
        let cache = self.remote.as_ref().and_then(RemoteMemory::cache);
        let cache = cache.into_iter().map(|cache| cache.as_fd().try_clone_to_owned());
        let open = |file: &Arc<ImageFile>| {
            let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
            OpenOptions::new().read(true).write(true).open(path).map(OwnedFd::from)
        };
        cache.chain(self.files.iter().filter(|file| !file.is_empty()).map(open)).collect()
    }

    /// Notes which blocks of the image's files are here: those that were sealed as zeros, and those whose
    /// bytes are right.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn note_arrived(&self) -> anyhow::Result<()> {
        let Some(remote) = self.remote() else { return Ok(()) };
        let presence = PresenceWriter::open(remote.presence.as_fd(), remote.len)?;
        for file in &self.files {
            let name = || file.name().display().to_string();
            note_blocks(file, &presence).with_context(name)?;
        }
        Ok(())
    }
}

fn note_blocks(file: &ImageFile, presence: &PresenceWriter) -> anyhow::Result<()> {
    let block = BLOCK as u64;
    let mut buffer = vec![0; BLOCK];
    let mut stored = stored_ranges(file)?.into_iter().peekable();
    for number in 0..file.len().div_ceil(block) {
        let offset = number * block;
        let bytes = &mut buffer[..file.block_len(number)];
        let end = offset + bytes.len() as u64;
        while stored.next_if(|range| range.end <= offset).is_some() {}
        let is_stored = stored.peek().is_some_and(|range| range.start < end);
        // In a sealed file whose bytes arrive, only what was sealed as zeros is a hole.
        let is_here = file.data(offset, end)?.is_none()
            || is_stored && read_block(file, offset, bytes)? && file.verify(offset, bytes).is_ok();
        if is_here && let Some(fetched) = file.source() {
            presence.set(fetched.page(offset), (bytes.len() as u64).div_ceil(PAGE_SIZE));
        }
    }
    Ok(())
}

/// Returns the ranges that the file system has bytes of, before any of them is read: readahead caches zeros
/// of reserved space, which the kernel then calls data, too (`SEEK_DATA`, lseek(2)). One block that is here
/// would have all be read.
fn stored_ranges(file: &ImageFile) -> io::Result<Vec<Range<u64>>> {
    let seek = |from: u64, whence| match lseek(file.as_fd(), from.cast_signed(), whence) {
        Ok(at) => Ok(Some(at.cast_unsigned())),
        Err(Errno::ENXIO) => Ok(None),
        Err(errno) => Err(io::Error::from(errno)),
    };
    let (mut ranges, mut end) = (Vec::new(), 0);
    while let Some(start) = seek(end, Whence::SeekData)? {
        end = seek(start, Whence::SeekHole)?.unwrap_or(file.len());
        ranges.push(start..end);
    }
    Ok(ranges)
}

fn read_block(file: &ImageFile, offset: u64, into: &mut [u8]) -> io::Result<bool> {
    let file = File::from(file.as_fd().try_clone_to_owned()?);
    match file.read_exact_at(into, offset) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| true),
    }
}
