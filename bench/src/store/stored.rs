// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image in a store behind a link.

use std::path::Path;

use anyhow::Context as _;
use rewake_testkit::seaweedfs::SeaweedServer;

use super::{Options, ROUND_TRIP, push};
use crate::agent::Agent;
use crate::harness::Tools;
use crate::link::Link;

/// A store with one image, and the link to it. The image has a second name when it has a working set.
#[derive(Debug)]
pub(super) struct Stored {
    server: SeaweedServer,
    pub(super) link: Link,
}

impl Stored {
    /// Starts a store and pushes a sealed image.
    pub(super) fn new(options: &Options, image: &Path) -> anyhow::Result<Self> {
        let server = SeaweedServer::start(&options.weed).context("SeaweedFS")?;
        let link = Link::to(server.port(), ROUND_TRIP)?;
        let stored = Self { server, link };
        push(&options.tools, image, Self::URL, &stored.variables_without_link())?;
        Ok(stored)
    }

    /// The image.
    pub(super) const URL: &str = "s3://bucket/image";
    /// The image with its working set.
    pub(super) const RECORDED_URL: &str = "s3://bucket/recorded";

    /// Variables for a client that needs no link.
    pub(super) fn variables_without_link(&self) -> [(String, String); 3] {
        SeaweedServer::environment(self.server.port())
    }

    /// Variables for a client behind the link.
    pub(super) fn variables(&self) -> [(String, String); 3] {
        SeaweedServer::environment(self.link.port())
    }

    /// Starts an agent with an empty cache.
    pub(super) fn agent(&self, tools: &Tools, work: &Path) -> anyhow::Result<Agent> {
        let cache = work.join("cache");
        Agent::start(&tools.rewake, work, &[Path::new("--cache"), &cache], &self.variables())
    }
}
