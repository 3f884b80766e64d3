// SPDX-License-Identifier: MIT OR Apache-2.0
//! A render node made anew, in the task that is asked for it, or in the first one that needs a buffer of it.
//!
//! A process knows its buffers and contexts by number, and the driver gives the lowest that is free: all numbers up to the
//! highest are made, and those that nobody had are let go of at the end. A file makes what is its own without waiting
//! for anybody, and then waits for what others make.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};

use rewake_amdgpu_uapi::abi::memory::PAGE;
use rewake_amdgpu_uapi::abi::{AMDGPU_GEM_DOMAIN_GTT, drm_amdgpu_gem_create_in, drm_amdgpu_gem_vm_entry};
use rewake_amdgpu_uapi::render::Render;
use rewake_criu_images::amdgpu::RenderBuffer;
use rewake_criu_plugin::{Answer, Host};

use super::{From, Node, Space};
use crate::restore::Restore;
use crate::restore::shared_state::MmapOffset;

#[derive(Debug, thiserror::Error)]
enum Unmade {
    #[error(
        "a render node (file {id:#x}) had {what} {wanted}, and the driver gives number {found}: who else uses this file?"
    )]
    Number { id: u32, what: &'static str, wanted: u32, found: u32 },
    #[error(
        "buffer {handle} of a render node (file {id:#x}) cannot be loaded: the driver gives no dma-buf of it"
    )]
    Bound { id: u32, handle: u32 },
}

impl Restore {
    /// A render node, whole but for the bytes of its buffers.
    pub(in crate::restore) fn render_file(&mut self, host: &Host, index: usize) -> Answer<OwnedFd> {
        let file = host.stored_fd(self.made(host, index)?)?;
        let render = Render::of(file.try_clone()?, self.nodes[index].place.minor);
        self.import_into(host, index, &render)?;
        Ok(file)
    }

    /// A render node with what is its own, by its id in CRIU's store.
    fn made(&mut self, host: &Host, index: usize) -> Answer<i32> {
        if self.board.take_node(index) {
            return self.make(host, index).inspect_err(|_| self.board.node_failed(index));
        }
        Ok(self.board.wait_node(index, self.nodes[index].id)?)
    }

    fn make(&mut self, host: &Host, index: usize) -> Answer<i32> {
        let stored = self.node_file(host, index)?;
        let node = &self.nodes[index];
        let render = Render::of(host.stored_fd(stored)?, node.place.minor);
        let own = node.own();
        for wanted in 1..=node.highest() {
            let found = match own.get(&wanted) {
                Some(buffer) => render.create_as(again(&node.contents.buffers[*buffer]))?,
                None => render.create(PAGE, AMDGPU_GEM_DOMAIN_GTT, 0)?,
            };
            node.check_number("buffer", wanted, found)?;
        }
        let mut dmabufs: Vec<Option<OwnedFd>> = node.contents.buffers.iter().map(|_| None).collect();
        for (handle, buffer) in own {
            node.map(&render, buffer)?;
            let offset = render.offset(handle)?;
            self.board.put_node_buffer(index, buffer, offset.map_or(MmapOffset::Nowhere, MmapOffset::Offset));
            let dmabuf = render.export(handle)?.ok_or(Unmade::Bound { id: node.id, handle })?;
            dmabufs[buffer] = Some(dmabuf);
        }
        node.contexts(&render)?;
        if dmabufs.iter().any(Option::is_some) {
            self.board.put_node_contents(index, Self::hand_over(host, &dmabufs)?);
        }
        self.board.put_node(index, stored);
        Ok(stored)
    }

