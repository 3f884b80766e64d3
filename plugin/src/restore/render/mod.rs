// SPDX-License-Identifier: MIT OR Apache-2.0
//! Open render nodes: which file each of them is, and what it has. [`make`] makes it anew.
//!
//! The one with a process's compute address space comes back as that one; every other is a file of its own. Where an image
//! does not tell, as CRIU's plugin's do not, all of a GPU's in a task that computes are its compute address space.

mod make;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, OwnedFd};

use rewake_bo_contents::PagesFile;
use rewake_criu_images::amdgpu::{MAX_BUFFERS, RenderBuffer, RenderContents, render_name};
use rewake_criu_images::rewake::{BufferOwner, RenderFile, RenderImport, SHARED_NAME, SharedImage};
use rewake_criu_plugin::Answer;

use super::gpu_assignment::{AssignedGpu, GpuAssignment};
use super::shared::{Sharing, Whose};
use crate::image::Images;
use rewake_bo_contents::folder::FileError;

/// One of the image, in the order of ids.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: u32,
    pub(super) place: AssignedGpu,
    pub(super) contents: RenderContents,
    space: Space,
    contexts: Vec<u32>,
    /// By index in the contents' buffers.
    imports: BTreeMap<usize, From>,
}

/// Whose address space a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Space {
    /// The compute side's of a process, by index in [`Images::kfd`].
    Compute(usize),
    /// Nobody's but its own.
    Own,
    /// The image does not tell.
    Unknown,
}

/// Who makes a buffer anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum From {
    /// A process: index in [`Sharing::exports`].
    Process(usize),
    /// Another render node: index in the list of all, and of its buffers.
    Node { node: usize, buffer: usize },
}

/// What no file can be made from.
#[derive(Debug, thiserror::Error)]
enum Unfit {
    #[error("{} is damaged: buffer {handle}: {why}", render_name(*id))]
    Damaged { id: u32, handle: u32, why: &'static str },
    #[error("{SHARED_NAME} is of another dump: {what}; remove it")]
    OtherDump { what: String },
    #[error(
        "{}: buffer {handle} came as a dma-buf, and the image does not tell whose it is: dump it with this plugin",
        render_name(*id)
    )]
    Whose { id: u32, handle: u32 },
}

/// All render nodes of the image. Buffers of processes that they import become exports of these.
pub(super) fn nodes(
    images: &Images,
    places: &GpuAssignment,
    shared: &SharedImage,
    sharing: &mut Sharing,
) -> Answer<Vec<Node>> {
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
        check(*id, &contents.buffers)?;
        let told = shared.render_files.iter().find(|file| file.id == *id);
        let imports = told.map_or(&[][..], |told| &told.imports);
        let imports = imports.iter().map(|import| {
            let buffer = import.buffer as usize;
            Ok((buffer, from(*id, import, images, &ids, sharing)?))
        });
        let node = Node {
            id: *id,
            place: places.of_render(image)?,
            contents,
            space: space(told, images)?,
            contexts: told.map_or_else(Vec::new, |told| told.contexts.clone()),
            imports: imports.collect::<Result<_, Unfit>>()?,
        };
        let lost = (0..)
            .zip(&node.contents.buffers)
            .find(|(index, buffer)| buffer.is_import && !node.has_import(*index));
        if let Some((_, buffer)) = lost {
            return Err(Unfit::Whose { id: *id, handle: buffer.handle }.into());
        }
        nodes.push(node);
    }
    Ok(nodes)
}

fn other_dump(what: String) -> Unfit {
    Unfit::OtherDump { what }
}

fn space(told: Option<&RenderFile>, images: &Images) -> Result<Space, Unfit> {
    let Some(told) = told else { return Ok(Space::Unknown) };
    let Some(kfd) = told.kfd else { return Ok(Space::Own) };
    let process = images.kfd.iter().position(|(id, _)| *id == kfd);
    let process = process
        .ok_or_else(|| other_dump(format!("it names file {kfd:#x}, and there is no amdgpu-kfd-{kfd}.img")));
    process.map(Space::Compute)
}

