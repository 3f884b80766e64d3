// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake-shared.img`: what processes of a tree have in common on their GPUs. Framed as CRIU's amdgpu images are.

use std::collections::BTreeSet;
use std::path::Path;

use prost::Message;

use crate::amdgpu::MAX_BUFFERS;
use crate::amdgpu::contents::file_of;
use crate::amdgpu::record::{Contents, record};
use crate::error::Result;
use crate::generated::gpu as raw;
use crate::rewake::bare::{self, BareMappings};
use crate::rewake::render::{self, RenderFile};

/// The file's name.
pub const SHARED_NAME: &str = "rewake-shared.img";
/// The most users of buffers, and the most second files, that the image may have.
pub const MAX_SHARED: usize = MAX_BUFFERS;

/// What processes of a tree have in common on their GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SharedImage {
    /// Buffers of several processes, and those with an open dma-buf.
    pub buffers: Vec<SharedBuffer>,
    /// Files of `/dev/kfd` that have no image of their own.
    pub second_files: Vec<SecondFile>,
    /// Render nodes of which there is more to say than [`crate::amdgpu::RenderImage`] can.
    pub render_files: Vec<RenderFile>,
    /// What of processes' mappings showed no buffer. A process that is not among them: it is not known.
    pub bare: Vec<BareMappings>,
}

/// One buffer that several processes have, or one with an open dma-buf.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SharedBuffer {
    /// Who has it, at least one; nobody has it twice. The first one makes it anew, the others import it.
    pub users: Vec<BufferUser>,
    /// Id of its open dma-buf, which [`crate::amdgpu::dmabuf_name`] names the image of.
    pub dmabuf: Option<u32>,
}

record! {
    /// A buffer of one process.
    #[derive(PartialOrd, Ord)]
    BufferUser = raw::BufferUser {
        /// Id of the process's `/dev/kfd`, which [`crate::amdgpu::kfd_name`] names the image of.
        kfd: u32,
        /// Index in [`crate::amdgpu::KfdImage::buffers`].
        buffer: u32,
    }
}

record! {
    /// A `/dev/kfd` of a process that has another one open: both are one compute state.
    SecondFile = raw::SecondFile {
        /// Id of the open file.
        id: u32,
        /// Id of the other one, which has the image.
        kfd: u32,
    }
}

impl SharedImage {
    /// Whether it says nothing: then it need not be there.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
            && self.second_files.is_empty()
            && self.render_files.is_empty()
            && self.bare.is_empty()
    }

    /// The whole file.
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
            bare: self.bare.iter().map(BareMappings::encode).collect(),
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
        bare: bare::parse_all(contents, &raw.bare)?,
    })
}

/// `all`: the users of the buffers before it, none of which may be named again.
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
        return Err(contents.damaged("a shared buffer that somebody has", "one without users"));
    }
    Ok(SharedBuffer { users, dmabuf: raw.dmabuf })
}
