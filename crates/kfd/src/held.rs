// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that register memory wait until it is there, whoever makes them: the driver itself does not wait for a userfaultfd.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use rewake_hold::{Call, Hold};

use crate::abi::registering;
use crate::topology::Topology;

/// Major number of every DRM device.
const DRM: u32 = 226;

/// Why such calls are not held.
#[derive(Debug, thiserror::Error)]
pub enum NotHeld {
    /// The GPUs of this machine are not known.
    #[error(transparent)]
    Machine(#[from] crate::Error),
    /// `/dev/kfd`.
    #[error("look at /dev/kfd")]
    Device(#[source] std::io::Error),
    /// The kernel does not.
    #[error(transparent)]
    Kernel(#[from] rewake_hold::Error),
}

/// Holds them on all of this machine's GPUs, from now on and as long as what this gives is open.
///
/// # Errors
/// The driver is not there, or the kernel cannot hold calls: see [`Hold`].
pub fn registering() -> Result<Hold, NotHeld> {
    Ok(Hold::new(&calls()?)?)
}

fn calls() -> Result<[Call; 3], NotHeld> {
    let mut render = Vec::new();
    for gpu in Topology::read()?.gpus() {
        // By number: not every node is to be seen in each container.
        render.push(libc::makedev(DRM, gpu.render_minor()));
    }
    let kfd = fs::metadata("/dev/kfd").map_err(NotHeld::Device)?;
    Ok(registering::calls(kfd.rdev(), &render))
}
