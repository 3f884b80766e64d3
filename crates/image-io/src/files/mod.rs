// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transfers many pieces at once between files and memory that the caller divides: buffer objects to and from
//! images. It uses io_uring, or plain positioned calls where io_uring is forbidden.
//!
//! One thread uses a ring, without locks. [`FileRing::submit`] starts transfers, [`FileRing::finished`]
//! returns those that ended, and [`FileRing::event`] wakes the thread.

mod request;
mod ring;
#[cfg(test)]
pub(crate) mod testing;

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use request::{Direction, Finished, Request, TransferError};
pub use ring::FileRing;

use crate::page_cache::{Cachestat, cachestat, pages};
use crate::{PAGE, shared_readers};

/// Memory that files are read into and written from.
///
/// # Safety
/// The bytes stay mapped, readable and writable while the value lives, also when it is moved. No references
/// to them exist: the kernel and devices change them at any time. It is not another device's memory, which
/// disks must not write to.
pub unsafe trait Memory {
    /// The first byte, page-aligned.
    fn start(&self) -> NonNull<u8>;
    /// The length in bytes.
    fn bytes(&self) -> usize;
}

/// A file that is transferred. It is opened a second time for direct I/O where the file system permits it.
#[derive(Debug)]
pub struct TransferFile {
    name: PathBuf,
    buffered: File,
    direct: Option<File>,
    refused: AtomicBool,
    joined: AtomicBool,
}

impl TransferFile {
    /// Makes a transfer file. `direct` is the same file, opened with `O_DIRECT`; `name` is for messages.
    pub fn new(name: impl Into<PathBuf>, buffered: File, direct: Option<File>) -> Arc<Self> {
        let [refused, joined] = [false; 2].map(AtomicBool::new);
        Arc::new(Self { name: name.into(), buffered, direct, refused, joined })
    }

    /// Registers this process as a reader of the file. While several processes read it, their reads use the
    /// page cache, so that the disk reads the bytes once. Files on remote file systems are not registered.
    pub fn join(&self) {
        self.joined.store(shared_readers::join(&self.buffered), Ordering::Relaxed);
    }

    /// Whether its bytes come from another host, or may.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        shared_readers::is_remote(&self.buffered)
    }

    /// Whether other processes have joined, too, so that sharing pays.
    fn is_shared(&self) -> bool {
        self.joined.load(Ordering::Relaxed) && shared_readers::has_others(&self.buffered)
    }

    /// The descriptor that is not opened for direct I/O.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.buffered
    }

    /// Returns the descriptor for a call at this place, and whether it is direct.
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

    /// Whether the page cache has all of these bytes that the file has. False where the kernel cannot say.
    #[must_use]
    pub fn is_cached(&self, offset: u64, bytes: usize) -> bool {
        let Ok(length) = self.buffered.metadata().map(|kind| kind.len()) else { return false };
        let bytes = length.saturating_sub(offset).min(bytes as u64);
        let cached = |stat: Cachestat| stat.cached >= pages(offset, bytes);
        bytes > 0 && cachestat(&self.buffered, offset, bytes).is_ok_and(cached)
    }

    /// Notes that the file system refused a direct call.
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
