// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gives each pages file of which another host has some bytes its place in the session's presence map.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rewake_image_io::{BLOCK, FetchedFile, ImageFile};
use rewake_pager::PAGE_SIZE;

use super::remote_memory::{LocalCopy, RemoteMemory};

/// Where the pages files are in the presence map, if another host has some of their bytes: after the cache
/// file.
#[derive(Debug)]
pub(super) struct FilePlace<'a> {
    remote: Option<&'a mut RemoteMemory>,
    /// The first page of the next file.
    next: u64,
}

impl<'a> FilePlace<'a> {
    pub(super) fn new(remote: Option<&'a mut RemoteMemory>) -> Self {
        let cache = remote.as_ref().and_then(|remote| remote.cache()).map_or(0, |cache| cache.len());
        Self { remote, next: cache / PAGE_SIZE }
    }

    /// Returns the place of the next file, which has `len` bytes, or `None` if all of its bytes are local.
    pub(super) fn fetched(&mut self, len: u64) -> anyhow::Result<Option<FetchedFile>> {
        let Some(RemoteMemory { source, len: all, .. }) = self.remote.as_deref() else { return Ok(None) };
        let first = self.next;
        let blocks = len.checked_next_multiple_of(BLOCK as u64).context("the length of a file")?;
        self.next = first.saturating_add(blocks / PAGE_SIZE);
        ensure!(self.next <= all / PAGE_SIZE, "files of more than {all} bytes");
        Ok(Some(FetchedFile { source: Arc::clone(source), first }))
    }

    /// Takes the number that a file has at the other host.
    pub(super) fn numbered(&mut self, number: u32, file: &ImageFile) -> anyhow::Result<()> {
        if let Some(RemoteMemory { copy, numbers, .. }) = self.remote.as_deref_mut() {
            let is_checked = number > 0 && file.is_sealed();
            let name = file.name().display();
            ensure!(
                is_checked || matches!(copy, LocalCopy::Cache { .. }),
                "{name}: its blocks cannot be fetched and checked"
            );
            numbers.push(number);
        }
        Ok(())
    }

    /// Checks that the files have all places.
    pub(super) fn end(&self) -> anyhow::Result<()> {
        let Some(RemoteMemory { len, .. }) = self.remote.as_deref() else { return Ok(()) };
        ensure!(self.next == len / PAGE_SIZE, "files of other lengths than {len} bytes together");
        Ok(())
    }
}
