// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dumps open render nodes. A process that renders has buffers there, and libraries may allocate some in one
//! that computes.
//!
//! A buffer may also be a process's compute memory, or another render node's buffer. That is known once CRIU
//! has passed all GPU files; then all queues are evicted, too, and none writes to the buffers. So all render
//! nodes are dumped with the last GPU file.
//!
//! * [`listing`]: what a file has, and which of it cannot be restored. [`state`]: syncobjs, metadata, numbers
//!   of submissions and the power state. [`space`]: which process's compute address space a file has.
//!
//! No ioctl reports buffer lists, sparse mappings (PRT) or priorities of contexts: a restored file has none.

mod listing;
mod space;
mod state;

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Instant;

use rewake_amdgpu_uapi::abi::AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED;
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_bo_contents::{GpuPagesFile, ProcessBuffers, folder};
use rewake_criu_images::amdgpu::{RenderContents, RenderImage, render_name};
use rewake_criu_images::rewake::{BufferOwner, RenderFile, RenderImport};
use rewake_criu_plugin::{Answer, Host};

pub(super) use space::AddressSpaces;

use super::shared::DumpSharing;
use crate::contents;
use listing::{IDLE_LIMIT, Listing, NotRestorable};

/// All open render nodes that CRIU has passed so far.
#[derive(Debug, Default)]
pub(super) struct RenderNodes {
    files: Vec<OpenNode>,
    /// The number of those that are in the image.
    written: usize,
}

#[derive(Debug)]
struct OpenNode {
    file: OwnedFd,
    id: u32,
    minor: u32,
}

/// A render node that is being written.
#[derive(Debug)]
struct NodeDump {
    /// Its GPU's id in the machine's topology.
    gpu: u32,
    image: RenderContents,
    /// The buffers' dma-bufs, in the image's order.
    dmabufs: Vec<Option<OwnedFd>>,
    record: RenderFile,
    /// Whether `record` has to be written. A file that is only a compute address space needs none.
    needs_record: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("/dev/dri/renderD{0}: the driver's topology has no GPU with this render node")]
struct UnknownNode(u32);

impl RenderNodes {
    pub(super) fn add(&mut self, file: OwnedFd, id: u32, minor: u32) {
        self.files.push(OpenNode { file, id, minor });
    }

    pub(super) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.files.iter().map(|open| open.file.as_fd())
    }

    /// Writes the render nodes that are not in the image yet.
    pub(super) fn write(
        &mut self,
        host: &Host,
        spaces: &mut AddressSpaces<'_>,
        shared: &mut DumpSharing,
    ) -> Answer {
        if self.written == self.files.len() {
            return Ok(());
        }
        let machine = Topology::read()?;
        let mut listings = Vec::new();
        for open in &self.files[self.written..] {
            let render = Render::of(open.file.try_clone()?, open.minor);
            let mut listing = listing::list(&render, open.id)?;
            listing.contexts = state::contexts(&render)?;
            listings.push((open, render, listing));
        }
        let first_owners = first_owners(&listings);
        let mut writing = Vec::new();
        for (open, render, listing) in &mut listings {
            let gpu =
                machine.gpus().find(|gpu| gpu.render_minor() == open.minor).map(|gpu: &Node| gpu.gpu_id);
            let gpu = gpu.ok_or(UnknownNode(open.minor))?;
            let end = Instant::now() + IDLE_LIMIT;
            listing::wait_until_idle(listing, open.id, end)?;
            listing.state = state::read(render, open.id, listing, end)?;
            let kfd = spaces.of(render, gpu, listing)?;
            if let Some(kfd) = kfd {
                spaces.remove_compute_mappings(kfd, listing);
            }
            let imports = imports(open.id, listing, &first_owners, shared)?;
            if listing.is_incomplete && !imports.is_empty() {
                host.warn(format_args!(
                    "file {:#x}, a render node: {} handles of compute buffers are restored without further \
                     mappings, which this kernel does not report: use one with AMDGPU_GEM_LIST_HANDLES if \
                     the program has such mappings",
                    open.id,
                    imports.len()
                ));
            }
            writing.push(NodeDump::of(open, gpu, std::mem::take(listing), (kfd, imports)));
        }
        save(host, &writing)?;
        for file in writing {
            host.info(format_args!(
                "renderD{}: file {:#x} has {} buffers ({} of them imported), {} contexts, {} syncobjs",
                file.image.minor,
                file.image.id,
                file.image.buffers.len(),
                file.record.imports.len(),
                file.record.contexts.len(),
                file.record.state.as_ref().map_or(0, |state| state.syncobjs.len())
            ));
            shared.remove_mappings_of(&file.image);
            let name = render_name(file.image.id);
            let image = RenderImage { gpu_id: spaces.user_name(file.gpu), contents: Some(file.image) };
            folder::write(host.image_dir()?, &name, &image.to_bytes())?;
            if file.needs_record || (file.record.kfd.is_none() && spaces.has_processes()) {
                shared.add_render_file(file.record);
            }
        }
        self.written = self.files.len();
        shared.write(host)
    }
}

