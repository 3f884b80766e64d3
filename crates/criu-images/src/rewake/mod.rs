// SPDX-License-Identifier: MIT OR Apache-2.0
//! Images that this project's plugins write beside CRIU's. CRIU and its own plugins do not look at them.
//!
//! * [`SharedImage`]: `rewake-shared.img`, what processes of a tree have in common on their GPUs.

mod bare;
mod render;
mod shared;

pub use bare::{BareMapping, BareMappings};
pub use render::{BufferOwner, RenderFile, RenderImport};
pub use shared::{BufferUser, MAX_SHARED, SHARED_NAME, SecondFile, SharedBuffer, SharedImage};

pub(crate) use shared::parse as parse_shared;

use crate::amdgpu::contents::contents;
use crate::dir::ImageDir;
use crate::error::Result;

impl ImageDir {
    /// What processes have in common on their GPUs; `None` where there is no such image.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn shared(&self) -> Result<Option<SharedImage>> {
        let Some((path, file, len)) = self.file(SHARED_NAME)? else { return Ok(None) };
        shared::parse(&path, &contents(&path, file, len)?).map(Some)
    }
}
