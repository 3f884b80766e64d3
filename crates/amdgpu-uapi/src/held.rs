// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that register memory wait until it is there, whoever makes them: the driver itself does not wait for a userfaultfd. And calls of
//! some processes are kept away.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

pub use rewake_ioctl_filter::{Attached, BlockList, CallClass};

pub use crate::abi::kept::{ACCESS, CREATE_PROCESS, CREATE_QUEUE, CROSS_COPY, EXPORT, MAP, UPDATE_QUEUE};
use crate::abi::{kept, registering};
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
    Kernel(#[from] rewake_ioctl_filter::Error),
}

/// Has calls that register memory wait, on all of this machine's GPUs, from now on and as long as the [`Attached`] is open. So long other calls
/// are kept away as [`BlockList`] say: a mark is of a process by its `/dev/kfd`, and its part a GPU by the id that the process calls it by, or 0 for what is of all;
/// a mark of [`ACCESS`] is of an open file of a render node, and what it mapped.
/// Whoever marks a GPU keeps [`CREATE_PROCESS`] away with part 0.
///
/// # Errors
/// The driver is not there, or the kernel cannot hold calls: see [`Attached`].
pub fn attach() -> Result<(Attached, BlockList), NotHeld> {
    let mut render = Vec::new();
    for gpu in Topology::read()?.gpus() {
        // By number: not every node is to be seen in each container.
        render.push(libc::makedev(DRM, gpu.render_minor()));
    }
    let kfd = fs::metadata("/dev/kfd").map_err(NotHeld::Device)?.rdev();
    Ok(rewake_ioctl_filter::attach(&registering::calls(kfd, &render), &kept::calls(kfd), kept::ACCESS)?)
}
