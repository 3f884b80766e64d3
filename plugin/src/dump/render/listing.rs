// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lists the buffers and contexts of an open render node. The descriptor is the dumped process's own file,
//! and the process is stopped, so the list does not change.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_amdgpu_uapi::abi::{
    AMDGPU_GEM_DOMAIN_CPU, AMDGPU_GEM_DOMAIN_DOORBELL, AMDGPU_GEM_DOMAIN_GTT, AMDGPU_GEM_DOMAIN_VRAM,
    drm_amdgpu_gem_list_handles_entry, drm_amdgpu_gem_vm_entry,
};
use rewake_amdgpu_uapi::render::Render;
use rewake_criu_images::amdgpu::{Mapping, RenderBuffer};
use rewake_criu_images::rewake::RenderState;
use rewake_criu_plugin::Answer;

use crate::dump::dmabuf;

/// How long submitted work may take to end. Work that waits for the stopped process never ends.
pub(super) const IDLE_LIMIT: Duration = Duration::from_secs(20);
/// Handles that are probed where the kernel has no list. A new buffer gets the lowest free handle: a file
/// with higher handles only had this many buffers and closed them.
const PROBED_HANDLES: u32 = 64;
/// `AMDGPU_GEM_LIST_HANDLES_FLAG_IS_IMPORT`: memory of another GPU or driver.
const IS_IMPORT: u32 = 1;

const COPYABLE_DOMAINS: u32 = AMDGPU_GEM_DOMAIN_GTT | AMDGPU_GEM_DOMAIN_VRAM;

#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) buffers: Vec<ListedBuffer>,
    /// The kernel does not report where buffers are mapped, and there may be more buffers.
    pub(super) is_incomplete: bool,
    /// Ids of submission contexts.
    pub(super) contexts: Vec<u32>,
    /// Its other state; known once all work has ended.
    pub(super) state: RenderState,
}

#[derive(Debug)]
pub(super) struct ListedBuffer {
    /// The buffer as the kernel reports it: `is_import` marks memory of another GPU or driver.
    pub(super) image: RenderBuffer,
    pub(super) dmabuf: OwnedFd,
    pub(super) inode: u64,
}

/// A buffer that a restore could not make again.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotRestorable {
    #[error(
        "file {id:#x}, a render node, has its own buffers (number {handle}, {size:#x} bytes), and this \
         kernel does not report where they are mapped: use one with AMDGPU_GEM_LIST_HANDLES (7.2 has it), or \
         end the rendering before the dump"
    )]
    NotListed { id: u32, handle: u32, size: u64 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, is a page of doorbells (AMDGPU_GEM_DOMAIN_DOORBELL) \
         of user queues (AMDGPU_USERQ), which the driver does not report: use the kernel's queues, or end \
         the program's user queues, before the dump"
    )]
    Doorbells { id: u32, handle: u32 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, is memory of domains {domains:#x}, which copy \
         engines cannot access"
    )]
    UnsupportedDomains { id: u32, handle: u32, domains: u64 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, cannot be read by another process: it is host \
         memory of the process (GEM_USERPTR), whose address the driver does not report, or bound to its \
         address space (VM_ALWAYS_VALID)"
    )]
    Bound { id: u32, handle: u32 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, was imported from another driver, or from a process \
         that is not dumped: also dump that process, or close the buffer"
    )]
    Foreign { id: u32, handle: u32 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, was imported as a process's compute memory, and \
         would be restored without CPU access"
    )]
    ImportedByCompute { id: u32, handle: u32 },
    #[error(
        "buffer {handle} of file {id:#x}, a render node, has been in use for {IDLE_LIMIT:?}: submitted \
         work must end before the buffer is copied"
    )]
    Busy { id: u32, handle: u32 },
}

/// Lists the buffers that the file `id` has.
pub(super) fn list(render: &Render, id: u32) -> Answer<Listing> {
    let Some(entries) = render.handles()? else {
        return Ok(Listing { buffers: probe(render, id)?, is_incomplete: true, ..Listing::default() });
    };
    let buffers = entries.iter().map(|entry| buffer(render, id, entry)).collect::<Answer<_>>()?;
    Ok(Listing { buffers, ..Listing::default() })
}

/// Probes for buffers where the kernel has no list. Programs open render nodes that they never use.
///
/// The statistics in `fdinfo` do not identify such files: Linux 6.12 counts page tables and compute memory
/// there, and leaves out buffers that are not mapped.
fn probe(render: &Render, id: u32) -> Answer<Vec<ListedBuffer>> {
    let mut buffers = Vec::new();
    for handle in 1..=PROBED_HANDLES {
        let Some(info) = render.created_as(handle)? else { continue };
        let not_listed = NotRestorable::NotListed { id, handle, size: info.bo_size };
        let dmabuf = render.export(handle)?.ok_or(not_listed)?;
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
        buffers.push(ListedBuffer { image, dmabuf, inode });
    }
    Ok(buffers)
}

fn buffer(render: &Render, id: u32, entry: &drm_amdgpu_gem_list_handles_entry) -> Answer<ListedBuffer> {
    let handle = entry.gem_handle;
    if entry.preferred_domains & u64::from(AMDGPU_GEM_DOMAIN_DOORBELL) != 0 {
        return Err(NotRestorable::Doorbells { id, handle }.into());
    }
    let domains = u32::try_from(entry.preferred_domains).ok();
    let domains = domains.filter(|domains| {
        domains & COPYABLE_DOMAINS != 0 && domains & !(COPYABLE_DOMAINS | AMDGPU_GEM_DOMAIN_CPU) == 0
    });
    let preferred_domains =
        domains.ok_or(NotRestorable::UnsupportedDomains { id, handle, domains: entry.preferred_domains })?;
    let dmabuf = render.export(handle)?.ok_or(NotRestorable::Bound { id, handle })?;
    // The list has the alignment in pages. This call has it in bytes, as GEM_CREATE takes it.
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
    Ok(ListedBuffer { image, dmabuf, inode })
}

fn mapping(entry: &drm_amdgpu_gem_vm_entry) -> Mapping {
    Mapping { address: entry.addr, size: entry.size, offset: entry.offset, flags: entry.flags }
}

/// Waits until the buffers are idle, until `end`. The process is stopped and submits no more.
pub(super) fn wait_until_idle(listing: &Listing, id: u32, end: Instant) -> Answer {
    for buffer in &listing.buffers {
        // A dma-buf polls as writable once no job reads or writes it (`dma_buf_poll`).
        let mut idle = [PollFd::new(buffer.dmabuf.as_fd(), PollFlags::POLLOUT)];
        let left = end.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        if poll(&mut idle, left)? == 0 {
            return Err(NotRestorable::Busy { id, handle: buffer.image.handle }.into());
        }
    }
    Ok(())
}
