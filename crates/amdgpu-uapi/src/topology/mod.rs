// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the driver's CPUs and GPUs from `/sys/class/kfd/kfd/topology`.
//!
//! Files are read with bounds: any content gives a [`Topology`] or an [`Error::Topology`].

mod node;
mod sysfs;

use std::io;
use std::path::Path;

pub use node::{Bank, Cache, GfxVersion, Link, Node, SaveArea};

use crate::Error;

/// The folder of the driver's topology.
pub const SYSFS: &str = "/sys/class/kfd/kfd/topology";
/// The most nodes. The driver numbers them without gaps, and supports 64 GPUs.
const NODES: u32 = 256;
/// The most reads of a topology that changes meanwhile.
const ATTEMPTS: u32 = 5;

/// The CPUs and GPUs of one generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// The generation, which counts changes.
    pub generation: u64,
    /// The nodes by number. Those that the device cgroup hides from this process are missing.
    pub nodes: Vec<Node>,
}

impl Topology {
    /// Reads this machine's topology.
    ///
    /// # Errors
    /// The driver does not exist, or its files are not valid.
    pub fn read() -> Result<Self, Error> {
        Self::read_from(Path::new(SYSFS))
    }

    /// Reads a topology from the folder `root`.
    ///
    /// # Errors
    /// It cannot be read, is not valid, or changes during every read.
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

    /// Returns the nodes that are GPUs, in order.
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
