// SPDX-License-Identifier: MIT OR Apache-2.0
//! `amdgpu-dmabuf_ID.img`: one open dma-buf. CRIU after 4.2.1 writes it
//! (`plugins/amdgpu/amdgpu_plugin_dmabuf.c`).

use std::path::Path;

use prost::Message;

use super::contents::file_of;
use super::record::{Contents, record};
use crate::error::Result;
use crate::generated::amdgpu as raw;

record! {
    /// An open dma-buf: a buffer that its process shares with other processes.
    DmabufImage = raw::DmabufImage {
        /// [`super::RenderBuffer::handle`] of the buffer.
        handle: u32,
    }
}

impl DmabufImage {
    /// Encodes the whole file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        file_of(&self.to_raw().encode_to_vec())
    }
}

pub(crate) fn parse(file: &Path, bytes: &[u8]) -> Result<DmabufImage> {
    let contents = Contents(file);
    let raw: raw::DmabufImage = contents.decode("an open dma-buf", bytes)?;
    contents.whole("a dma-buf", DmabufImage::from_raw(&raw))
}
