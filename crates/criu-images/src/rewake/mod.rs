// SPDX-License-Identifier: MIT OR Apache-2.0
//! Images that Rewake's plugins write in addition to CRIU's. CRIU and its own plugins ignore them.
//!
//! - [`SharedImage`]: `rewake-shared.img`, the GPU objects that processes of a tree share.

mod buffer_user;
mod freed_mappings;
mod render;
mod render_state;
mod shared;

pub use buffer_user::{BufferUser, MAX_SHARED};
pub use freed_mappings::{FreedMapping, FreedMappings};
pub use render::{BufferOwner, RenderFile, RenderImport};
pub use render_state::{
    BufferMetadata, MAX_SUBMISSIONS, MAX_SYNCOBJS, RenderState, StablePstate, Submissions, Syncobj,
};
pub use shared::{SHARED_NAME, SecondFile, SharedBuffer, SharedImage};

#[cfg(feature = "testing")]
pub(crate) use shared::parse as parse_shared;

use crate::amdgpu::contents::contents;
use crate::dir::ImageDir;
use crate::error::Result;

impl ImageDir {
    /// Reads the GPU objects that processes share; `None` without such an image.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn shared(&self) -> Result<Option<SharedImage>> {
        let Some((path, file, len)) = self.file(SHARED_NAME)? else { return Ok(None) };
        shared::parse(&path, &contents(&path, file, len)?).map(Some)
    }
}
