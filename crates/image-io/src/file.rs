// SPDX-License-Identifier: MIT OR Apache-2.0
//! One file of an image: its identity, its two descriptors, its holes, and its state in the page cache.
//!
//! A session serves the contents that a file had when it was opened. After every read, this crate checks the
//! file ([`ImageFile::check_unchanged`]) before it gives the bytes to a caller. The file may be removed,
//! renamed or linked meanwhile, and may get another owner or mode. Any other change of its change time is an
//! error: a write, another length or modification time, a hole, an extended attribute.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, PosixFadviseAdvice, fcntl, posix_fadvise};
use nix::unistd::{Whence, lseek};

use crate::cache_regions::CacheRegions;
use crate::error::{StoreError, TransferError};
use crate::fetch_source::FetchedFile;
use crate::free_memory;
use crate::identity::{FileKey, FileState};
use crate::page_cache::{self, Cachestat};
use crate::shared_readers;
use crate::units::BLOCK;
use crate::verification::BlockChecksums;

/// How to read a range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadMode {
    /// Through the page cache, which has all of the bytes.
    Cached,
    /// Through the page cache, which reads ahead.
    Buffered,
    /// Through the page cache, which reads no other bytes: other reads must not wait for them.
    Exact,
    /// `O_DIRECT`: no copy and no page cache. A transfer falls back to a buffered call where the file or the
    /// offset does not allow it.
    Direct,
}

/// An open file of an image. Its length and key are those at open. A file that shrinks later gives
/// [`TransferError::Short`]; one that is rewritten in place gives [`TransferError::Changed`].
#[derive(Debug)]
pub struct ImageFile {
    name: PathBuf,
    buffered: File,
    /// A descriptor whose reads do not make the kernel read ahead.
    exact: Option<File>,
    direct: Option<File>,
    /// The state at open.
    state: FileState,
    /// The state at the last check. It differs from `state` only in what [`FileState::follow`] accepts.
    seen: Mutex<FileState>,
    cachestat_works: AtomicBool,
    nowait_works: AtomicBool,
    /// Whether the file system has refused a direct call.
    direct_refused: AtomicBool,
    /// Whether other readers can find this one.
    joined: AtomicBool,
    /// See [`keep_in_page_cache`].
    kept: AtomicBool,
    is_remote: bool,
    regions: CacheRegions,
    /// None: its bytes cannot be checked.
    checksums: OnceLock<BlockChecksums>,
    /// For a file that a fetcher writes: where missing bytes come from.
    source: Option<FetchedFile>,
    /// Whether another process writes what it lacks.
    arrives: AtomicBool,
    /// The data range that was found last. The file system scans a whole range to find its end.
    data: Mutex<Range<u64>>,
}

impl ImageFile {
    /// Takes over an open file, for reading or for both directions; `name` is for messages only. It is not
    /// joined ([`ImageFile::join`]).
    ///
    /// # Errors
    /// [`StoreError::Open`] and [`StoreError::NotRegular`], with the name.
    pub fn from_file(file: File, name: impl Into<PathBuf>) -> Result<Arc<Self>, StoreError> {
        let name = name.into();
        let open = |error| StoreError::Open { file: name.clone(), error };
        if !file.metadata().map_err(open)?.is_file() {
            return Err(StoreError::NotRegular { file: name });
        }
        let state = FileState::of(&file).map_err(open)?;
        Ok(Self::with(file, name, state.clone(), state, None))
    }

    /// Takes over a file that a fetcher writes: a cache file, or one of an image some of whose blocks are
    /// missing. It is read through the page cache, where its bytes are when they have arrived.
    ///
    /// # Errors
    /// As for [`ImageFile::from_file`].
    pub fn fetched(
        file: File,
        name: impl Into<PathBuf>,
        source: FetchedFile,
    ) -> Result<Arc<Self>, StoreError> {
        let name = name.into();
        let state = FileState::of(&file).map_err(|error| StoreError::Open { file: name.clone(), error })?;
        let file = Self::with(file, name, state.clone(), state, Some(source));
        file.kept.store(true, Ordering::Relaxed);
        Ok(file)
    }

    /// Takes over a file that another [`ImageFile`] had opened in `state`, from any process, and joins it.
    ///
    /// # Errors
    /// [`StoreError::Another`] when it is not that file, or its contents may have changed since.
    pub fn inherit(file: File, name: impl Into<PathBuf>, state: FileState) -> Result<Arc<Self>, StoreError> {
        let name = name.into();
        match state.follow(&file) {
            Ok(now) => {
                let file = Self::with(file, name, state.clone(), now.unwrap_or(state), None);
                file.join();
                Ok(file)
            }
            Err(what) => Err(StoreError::Another { file: name, what }),
        }
    }

