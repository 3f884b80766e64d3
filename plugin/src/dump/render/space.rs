// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which render node has the compute address space of a process: it must come back as that one. No call tells; but the
//! driver maps the compute side's buffers through that file only (`drm_vma_node_allow` in `amdgpu_amdkfd_gpuvm.c`).

use std::os::fd::AsFd as _;

use rewake_amdgpu_uapi::abi::{
    KFD_IOC_ALLOC_MEM_FLAGS_AQL_QUEUE_MEM, KFD_IOC_ALLOC_MEM_FLAGS_GTT, KFD_IOC_ALLOC_MEM_FLAGS_VRAM,
};
use rewake_amdgpu_uapi::render::Render;
use rewake_criu_images::amdgpu::KfdBuffer;
use rewake_criu_plugin::Answer;

use super::listing::Listing;
use crate::device::Devices;
use crate::dump::Process;
use crate::dump::tasks::Tasks;

/// Buffers that are mapped through render nodes.
const OF_RENDER_NODES: u32 = KFD_IOC_ALLOC_MEM_FLAGS_VRAM | KFD_IOC_ALLOC_MEM_FLAGS_GTT;

/// What processes compute, and where.
#[derive(Debug)]
pub(in crate::dump) struct Spaces<'a> {
    devices: &'a Devices,
    tasks: &'a Tasks,
    processes: &'a [Process],
    /// Files' ids and GPUs' names in the machine of spaces whose file was guessed.
    guessed: Vec<(u32, u32)>,
}

impl<'a> Spaces<'a> {
    pub(in crate::dump) fn new(devices: &'a Devices, tasks: &'a Tasks, processes: &'a [Process]) -> Self {
        Self { devices, tasks, processes, guessed: Vec::new() }
    }

    /// Whether anybody computes.
    pub(super) fn are_some(&self) -> bool {
        !self.processes.is_empty()
    }

    /// A GPU's name in the dumped processes.
    pub(super) fn name(&self, gpu: u32) -> u32 {
        let names = self.processes.iter().flat_map(|process| &process.names);
        names.into_iter().find(|name| name.actual == gpu).map_or(gpu, |name| name.user)
    }

    /// The id of the `/dev/kfd` of the process whose compute address space on that GPU is this file's.
    pub(super) fn of(&mut self, render: &Render, gpu: u32, listing: &Listing) -> Answer<Option<u32>> {
        for process in self.processes {
            let Some(name) = process.names.iter().find(|name| name.actual == gpu) else { continue };
            if !self.tasks.one_has(self.devices, render.as_fd(), process.kfd.as_fd()) {
                continue;
            }
            let told = |buffer: &&KfdBuffer| {
                buffer.gpu_id == name.user
                    && buffer.alloc_flags & OF_RENDER_NODES != 0
                    && self.is_one_s(process, buffer)
                    && !listing.buffers.iter().any(|own| own.image.offset == buffer.offset)
            };
            let its = match process.buffers.iter().find(told) {
                Some(buffer) => render.may_map(buffer.offset)?,
                // Nothing to ask about: the first file is taken for it.
                None => !self.guessed.contains(&(process.id, gpu)),
            };
            if its {
                self.guessed.push((process.id, gpu));
                return Ok(Some(process.id));
            }
        }
        Ok(None)
    }

    /// Takes out what the compute side has mapped in its address space: the kernel tells of it as of all other mappings, and
    /// it comes back with the process.
    pub(super) fn leave_out(&self, kfd: u32, listing: &mut Listing) {
        let Some(process) = self.processes.iter().find(|process| process.id == kfd) else { return };
        let range = |buffer: &KfdBuffer| {
            // Mapped twice in a row; images have the single size.
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

    /// Whether no other process has the buffer: each that has may map it.
    fn is_one_s(&self, process: &Process, buffer: &KfdBuffer) -> bool {
        let others = self.processes.iter().filter(|other| other.id != process.id);
        others.flat_map(|other| &other.buffers).all(|other| other.offset != buffer.offset)
    }
}
