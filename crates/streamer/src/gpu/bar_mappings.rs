// SPDX-License-Identifier: MIT OR Apache-2.0
//! Maps resident buffers of a process into this process, so that the CPU can read and write them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::BorrowedFd;

use rewake_amdgpu_uapi::Error;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::render::Render;

/// The mappings of buffers that were accessed; they are removed when this value is dropped.
#[derive(Debug, Default)]
pub(super) struct BarMappings {
    renders: BTreeMap<u32, Render>,
    /// By the image's numbers of the buffers.
    mappings: BTreeMap<usize, Mapping>,
}

impl BarMappings {
    /// Returns the mapping of a resident buffer that a program has mapped itself, so that CPUs can access
    /// it.
    ///
    /// # Errors
    /// The driver refuses to import or map the buffer.
    pub(super) fn of(
        &mut self,
        buffer: usize,
        minor: u32,
        dmabuf: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<&Mapping, Error> {
        let mapping = match self.mappings.entry(buffer) {
            Entry::Occupied(mapping) => return Ok(mapping.into_mut()),
            Entry::Vacant(mapping) => mapping,
        };
        let render = match self.renders.entry(minor) {
            Entry::Occupied(render) => render.into_mut(),
            Entry::Vacant(render) => render.insert(Render::open(minor)?),
        };
        Ok(mapping.insert(render.map(render.import(dmabuf)?, bytes)?))
    }
}
