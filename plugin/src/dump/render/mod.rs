// SPDX-License-Identifier: MIT OR Apache-2.0
//! Open render nodes: who renders has buffers there, and so has who computes if libraries asked for them.
//!
//! A buffer may be a process's compute memory, too, or another render node's; which, is known when all files of GPUs have
//! been seen, and nothing writes to it when all queues are paused. So they are dumped together, with the last one.
//!
//! * [`listing`]: what a file has, and what of that cannot come back. [`space`]: whose compute address space it is.
//!
//! No ioctl tells of syncobjs, lists of buffers, sparse mappings (PRT) or metadata of buffers: a restored file has none.

mod listing;
mod space;

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rewake_amdgpu_uapi::abi::AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED;
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_bo_contents::{PagesFile, Process, folder};
use rewake_criu_images::amdgpu::{RenderContents, RenderImage, render_name};
use rewake_criu_images::rewake::{BufferOwner, RenderFile, RenderImport};
use rewake_criu_plugin::{Answer, Host};

pub(super) use space::Spaces;

use super::shared::Shared;
use crate::contents;
use listing::{Listing, Refused};

/// All render nodes so far.
#[derive(Debug, Default)]
pub(super) struct Renders {
    files: Vec<Open>,
    /// How many of them are in the image.
    written: usize,
}

#[derive(Debug)]
struct Open {
    file: OwnedFd,
    id: u32,
    minor: u32,
}

/// One that is being written.
#[derive(Debug)]
struct Writing {
    /// Its GPU's name in the machine.
    gpu: u32,
    image: RenderContents,
    /// In the image's order.
    dmabufs: Vec<Option<OwnedFd>>,
    told: RenderFile,
    /// Whether that is more than the image has place for. A compute address space with nothing else is not.
    is_told: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("/dev/dri/renderD{0} is no GPU of the driver's topology")]
struct UnknownNode(u32);

impl Renders {
    pub(super) fn add(&mut self, file: OwnedFd, id: u32, minor: u32) {
        self.files.push(Open { file, id, minor });
    }

    pub(super) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.files.iter().map(|open| open.file.as_fd())
    }

    /// Writes those that are not in the image yet.
    pub(super) fn write(&mut self, host: &Host, spaces: &mut Spaces<'_>, shared: &mut Shared) -> Answer {
        if self.written == self.files.len() {
            return Ok(());
        }
        let machine = Topology::read()?;
        let mut listings = Vec::new();
        for open in &self.files[self.written..] {
            let render = Render::of(open.file.try_clone()?, open.minor);
            let listing = listing::of(&render, open.id)?;
            listings.push((open, render, listing));
        }
        let first = first_users(&listings);
        let mut writing = Vec::new();
        for (open, render, listing) in &mut listings {
            let gpu =
                machine.gpus().find(|gpu| gpu.render_minor() == open.minor).map(|gpu: &Node| gpu.gpu_id);
            let gpu = gpu.ok_or(UnknownNode(open.minor))?;
            listing::wait_until_idle(listing, open.id)?;
            let kfd = spaces.of(render, gpu, listing)?;
            if let Some(kfd) = kfd {
                spaces.leave_out(kfd, listing);
            }
            let imports = imports(open.id, listing, &first, shared)?;
            if listing.untold && !imports.is_empty() {
                host.warn(format_args!(
                    "file {:#x}, a render node: {} numbers of buffers of the compute side come back; where they are mapped \
                     besides, this kernel does not tell: use one with AMDGPU_GEM_LIST_HANDLES if the program does that",
                    open.id,
                    imports.len()
                ));
            }
            writing.push(Writing::of(open, gpu, std::mem::take(listing), (kfd, imports)));
        }
        save(host, &writing)?;
        for file in writing {
            host.info(format_args!(
                "renderD{}: file {:#x} has {} buffers, {} of them others', {} contexts",
                file.image.minor,
                file.image.id,
                file.image.buffers.len(),
                file.told.imports.len(),
                file.told.contexts.len()
            ));
            shared.shown(&file.image);
            let name = render_name(file.image.id);
            let image = RenderImage { gpu_id: spaces.name(file.gpu), contents: Some(file.image) };
            folder::write(host.image_dir()?, &name, &image.to_bytes())?;
            if file.is_told || (file.told.kfd.is_none() && spaces.are_some()) {
                shared.render_file(file.told);
            }
        }
        self.written = self.files.len();
        shared.write(host)
    }
}

