// SPDX-License-Identifier: MIT OR Apache-2.0
//! `amdgpu-renderD-ID.img`: one open render node.

use std::path::Path;

use prost::Message;

use super::contents::{HEADER, file_of};
use super::kfd::MAX_BUFFERS;
use super::record::{Contents, MissingField, record};
use crate::error::Result;
use crate::generated::amdgpu as raw;

/// An open render node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RenderImage {
    /// [`super::Properties::gpu_id`] of the GPU at the dump.
    pub gpu_id: u32,
    /// Its buffers; `None` in images of CRIU up to 4.2.1, which does not save them.
    pub contents: Option<RenderContents>,
}

/// The buffers of an open render node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RenderContents {
    /// Id of the open file.
    pub id: u32,
    /// N of `/dev/dri/renderDN`.
    pub minor: u32,
    /// Its buffers.
    pub buffers: Vec<RenderBuffer>,
}

/// A buffer object of a render node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RenderBuffer {
    /// Address of the last of `mappings`, at which CRIU searches for CPU mappings; 0 without mappings.
    pub address: u64,
    /// Size in bytes, at least 1.
    pub size: u64,
    /// Offset of its CPU mappings at the dump.
    pub offset: u64,
    /// `AMDGPU_GEM_CREATE_*`
    pub alloc_flags: u64,
    /// Alignment in bytes.
    pub alignment: u64,
    /// `AMDGPU_GEM_DOMAIN_*`
    pub preferred_domains: u32,
    /// Its GEM handle.
    pub handle: u32,
    /// Whether it was imported as a dma-buf.
    pub is_import: bool,
    /// Its mappings in the render node's address space.
    pub mappings: Vec<Mapping>,
}

record! {
    /// A mapping of a buffer in a render node's address space.
    Mapping = raw::Mapping {
        /// Address on the GPU.
        address: u64,
        /// Size in bytes.
        size: u64,
        /// Offset in the buffer.
        offset: u64,
        /// `AMDGPU_VM_PAGE_*`
        flags: u64,
    }
}

/// `AMDGPU_GEM_DOMAIN_GTT` and `_VRAM`.
const WITH_CONTENTS: u32 = 2 | 4;

impl RenderContents {
    /// Offset of a buffer's contents in its file, in bytes.
    pub const PAGES_OFFSET: u64 = HEADER;
}

impl RenderBuffer {
    /// Whether a restore reads the buffer's contents (`plugins/amdgpu/amdgpu_plugin_drm.c`:
    /// `restore_bo_contents_drm`).
    #[must_use]
    pub fn has_contents(&self) -> bool {
        self.preferred_domains & WITH_CONTENTS != 0 && !self.mappings.is_empty()
    }
}

impl RenderImage {
    /// Encodes the whole file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut image = raw::RenderImage { gpu_id: Some(self.gpu_id), ..raw::RenderImage::default() };
        if let Some(contents) = &self.contents {
            image.id = Some(contents.id);
            image.minor = Some(contents.minor);
            image.buffer_count = Some(contents.buffers.len() as u64);
            image.buffers = contents.buffers.iter().map(RenderBuffer::encode).collect();
        }
        file_of(&image.encode_to_vec())
    }
}

impl RenderBuffer {
    fn encode(&self) -> Vec<u8> {
        raw::RenderBuffer {
            address: Some(self.address),
            size: Some(self.size),
            offset: Some(self.offset),
            alloc_flags: Some(self.alloc_flags),
            alignment: Some(self.alignment),
            preferred_domains: Some(self.preferred_domains),
            handle: Some(self.handle),
            is_import: Some(self.is_import.into()),
            mapping_count: Some(u32::try_from(self.mappings.len()).unwrap_or(u32::MAX)),
            mappings: self.mappings.iter().map(|mapping| mapping.to_raw().encode_to_vec()).collect(),
        }
        .encode_to_vec()
    }
}

pub(crate) fn parse(file: &Path, bytes: &[u8]) -> Result<RenderImage> {
    let contents = Contents(file);
    let image: raw::RenderImage = contents.decode("an open render node", bytes)?;
    let need = |name, value: Option<u32>| contents.whole("a render node", value.ok_or(MissingField(name)));
    let gpu_id = need("gpu_id", image.gpu_id)?;
    if (image.id, image.minor, image.buffer_count, image.buffers.len()) == (None, None, None, 0) {
        return Ok(RenderImage { gpu_id, contents: None });
    }
    contents.count("buffers", image.buffer_count, image.buffers.len(), ("MAX_BUFFERS", MAX_BUFFERS))?;
    let node_contents = RenderContents {
        id: need("id", image.id)?,
        minor: need("drm_render_minor", image.minor)?,
        buffers: image.buffers.iter().map(|bytes| buffer(contents, bytes)).collect::<Result<_>>()?,
    };
    Ok(RenderImage { gpu_id, contents: Some(node_contents) })
}

fn buffer(contents: Contents<'_>, bytes: &[u8]) -> Result<RenderBuffer> {
    let raw: raw::RenderBuffer = contents.decode("a buffer of a render node", bytes)?;
    let claimed = raw.mapping_count.map(u64::from);
    contents.count("mappings", claimed, raw.mappings.len(), ("MAX_BUFFERS", MAX_BUFFERS))?;
    let mapping = |bytes: &Vec<u8>| {
        let raw: raw::Mapping = contents.decode("a mapping of a buffer", bytes)?;
        contents.whole("a mapping", Mapping::from_raw(&raw))
    };
    let mappings = raw.mappings.iter().map(mapping).collect::<Result<_>>()?;
    let whole = || {
        Ok(RenderBuffer {
            address: raw.address.ok_or(MissingField("addr"))?,
            size: raw.size.ok_or(MissingField("size"))?,
            offset: raw.offset.ok_or(MissingField("offset"))?,
            alloc_flags: raw.alloc_flags.ok_or(MissingField("alloc_flags"))?,
            alignment: raw.alignment.ok_or(MissingField("alignment"))?,
            preferred_domains: raw.preferred_domains.ok_or(MissingField("preferred_domains"))?,
            handle: raw.handle.ok_or(MissingField("handle"))?,
            is_import: raw.is_import.ok_or(MissingField("is_import"))? != 0,
            mappings,
        })
    };
    let buffer = contents.whole("a buffer", whole())?;
    if buffer.size == 0 {
        return Err(contents.damaged("a buffer of 1 byte or more", "one of 0"));
    }
    Ok(buffer)
}
