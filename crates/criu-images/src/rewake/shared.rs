// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake-shared.img`: the GPU objects that processes of a tree share. It is framed as CRIU's amdgpu images
//! are.

use std::collections::BTreeSet;
use std::path::Path;

use prost::Message;

use crate::amdgpu::contents::file_of;
use crate::amdgpu::record::{Contents, record};
use crate::error::Result;
use crate::generated::gpu as raw;
use crate::rewake::buffer_user::{BufferUser, MAX_SHARED};
use crate::rewake::freed_mappings::{self, FreedMappings};
use crate::rewake::render::{self, RenderFile};

/// The file's name.
pub const SHARED_NAME: &str = "rewake-shared.img";
/// The GPU objects that processes of a tree share.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SharedImage {
    /// Buffers of several processes, and buffers with an open dma-buf.
    pub buffers: Vec<SharedBuffer>,
    /// Open files of `/dev/kfd` without an image of their own.
    pub second_files: Vec<SecondFile>,
    /// Render nodes with more data than [`crate::amdgpu::RenderImage`] can have.
    pub render_files: Vec<RenderFile>,
    /// Mappings without a buffer, by process. For a process that is not listed they are not known.
    pub freed_mappings: Vec<FreedMappings>,
}

/// A buffer that several processes have, or that has an open dma-buf.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SharedBuffer {
    /// Its users, at least one, each once. The first one makes it again; the others import it.
    pub users: Vec<BufferUser>,
    /// Id of its open dma-buf: [`crate::amdgpu::dmabuf_name`] gives the name of its image.
    pub dmabuf: Option<u32>,
}

record! {
    /// An open `/dev/kfd` of a process that has another one open: both have one compute state.
    SecondFile = raw::SecondFile {
        /// Id of the open file.
        id: u32,
        /// Id of the other file, which has the image.
        kfd: u32,
    }
}

impl SharedImage {
    /// Whether it has no data: then the file is not needed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
            && self.second_files.is_empty()
            && self.render_files.is_empty()
            && self.freed_mappings.is_empty()
    }

    /// Encodes the whole file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let buffer = |buffer: &SharedBuffer| {
            let users = buffer.users.iter().map(|user| user.to_raw().encode_to_vec()).collect();
            raw::SharedBuffer { users, dmabuf: buffer.dmabuf }.encode_to_vec()
        };
        let image = raw::SharedImage {
            buffers: self.buffers.iter().map(buffer).collect(),
            second_files: self.second_files.iter().map(|file| file.to_raw().encode_to_vec()).collect(),
            render_files: self.render_files.iter().map(RenderFile::encode).collect(),
            bare: self.freed_mappings.iter().map(FreedMappings::encode).collect(),
        };
        file_of(&image.encode_to_vec())
    }
}

pub(crate) fn parse(file: &Path, bytes: &[u8]) -> Result<SharedImage> {
    let contents = Contents(file);
    let raw: raw::SharedImage = contents.decode("what processes share", bytes)?;
    contents.limit("shared buffers", raw.buffers.len(), ("MAX_SHARED", MAX_SHARED))?;
    contents.limit("second files", raw.second_files.len(), ("MAX_SHARED", MAX_SHARED))?;
    let second_file = |bytes: &Vec<u8>| {
        let raw: raw::SecondFile = contents.decode("a second file", bytes)?;
        contents.whole("a second file", SecondFile::from_raw(&raw))
    };
    let mut users = BTreeSet::new();
    Ok(SharedImage {
        buffers: raw
            .buffers
            .iter()
            .map(|bytes| buffer(contents, bytes, &mut users))
            .collect::<Result<_>>()?,
        second_files: raw.second_files.iter().map(second_file).collect::<Result<_>>()?,
        render_files: render::parse_all(contents, &raw.render_files)?,
        freed_mappings: freed_mappings::parse_all(contents, &raw.bare)?,
    })
}

/// Parses one buffer. `all` has the users of the buffers before it, none of which may be named again.
fn buffer(contents: Contents<'_>, bytes: &[u8], all: &mut BTreeSet<BufferUser>) -> Result<SharedBuffer> {
    let raw: raw::SharedBuffer = contents.decode("a shared buffer", bytes)?;
    let mut users = Vec::new();
    for bytes in &raw.users {
        let raw: raw::BufferUser = contents.decode("a buffer's user", bytes)?;
        let user = contents.whole("a buffer's user", BufferUser::from_raw(&raw))?;
        if !all.insert(user) {
            let found = format!("buffer {} of /dev/kfd {} twice", user.buffer, user.kfd);
            return Err(contents.damaged("each buffer of a process once", found));
        }
        contents.limit("users of buffers", all.len(), ("MAX_SHARED", MAX_SHARED))?;
        users.push(user);
    }
    if users.is_empty() {
        return Err(contents.damaged("a shared buffer with users", "one without users"));
    }
    Ok(SharedBuffer { users, dmabuf: raw.dmabuf })
}