    fn with(
        file: File,
        name: PathBuf,
        state: FileState,
        seen: FileState,
        source: Option<FetchedFile>,
    ) -> Arc<Self> {
        let open = |flags| {
            // Opens by /proc: the same inode, even when the path now names another file or none.
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let mut options = OpenOptions::new();
            options.read(true).write(is_writable(&file)).custom_flags(flags).open(path).ok()
        };
        let direct = if source.is_some() { None } else { open(libc::O_DIRECT) };
        if source.is_some() {
            // What has arrived is in the page cache. Readahead would fill it with zeros of what has not. Only
            // the time depends on this advice.
            let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM);
        }
        let exact =
            open(0).filter(|exact| posix_fadvise(exact, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM).is_ok());
        let [cachestat_works, nowait_works] = [(); 2].map(|()| AtomicBool::new(true));
        let [direct_refused, joined, kept] = [(); 3].map(|()| AtomicBool::new(false));
        Arc::new(Self {
            regions: CacheRegions::new(state.key.len),
            is_remote: shared_readers::is_remote(&file),
            name,
            buffered: file,
            exact,
            direct,
            state,
            seen: Mutex::new(seen),
            cachestat_works,
            nowait_works,
            direct_refused,
            joined,
            kept,
            checksums: OnceLock::new(),
            source,
            arrives: AtomicBool::new(false),
            data: Mutex::default(),
        })
    }

    /// Registers this process as a reader of the file. While several processes read it, their reads use the
    /// page cache, so that the disk reads the bytes once. Files on remote file systems are not registered.
    pub fn join(&self) {
        let joined = !self.is_remote && shared_readers::join(&self.buffered);
        self.joined.store(joined, Ordering::Relaxed);
    }

    /// Returns where missing bytes come from; none for a file that has all of them.
    pub fn source(&self) -> Option<&FetchedFile> {
        self.source.as_ref()
    }

    /// Whether the file has these bytes, and those that must be read to check them: of a sealed file whole
    /// blocks. Bytes that have not arrived must not be read.
    pub fn has(&self, offset: u64, len: usize) -> bool {
        let Some(source) = &self.source else { return true };
        if !self.is_sealed() {
            return source.has(offset, len);
        }
        let (start, end) = (offset / BLOCK as u64 * BLOCK as u64, offset.saturating_add(len as u64));
        let end = end.next_multiple_of(BLOCK as u64).min(self.len());
        source.has(start, usize::try_from(end.saturating_sub(start)).unwrap_or(usize::MAX))
    }

    /// Whether its bytes come from another host, or may.
    pub fn is_remote(&self) -> bool {
        self.is_remote
    }

    /// Checks that the file still has the contents that it was opened with.
    ///
    /// # Errors
    /// [`TransferError::Changed`], with what changed. Bytes read since the last check must not be used.
    pub fn check_unchanged(&self) -> Result<(), TransferError> {
        if self.is_written() {
            // The presence map says what of it may be used. A cache file has no name by which other programs
            // could open it, and the blocks of a sealed image's file are checked.
            return Ok(());
        }
        // The lock is not held over the system call, except after a change.
        let known = lock(&self.seen).key;
        if self.buffered.metadata().is_ok_and(|now| FileKey::of(&now) == known) {
            return Ok(());
        }
        let mut seen = lock(&self.seen);
        match seen.follow(&self.buffered) {
            Ok(now) => {
                *seen = now.unwrap_or_else(|| seen.clone());
                Ok(())
            }
            Err(what) => Err(TransferError::Changed { file: self.name.clone(), what }),
        }
    }

    /// Accepts that a fetcher of another process writes what the file lacks. Blocks of a sealed file are
    /// checked when they are read. Of others the caller reads only what has arrived. It is read through the
    /// page cache, which has what was written last.
    pub fn allow_arrival(&self) {
        self.arrives.store(true, Ordering::Relaxed);
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Whether a fetcher writes it.
    fn is_written(&self) -> bool {
        self.source.is_some() || self.arrives.load(Ordering::Relaxed)
    }

    /// Has every block that is read from now on checked. Only the first call has an effect.
    pub fn verify_with(&self, checksums: BlockChecksums) {
        // The bytes that a file must have do not change while it is open.
        let _ = self.checksums.set(checksums);
    }

    /// Whether blocks of it are checked.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.checksums.get().is_some()
    }

    pub(crate) fn checksums(&self) -> Option<&BlockChecksums> {
        self.checksums.get()
    }

    /// Returns the next range between `offset` and `end` that is not a hole. A hole in the place of sealed
    /// bytes counts as data.
    ///
    /// # Errors
    /// The file system cannot say, or the file has changed since it was opened.
    pub fn data(&self, offset: u64, end: u64) -> Result<Option<(u64, u64)>, TransferError> {
        let found = self.stored_data(offset, end)?;
        let hole = offset..found.map_or(end, |(start, _)| start);
        Ok(self.sealed_data(hole).or(found))
    }

    /// Returns the next range that the file system has bytes of.
    fn stored_data(&self, offset: u64, end: u64) -> Result<Option<(u64, u64)>, TransferError> {
        let seek = |from: u64, whence| match lseek(&self.buffered, from.cast_signed(), whence) {
            Ok(at) => Ok(Some(at.cast_unsigned())),
            Err(Errno::ENXIO) => Ok(None),
            Err(errno) => Err(TransferError::Io {
                act: "looking for holes in",
                file: self.name.clone(),
                offset: from,
                expected: usize::try_from(end - offset).unwrap_or(usize::MAX),
                tries: 1,
                source: errno.into(),
            }),
        };
        if self.is_written() {
            // What has not arrived looks like a hole. In a sealed file the checksums say where zeros are.
            return Ok((offset < end && !self.is_sealed()).then_some((offset, end)));
        }
        let known = lock(&self.data).clone();
        if known.contains(&offset) {
            return Ok(Some((offset, known.end.min(end))));
        }
        let start = seek(offset, Whence::SeekData)?.filter(|start| *start < end);
        let stop = start.map(|start| seek(start, Whence::SeekHole)).transpose()?.flatten().unwrap_or(end);
        // A file that was shortened looks like a hole.
        self.check_unchanged()?;
        let Some(start) = start else { return Ok(None) };
        *lock(&self.data) = start..stop;
        Ok(Some((start, stop.min(end))))
    }

    /// The state at open, for a successor's [`ImageFile::inherit`].
    pub fn state(&self) -> &FileState {
        &self.state
    }

    /// The name for messages.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Length in bytes at open.
    pub fn len(&self) -> u64 {
        self.state.key.len
    }

    /// Whether the file was empty at open.
    pub fn is_empty(&self) -> bool {
        self.state.key.len == 0
    }

    /// The content's identity.
    pub fn key(&self) -> FileKey {
        self.state.key
    }

    /// Whether the page cache has all of these bytes. Of a block it must have most of the region around it,
    /// too: chunks are longer than the kernel reads ahead. `false` where the kernel cannot say (before 6.5,
    /// or refused).
    pub fn is_cached(&self, offset: u64, len: usize) -> bool {
        let in_cold_region = len <= BLOCK && self.is_cold(offset);
        !in_cold_region
            && self.cachestat(offset, len as u64).is_some_and(|(stat, pages)| stat.cached >= pages)
    }

    /// Reads bytes that the page cache has, and never waits for the disk. Returns the number of bytes up to
    /// the first page that it does not have: 0 also in a region that is mostly on the disk, or where bytes
    /// have not arrived. With `ahead`, and where the file is kept in the page cache, the kernel then begins
    /// to read the others, and those after them, but for a file whose bytes arrive.
    ///
    /// # Errors
    /// The file has changed since it was opened. The bytes must not be used then.
    pub fn read_cached(&self, offset: u64, into: &mut [u8], ahead: bool) -> Result<usize, TransferError> {
        let arrived = self.source.as_ref().map_or(into.len(), |source| source.prefix(offset, into.len()));
        if arrived == 0 {
            return Ok(0);
        }
        let into = &mut into[..arrived];
        if self.is_cold(offset) || !ahead && self.is_kept() && self.is_missing(offset, into.len()) {
            return Ok(0);
        }
        let read = if self.nowait_works.load(Ordering::Relaxed) {
            page_cache::read_cached(if ahead { &self.buffered } else { self.exact() }, offset, into)
        } else {
            Err(Errno::EOPNOTSUPP.into())
        };
        let read = match read {
            Ok(read) => read,
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                // This file system cannot read without waiting. The answer stays the same for this file.
                self.nowait_works.store(false, Ordering::Relaxed);
                if !self.is_cached(offset, into.len()) {
                    return Ok(0);
                }
                self.buffered.read_at(into, offset).unwrap_or(0)
            }
            // The read from the disk that follows reports it, or tries again.
            Err(_) => return Ok(0),
        };
        self.check_unchanged()?;
        Ok(read)
    }

    /// Chooses how to read these bytes. A range with dirty pages is read through the page cache: a direct
    /// read would wait for the disk. All reads go through it where the file is kept there, and while other
    /// processes read the file, so that the disk reads the bytes once. With `ahead` the kernel may read more
    /// there.
    pub fn mode(&self, offset: u64, len: usize, ahead: bool) -> ReadMode {
        let buffered = if ahead { ReadMode::Buffered } else { ReadMode::Exact };
        let from_disk = || {
            let is_buffered = self.is_kept() || self.direct().is_none() || self.is_shared();
            if is_buffered { buffered } else { ReadMode::Direct }
        };
        if len <= BLOCK && self.is_cold(offset) {
            return from_disk();
        }
        match self.cachestat(offset, len as u64) {
            Some((stat, pages)) if stat.cached >= pages => ReadMode::Cached,
            Some((stat, _)) if stat.dirty + stat.writeback == 0 => from_disk(),
            _ => buffered,
        }
    }

    /// Whether the page cache lacks some of these bytes. `false` where the kernel cannot say.
    fn is_missing(&self, offset: u64, len: usize) -> bool {
        self.cachestat(offset, len as u64).is_some_and(|(stat, pages)| stat.cached < pages)
    }

    fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Relaxed)
    }

    fn is_shared(&self) -> bool {
        self.joined.load(Ordering::Relaxed) && shared_readers::has_others(&self.buffered)
    }

    /// Whether less than seven eighths of the region of `offset` were in the page cache at the first query.
    fn is_cold(&self, offset: u64) -> bool {
        !self.is_kept()
            && self.direct.is_some()
            && self.regions.is_cold(offset, |start, len| match self.cachestat(start, len) {
                Some((stat, pages)) => stat.cached >= pages - pages / 8 || stat.dirty + stat.writeback > 0,
                None => true,
            })
    }

    /// Valid bytes of a block: [`BLOCK`], less at the end. A block beyond the end counts as whole, so that
    /// reading it is an error and not an empty block.
    pub fn block_len(&self, block: u64) -> usize {
        let rest = self.state.key.len.saturating_sub(block.saturating_mul(BLOCK as u64));
        match usize::try_from(rest) {
            Ok(tail @ 1..BLOCK) => tail,
            _ => BLOCK,
        }
    }

    pub(crate) fn buffered(&self) -> &File {
        &self.buffered
    }

    /// The descriptor for reads of these bytes alone.
    pub(crate) fn exact(&self) -> &File {
        self.exact.as_ref().unwrap_or(&self.buffered)
    }

    /// The descriptor for direct calls, until the file system refuses one.
    pub(crate) fn direct(&self) -> Option<&File> {
        self.direct.as_ref().filter(|_| !self.direct_refused.load(Ordering::Relaxed))
    }

    /// Notes that the file system refused a direct call.
    pub(crate) fn refuse_direct(&self) {
        self.direct_refused.store(true, Ordering::Relaxed);
    }

    /// The page cache's state of a range, and the number of pages in the range; None where the kernel does
    /// not give it.
    fn cachestat(&self, offset: u64, len: u64) -> Option<(Cachestat, u64)> {
        if !self.cachestat_works.load(Ordering::Relaxed) {
            return None;
        }
        let end = offset.saturating_add(len).min(self.state.key.len);
        if end <= offset {
            return None;
        }
        let errno = match page_cache::cachestat(&self.buffered, offset, end - offset) {
            Ok(stat) => return Some((stat, page_cache::pages(offset, end - offset))),
            Err(error) => error.raw_os_error(),
        };
        if matches!(errno, Some(libc::ENOSYS | libc::EPERM | libc::EACCES | libc::EOPNOTSUPP)) {
            // The answer stays the same for this file: do not query again.
            self.cachestat_works.store(false, Ordering::Relaxed);
        }
        None
    }
}

/// Decides whether the bytes of an image stay in the page cache when they are read from the disk, for the
/// next restore. They do if that fills no more than half of the memory that is left: the restored program
/// needs the other half, as its memory is as large as its image. Otherwise they are read past the page cache.
/// Files that a fetcher writes are always read through it.
pub fn keep_in_page_cache<'a>(files: impl Iterator<Item = &'a ImageFile> + Clone) {
    let files = files.filter(|file| !file.is_written());
    // A sparse file takes less than its length.
    let bytes = files.clone().map(|file| {
        let blocks = file.buffered.metadata().map_or(u64::MAX, |now| now.blocks());
        file.len().min(blocks.saturating_mul(512))
    });
    let bytes = bytes.fold(0, u64::saturating_add);
    let kept = free_memory::available().is_some_and(|available| bytes <= available / 2);
    files.for_each(|file| file.kept.store(kept, Ordering::Relaxed));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_writable(file: &File) -> bool {
    let flags = fcntl(file, FcntlArg::F_GETFL).unwrap_or(0);
    flags & libc::O_ACCMODE == libc::O_RDWR
}

/// The descriptor that the file was opened by.
impl AsFd for ImageFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }
}
