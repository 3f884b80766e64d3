// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of an image in the node's cache, which all streamers that restore the image share: one fetcher,
//! one presence map, one copy in the page cache. The node agent has it; [`agent_fetch`](crate::agent_fetch)
//! is the streamer's side.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Child;

use anyhow::Context as _;
use rewake_image_io::{PAGE, PresenceMap};

use crate::fetch_peer::FetchPeer;
use crate::fetcher_process::{self, FetchDescriptors};
use crate::planner;
use crate::session::image::{LazyMemory, plan_file};

/// What the fetchers of an image need, one after another.
#[derive(Debug)]
pub struct SharedFetch {
    files: FetchDescriptors,
    map: PresenceMap,
    /// The presence map for streamers, which cannot write to it by this descriptor.
    read_only: OwnedFd,
    layout: u64,
    /// Bytes that the presence map is for.
    len: u64,
}

impl SharedFetch {
    /// Plans what an image in a directory lacks, and compares what it has with its checksums. It may take
    /// long.
    ///
    /// # Errors
    /// The directory has no image, or a damaged one.
    pub fn prepare(images: &Path, server: &FetchPeer) -> anyhow::Result<Self> {
        let image = planner::plan(images, &LazyMemory::ForCache, &[])?;
        let remote = image.remote().context("an image whose memory is all here")?;
        let plan = image.fetch_plan(remote, server)?;
        let memory = plan_file::memory_file().context("making a memory file for the fetcher")?;
        plan.write(&memory).context("writing the fetch plan")?;
        let files = FetchDescriptors::of(&image, remote, memory, &plan)?;
        let map = PresenceMap::open(files.presence.as_fd(), plan.len).context("the presence map")?;
        let path = format!("/proc/self/fd/{}", files.presence.as_raw_fd());
        let read_only = File::open(path).context("opening the presence map for reading")?.into();
        let (layout, len) = (plan.layout(), plan.len);
        // The image's leases end here: the agent knows that the image is in use.
        Ok(Self { files, map, read_only, layout, len })
    }

    /// Starts a fetcher. Returns it, and the socket to it. `again`: there was one before.
    ///
    /// # Errors
    /// EAGAIN, ENOMEM, EMFILE; or it ends at once.
    pub fn start(&self, again: bool) -> anyhow::Result<(Child, OwnedFd)> {
        fetcher_process::start(again, &self.files, None, &[])
    }

    /// Returns the presence map for streamers.
    #[must_use]
    pub fn presence(&self) -> BorrowedFd<'_> {
        self.read_only.as_fd()
    }

    /// Returns the checksum of where each file is in the presence map.
    #[must_use]
    pub fn layout(&self) -> u64 {
        self.layout
    }

    /// Returns whether all bytes have arrived.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.map.is_closed()
    }

    /// Returns the pages that have arrived.
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.map.arrived()
    }

    /// Returns the bytes that have not arrived, up to whole pages.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.len.saturating_sub(self.arrived() * PAGE as u64)
    }
}
