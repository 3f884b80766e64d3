// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the driver says of its CPUs and GPUs, under `/sys/class/kfd/kfd/topology`.
//!
//! Files are read with bounds: whatever lies there, the answer is a [`Topology`] or an [`Error::Topology`].

mod node;
mod sysfs;

use std::io;
use std::path::Path;

pub use node::{Bank, Cache, GfxVersion, Link, Node, SaveArea};

use crate::Error;

/// Where the driver shows its topology.
pub const SYSFS: &str = "/sys/class/kfd/kfd/topology";
/// Nodes that are looked for; the driver numbers them without gaps and knows 64 GPUs at most.
const NODES: u32 = 256;
/// How often a topology that changes while it is read is read again.
const ATTEMPTS: u32 = 5;

/// CPUs and GPUs as of one generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Counts changes.
    pub generation: u64,
    /// By number; those that the device cgroup hides from this process are left out.
    pub nodes: Vec<Node>,
}

impl Topology {
    /// This machine's.
    ///
    /// # Errors
    /// No driver, or files that make no sense.
    pub fn read() -> Result<Self, Error> {
        Self::read_from(Path::new(SYSFS))
    }

    /// The topology shown in the folder `root`.
    ///
    /// # Errors
    /// It cannot be read, makes no sense, or changes every time.
    pub fn read_from(root: &Path) -> Result<Self, Error> {
        let generation_file = root.join("generation_id");
        for _ in 0..ATTEMPTS {
            let generation = sysfs::number(&generation_file)?;
            let nodes = nodes(&root.join("nodes"))?;
            if sysfs::number(&generation_file)? == generation {
                return Ok(Self { generation, nodes });
            }
        }
        let reason = format!("changed {ATTEMPTS} times while it was read: try again");
        Err(Error::Topology { path: generation_file, reason })
    }

    /// Nodes that are GPUs, in order.
    pub fn gpus(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.is_gpu())
    }
}

fn nodes(folder: &Path) -> Result<Vec<Node>, Error> {
    let mut nodes = Vec::new();
    for number in 0..NODES {
        let path = folder.join(number.to_string());
        match path.symlink_metadata() {
            Ok(_) => nodes.extend(Node::read(number, &path)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(nodes),
            Err(error) => return Err(Error::Topology { path, reason: error.to_string() }),
        }
    }
    let reason = format!("more than {NODES} nodes");
    Err(Error::Topology { path: folder.to_owned(), reason })
}
