// SPDX-License-Identifier: MIT OR Apache-2.0
//! The filter for KFD and render nodes.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use rewake_amdgpu_uapi::topology::Topology;

use crate::{Attached, BlockList, Error, Loaded, Rules, abi, deny_rules, wait_rules};

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
/// whole process. An entry for [`crate::ACCESS`] covers an open file of a render node, and its mappings. A
/// caller that blocks a GPU also blocks [`crate::CREATE_PROCESS`] in part 0.
///
/// # Errors
/// The driver does not exist, or the kernel cannot filter calls.
pub fn attach() -> Result<(Attached, BlockList), AttachError> {
    Ok(Loaded::new(&rules()?)?.attach()?)
}

/// Checks whether [`attach`] would succeed, without a change of this machine: it loads the programs, which
/// the kernel verifies, and reads the kernel's list of active security modules. It cannot see whether the
/// kernel has room for one more program at these hooks.
///
/// # Errors
/// As [`attach`].
pub fn check() -> Result<(), AttachError> {
    Loaded::new(&rules()?)?;
    if abi::runs_lsm_programs().map_err(Error::NoModules)? { Ok(()) } else { Err(Error::NotRun.into()) }
}

fn rules() -> Result<Rules, AttachError> {
    // The nodes are named by number, because a container may not show all of them.
    let render: Vec<_> = Topology::read()?.gpus().map(|gpu| libc::makedev(DRM, gpu.render_minor())).collect();
    let kfd = fs::metadata("/dev/kfd").map_err(AttachError::Device)?.rdev();
    let (wait, deny) = (wait_rules::calls(kfd, &render), deny_rules::calls(kfd));
    Ok(Rules { wait, deny, access: deny_rules::ACCESS })
}
