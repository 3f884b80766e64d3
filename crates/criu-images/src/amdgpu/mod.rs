// SPDX-License-Identifier: MIT OR Apache-2.0
//! The images of CRIU's amdgpu plugin: what a process has on its GPUs. What the plugin of CRIU 4.2 writes and what the
//! one of the development branch writes are both read.
//!
//! * [`KfdImage`]: `amdgpu-kfd-ID.img`, the compute driver's state of one process, with the layout of the
//!   `amdgpu-pages-ID-GPU.img` beside it.
//! * [`RenderImage`]: `amdgpu-renderD-ID.img`, one open render node.
//!
//! ID is the id of the open file in `files.img`.

mod contents;
mod kfd;
mod record;
mod render;

pub use contents::CONTENTS_LIMIT;
pub use kfd::{KfdBuffer, KfdImage, Link, MAX_BUFFERS, MAX_NODES, Node, Properties, Stretch};
pub use render::{Mapping, RenderBuffer, RenderContents, RenderImage};

pub(crate) use contents::contents;
pub(crate) use kfd::parse as parse_kfd;
pub(crate) use render::parse as parse_render;

use crate::dir::ImageDir;
use crate::error::Result;

/// The name of the image of the open file `id` of `/dev/kfd`.
#[must_use]
pub fn kfd_name(id: u32) -> String {
    format!("amdgpu-kfd-{id}.img")
}

/// The name of the image of the open file `id` of a render node.
#[must_use]
pub fn render_name(id: u32) -> String {
    format!("amdgpu-renderD-{id}.img")
}

/// The name of the file with the contents of one GPU's buffers.
#[must_use]
pub fn pages_name(id: u32, gpu_id: u32) -> String {
    format!("amdgpu-pages-{id}-{gpu_id:04x}.img")
}

impl ImageDir {
    /// What the process that has the open file `id` of `/dev/kfd` has on its GPUs; `None` where there is no such image.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn kfd(&self, id: u32) -> Result<Option<KfdImage>> {
        let Some((path, file, len)) = self.file(&kfd_name(id))? else { return Ok(None) };
        kfd::parse(&path, &contents(&path, file, len)?).map(Some)
    }

    /// The open file `id` of a render node; `None` where there is no such image.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn render_node(&self, id: u32) -> Result<Option<RenderImage>> {
        let Some((path, file, len)) = self.file(&render_name(id))? else { return Ok(None) };
        render::parse(&path, &contents(&path, file, len)?).map(Some)
    }
}
