// SPDX-License-Identifier: MIT OR Apache-2.0
//! One pages file: its identity, its two descriptors, and its state in the page cache.
//!
//! A session serves the contents that a file had when it was opened. After every read, this crate checks the
//! file ([`PagesFile::check_unchanged`]) before it gives the bytes to a caller. The file may be removed,
//! renamed or linked meanwhile, and may get another owner or mode. Any other change of its change time is an
//! error: a write, another length or modification time, a hole, an extended attribute.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::BLOCK;
use crate::cache_regions::CacheRegions;
use crate::engine::ReadMode;
use crate::error::{ReadError, StoreError};
use crate::identity::{FileKey, FileState};
use crate::page_cache::{self, Cachestat};
use crate::shared_readers;

/// An open pages file. Its length and key are those at open. A file that shrinks later gives
/// [`ReadError::Short`]; one that is rewritten in place gives [`ReadError::Changed`].
#[derive(Debug)]
pub struct PagesFile {
    name: PathBuf,
    buffered: File,
    direct: Option<File>,
    /// The state at open.
    state: FileState,
    /// The state at the last check. It differs from `state` only in what [`FileState::follow`] accepts.
    seen: Mutex<FileState>,
    cachestat_works: AtomicBool,
    /// Whether other readers can find this one.
    joined: bool,
    regions: CacheRegions,
}

impl PagesFile {
    /// Opens a pages file for reading.
    ///
    /// # Errors
    /// [`StoreError::Open`] and [`StoreError::NotRegular`], with the path.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>, StoreError> {
        let path = path.as_ref();
        // O_NONBLOCK: opening a FIFO by mistake must be refused below, not block here.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|error| StoreError::Open { file: path.to_path_buf(), error })?;
        Self::from_file(file, path)
    }

    /// Takes over a file that is already open for reading; `name` is for messages only.
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
        Ok(Self::with(file, name, state.clone(), state))
    }

    /// Takes over a file that another [`PagesFile`] had opened in `state`, from any process.
    ///
    /// # Errors
    /// [`StoreError::Another`] when it is not that file, or its contents may have changed since.
    pub fn inherit(file: File, name: impl Into<PathBuf>, state: FileState) -> Result<Arc<Self>, StoreError> {
        let name = name.into();
        match state.follow(&file) {
            Ok(now) => Ok(Self::with(file, name, state.clone(), now.unwrap_or(state))),
            Err(what) => Err(StoreError::Another { file: name, what }),
        }
    }

    fn with(file: File, name: PathBuf, state: FileState, seen: FileState) -> Arc<Self> {
        // Opens by /proc: the same inode, even when the path now names another file or none.
        let direct = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .ok();
        let regions = CacheRegions::new(state.key.len);
        let (seen, cachestat_works) = (Mutex::new(seen), AtomicBool::new(true));
        let joined = shared_readers::join(&file);
        Arc::new(Self { name, buffered: file, direct, state, seen, cachestat_works, joined, regions })
    }

    /// Checks that the file still has the contents that it was opened with.
    ///
    /// # Errors
    /// [`ReadError::Changed`], with what changed. Bytes read since the last check must not be used.
    pub fn check_unchanged(&self) -> Result<(), ReadError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match seen.follow(&self.buffered) {
            Ok(None) => Ok(()),
            Ok(Some(now)) => {
                *seen = now;
                Ok(())
            }
            Err(what) => Err(ReadError::Changed { file: self.name.clone(), what }),
        }
    }

    /// The state at open, for a successor's [`PagesFile::inherit`].
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

    /// Whether the file system permits direct reads of the file.
    pub fn has_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Number of blocks; the last one may be shorter than [`BLOCK`].
    pub fn blocks(&self) -> u64 {
        self.state.key.len.div_ceil(BLOCK as u64)
    }

    /// Whether these bytes are to be read from the page cache: it has all of them, and most of the region
    /// around them. `true` where the kernel cannot say (before 6.5, or refused): buffered reads are correct
    /// everywhere.
    pub fn is_cached(&self, offset: u64, len: usize) -> bool {
        if self.is_cold(offset) {
            return false;
        }
        match self.cachestat(offset, len as u64) {
            Some((stat, pages)) => stat.cached >= pages,
            None => true,
        }
    }

    /// Chooses how to read these bytes, by measurement: through the page cache when it has all of them, else
    /// past it. A range with dirty pages is read through it: a direct read would wait for the disk. While other
    /// processes read the file, all reads go through it, so that the disk reads the bytes once.
    pub fn how(&self, offset: u64, len: usize) -> ReadMode {
        if self.direct.is_none() || self.is_shared() {
            return ReadMode::Buffered;
        }
        if self.is_cold(offset) {
            return ReadMode::Direct;
        }
        match self.cachestat(offset, len as u64) {
            Some((stat, pages)) if stat.cached < pages && stat.dirty + stat.writeback == 0 => {
                ReadMode::Direct
            }
            _ => ReadMode::Buffered,
        }
    }

    fn is_shared(&self) -> bool {
        self.joined && shared_readers::has_others(&self.buffered)
    }

    /// Whether less than seven eighths of the region of `offset` were in the page cache at the first query.
    fn is_cold(&self, offset: u64) -> bool {
        self.direct.is_some()
            && self.regions.is_cold(offset, |start, len| match self.cachestat(start, len) {
                Some((stat, pages)) => stat.cached >= pages - pages / 8 || stat.dirty + stat.writeback > 0,
                None => true,
            })
    }

    /// Checks that the file has these bytes, by its length at open.
    ///
    /// # Errors
    /// [`ReadError::Short`] when the range ends beyond the file.
    pub fn check_range(&self, offset: u64, len: usize) -> Result<(), ReadError> {
        let rest = self.state.key.len.saturating_sub(offset);
        match usize::try_from(rest) {
            Ok(got) if got < len => {
                Err(ReadError::Short { file: self.name.clone(), offset, expected: len, got })
            }
            _ => Ok(()),
        }
    }

    /// Valid bytes of a block: [`BLOCK`], less at the end. A block beyond the end counts as whole, so that
    /// reading it is an error and not an empty block.
    pub(crate) fn block_len(&self, block: u64) -> usize {
        let rest = self.state.key.len.saturating_sub(block.saturating_mul(BLOCK as u64));
        match usize::try_from(rest) {
            Ok(tail @ 1..BLOCK) => tail,
            _ => BLOCK,
        }
    }

    pub(crate) fn buffered(&self) -> &File {
        &self.buffered
    }

    pub(crate) fn direct(&self) -> Option<&File> {
        self.direct.as_ref()
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

/// The descriptor that the file was opened by.
impl AsFd for PagesFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }
}
