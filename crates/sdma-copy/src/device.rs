// SPDX-License-Identifier: MIT OR Apache-2.0
//! The devices whose BOs the CPU copies: a GPU's render node, or memory of this process.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use drm::control::Device as _;
use nix::sys::stat::fstat;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::render::Render;

use crate::Error;
use crate::rings::close_handle;

/// Memory of this process in the place of GPUs, for tests and for measurements without a GPU. Its BOs are
/// memfds, and a thread copies. All of it is mapped and populated from the start, like GPU memory.
#[derive(Debug)]
pub struct MemoryDevice {
    /// Mappings of the BOs. A handle is the index plus one.
    views: Vec<Arc<Mapping>>,
    /// Handles by device and inode.
    handles: HashMap<(u64, u64), u32>,
}

impl MemoryDevice {
    /// Maps these memfds, of at least one byte each, as BOs.
    ///
    /// # Errors
    /// A memfd cannot be mapped, or memory is exhausted.
    pub fn new<'a>(memfds: impl IntoIterator<Item = BorrowedFd<'a>>) -> io::Result<Arc<Self>> {
        let (mut views, mut handles) = (Vec::new(), HashMap::new());
        for memfd in memfds {
            let file = fstat(memfd)?;
            let view = Mapping::shared(memfd, 0, file.st_size.cast_unsigned())?;
            view.populate()?;
            views.push(Arc::new(view));
            handles.insert((file.st_dev, file.st_ino), u32::try_from(views.len()).unwrap_or(u32::MAX));
        }
        Ok(Arc::new(Self { views, handles }))
    }

    fn handle(&self, memfd: BorrowedFd<'_>) -> io::Result<u32> {
        let file = fstat(memfd)?;
        let handle = self.handles.get(&(file.st_dev, file.st_ino));
        handle.copied().ok_or_else(|| io::Error::other("not one of the device's memfds"))
    }
}

/// A GPU or memory in its place.
#[derive(Debug)]
pub(crate) enum CopyDevice {
    Node(Render),
    /// Memory in the place of the render node with this number.
    Memory(u32, Arc<MemoryDevice>),
}

impl CopyDevice {
    pub(crate) fn minor(&self) -> u32 {
        match self {
            Self::Node(render) => render.minor(),
            Self::Memory(minor, _) => *minor,
        }
    }

    /// Returns the handle of a BO: the same one for each import.
    pub(crate) fn import(&self, dmabuf: BorrowedFd<'_>) -> Result<u32, Error> {
        match self {
            Self::Node(render) => import(render, dmabuf),
            Self::Memory(minor, memory) => {
                let failed = |source| Error::Drm { minor: *minor, call: "import of a memfd", source };
                memory.handle(dmabuf).map_err(failed)
            }
        }
    }

    /// Returns the CPU mapping of a BO. For GPU memory, this is the PCI BAR.
    pub(crate) fn view(&self, handle: u32, bytes: u64) -> Result<Arc<Mapping>, Error> {
        match self {
            Self::Node(render) => {
                let unreachable = |source| Error::Unreachable { minor: render.minor(), bytes, source };
                render.map(handle, bytes).map(Arc::new).map_err(unreachable)
            }
            Self::Memory(minor, memory) => {
                let view = memory.views.get((handle as usize).wrapping_sub(1));
                view.cloned().ok_or(Error::Bo { minor: *minor })
            }
        }
    }

    pub(crate) fn close(&self, handle: u32) -> Result<(), Error> {
        match self {
            Self::Node(render) => close_handle(render, handle),
            Self::Memory(..) => Ok(()),
        }
    }
}

/// Returns the GEM handle of a BO.
pub(crate) fn import(render: &Render, dmabuf: BorrowedFd<'_>) -> Result<u32, Error> {
    let failed = |source| Error::Drm { minor: render.minor(), call: "PRIME_FD_TO_HANDLE", source };
    render.prime_fd_to_buffer(dmabuf).map(Into::into).map_err(failed)
}
