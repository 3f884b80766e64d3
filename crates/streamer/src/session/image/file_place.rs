// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gives each pages file of a partial image its place in the session's presence map.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rewake_image_io::{BLOCK, FetchedFile, ImageFile};
use rewake_pager::PAGE_SIZE;

use super::remote_memory::{LocalCopy, RemoteMemory};

/// Where the pages files are in the presence map, if another host has some of their blocks.
#[derive(Debug)]
pub(super) struct FilePlace<'a> {
    remote: Option<&'a mut RemoteMemory>,
    /// The first page of the next file.
    next: u64,
}

impl<'a> FilePlace<'a> {
    pub(super) fn new(remote: Option<&'a mut RemoteMemory>) -> Self {
        Self { remote, next: 0 }
    }

    /// Returns the place of the next file, of so many bytes; none if all of its blocks are here.
    pub(super) fn fetched(&mut self, len: u64) -> anyhow::Result<Option<FetchedFile>> {
        let Some(RemoteMemory { source, copy: LocalCopy::Files { .. }, len: all, .. }) =
            self.remote.as_deref()
        else {
            return Ok(None);
        };
        let first = self.next;
        let blocks = len.checked_next_multiple_of(BLOCK as u64).context("the length of a file")?;
        self.next = first.saturating_add(blocks / PAGE_SIZE);
        ensure!(self.next <= all / PAGE_SIZE, "files of more than {all} bytes");
        Ok(Some(FetchedFile { source: Arc::clone(source), first }))
    }

    /// Takes the number that a file has in the manifest.
    pub(super) fn numbered(&mut self, number: u32, file: &ImageFile) -> anyhow::Result<()> {
        if let Some(RemoteMemory { copy: LocalCopy::Files { numbers, .. }, .. }) = self.remote.as_deref_mut()
        {
            let name = file.name().display();
            ensure!(number > 0 && file.is_sealed(), "{name}: its blocks cannot be fetched and checked");
            numbers.push(number);
        }
        Ok(())
    }

    /// Checks that the files have all places.
    pub(super) fn end(&self) -> anyhow::Result<()> {
        match self.remote.as_deref() {
            Some(RemoteMemory { copy: LocalCopy::Files { .. }, len, .. }) => {
                ensure!(self.next == len / PAGE_SIZE, "files of other lengths than {len} bytes together");
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
