// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where memory of a restore is, if it is not in the image.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use rewake_fetcher::plan::{PagePeer, PeerTls};

use crate::agent_fetch::{self, AgentFetch};
use crate::session::image::LazyMemory;

/// The host that has memory of a restore.
#[derive(Debug)]
pub struct FetchPeer {
    /// Where its server is.
    pub peer: PagePeer,
    /// How the connection is encrypted; none: it is not.
    pub tls: Option<PeerTls>,
    /// The connection, if the caller has made it.
    pub connected: Option<OwnedFd>,
    /// The image there, for an image server; none: it is a page server.
    pub image: Option<FetchedImage>,
}

/// An image of an image server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchedImage {
    /// Its name there.
    pub name: PathBuf,
    /// Its id, in full.
    pub id: String,
}

impl FetchPeer {
    /// Whether the session completes the copy of the image that it restores.
    pub(crate) fn has_own_copy(&self) -> bool {
        self.image.is_some() && !matches!(self.peer, PagePeer::Agent(_))
    }
}

/// Finds where the memory of an image is when a session begins. Returns what the agent has, too, if it has
/// the image.
///
/// # Errors
/// The agent does not run, or refuses.
pub(crate) async fn find_memory(
    server: Option<&FetchPeer>,
    work: &Path,
) -> anyhow::Result<(LazyMemory, Option<AgentFetch>)> {
    Ok(match server {
        None => (LazyMemory::Here, None),
        Some(FetchPeer { image: None, .. }) => (LazyMemory::OnPageServer(work.to_owned()), None),
        Some(FetchPeer { image: Some(image), peer: PagePeer::Agent(agent), .. }) => {
            match agent_fetch::ask(agent, &image.id).await? {
                AgentFetch::Complete => (LazyMemory::Here, None),
                AgentFetch::Partial { presence, socket, layout } => {
                    let map = Arc::new(presence.try_clone().context("the presence map")?);
                    (LazyMemory::InCache(map), Some(AgentFetch::Partial { presence, socket, layout }))
                }
            }
        }
        Some(FetchPeer { image: Some(_), .. }) => (LazyMemory::OnImageServer, None),
    })
}
