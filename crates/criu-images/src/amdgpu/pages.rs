// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files with the contents of buffers: [`HEADER`] bytes, then the contents without gaps.

use std::os::unix::fs::FileExt as _;

use super::contents::{HEADER, damaged};
use super::{KfdImage, RenderContents, drm_pages_name, pages_name};
use crate::dir::{ImageDir, io_error};
use crate::error::{ImageError, Result};
use crate::plan::PagesFile;

impl ImageDir {
    /// Opens the contents of the buffers of one GPU of `image`, the image of the open file `id`, and checks
    /// their length. [`KfdImage::pages`] gives the place of each buffer.
    ///
    /// # Errors
    /// The file is missing, truncated, or belongs to another image.
    pub fn gpu_pages(&self, id: u32, image: &KfdImage, gpu_id: u32) -> Result<PagesFile> {
        let (_, end) = image.pages(gpu_id);
        let pages = self.pages_of(&pages_name(id, gpu_id), end)?;
        let mut header = [0; size_of::<u64>()];
        let read = pages.file.read_exact_at(&mut header, 0);
        read.map_err(|error| io_error("read", &pages.path, error))?;
        // CRIU's plugin refuses another sum, too.
        let (claimed, sum) = (u64::from_le_bytes(header), end - HEADER);
        if claimed != sum {
            let expected = format!("contents of {sum} bytes, as in {}", super::kfd_name(id));
            return Err(damaged(&pages.path, 0, expected, format!("{claimed} bytes")));
        }
        Ok(pages)
    }

    /// Opens the contents of buffer `index` of a render node: the file's bytes from
    /// [`RenderContents::PAGES_OFFSET`] on. The bytes before are meaningless: CRIU's plugin has not always
    /// set them.
    ///
    /// # Errors
    /// The file is missing or truncated.
    ///
    /// # Panics
    /// `index` is not a buffer of the render node.
    pub fn render_pages(&self, contents: &RenderContents, index: usize) -> Result<PagesFile> {
        let end = RenderContents::PAGES_OFFSET.saturating_add(contents.buffers[index].size);
        self.pages_of(&drm_pages_name(contents.id, contents.minor, index), end)
    }

    /// Opens a file that must have at least `expected` bytes.
    fn pages_of(&self, name: &str, expected: u64) -> Result<PagesFile> {
        let missing = || ImageError::Missing {
            file: self.path().join(name),
            expected: "the contents of buffers of a GPU",
        };
        let (path, file, len) = self.file(name)?.ok_or_else(missing)?;
        if len < expected {
            return Err(ImageError::PagesTruncated { file: path, len, expected });
        }
        Ok(PagesFile { path, file, len })
    }
}
