// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes a render node in the task that CRIU restores it in, or in the first one that needs a buffer of it.
//!
//! A process refers to its buffers and contexts by number, and the driver gives the lowest free one. So all
//! numbers up to the highest are allocated, and spare ones freed at the end. A file makes its own buffers
//! without a wait, and only then waits for the buffers of others.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};

use rewake_amdgpu_uapi::abi::memory::PAGE;
use rewake_amdgpu_uapi::abi::{AMDGPU_GEM_DOMAIN_GTT, drm_amdgpu_gem_create_in, drm_amdgpu_gem_vm_entry};
use rewake_amdgpu_uapi::render::Render;
use rewake_criu_images::amdgpu::{KfdBuffer, RenderBuffer};
use rewake_criu_plugin::{Answer, Host};

use super::{BufferSource, RenderNode, Space};
use crate::restore::Restore;
use crate::restore::shared_state::MmapOffset;

#[derive(Debug, thiserror::Error)]
pub(super) enum NodeError {
    #[error(
        "a render node (file {id:#x}) had {what} {wanted}, and the driver gives number {found}: does another \
         process use this file?"
    )]
    Number { id: u32, what: &'static str, wanted: u32, found: u32 },
    #[error(
        "buffer {handle} of a render node (file {id:#x}) cannot be loaded: the driver gives no dma-buf of it"
    )]
    Bound { id: u32, handle: u32 },
}

impl Restore {
    /// Returns a render node, complete except for the contents of its buffers.
    pub(in crate::restore) fn render_file(&mut self, host: &Host, index: usize) -> Answer<OwnedFd> {
        let file = host.stored_fd(self.node_by_id(host, index)?)?;
        let render = Render::of(file.try_clone()?, self.nodes[index].gpu.minor);
        self.import_into(host, index, &render)?;
        Ok(file)
    }

    /// Returns a render node with its own buffers, by its id in CRIU's store. Makes it if no task has begun
    /// to.
    fn node_by_id(&mut self, host: &Host, index: usize) -> Answer<i32> {
        if self.shared_state.claim_node(index) {
            return self.make_node(host, index).inspect_err(|_| self.shared_state.node_failed(index));
        }
        Ok(self.shared_state.wait_node(index, self.nodes[index].id)?)
    }

    fn make_node(&mut self, host: &Host, index: usize) -> Answer<i32> {
        let stored = self.node_file(host, index)?;
        let node = &self.nodes[index];
        let render = Render::of(host.stored_fd(stored)?, node.gpu.minor);
        let own = node.own();
        for wanted in 1..=node.highest() {
            let found = match own.get(&wanted) {
                Some(buffer) => render.create_as(create_arguments(&node.contents.buffers[*buffer]))?,
                None => render.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, 0)?,
            };
            node.check_number("buffer", wanted, found)?;
        }
        let mut dmabufs: Vec<Option<OwnedFd>> = node.contents.buffers.iter().map(|_| None).collect();
        for (handle, buffer) in own {
            node.map(&render, buffer)?;
            let offset = render.offset(handle)?;
            self.shared_state.put_node_buffer(
                index,
                buffer,
                offset.map_or(MmapOffset::Nowhere, MmapOffset::Offset),
            );
            let dmabuf = render.export(handle)?.ok_or(NodeError::Bound { id: node.id, handle })?;
            dmabufs[buffer] = Some(dmabuf);
        }
        node.contexts(&render)?;
        node.make_state(host, &render, &self.taken_addresses(node))?;
        if dmabufs.iter().any(Option::is_some) {
            self.shared_state.put_node_contents(index, Self::send_dmabufs(host, &dmabufs)?);
        }
        self.shared_state.put_node(index, stored);
        Ok(stored)
    }

    /// Returns the GPU addresses of all buffers in a file's address space, those that are mapped later among
    /// them.
    fn taken_addresses(&self, node: &RenderNode) -> Vec<Range<u64>> {
        let mappings = node.contents.buffers.iter().flat_map(|buffer| &buffer.mappings);
        let mut taken: Vec<_> = mappings.map(|of| of.address..of.address.saturating_add(of.size)).collect();
        if let Space::Compute(process) = node.space {
            // The driver maps some buffers twice in a row.
            let range = |of: &KfdBuffer| of.address..of.address.saturating_add(of.size.saturating_mul(2));
            taken.extend(self.images.kfd[process].1.buffers.iter().map(range));
        }
        taken
    }

    /// Opens the file for a render node, still without buffers, and returns its id in CRIU's store.
    fn node_file(&mut self, host: &Host, index: usize) -> Answer<i32> {
        let assigned = self.nodes[index].gpu;
        match (self.nodes[index].space, self.own) {
            (Space::Compute(process), own) if own != Some(process) => {
                let image = &self.images.kfd[process].1;
                self.shared_state.wait(process, image.pid)?;
                let here = |node: &rewake_criu_images::amdgpu::NodeImage| {
                    let gpu = &node.properties;
                    gpu.gpu_id != 0
                        && self.assignment.of(gpu).is_ok_and(|other| other.actual == assigned.actual)
                };
                let node = image.nodes.iter().position(here).ok_or("the process does not have the GPU")?;
                Ok(self.shared_state.render(process, node))
            }
            (Space::Compute(_), _) | (Space::Unknown, Some(_)) => {
                self.render_node(host, assigned.actual, assigned.minor)
            }
            (Space::Own, _) | (Space::Unknown, None) => {
                Ok(host.store_fd(self.machine_nodes.open(assigned.minor)?.as_fd())?)
            }
        }
    }

    /// Imports the buffers of others with the numbers that were kept for them, and frees all other spare
    /// numbers.
    fn import_into(&mut self, host: &Host, index: usize, render: &Render) -> Answer {
        let imports: Vec<(usize, BufferSource)> =
            self.nodes[index].imports.iter().map(|(buffer, from)| (*buffer, *from)).collect();
        let mut used = self.nodes[index].own();
        for (buffer, from) in imports {
            let dmabuf = match from {
                BufferSource::Process(export) => self.exported(host, export)?,
                BufferSource::Node { node, buffer } => self.exported_by_node(host, node, buffer)?,
            };
            let node = &self.nodes[index];
            let wanted = node.contents.buffers[buffer].handle;
            render.close(wanted)?;
            node.check_number("buffer", wanted, render.import(dmabuf.as_fd())?)?;
            node.map(render, buffer)?;
            used.insert(wanted, buffer);
        }
        for spare in (1..=self.nodes[index].highest()).filter(|number| !used.contains_key(number)) {
            render.close(spare)?;
        }
        Ok(())
    }

    /// Returns a buffer of a render node, which is made now if no task has made it.
    fn exported_by_node(&mut self, host: &Host, index: usize, buffer: usize) -> Answer<OwnedFd> {
        let file = host.stored_fd(self.node_by_id(host, index)?)?;
        let node = &self.nodes[index];
        let handle = node.contents.buffers[buffer].handle;
        let dmabuf = Render::of(file, node.gpu.minor).export(handle)?;
        Ok(dmabuf.ok_or(NodeError::Bound { id: node.id, handle })?)
    }
}

