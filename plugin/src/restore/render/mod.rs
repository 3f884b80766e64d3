// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans open render nodes: which address space each has, and which buffers it makes or imports. [`make`]
//! makes them, and [`state`] what they had besides buffers and contexts.
//!
//! The file with a process's compute address space is restored with that role; every other file has its own
//! address space. Images of CRIU's plugin do not say which: there all files of a GPU in a task that computes
//! get its compute address space.

mod make;
mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd};

use rewake_bo_contents::GpuPagesFile;
use rewake_criu_images::amdgpu::{MAX_BUFFERS, RenderBuffer, RenderContents, render_name};
use rewake_criu_images::rewake::{
    BufferOwner, RenderFile, RenderImport, RenderState, SHARED_NAME, SharedImage,
};
use rewake_criu_plugin::{Answer, Host};

use super::gpu_assignment::{AssignedGpu, GpuAssignment};
use super::shared::{ProcessBuffer, Sharing};
use crate::image::Images;
use rewake_bo_contents::folder::FileError;

/// An open render node of the image.
#[derive(Debug)]
pub(super) struct RenderNode {
    pub(super) id: u32,
    pub(super) gpu: AssignedGpu,
    pub(super) contents: RenderContents,
    space: Space,
    contexts: Vec<u32>,
    state: RenderState,
    /// The image does not have the state, and may have had some.
    has_lost_state: bool,
    /// Sources of imported buffers, by index in the contents' buffers.
    imports: BTreeMap<usize, BufferSource>,
}

/// The address space of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Space {
    /// The compute address space of a process: index in [`Images::kfd`].
    Compute(usize),
    /// Its own address space.
    Own,
    /// The image does not say.
    Unknown,
}

/// What makes a buffer that a render node imports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BufferSource {
    /// A process: index in [`Sharing::exports`].
    Process(usize),
    /// Another render node: index in the list of all, and of its buffers.
    Node { node: usize, buffer: usize },
}

/// A render node that cannot be made from the image.
#[derive(Debug, thiserror::Error)]
enum UnfitNode {
    #[error("{} is damaged: buffer {handle}: {why}", render_name(*id))]
    Damaged { id: u32, handle: u32, why: &'static str },
    #[error("{SHARED_NAME} is of another dump: {what}; remove it")]
    OtherDump { what: String },
    #[error(
        "{}: buffer {handle} was imported, and the image does not name its owner: dump it with this plugin",
        render_name(*id)
    )]
    Whose { id: u32, handle: u32 },
}

/// Returns all render nodes of the image, in the order of ids. Buffers of processes that they import become
/// exports.
pub(super) fn nodes(
    images: &Images,
    assignment: &GpuAssignment,
    shared: &SharedImage,
    sharing: &mut Sharing,
) -> Answer<Vec<RenderNode>> {
    let ids: Vec<u32> = images.render.keys().copied().collect();
    if let Some(file) = shared.render_files.iter().find(|file| !ids.contains(&file.id)) {
        return Err(other_dump(format!(
            "it names file {:#x}, and there is no {}",
            file.id,
            render_name(file.id)
        ))
        .into());
    }
    let mut nodes = Vec::new();
    for (id, image) in &images.render {
        let contents = image.contents.clone().unwrap_or_default();
        check_buffers(*id, &contents.buffers)?;
        let record = shared.render_files.iter().find(|file| file.id == *id);
        let imports = record.map_or(&[][..], |record| &record.imports);
        let state = record.and_then(|record| record.state.clone());
        // A dump by this version has a record of every file with buffers or contexts.
        let has_lost_state = state.is_none() && (record.is_some() || !contents.buffers.is_empty());
        let state = state.unwrap_or_default();
        check_metadata(*id, &contents.buffers, &state)?;
        let imports = imports.iter().map(|import| {
            let buffer = import.buffer as usize;
            Ok((buffer, buffer_source(*id, import, images, &ids, sharing)?))
        });
        let node = RenderNode {
            id: *id,
            gpu: assignment.of_render(image)?,
            contents,
            space: space(record, images)?,
            contexts: record.map_or_else(Vec::new, |record| record.contexts.clone()),
            state,
            has_lost_state,
            imports: imports.collect::<Result<_, UnfitNode>>()?,
        };
        let lost = (0..)
            .zip(&node.contents.buffers)
            .find(|(index, buffer)| buffer.is_import && !node.has_import(*index));
        if let Some((_, buffer)) = lost {
            return Err(UnfitNode::Whose { id: *id, handle: buffer.handle }.into());
        }
        nodes.push(node);
    }
    Ok(nodes)
}

/// Logs once what images of other versions do not have.
pub(super) fn warn_of_lost_state(host: &Host, nodes: &[RenderNode]) {
    let lost = nodes.iter().filter(|node| node.has_lost_state).count();
    if lost > 0 {
        host.warn(format_args!(
            "the image was written by another version, which did not look for syncobjs, metadata of buffers, \
             numbers of submissions and stable power states: {lost} open render nodes are restored without \
             them"
        ));
    }
}

fn other_dump(what: String) -> UnfitNode {
    UnfitNode::OtherDump { what }
}

