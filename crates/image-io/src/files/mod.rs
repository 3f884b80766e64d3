// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many reads and writes at once, between files and memory that the caller divides up: what moves buffer objects to and
//! from images. By io_uring, or by plain positioned calls where that is forbidden.
//!
//! One thread, no locks. [`FileRing::submit`] starts, [`FileRing::finished`] tells what ended, [`FileRing::event`] wakes.

mod request;
mod ring;
mod shared_readers;
#[cfg(test)]
mod testing;

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use request::{Direction, Finished, Request, TransferError};
pub use ring::FileRing;

use crate::PAGE;
use crate::page_cache::{Cachestat, cachestat, pages};

/// Memory that files are read into and written from.
///
/// # Safety
/// The bytes stay mapped, readable and writable as long as the value lives, wherever it is moved to, and there are no
/// references to them: the kernel and devices change them at any time.
pub unsafe trait Memory {
    /// First byte, at a page.
    fn start(&self) -> NonNull<u8>;
    /// Bytes.
    fn bytes(&self) -> usize;
    /// Whether disks may write into it themselves: not into what is another device's.
    fn is_for_devices(&self) -> bool;
}

/// A file that is transferred, opened once or twice: past the page cache, too, where the file system permits it.
#[derive(Debug)]
pub struct TransferFile {
    name: PathBuf,
    buffered: File,
    direct: Option<File>,
    refused: AtomicBool,
    joined: AtomicBool,
}

impl TransferFile {
    /// `direct` is the same file, opened with `O_DIRECT`; `name` is for messages.
    pub fn new(name: impl Into<PathBuf>, buffered: File, direct: Option<File>) -> Arc<Self> {
        let [refused, joined] = [false; 2].map(AtomicBool::new);
        Arc::new(Self { name: name.into(), buffered, direct, refused, joined })
    }

    /// It is read from now on: what others read at the same time, in other processes, goes through the page cache, which reads it from the disk
    /// once. Not on file systems of other hosts.
    pub fn join(&self) {
        self.joined.store(shared_readers::join(&self.buffered), Ordering::Relaxed);
    }

    /// Whether its bytes come from another host, or may.
    #[must_use]
    pub fn is_of_another_host(&self) -> bool {
        shared_readers::is_of_another_host(&self.buffered)
    }

    /// Whether others have joined, too, and it is worth while to share.
    fn is_shared(&self) -> bool {
        self.joined.load(Ordering::Relaxed) && shared_readers::has_others(&self.buffered)
    }

    /// The file, for everything else.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.buffered
    }

    /// The descriptor for a call at this place.
    fn at(&self, offset: u64, at: usize, bytes: usize) -> (&File, bool) {
        let aligned =
            offset.is_multiple_of(PAGE as u64) && at.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE);
        match &self.direct {
            Some(direct) if aligned && !self.refused.load(Ordering::Relaxed) && !self.is_shared() => {
                (direct, true)
            }
            _ => (&self.buffered, false),
        }
    }

    /// Whether the page cache has all of these bytes, as far as the file has them. Not where the kernel cannot tell.
    #[must_use]
    pub fn is_cached(&self, offset: u64, bytes: usize) -> bool {
        let Ok(length) = self.buffered.metadata().map(|kind| kind.len()) else { return false };
        let bytes = length.saturating_sub(offset).min(bytes as u64);
        let cached = |stat: Cachestat| stat.cached >= pages(offset, bytes);
        bytes > 0 && cachestat(&self.buffered, offset, bytes).is_ok_and(cached)
    }

    /// The file system takes no direct calls after all, or not such ones.
    fn refuse_direct(&self) {
        self.refused.store(true, Ordering::Relaxed);
    }

    fn error<M>(&self, request: &Request<M>, source: io::Error) -> TransferError {
        TransferError {
            act: request.direction.act(),
            file: self.name.clone(),
            offset: request.offset,
            bytes: request.bytes,
            source,
        }
    }
}
