// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where BOs are that the CPU copies: on a GPU, behind its render node, or in this process's own memory.

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

/// Memory of this process that stands in for GPUs where there are none: in tests, and where the way to a GPU is measured.
/// Its BOs are memfds, and a thread copies. All of it is mapped and in memory from the start, as a GPU's own is.
#[derive(Debug)]
pub struct MemoryDevice {
    /// A BO's handle is its place here, and one.
    views: Vec<Arc<Mapping>>,
    /// By device and inode.
    handles: HashMap<(u64, u64), u32>,
}

impl MemoryDevice {
    /// With these memfds, of at least one byte each, as its BOs.
    ///
    /// # Errors
    /// One cannot be mapped, or there is not memory enough.
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
        handle.copied().ok_or_else(|| io::Error::other("none of the memfds that the device was made of"))
    }
}

/// Either of the two.
#[derive(Debug)]
pub(crate) enum Device {
    Node(Render),
    /// In the place of a render node of that number.
    Memory(u32, Arc<MemoryDevice>),
}

impl Device {
    pub(crate) fn minor(&self) -> u32 {
        match self {
            Self::Node(render) => render.minor(),
            Self::Memory(minor, _) => *minor,
        }
    }

    /// The handle of a BO, the same one however often it is asked for.
    pub(crate) fn import(&self, dmabuf: BorrowedFd<'_>) -> Result<u32, Error> {
        match self {
            Self::Node(render) => import(render, dmabuf),
            Self::Memory(minor, memory) => {
                let failed = |source| Error::Drm { minor: *minor, call: "import of a memfd", source };
                memory.handle(dmabuf).map_err(failed)
            }
        }
    }

    /// The CPU's view of a BO (on a GPU's own memory: the PCI BAR).
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

/// The GEM handle of a BO.
pub(crate) fn import(render: &Render, dmabuf: BorrowedFd<'_>) -> Result<u32, Error> {
    let failed = |source| Error::Drm { minor: render.minor(), call: "PRIME_FD_TO_HANDLE", source };
    render.prime_fd_to_buffer(dmabuf).map(Into::into).map_err(failed)
}