/// By the dma-buf's inode: the file, by its id, that has the buffer first, and where in its list. Who imported it from
/// another GPU or driver does not count.
fn first_users(listings: &[(&Open, Render, Listing)]) -> BTreeMap<u64, (u32, u32)> {
    let mut first = BTreeMap::new();
    for (open, _, listing) in listings {
        for (index, buffer) in (0..).zip(&listing.buffers).filter(|(_, buffer)| !buffer.image.is_import) {
            first.entry(buffer.inode).or_insert((open.id, index));
        }
    }
    first
}

/// The buffers of a file that others make anew: the compute side if it has them, otherwise the first user.
fn imports(
    id: u32,
    listing: &Listing,
    first: &BTreeMap<u64, (u32, u32)>,
    shared: &Shared,
) -> Answer<Vec<RenderImport>> {
    let mut imports = Vec::new();
    for (index, buffer) in (0..).zip(&listing.buffers) {
        let handle = buffer.image.handle;
        let owner = match (shared.owner(buffer.inode), first.get(&buffer.inode)) {
            (Some(user), _) => {
                // What the compute side imported would come back without the CPU's access.
                let asked = buffer.image.alloc_flags & u64::from(AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED) != 0;
                if shared.is_import(buffer.inode) && asked {
                    return Err(Refused::Taken { id, handle }.into());
                }
                BufferOwner::Kfd(user)
            }
            (None, _) if listing.untold => {
                return Err(Refused::Untold { id, handle, size: buffer.image.size }.into());
            }
            (None, Some((own, _))) if *own == id => continue,
            (None, Some((id, buffer))) => BufferOwner::Render { id: *id, buffer: *buffer },
            (None, None) => return Err(Refused::Foreign { id, handle }.into()),
        };
        imports.push(RenderImport { buffer: index, owner });
    }
    Ok(imports)
}

impl Writing {
    fn of(open: &Open, gpu: u32, listing: Listing, (kfd, imports): (Option<u32>, Vec<RenderImport>)) -> Self {
        let (mut buffers, mut dmabufs) = (Vec::new(), Vec::new());
        for buffer in listing.buffers {
            buffers.push(buffer.image);
            dmabufs.push(Some(buffer.dmabuf));
        }
        // CRIU's plugin imports what is marked so, in whichever way it was shared.
        for import in &imports {
            buffers[import.buffer as usize].is_import = true;
        }
        let image = RenderContents { id: open.id, minor: open.minor, buffers };
        let told = RenderFile { id: open.id, kfd, contexts: listing.contexts, imports };
        let is_told = !image.buffers.is_empty();
        Self { gpu, image, dmabufs, told, is_told }
    }
}

/// Writes the memory of all buffers, a file for each. What others make anew is written, too, as CRIU's plugin does.
fn save(host: &Host, writing: &[Writing]) -> Answer {
    let folder = host.image_dir()?;
    let mut files = Vec::new();
    for file in writing {
        let buffers = 0..file.image.buffers.len();
        let create = |buffer| PagesFile::create_render(folder, &file.image, buffer, file.image.minor);
        files.push(buffers.map(create).collect::<Result<Vec<_>, _>>()?);
    }
    let process = |(files, writing)| -> Process<'_> {
        let (files, writing): (&Vec<PagesFile>, &Writing) = (files, writing);
        Process { files, dmabufs: &writing.dmabufs }
    };
    let processes: Vec<_> = files.iter().zip(writing).map(process).collect();
    contents::save(host, &processes)
}