/// Returns the arguments that make a buffer again. CRIU's plugin has the alignment in pages, as in the
/// kernel's list.
fn create_arguments(buffer: &RenderBuffer) -> drm_amdgpu_gem_create_in {
    let alignment = if buffer.alignment < PAGE { buffer.alignment * PAGE } else { buffer.alignment };
    drm_amdgpu_gem_create_in {
        bo_size: buffer.size,
        alignment,
        domains: u64::from(buffer.preferred_domains),
        domain_flags: buffer.alloc_flags,
    }
}

impl RenderNode {
    /// Returns the buffers that this file makes, by their numbers.
    fn own(&self) -> BTreeMap<u32, usize> {
        let own = (0..).zip(&self.contents.buffers).filter(|(index, _)| !self.has_import(*index));
        own.map(|(index, buffer)| (buffer.handle, index)).collect()
    }

    fn highest(&self) -> u32 {
        self.contents.buffers.iter().map(|buffer| buffer.handle).max().unwrap_or(0)
    }

    pub(super) fn check_number(&self, what: &'static str, wanted: u32, found: u32) -> Result<(), NodeError> {
        if found == wanted { Ok(()) } else { Err(NodeError::Number { id: self.id, what, wanted, found }) }
    }

    /// Maps a buffer at its earlier addresses in the file's address space, and sets its metadata.
    fn map(&self, render: &Render, buffer: usize) -> Answer {
        let buffer = &self.contents.buffers[buffer];
        for mapping in &buffer.mappings {
            let (addr, size) = (mapping.address, mapping.size);
            let entry = drm_amdgpu_gem_vm_entry { addr, size, offset: mapping.offset, flags: mapping.flags };
            render.map_again(buffer.handle, &entry)?;
        }
        self.describe(render, buffer.handle)
    }

    /// Makes submission contexts with their numbers. All get normal priority: the kernel does not report the
    /// one that they had.
    fn contexts(&self, render: &Render) -> Answer {
        let mut spare = Vec::new();
        for wanted in 1..=self.contexts.last().copied().unwrap_or(0) {
            self.check_number("context", wanted, render.context()?)?;
            if self.contexts.binary_search(&wanted).is_err() {
                spare.push(wanted);
            }
        }
        for context in spare {
            render.free_context(context)?;
        }
        Ok(())
    }
}
