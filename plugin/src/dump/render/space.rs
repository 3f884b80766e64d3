// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the render node that has the compute address space of a process, so that a restore gives it that
//! role again. No call reports it, but the driver maps compute buffers through that file only
//! (`drm_vma_node_allow` in `amdgpu_amdkfd_gpuvm.c`).

use std::os::fd::AsFd as _;

use rewake_amdgpu_uapi::abi::{
    KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM, KFD_IOC_ALLOC_MEM_FLAGS_GTT, KFD_IOC_ALLOC_MEM_FLAGS_VRAM,
};
use rewake_amdgpu_uapi::render::Render;
use rewake_criu_images::amdgpu::KfdBuffer;
use rewake_criu_plugin::Answer;

use super::listing::Listing;
use crate::device::Devices;
use crate::dump::EvictedProcess;
use crate::dump::tasks::Tasks;

/// Flags of buffers that are mapped through render nodes.
const MAPPED_THROUGH_RENDER_NODES: u32 = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_GTT;

/// The compute address spaces of the dumped processes.
#[derive(Debug)]
pub(in crate::dump) struct AddressSpaces<'a> {
    devices: &'a Devices,
    tasks: &'a Tasks,
    processes: &'a [EvictedProcess],
    /// Address spaces whose file was found or guessed: the process's file id, and the GPU's id in the
    /// topology.
    guessed: Vec<(u32, u32)>,
}

impl<'a> AddressSpaces<'a> {
    pub(in crate::dump) fn new(
        devices: &'a Devices,
        tasks: &'a Tasks,
        processes: &'a [EvictedProcess],
    ) -> Self {
        Self { devices, tasks, processes, guessed: Vec::new() }
    }

    /// Returns whether a process computes.
    pub(super) fn has_processes(&self) -> bool {
        !self.processes.is_empty()
    }

    /// Returns the id of a GPU in the dumped processes.
    pub(super) fn user_name(&self, gpu: u32) -> u32 {
        let names = self.processes.iter().flat_map(|process| &process.names);
        names.into_iter().find(|name| name.actual == gpu).map_or(gpu, |name| name.user)
    }

    /// Returns the id of the `/dev/kfd` of the process whose compute address space on that GPU is this
    /// file's.
    pub(super) fn of(&mut self, render: &Render, gpu: u32, listing: &Listing) -> Answer<Option<u32>> {
        for process in self.processes {
            let Some(name) = process.names.iter().find(|name| name.actual == gpu) else { continue };
            if !self.tasks.any_has(self.devices, render.as_fd(), process.kfd.as_fd()) {
                continue;
            }
            let is_exclusive_and_unlisted = |buffer: &&KfdBuffer| {
                buffer.gpu_id == name.user
                    && buffer.alloc_flags & MAPPED_THROUGH_RENDER_NODES != 0
                    && self.is_exclusive(process, buffer)
                    && !listing.buffers.iter().any(|own| own.image.offset == buffer.offset)
            };
            let is_compute_space = match process.buffers.iter().find(is_exclusive_and_unlisted) {
                Some(buffer) => render.may_map(buffer.offset)?,
                // No buffer identifies the file: use the first one.
                None => !self.guessed.contains(&(process.id, gpu)),
            };
            if is_compute_space {
                self.guessed.push((process.id, gpu));
                return Ok(Some(process.id));
            }
        }
        Ok(None)
    }

    /// Removes the mappings of compute buffers. The kernel lists them with all others, and they are restored
    /// with the process.
    pub(super) fn remove_compute_mappings(&self, kfd: u32, listing: &mut Listing) {
        let Some(process) = self.processes.iter().find(|process| process.id == kfd) else { return };
        let range = |buffer: &KfdBuffer| {
            // The driver maps such a buffer twice in a row. Images have the size of one mapping.
            let twice = buffer.alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM != 0;
            let size = if twice { buffer.size.saturating_mul(2) } else { buffer.size };
            buffer.address..buffer.address.saturating_add(size)
        };
        let ranges: Vec<_> = process.buffers.iter().map(range).collect();
        for buffer in &mut listing.buffers {
            buffer
                .image
                .mappings
                .retain(|mapping| !ranges.iter().any(|range| range.contains(&mapping.address)));
            buffer.image.address = buffer.image.mappings.last().map_or(0, |mapping| mapping.address);
        }
    }

    /// Returns whether no other process has the buffer. Every process that has it may map it.
    fn is_exclusive(&self, process: &EvictedProcess, buffer: &KfdBuffer) -> bool {
        let others = self.processes.iter().filter(|other| other.id != process.id);
        others.flat_map(|other| &other.buffers).all(|other| other.offset != buffer.offset)
    }
}
