// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that `rewake_image_io` may read files into.

use std::ptr::NonNull;
use std::sync::Arc;

use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_image_io::Memory;
use rewake_sdma_copy::{Shape, Staging, StagingOffset};

/// Memory that files are read into and written from, slot by slot.
#[derive(Debug, Clone)]
pub(crate) enum IoMemory {
    /// Staging memory of ordinary pages.
    Staging(Staging),
    /// Memory of this process, where files cannot be read into staging memory.
    Own(Arc<Mapping>),
}

// SAFETY: all are mapped until the last clone is dropped, and none is ever borrowed: all accesses are
// volatile copies.
unsafe impl Memory for IoMemory {
    fn start(&self) -> NonNull<u8> {
        match self {
            Self::Staging(staging) => {
                let slot = staging.slots().next().expect("staging memory has slots");
                staging.pointer(StagingOffset { slot, at: 0 }, 0)
            }
            Self::Own(mapping) => mapping.pointer(0, 0),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Staging(staging) => {
                let Shape { slots, slot_bytes } = staging.shape();
                usize::try_from(u64::from(slots) * slot_bytes).unwrap_or(0)
            }
            Self::Own(mapping) => usize::try_from(mapping.len()).unwrap_or(0),
        }
    }
}
