// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data of an open render node that its `amdgpu-renderD-ID.img` does not have.

use std::collections::BTreeSet;

use prost::Message;

use super::buffer_user::{BufferUser, MAX_SHARED};
use super::render_state::{self, RenderState};
use crate::amdgpu::record::{Contents, MissingField};
use crate::error::Result;
use crate::generated::gpu as raw;

/// An open render node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RenderFile {
    /// Id of the open file: [`crate::amdgpu::render_name`] gives the name of its image.
    pub id: u32,
    /// Id of the `/dev/kfd` of the process whose compute address space on that GPU is this file's. `None`: of
    /// no process.
    pub kfd: Option<u32>,
    /// Ids of its submission contexts, ascending.
    pub contexts: Vec<u32>,
    /// Its buffers that another owner makes again, each once.
    pub imports: Vec<RenderImport>,
    /// Its other state. `None`: the image is of an earlier version, whose dumps did not look for it.
    pub state: Option<RenderState>,
}

/// A buffer of a render node that another owner makes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RenderImport {
    /// Index in [`crate::amdgpu::RenderContents::buffers`].
    pub buffer: u32,
    /// The owner that makes it.
    pub owner: BufferOwner,
}

/// The owner that makes a buffer again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferOwner {
    /// A process, as compute memory.
    Kfd(BufferUser),
    /// Another render node.
    Render {
        /// Id of the open file.
        id: u32,
        /// Index in that file's [`crate::amdgpu::RenderContents::buffers`].
        buffer: u32,
    },
}

impl RenderFile {
    pub(super) fn encode(&self) -> Vec<u8> {
        let import = |import: &RenderImport| {
            let (kfd, render, their_buffer) = match import.owner {
                BufferOwner::Kfd(user) => (Some(user.kfd), None, user.buffer),
                BufferOwner::Render { id, buffer } => (None, Some(id), buffer),
            };
            let raw =
                raw::RenderImport { buffer: Some(import.buffer), kfd, render, there: Some(their_buffer) };
            raw.encode_to_vec()
        };
        raw::RenderFile {
            id: Some(self.id),
            kfd: self.kfd,
            contexts: self.contexts.clone(),
            imports: self.imports.iter().map(import).collect(),
            state: self.state.as_ref().map(RenderState::encode),
        }
        .encode_to_vec()
    }
}

pub(super) fn parse_all(contents: Contents<'_>, raw: &[Vec<u8>]) -> Result<Vec<RenderFile>> {
    contents.limit("render nodes", raw.len(), ("MAX_SHARED", MAX_SHARED))?;
    let mut ids = BTreeSet::new();
    let mut files = Vec::new();
    for bytes in raw {
        let file = file(contents, bytes)?;
        if !ids.insert(file.id) {
            return Err(contents.damaged("each render node once", format!("file {} twice", file.id)));
        }
        files.push(file);
    }
    Ok(files)
}

fn file(contents: Contents<'_>, bytes: &[u8]) -> Result<RenderFile> {
    let raw: raw::RenderFile = contents.decode("a render node", bytes)?;
    let id = contents.whole("a render node", raw.id.ok_or(MissingField("id")))?;
    contents.limit("contexts", raw.contexts.len(), ("MAX_SHARED", MAX_SHARED))?;
    contents.limit("imports", raw.imports.len(), ("MAX_SHARED", MAX_SHARED))?;
    if raw.contexts.first() == Some(&0) || !raw.contexts.is_sorted_by(|one, next| one < next) {
        return Err(contents.damaged("contexts by ascending numbers from 1", format!("{:?}", raw.contexts)));
    }
    let mut buffers = BTreeSet::new();
    let mut imports = Vec::new();
    for bytes in &raw.imports {
        let import = import(contents, bytes)?;
        if !buffers.insert(import.buffer) {
            let found = format!("buffer {} of file {id} twice", import.buffer);
            return Err(contents.damaged("each import once", found));
        }
        imports.push(import);
    }
    let state = raw.state.as_ref().map(|bytes| render_state::parse(contents, bytes, &raw.contexts));
    let state = state.transpose()?;
    Ok(RenderFile { id, kfd: raw.kfd, contexts: raw.contexts, imports, state })
}

fn import(contents: Contents<'_>, bytes: &[u8]) -> Result<RenderImport> {
    let raw: raw::RenderImport = contents.decode("an import", bytes)?;
    let need = |name, value: Option<u32>| contents.whole("an import", value.ok_or(MissingField(name)));
    let (buffer, their_buffer) = (need("buffer", raw.buffer)?, need("there", raw.there)?);
    let owner = match (raw.kfd, raw.render) {
        (Some(kfd), None) => BufferOwner::Kfd(BufferUser { kfd, buffer: their_buffer }),
        (None, Some(id)) => BufferOwner::Render { id, buffer: their_buffer },
        _ => return Err(contents.damaged("an import from one owner", "none, or two")),
    };
    Ok(RenderImport { buffer, owner })
}
