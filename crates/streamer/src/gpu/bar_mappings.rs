// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPU's view of buffers that are there.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::BorrowedFd;

use rewake_amdgpu_uapi::Error;
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::render::Render;

/// Of buffers that were looked at, until it is dropped.
#[derive(Debug, Default)]
pub(super) struct BarMappings {
    renders: BTreeMap<u32, Render>,
    /// By the process's place among those loaded, and the image's number.
    views: BTreeMap<(usize, usize), Mapping>,
}

impl BarMappings {
    /// Of a buffer that is resident, and that a program has mapped itself: CPUs reach it.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn of(
        &mut self,
        buffer: (usize, usize),
        minor: u32,
        dmabuf: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<&Mapping, Error> {
        let view = match self.views.entry(buffer) {
            Entry::Occupied(view) => return Ok(view.into_mut()),
            Entry::Vacant(view) => view,
        };
        let render = match self.renders.entry(minor) {
            Entry::Occupied(render) => render.into_mut(),
            Entry::Vacant(render) => render.insert(Render::open(minor)?),
        };
        Ok(view.insert(render.map(render.import(dmabuf)?, bytes)?))
    }
}