/// Returns the first file of each buffer and the index in its list, by the dma-buf's inode. Files that
/// imported the buffer from another GPU or driver do not count.
fn first_owners(listings: &[(&OpenNode, Render, Listing)]) -> BTreeMap<u64, (u32, u32)> {
    let mut owners = BTreeMap::new();
    for (open, _, listing) in listings {
        for (index, buffer) in (0..).zip(&listing.buffers).filter(|(_, buffer)| !buffer.image.is_import) {
            owners.entry(buffer.inode).or_insert((open.id, index));
        }
    }
    owners
}

/// Returns the buffers that a restored file imports: from the process that computes with them, otherwise from
/// the first file that has them.
fn imports(
    id: u32,
    listing: &Listing,
    first_owners: &BTreeMap<u64, (u32, u32)>,
    shared: &DumpSharing,
) -> Answer<Vec<RenderImport>> {
    let mut imports = Vec::new();
    for (index, buffer) in (0..).zip(&listing.buffers) {
        let handle = buffer.image.handle;
        let owner = match (shared.owner(buffer.inode), first_owners.get(&buffer.inode)) {
            (Some(user), _) => {
                // A buffer that the process imported is restored without CPU access.
                let needs_cpu =
                    buffer.image.alloc_flags & u64::from(AMDGPU_GEM_CREATE_CPU_ACCESS_REQUIRED) != 0;
                if shared.is_import(buffer.inode) && needs_cpu {
                    return Err(NotRestorable::ImportedByCompute { id, handle }.into());
                }
                BufferOwner::Kfd(user)
            }
            (None, _) if listing.is_incomplete => {
                return Err(NotRestorable::NotListed { id, handle, size: buffer.image.size }.into());
            }
            (None, Some((own, _))) if *own == id => continue,
            (None, Some((id, buffer))) => BufferOwner::Render { id: *id, buffer: *buffer },
            (None, None) => return Err(NotRestorable::Foreign { id, handle }.into()),
        };
        imports.push(RenderImport { buffer: index, owner });
    }
    Ok(imports)
}

impl NodeDump {
    fn of(
        open: &OpenNode,
        gpu: u32,
        listing: Listing,
        (kfd, imports): (Option<u32>, Vec<RenderImport>),
    ) -> Self {
        let (mut buffers, mut dmabufs) = (Vec::new(), Vec::new());
        for buffer in listing.buffers {
            buffers.push(buffer.image);
            dmabufs.push(Some(buffer.dmabuf));
        }
        // CRIU's plugin imports the buffers that are marked so.
        for import in &imports {
            buffers[import.buffer as usize].is_import = true;
        }
        let image = RenderContents { id: open.id, minor: open.minor, buffers };
        let needs_record =
            !image.buffers.is_empty() || !listing.contexts.is_empty() || !listing.state.is_empty();
        let (contexts, state) = (listing.contexts, Some(listing.state));
        let record = RenderFile { id: open.id, kfd, contexts, imports, state };
        Self { gpu, image, dmabufs, record, needs_record }
    }
}

/// Writes the memory of all buffers, one file for each. Imported buffers are written, too, as CRIU's plugin
/// does.
fn save(host: &Host, writing: &[NodeDump]) -> Answer {
    let folder = host.image_dir()?;
    let mut files = Vec::new();
    for file in writing {
        let buffers = 0..file.image.buffers.len();
        let create = |buffer| GpuPagesFile::create_render(folder, &file.image, buffer, file.image.minor);
        files.push(buffers.map(create).collect::<Result<Vec<_>, _>>()?);
    }
    let process = |(files, writing)| -> ProcessBuffers<'_> {
        let (files, writing): (&Vec<GpuPagesFile>, &NodeDump) = (files, writing);
        ProcessBuffers { files, dmabufs: &writing.dmabufs }
    };
    let processes: Vec<_> = files.iter().zip(writing).map(process).collect();
    contents::save(host, &processes)
}