/// Every buffer can have its number and place.
fn check(id: u32, buffers: &[RenderBuffer]) -> Result<(), Unfit> {
    let mut numbers = BTreeSet::new();
    for buffer in buffers {
        let damaged = |why| Err(Unfit::Damaged { id, handle: buffer.handle, why });
        if buffer.handle == 0 || buffer.handle as usize > MAX_BUFFERS {
            return damaged("no driver has such a number");
        }
        if !numbers.insert(buffer.handle) {
            return damaged("there are two of that number");
        }
        let inside = |offset: u64, size: u64| offset.checked_add(size).is_some_and(|end| end <= buffer.size);
        if !buffer.mappings.iter().all(|mapping| inside(mapping.offset, mapping.size)) {
            return damaged("it is mapped beyond its end");
        }
    }
    Ok(())
}

fn from(
    id: u32,
    import: &RenderImport,
    images: &Images,
    ids: &[u32],
    sharing: &mut Sharing,
) -> Result<From, Unfit> {
    let unfit = || other_dump(format!("buffer {} of file {id:#x} and its owner's do not fit", import.buffer));
    let buffers =
        |id: &u32| images.render[id].contents.as_ref().map_or(&[][..], |contents| &contents.buffers);
    let size = buffers(&id).get(import.buffer as usize).ok_or_else(unfit)?.size;
    match import.owner {
        BufferOwner::Kfd(user) => {
            let process = images.kfd.iter().position(|(kfd, _)| *kfd == user.kfd).ok_or_else(unfit)?;
            let whose = Whose { process, buffer: user.buffer as usize };
            let buffer = images.kfd[process].1.buffers.get(whose.buffer).ok_or_else(unfit)?;
            let fits = buffer.has_contents() && buffer.size == size;
            fits.then(|| From::Process(sharing.export_of(whose))).ok_or_else(unfit)
        }
        BufferOwner::Render { id: owner, buffer } => {
            let node = ids.iter().position(|known| *known == owner && owner != id).ok_or_else(unfit)?;
            let buffer = buffer as usize;
            let there =
                buffers(&ids[node]).get(buffer).filter(|there| there.size == size && !there.is_import);
            there.map(|_| From::Node { node, buffer }).ok_or_else(unfit)
        }
    }
}

impl Node {
    /// Whether somebody else makes the buffer anew.
    pub(super) fn has_import(&self, buffer: usize) -> bool {
        self.imports.contains_key(&buffer)
    }

    /// The files with the bytes of those that have a dma-buf. CRIU's plugin does not look for the bytes of what is mapped
    /// nowhere, and may have written none.
    pub(super) fn files(
        &self,
        folder: BorrowedFd<'_>,
        dmabufs: &[Option<OwnedFd>],
    ) -> Result<Vec<PagesFile>, FileError> {
        let mut files = Vec::new();
        for (buffer, _) in dmabufs.iter().enumerate().filter(|(_, dmabuf)| dmabuf.is_some()) {
            match PagesFile::open_render(folder, &self.contents, buffer, self.place.minor) {
                Err(error) if error.is_missing() && !self.contents.buffers[buffer].has_contents() => {}
                file => files.push(file?),
            }
        }
        Ok(files)
    }

    /// The buffer that was mapped at an offset of `/dev/dri/renderD<minor>`, of those that this file makes anew.
    pub(super) fn mapped_at(&self, minor: u32, offset: u64) -> Option<usize> {
        let inside = |buffer: &RenderBuffer| {
            // Without the CPU's access there is none.
            buffer.offset != 0 && (buffer.offset..buffer.offset.saturating_add(buffer.size)).contains(&offset)
        };
        let here = self.contents.minor == minor;
        let own = (0..).zip(&self.contents.buffers).filter(|(index, _)| here && !self.has_import(*index));
        own.into_iter().find(|(_, buffer)| inside(buffer)).map(|(index, _)| index)
    }
}
