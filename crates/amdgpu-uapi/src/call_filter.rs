// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attaches the BPF filter for KFD and render-node calls. Calls that register missing memory wait, because
//! the driver itself does not wait for a userfaultfd. Calls of chosen processes are blocked.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

pub use rewake_ioctl_filter::{Attached, BlockList, CallClass};

pub use crate::abi::deny_rules::{ACCESS, CREATE_PROCESS, CROSS_COPY, EXPORT};
use crate::abi::{deny_rules, wait_rules};
use crate::topology::Topology;

/// Major number of every DRM device.
const DRM: u32 = 226;

/// The filter could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The GPUs of this machine are not known.
    #[error(transparent)]
    Machine(#[from] crate::Error),
    /// `/dev/kfd` cannot be examined.
    #[error("look at /dev/kfd")]
    Device(#[source] std::io::Error),
    /// The kernel refuses.
    #[error(transparent)]
    Kernel(#[from] rewake_ioctl_filter::Error),
}

/// Makes calls that register memory wait, on all of this machine's GPUs, until the [`Attached`] is dropped.
/// Until then the [`BlockList`] can block other calls.
///
/// An entry for `/dev/kfd` covers a process. Its part is a GPU, by the id that the process uses, or 0 for the
/// whole process. An entry for [`ACCESS`] covers an open file of a render node, and its mappings. A caller
/// that blocks a GPU also blocks [`CREATE_PROCESS`] in part 0.
///
/// # Errors
/// The driver does not exist, or the kernel cannot filter calls: see [`Attached`].
pub fn attach() -> Result<(Attached, BlockList), AttachError> {
    let mut render = Vec::new();
    for gpu in Topology::read()?.gpus() {
        // The nodes are named by number, because a container may not show all of them.
        render.push(libc::makedev(DRM, gpu.render_minor()));
    }
    let kfd = fs::metadata("/dev/kfd").map_err(AttachError::Device)?.rdev();
    Ok(rewake_ioctl_filter::attach(
        &wait_rules::calls(kfd, &render),
        &deny_rules::calls(kfd),
        deny_rules::ACCESS,
    )?)
}