    /// The file that a render node is to be, with nothing in it, by its id in CRIU's store.
    fn node_file(&mut self, host: &Host, index: usize) -> Answer<i32> {
        let place = self.nodes[index].place;
        match (self.nodes[index].space, self.own) {
            (Space::Compute(process), own) if own != Some(process) => {
                let image = &self.images.kfd[process].1;
                self.board.wait(process, image.pid)?;
                let here = |node: &rewake_criu_images::amdgpu::Node| {
                    let gpu = &node.properties;
                    gpu.gpu_id != 0 && self.places.of(gpu).is_ok_and(|other| other.actual == place.actual)
                };
                let node = image.nodes.iter().position(here).ok_or("the process does not have the GPU")?;
                Ok(self.board.render(process, node))
            }
            (Space::Compute(_), _) | (Space::Unknown, Some(_)) => {
                self.render_node(host, place.actual, place.minor)
            }
            (Space::Own, _) | (Space::Unknown, None) => {
                Ok(host.store_fd(Render::open(place.minor)?.as_fd())?)
            }
        }
    }

    /// Puts what others make in the places that were kept for it, and lets go of the other places.
    fn import_into(&mut self, host: &Host, index: usize, render: &Render) -> Answer {
        let imports: Vec<(usize, From)> =
            self.nodes[index].imports.iter().map(|(buffer, from)| (*buffer, *from)).collect();
        let mut taken = self.nodes[index].own();
        for (buffer, from) in imports {
            let dmabuf = match from {
                From::Process(export) => self.shown(host, export)?,
                From::Node { node, buffer } => self.shown_by(host, node, buffer)?,
            };
            let node = &self.nodes[index];
            let wanted = node.contents.buffers[buffer].handle;
            render.close(wanted)?;
            node.check_number("buffer", wanted, render.import(dmabuf.as_fd())?)?;
            node.map(render, buffer)?;
            taken.insert(wanted, buffer);
        }
        for spare in (1..=self.nodes[index].highest()).filter(|number| !taken.contains_key(number)) {
            render.close(spare)?;
        }
        Ok(())
    }

    /// A buffer that a render node makes, which is made now if nobody has made it.
    fn shown_by(&mut self, host: &Host, index: usize, buffer: usize) -> Answer<OwnedFd> {
        let file = host.stored_fd(self.made(host, index)?)?;
        let node = &self.nodes[index];
        let handle = node.contents.buffers[buffer].handle;
        let dmabuf = Render::of(file, node.place.minor).export(handle)?;
        Ok(dmabuf.ok_or(Unmade::Bound { id: node.id, handle })?)
    }
}

/// What a buffer is made anew with. CRIU's plugin keeps its alignment in pages, as the kernel's list has it.
fn again(buffer: &RenderBuffer) -> drm_amdgpu_gem_create_in {
    let alignment = if buffer.alignment < PAGE { buffer.alignment * PAGE } else { buffer.alignment };
    drm_amdgpu_gem_create_in {
        bo_size: buffer.size,
        alignment,
        domains: u64::from(buffer.preferred_domains),
        domain_flags: buffer.alloc_flags,
    }
}

impl Node {
    /// Buffers that this file makes, by their numbers.
    fn own(&self) -> BTreeMap<u32, usize> {
        let own = (0..).zip(&self.contents.buffers).filter(|(index, _)| !self.has_import(*index));
        own.map(|(index, buffer)| (buffer.handle, index)).collect()
    }

    fn highest(&self) -> u32 {
        self.contents.buffers.iter().map(|buffer| buffer.handle).max().unwrap_or(0)
    }

    fn check_number(&self, what: &'static str, wanted: u32, found: u32) -> Result<(), Unmade> {
        if found == wanted { Ok(()) } else { Err(Unmade::Number { id: self.id, what, wanted, found }) }
    }

    /// Maps a buffer where it was in the file's address space.
    fn map(&self, render: &Render, buffer: usize) -> Answer {
        let buffer = &self.contents.buffers[buffer];
        for mapping in &buffer.mappings {
            let (addr, size) = (mapping.address, mapping.size);
            let entry = drm_amdgpu_gem_vm_entry { addr, size, offset: mapping.offset, flags: mapping.flags };
            render.map_again(buffer.handle, &entry)?;
        }
        Ok(())
    }

    /// Submission contexts by their numbers, of normal priority: which one they had is not told.
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
