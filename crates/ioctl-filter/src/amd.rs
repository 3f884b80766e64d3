// SPDX-License-Identifier: MIT OR Apache-2.0
//! The filter for KFD and render nodes.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use rewake_amdgpu_uapi::topology::Topology;

use crate::{Attached, BlockList, Error, attach_rules, deny_rules, wait_rules};

/// Major number of every DRM device.
const DRM: u32 = 226;

/// The filter could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The GPUs of this machine are not known.
    #[error(transparent)]
    Machine(#[from] rewake_amdgpu_uapi::Error),
    /// `/dev/kfd` cannot be examined.
    #[error("look at /dev/kfd")]
    Device(#[source] std::io::Error),
    /// The kernel refuses.
    #[error(transparent)]
    Kernel(#[from] Error),
}

/// Makes calls that register memory wait, on all of this machine's GPUs, until the [`Attached`] is dropped.
/// Until then the [`BlockList`] can block other calls.
///
/// An entry for `/dev/kfd` covers a process. Its part is a GPU, by the id that the process uses, or 0 for the
/// whole process. An entry for [`crate::ACCESS`] covers an open file of a render node, and its mappings. A caller
/// that blocks a GPU also blocks [`crate::CREATE_PROCESS`] in part 0.
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
    Ok(attach_rules(&wait_rules::calls(kfd, &render), &deny_rules::calls(kfd), deny_rules::ACCESS)?)
}
