// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an open render node has. Calls on the file act on the dumped process's: it stands still.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_amdgpu_uapi::abi::{
    AMDGPU_GEM_DOMAIN_CPU, AMDGPU_GEM_DOMAIN_GTT, AMDGPU_GEM_DOMAIN_VRAM, drm_amdgpu_gem_list_handles_entry,
    drm_amdgpu_gem_vm_entry,
};
use rewake_amdgpu_uapi::render::Render;
use rewake_criu_images::amdgpu::{Mapping, RenderBuffer};
use rewake_criu_plugin::Answer;

use crate::dump::dmabuf;

/// How long rendering that is under way may go on. What waits for the stopped process would never end.
const IDLE: Duration = Duration::from_secs(20);
/// Numbers of buffers that are tried where the kernel has no list. The lowest free number is given to the next buffer: a file
/// that has only higher ones had this many and closed them.
const TRIED: u32 = 64;
/// One more than the highest number of a context (`AMDGPU_VM_MAX_NUM_CTX`).
const CONTEXTS: u32 = 4096;
/// `AMDGPU_GEM_LIST_HANDLES_FLAG_IS_IMPORT`: memory of another GPU or driver.
const IS_IMPORT: u32 = 1;

const MEMORY: u32 = AMDGPU_GEM_DOMAIN_GTT | AMDGPU_GEM_DOMAIN_VRAM;

#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) buffers: Vec<Buffer>,
    /// The kernel does not tell where they are mapped, nor whether these are all.
    pub(super) untold: bool,
    /// Numbers of submission contexts.
    pub(super) contexts: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct Buffer {
    /// As the kernel tells it: `is_import` is memory of another GPU or driver.
    pub(super) image: RenderBuffer,
    pub(super) dmabuf: OwnedFd,
    pub(super) inode: u64,
}

/// What would not come back.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error(
        "file {id:#x}, a render node, has buffers of its own (number {handle}, {size:#x} bytes), and this kernel does not tell \
         where they are mapped: use one with AMDGPU_GEM_LIST_HANDLES (7.2 has it), or end what renders before the dump"
    )]
    Untold { id: u32, handle: u32, size: u64 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, is memory of domains {domains:#x}, which copy engines do not reach"
    )]
    Domains { id: u32, handle: u32, domains: u64 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, cannot be read by anybody else: it is host memory of the process \
         (GEM_USERPTR), of which the driver does not tell the address, or bound to its address space (VM_ALWAYS_VALID)"
    )]
    Bound { id: u32, handle: u32 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, came as a dma-buf from another driver, or from a process that is not \
         dumped: dump that one, too, or close the buffer"
    )]
    Foreign { id: u32, handle: u32 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, was imported by a process's compute side, and would come back without \
         the CPU's access to it"
    )]
    Taken { id: u32, handle: u32 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, has been in use for {IDLE:?}: rendering must end before it is copied"
    )]
    Busy { id: u32, handle: u32 },
}

/// What the file `id` has.
pub(super) fn of(render: &Render, id: u32) -> Answer<Listing> {
    let mut listing = match render.handles()? {
        Some(entries) => {
            let buffers = entries.iter().map(|entry| buffer(render, id, entry)).collect::<Answer<_>>()?;
            Listing { buffers, ..Listing::default() }
        }
        None => Listing { buffers: tried(render, id)?, untold: true, ..Listing::default() },
    };
    // Without a buffer nothing can be submitted.
    if !listing.buffers.is_empty() {
        for context in 1..CONTEXTS {
            if render.has_context(context)? {
                listing.contexts.push(context);
            }
        }
    }
    Ok(listing)
}

/// Where the kernel has no list. Programs have render nodes open that they never use; the statistics in `fdinfo` do not tell
/// them: Linux 6.12 counts page tables and compute memory there, and leaves out what is not mapped.
fn tried(render: &Render, id: u32) -> Answer<Vec<Buffer>> {
    let mut buffers = Vec::new();
    for handle in 1..=TRIED {
        let Some(info) = render.created_as(handle)? else { continue };
        let untold = Refused::Untold { id, handle, size: info.bo_size };
        let dmabuf = render.export(handle)?.ok_or(untold)?;
        let image = RenderBuffer {
            size: info.bo_size,
            offset: render.offset(handle)?.unwrap_or(0),
            alloc_flags: info.domain_flags,
            alignment: info.alignment,
            preferred_domains: u32::try_from(info.domains).unwrap_or(0),
            handle,
            ..RenderBuffer::default()
        };
        let inode = dmabuf::inode(dmabuf.as_fd())?;
        buffers.push(Buffer { image, dmabuf, inode });
    }
    Ok(buffers)
}

fn buffer(render: &Render, id: u32, entry: &drm_amdgpu_gem_list_handles_entry) -> Answer<Buffer> {
    let handle = entry.gem_handle;
    let domains = u32::try_from(entry.preferred_domains).ok();
    let domains =
        domains.filter(|domains| domains & MEMORY != 0 && domains & !(MEMORY | AMDGPU_GEM_DOMAIN_CPU) == 0);
    let preferred_domains =
        domains.ok_or(Refused::Domains { id, handle, domains: entry.preferred_domains })?;
    let dmabuf = render.export(handle)?.ok_or(Refused::Bound { id, handle })?;
    // The list has pages, this has bytes, as GEM_CREATE takes them.
    let alignment = render.created_as(handle)?.map_or(0, |info| info.alignment);
    let mappings: Vec<Mapping> = render.mappings(handle)?.iter().map(mapping).collect();
    let image = RenderBuffer {
        address: mappings.last().map_or(0, |mapping| mapping.address),
        size: entry.size,
        offset: render.offset(handle)?.unwrap_or(0),
        alloc_flags: entry.alloc_flags,
        alignment,
        preferred_domains,
        handle,
        is_import: entry.flags & IS_IMPORT != 0,
        mappings,
    };
    let inode = dmabuf::inode(dmabuf.as_fd())?;
    Ok(Buffer { image, dmabuf, inode })
}

fn mapping(entry: &drm_amdgpu_gem_vm_entry) -> Mapping {
    Mapping { address: entry.addr, size: entry.size, offset: entry.offset, flags: entry.flags }
}

/// Waits until what was submitted has ended. The process stands still: nothing more comes.
pub(super) fn wait_until_idle(listing: &Listing, id: u32) -> Answer {
    let end = Instant::now() + IDLE;
    for buffer in &listing.buffers {
        // A dma-buf can be written to when nobody uses it any more, for reading or writing (`dma_buf_poll`).
        let mut idle = [PollFd::new(buffer.dmabuf.as_fd(), PollFlags::POLLOUT)];
        let left = end.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        if poll(&mut idle, left)? == 0 {
            return Err(Refused::Busy { id, handle: buffer.image.handle }.into());
        }
    }
    Ok(())
}
