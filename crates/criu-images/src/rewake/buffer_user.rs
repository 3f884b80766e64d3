// SPDX-License-Identifier: MIT OR Apache-2.0
//! A buffer of one process, as other processes name it.

use crate::amdgpu::MAX_BUFFERS;
use crate::amdgpu::record::record;
use crate::generated::gpu as raw;

/// The most users of buffers, and the most second files, of an image.
pub const MAX_SHARED: usize = MAX_BUFFERS;

record! {
    /// A buffer of one process.
    #[derive(PartialOrd, Ord)]
    BufferUser = raw::BufferUser {
        /// Id of the process's `/dev/kfd`: [`crate::amdgpu::kfd_name`] gives the name of its image.
        kfd: u32,
        /// Index in [`crate::amdgpu::KfdImage::buffers`].
        buffer: u32,
    }
}
