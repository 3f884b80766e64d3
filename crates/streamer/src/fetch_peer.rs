// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where memory of a restore is, if it is not in the image.

use std::os::fd::OwnedFd;

use rewake_fetcher::plan::{PagePeer, PeerTls};

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
    pub name: String,
    /// Its id, in full.
    pub id: String,
}
