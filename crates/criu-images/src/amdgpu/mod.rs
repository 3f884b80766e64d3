// SPDX-License-Identifier: MIT OR Apache-2.0
//! The images of CRIU's amdgpu plugin: the GPU state of a process. This crate reads images of CRIU 4.2's
//! plugin and of the development branch.
//!
//! - [`KfdImage`]: `amdgpu-kfd-ID.img`, the KFD state of one process, with the layout of its
//!   `amdgpu-pages-ID-GPU.img`.
//! - [`RenderImage`]: `amdgpu-renderD-ID.img`, one open render node, with an
//!   `amdgpu-drm-pages-ID-MINOR-INDEX.img` for each buffer.
//! - [`DmabufImage`]: `amdgpu-dmabuf_ID.img`, one open dma-buf.
//! - `pages`: the contents of buffers.
//! - [`settings`]: the environment variables of that plugin, which Rewake's plugin has too.
//!
//! ID is the id of the open file in `files.img`.

pub(crate) mod contents;
mod dmabuf;
mod kfd;
mod pages;
pub(crate) mod record;
mod render;
pub mod settings;

pub use contents::CONTENTS_LIMIT;
pub use dmabuf::DmabufImage;
pub use kfd::{ContentsRange, KfdBuffer, KfdImage, Link, MAX_BUFFERS, MAX_NODES, NodeImage, Properties};
pub use render::{Mapping, RenderBuffer, RenderContents, RenderImage};

#[cfg(feature = "testing")]
pub(crate) use {dmabuf::parse as parse_dmabuf, kfd::parse as parse_kfd, render::parse as parse_render};

use std::fs::DirEntry;
use std::io;
use std::path::Path;

use contents::contents;

use crate::dir::ImageDir;
use crate::error::Result;

/// Returns the name of the image of the open file `id` of `/dev/kfd`.
#[must_use]
pub fn kfd_name(id: u32) -> String {
    format!("amdgpu-kfd-{id}.img")
}

/// Returns the name of the image of the open file `id` of a render node.
#[must_use]
pub fn render_name(id: u32) -> String {
    format!("amdgpu-renderD-{id}.img")
}

/// Returns the name of the file with the contents of one GPU's buffers.
#[must_use]
pub fn pages_name(id: u32, gpu_id: u32) -> String {
    format!("amdgpu-pages-{id}-{gpu_id:04x}.img")
}

/// Returns the name of the image of the open dma-buf `id`.
#[must_use]
pub fn dmabuf_name(id: u32) -> String {
    format!("amdgpu-dmabuf_{id}.img")
}

/// Returns the name of the file with the contents of buffer `index` of the open file `id` of
/// `/dev/dri/renderD<minor>`.
#[must_use]
pub fn drm_pages_name(id: u32, minor: u32, index: usize) -> String {
    format!("amdgpu-drm-pages-{id}-{minor}-{index:04x}.img")
}

/// An image of an open file, by its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuFile {
    /// [`ImageDir::kfd`]
    Kfd(u32),
    /// [`ImageDir::render_node`]
    Render(u32),
    /// [`ImageDir::dmabuf`]
    Dmabuf(u32),
}

impl GpuFile {
    /// Returns the kind of a file of an image directory by its name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        let id: u32 = name.strip_suffix(".img")?.rsplit(['-', '_']).next()?.parse().ok()?;
        let named = [
            (Self::Kfd(id), kfd_name(id)),
            (Self::Render(id), render_name(id)),
            (Self::Dmabuf(id), dmabuf_name(id)),
        ];
        named.into_iter().find_map(|(file, known)| (known == name).then_some(file))
    }
}

/// Returns the images of open files in an image directory.
///
/// # Errors
/// The directory cannot be read.
pub fn gpu_files(images: &Path) -> io::Result<Vec<GpuFile>> {
    let of = |entry: io::Result<DirEntry>| Ok(entry?.file_name().to_str().and_then(GpuFile::of_name));
    images.read_dir()?.filter_map(|entry| of(entry).transpose()).collect()
}

/// Returns whether an image holds the state of a GPU.
///
/// # Errors
/// The directory cannot be read.
pub fn image_has_gpu(images: &Path) -> io::Result<bool> {
    Ok(!gpu_files(images)?.is_empty())
}

impl ImageDir {
    /// Reads the KFD state of the process with the open file `id` of `/dev/kfd`; `None` without such an
    /// image.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn kfd(&self, id: u32) -> Result<Option<KfdImage>> {
        let Some((path, file, len)) = self.file(&kfd_name(id))? else { return Ok(None) };
        kfd::parse(&path, &contents(&path, file, len)?).map(Some)
    }

    /// Reads the open file `id` of a render node; `None` without such an image.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn render_node(&self, id: u32) -> Result<Option<RenderImage>> {
        let Some((path, file, len)) = self.file(&render_name(id))? else { return Ok(None) };
        render::parse(&path, &contents(&path, file, len)?).map(Some)
    }

    /// Reads the open dma-buf `id`; `None` without such an image.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn dmabuf(&self, id: u32) -> Result<Option<DmabufImage>> {
        let Some((path, file, len)) = self.file(&dmabuf_name(id))? else { return Ok(None) };
        dmabuf::parse(&path, &contents(&path, file, len)?).map(Some)
    }
}
