// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cache file of an image whose lazy pages a page server has: a local copy that a fetcher fills.
//!
//! It has no name, so no other program writes it, and it takes no space when the session has ended.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use rewake_fetcher::plan::{FetchExtent, FetchPlan};
use rewake_image_io::{FetchSource, ImageFile, PresenceMap, PresenceWriter, presence_file};
use rewake_page_protocol::HeaderLayout;
use rewake_pager::PAGE_SIZE;

use super::Image;
use crate::fetch::PageServerPeer;

/// The cache file and its presence map.
#[derive(Debug)]
pub(crate) struct CacheFile {
    /// The file.
    pub(crate) file: Arc<ImageFile>,
    /// The presence map's memory file.
    pub(crate) presence: OwnedFd,
    /// Where missing bytes come from.
    pub(crate) source: Arc<FetchSource>,
    /// The headers of the CRIU that made the image.
    pub(super) layout: HeaderLayout,
}

impl CacheFile {
    /// Makes a cache file of so many bytes in a directory, and reserves its space.
    ///
    /// # Errors
    /// The file system has not enough space.
    pub(crate) fn create(work: &Path, len: u64, layout: HeaderLayout) -> anyhow::Result<Self> {
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
        Self::of(file, presence_file(len).with_context(place)?, layout)
    }

    /// Takes over a cache file that another worker has made.
    pub(crate) fn inherit(
        cache: OwnedFd,
        presence: OwnedFd,
        len: u64,
        layout: HeaderLayout,
    ) -> anyhow::Result<Self> {
        let cache = File::from(cache);
        let found = cache.metadata().context("the cache file")?.len();
        if found != len {
            bail!(
                "the cache file has {found} bytes, and {len} were reserved: did another program write to it?"
            );
        }
        Self::of(cache, presence, layout)
    }

    fn of(file: File, presence: OwnedFd, layout: HeaderLayout) -> anyhow::Result<Self> {
        let len = file.metadata().context("the cache file")?.len();
        let map = PresenceMap::open(presence.as_fd(), len).context("the presence map")?;
        let source = Arc::new(FetchSource::new(map));
        let file = ImageFile::fetched(file, "pages of the page server", Arc::clone(&source))?;
        Ok(Self { file, presence, source, layout })
    }

    /// Returns the descriptors that a successor needs: the file's and the presence map's.
    pub(crate) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.file.as_fd(), self.presence.as_fd()]
    }
}

impl Image {
    /// Returns the cache file; none if all bytes are in files of the image.
    pub(crate) fn cache_file(&self) -> Option<&CacheFile> {
        self.cache.as_ref()
    }

    /// Makes the plan of the fetcher. Pages of the cache file that are no task's count as arrived from here on.
    ///
    /// # Errors
    /// The presence map cannot be mapped.
    pub(crate) fn fetch_plan(&self, cache: &CacheFile, server: &PageServerPeer) -> io::Result<FetchPlan> {
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
        let len = cache.file.len();
        let presence = PresenceWriter::open(cache.presence.as_fd(), len)?;
        let mut end = 0;
        for (first, pages) in
            extents.iter().map(|of| (of.first, of.pages)).chain([(len.div_ceil(PAGE_SIZE), 0)])
        {
            presence.set(end, first - end);
            end = first + pages;
        }
        let (peer, tls) = (server.peer.clone(), server.tls.clone());
        Ok(FetchPlan { peer, tls, layout: cache.layout, cache: len, extents })
    }
}