fn space(record: Option<&RenderFile>, images: &Images) -> Result<Space, UnfitNode> {
    let Some(record) = record else { return Ok(Space::Unknown) };
    let Some(kfd) = record.kfd else { return Ok(Space::Own) };
    let process = images.kfd.iter().position(|(id, _)| *id == kfd);
    let process = process
        .ok_or_else(|| other_dump(format!("it names file {kfd:#x}, and there is no amdgpu-kfd-{kfd}.img")));
    process.map(Space::Compute)
}

/// Checks that every buffer can have its number and its mappings.
fn check_buffers(id: u32, buffers: &[RenderBuffer]) -> Result<(), UnfitNode> {
    let mut numbers = BTreeSet::new();
    for buffer in buffers {
        let damaged = |why| Err(UnfitNode::Damaged { id, handle: buffer.handle, why });
        if buffer.handle == 0 || buffer.handle as usize > MAX_BUFFERS {
            return damaged("the number is out of range");
        }
        if !numbers.insert(buffer.handle) {
            return damaged("another buffer has the same number");
        }
        let inside = |offset: u64, size: u64| offset.checked_add(size).is_some_and(|end| end <= buffer.size);
        if !buffer.mappings.iter().all(|mapping| inside(mapping.offset, mapping.size)) {
            return damaged("it is mapped beyond its end");
        }
    }
    Ok(())
}

/// Checks that all metadata is of buffers of the file.
fn check_metadata(id: u32, buffers: &[RenderBuffer], state: &RenderState) -> Result<(), UnfitNode> {
    let numbers: BTreeSet<u32> = buffers.iter().map(|buffer| buffer.handle).collect();
    match state.metadata.iter().find(|metadata| !numbers.contains(&metadata.handle)) {
        Some(metadata) => {
            Err(other_dump(format!("it has metadata of buffer {} of file {id:#x}", metadata.handle)))
        }
        None => Ok(()),
    }
}

fn buffer_source(
    id: u32,
    import: &RenderImport,
    images: &Images,
    ids: &[u32],
    sharing: &mut Sharing,
) -> Result<BufferSource, UnfitNode> {
    let unfit = || other_dump(format!("buffer {} of file {id:#x} differs from its owner's", import.buffer));
    let buffers =
        |id: &u32| images.render[id].contents.as_ref().map_or(&[][..], |contents| &contents.buffers);
    let size = buffers(&id).get(import.buffer as usize).ok_or_else(unfit)?.size;
    match import.owner {
        BufferOwner::Kfd(user) => {
            let process = images.kfd.iter().position(|(kfd, _)| *kfd == user.kfd).ok_or_else(unfit)?;
            let owner = ProcessBuffer { process, buffer: user.buffer as usize };
            let buffer = images.kfd[process].1.buffers.get(owner.buffer).ok_or_else(unfit)?;
            let fits = buffer.has_contents() && buffer.size == size;
            fits.then(|| BufferSource::Process(sharing.export_of(owner))).ok_or_else(unfit)
        }
        BufferOwner::Render { id: owner, buffer } => {
            let node = ids.iter().position(|known| *known == owner && owner != id).ok_or_else(unfit)?;
            let buffer = buffer as usize;
            let found =
                buffers(&ids[node]).get(buffer).filter(|found| found.size == size && !found.is_import);
            found.map(|_| BufferSource::Node { node, buffer }).ok_or_else(unfit)
        }
    }
}

impl RenderNode {
    /// Returns whether the file imports the buffer.
    pub(super) fn has_import(&self, buffer: usize) -> bool {
        self.imports.contains_key(&buffer)
    }

    /// Opens the pages files of the buffers that have a dma-buf. CRIU's plugin may not have written files of
    /// buffers that are mapped nowhere, and does not read them.
    pub(super) fn files(
        &self,
        folder: BorrowedFd<'_>,
        dmabufs: &[Option<OwnedFd>],
    ) -> Result<Vec<GpuPagesFile>, FileError> {
        let mut files = Vec::new();
        for (buffer, _) in dmabufs.iter().enumerate().filter(|(_, dmabuf)| dmabuf.is_some()) {
            match GpuPagesFile::open_render(folder, &self.contents, buffer, self.gpu.minor) {
                Err(error) if error.is_missing() && !self.contents.buffers[buffer].has_contents() => {}
                file => files.push(file?),
            }
        }
        Ok(files)
    }

    /// Returns the buffer that was mapped at an offset of `/dev/dri/renderD<minor>`, of those that this file
    /// makes.
    pub(super) fn mapped_at(&self, minor: u32, offset: u64) -> Option<usize> {
        let inside = |buffer: &RenderBuffer| {
            // A buffer without CPU access has no offset.
            buffer.offset != 0 && (buffer.offset..buffer.offset.saturating_add(buffer.size)).contains(&offset)
        };
        let here = self.contents.minor == minor;
        let own = (0..).zip(&self.contents.buffers).filter(|(index, _)| here && !self.has_import(*index));
        own.into_iter().find(|(_, buffer)| inside(buffer)).map(|(index, _)| index)
    }
}
