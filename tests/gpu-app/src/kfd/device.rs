// SPDX-License-Identifier: MIT OR Apache-2.0
//! A GPU with this process's address space on it.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use rewake_amdgpu_uapi::abi::{call, *};
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::Node;
use rewake_amdgpu_uapi::{Error, FailedCall, Kfd};

/// A GPU with this process's address space on it.
#[derive(Debug)]
pub struct Device {
    kfd: Arc<Kfd>,
    render: Render,
    node: Node,
}

impl Device {
    /// Opens the node's render node, and makes its address space the one for compute.
    ///
    /// # Errors
    /// The render node cannot be opened, or ACQUIRE_VM failed: EBUSY if the process has an address space
    /// there.
    pub fn open(kfd: &Arc<Kfd>, node: &Node) -> Result<Arc<Self>, Error> {
        Self::with(kfd, Render::open(node.render_minor())?, node)
    }

    /// Makes the address space of `render` the one for compute. After a restore, it already is.
    ///
    /// # Errors
    /// ACQUIRE_VM failed: EBUSY if the process has another address space there.
    pub fn with(kfd: &Arc<Kfd>, render: Render, node: &Node) -> Result<Arc<Self>, Error> {
        let mut argument =
            kfd_ioctl_acquire_vm_args { drm_fd: call::number(render.as_fd()), gpu_id: node.gpu_id };
        call::acquire_vm(kfd.as_fd(), &mut argument)
            .map_err(FailedCall::named("ACQUIRE_VM").on(node.gpu_id).failed())?;
        Ok(Arc::new(Self { kfd: Arc::clone(kfd), render, node: node.clone() }))
    }

    /// Returns the process's compute state.
    #[must_use]
    pub fn kfd(&self) -> &Arc<Kfd> {
        &self.kfd
    }

    /// Returns the render node of the address space.
    #[must_use]
    pub fn render(&self) -> &Render {
        &self.render
    }

    /// Returns the GPU's node in the topology.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Returns the GPU's id in the driver.
    #[must_use]
    pub fn gpu_id(&self) -> u32 {
        self.node.gpu_id
    }

    /// Returns the bytes of VRAM that can be allocated.
    ///
    /// # Errors
    /// AVAILABLE_MEMORY failed.
    pub fn available(&self) -> Result<u64, Error> {
        let mut argument =
            kfd_ioctl_get_available_memory_args { available: 0, gpu_id: self.gpu_id(), pad: 0 };
        let act = FailedCall::named("AVAILABLE_MEMORY").on(self.gpu_id());
        call::available_memory(self.kfd.as_fd(), &mut argument).map_err(act.failed())?;
        Ok(argument.available)
    }
}

/// Returns whether GPU page faults are retried in this process (XNACK).
///
/// # Errors
/// SET_XNACK_MODE failed; EPERM where the kernel has no SVM.
pub fn xnack(kfd: &Kfd) -> Result<bool, Error> {
    let mut argument = kfd_ioctl_set_xnack_mode_args { xnack_enabled: -1 };
    call::set_xnack_mode(kfd.as_fd(), &mut argument).map_err(FailedCall::named("SET_XNACK_MODE").failed())?;
    Ok(argument.xnack_enabled == 1)
}

/// Turns retries of GPU page faults on or off. This must precede the first queue.
///
/// # Errors
/// SET_XNACK_MODE failed: EPERM if a GPU cannot, EBUSY with queues.
pub fn set_xnack(kfd: &Kfd, on: bool) -> Result<(), Error> {
    let mut argument = kfd_ioctl_set_xnack_mode_args { xnack_enabled: i32::from(on) };
    call::set_xnack_mode(kfd.as_fd(), &mut argument).map_err(FailedCall::named("SET_XNACK_MODE").failed())
}
