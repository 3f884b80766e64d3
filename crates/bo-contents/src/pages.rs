// SPDX-License-Identifier: MIT OR Apache-2.0
//! The layout of a pages file: the length of the contents in 8 bytes, then the bytes of the buffers. KFD
//! buffers of a process have one file for each GPU. Each buffer of a render node has its own.

use std::fs::File;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rewake_criu_images::amdgpu::{KfdImage, RenderContents, drm_pages_name, pages_name};
use rewake_image_io::{ImageFile, read_now};
use rewake_manifest::{ImageChecksums, MANIFEST_NAME};

use crate::folder::{self as image, FileError};

/// Bytes of a chunk, which fits a slot of staging memory.
pub(crate) const CHUNK: u64 = 2 << 20;
/// Bytes of the length at the start of a file.
pub(crate) const HEADER: u64 = 8;

/// A file with the memory of buffers of one GPU.
#[derive(Debug)]
pub struct GpuPagesFile {
    pub(crate) name: String,
    pub(crate) file: Arc<ImageFile>,
    /// The N of the GPU's `/dev/dri/renderDN`.
    pub(crate) minor: u32,
    /// The buffers in file order.
    stretches: Vec<Stretch>,
    /// The length of the whole file.
    pub(crate) length: u64,
}

/// A buffer's bytes in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stretch {
    /// The number of the buffer.
    pub(crate) buffer: usize,
    /// The first byte in the file.
    pub(crate) start: u64,
    /// The number of bytes.
    pub(crate) bytes: u64,
}

impl Stretch {
    /// Returns the chunks that hold the bytes, or `None` if there are no bytes.
    pub(crate) fn chunks(&self) -> Option<RangeInclusive<u64>> {
        let last = (self.start + self.bytes).checked_sub(1).filter(|_| self.bytes > 0)?;
        Some(self.start / CHUNK..=last / CHUNK)
    }
}

/// Bytes of a buffer in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The number of the buffer.
    pub(crate) buffer: usize,
    /// The first byte in the buffer.
    pub(crate) at: u64,
    /// The first byte in the file.
    pub(crate) offset: u64,
    /// The number of bytes.
    pub(crate) bytes: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("{found}, where buffers need {expected}: the image is damaged or incomplete")]
struct Length {
    expected: u64,
    found: String,
}

#[derive(Debug, thiserror::Error)]
#[error("its image was sealed without it, or with another length: copy the image again")]
struct Unsealed;

impl GpuPagesFile {
    /// Creates a file of full length. It is a hole, except for the length of the contents.
    pub fn create(
        folder: BorrowedFd<'_>,
        id: u32,
        image: &KfdImage,
        gpu: u32,
        minor: u32,
    ) -> Result<Self, FileError> {
        Self::create_with_layout(folder, pages_name(id, gpu), minor, of_gpu(image, gpu))
    }

    /// As [`GpuPagesFile::create`], for one buffer of a render node. `minor` is the GPU's number on this
    /// host.
    pub fn create_render(
        folder: BorrowedFd<'_>,
        contents: &RenderContents,
        buffer: usize,
        minor: u32,
    ) -> Result<Self, FileError> {
        let name = drm_pages_name(contents.id, contents.minor, buffer);
        Self::create_with_layout(folder, name, minor, of_buffer(contents, buffer))
    }

    /// Opens a file, and refuses one whose length does not match the image's buffers.
    pub fn open(
        folder: BorrowedFd<'_>,
        id: u32,
        image: &KfdImage,
        gpu: u32,
        minor: u32,
    ) -> Result<Self, FileError> {
        let pages = Self::open_existing(folder, pages_name(id, gpu), minor, of_gpu(image, gpu))?;
        pages.check_header().map_err(FileError::of("read", &pages.name))?;
        Ok(pages)
    }

    /// Takes over the file of a partial image: what it lacks is requested. The plugin compares the header.
    ///
    /// # Errors
    /// Its length does not match the image's buffers.
    pub fn arriving(
        file: &Arc<ImageFile>,
        image: &KfdImage,
        gpu: u32,
        minor: u32,
    ) -> Result<Self, FileError> {
        let name = file.name().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (stretches, length) = of_gpu(image, gpu);
        let pages = Self { name, file: Arc::clone(file), minor, stretches, length };
        pages.check_length()?;
        Ok(pages)
    }

    /// As [`GpuPagesFile::open`], for one buffer of a render node. CRIU's plugin does not set the header of
    /// such files.
    pub fn open_render(
        folder: BorrowedFd<'_>,
        contents: &RenderContents,
        buffer: usize,
        minor: u32,
    ) -> Result<Self, FileError> {
        let name = drm_pages_name(contents.id, contents.minor, buffer);
        Self::open_existing(folder, name, minor, of_buffer(contents, buffer))
    }

    /// Has every block that is loaded checked with the checksums of its image. Of a partial image, a fetcher
    /// may write the file meanwhile.
    ///
    /// # Errors
    /// The file was sealed with another length, or not at all.
    pub fn verify_with(&self, sealed: &ImageChecksums) -> Result<(), FileError> {
        let checksums = sealed.of(&self.name, self.file.len());
        let unsealed = || FileError::of("verify", &self.name)(io::Error::other(Unsealed));
        self.file.verify_with(checksums.ok_or_else(unsealed)?);
        if sealed.is_partial {
            self.allow_arrival();
        }
        Ok(())
    }

    /// Accepts that a fetcher writes the file meanwhile. What is loaded must have arrived, if the image is
    /// not sealed.
    pub fn allow_arrival(&self) {
        self.file.allow_arrival();
    }

    /// Returns the name of the file.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the ranges of the file with the bytes of these buffers, in ascending order. Adjacent ones are
    /// one range.
    #[must_use]
    pub fn ranges(&self, is_one: impl Fn(usize) -> bool) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for stretch in self.stretches.iter().filter(|stretch| stretch.bytes > 0 && is_one(stretch.buffer)) {
            let end = stretch.start + stretch.bytes;
            match ranges.last_mut() {
                Some(last) if last.end == stretch.start => last.end = end,
                _ => ranges.push(stretch.start..end),
            }
        }
        ranges
    }

    fn create_with_layout(
        folder: BorrowedFd<'_>,
        name: String,
        minor: u32,
        layout: Layout,
    ) -> Result<Self, FileError> {
        // It is of an earlier image in the directory.
        image::remove(folder, MANIFEST_NAME)?;
        let file = image::create(folder, &name)?;
        let made = file.set_len(layout.1);
        let made = made.and_then(|()| file.write_all_at(&(layout.1 - HEADER).to_le_bytes(), 0));
        made.map_err(FileError::of("write", &name))?;
        Self::with_layout(name, file, minor, layout)
    }

    fn open_existing(
        folder: BorrowedFd<'_>,
        name: String,
        minor: u32,
        layout: Layout,
    ) -> Result<Self, FileError> {
        let file = image::open(folder, &name)?;
        let pages = Self::with_layout(name, file, minor, layout)?;
        pages.check_length()?;
        Ok(pages)
    }

    fn check_length(&self) -> Result<(), FileError> {
        let (found, expected) = (self.file.len(), self.length);
        if found < expected {
            let wrong = Length { expected, found: format!("{found} bytes") };
            return Err(FileError::of("read", &self.name)(io::Error::other(wrong)));
        }
        Ok(())
    }

    fn with_layout(name: String, file: File, minor: u32, layout: Layout) -> Result<Self, FileError> {
        let file = ImageFile::from_file(file, &name)
            .map_err(|error| FileError::of("open", &name)(io::Error::other(error)))?;
        let (stretches, length) = layout;
        Ok(Self { name, file, minor, stretches, length })
    }

    fn check_header(&self) -> io::Result<()> {
        let wrong = |found| io::Error::other(Length { expected: self.length, found });
        let mut header = [0; 8];
        read_now(&self.file, 0, &mut header).map_err(io::Error::other)?;
        let content_bytes = u64::from_le_bytes(header);
        if content_bytes != self.length - HEADER {
            return Err(wrong(format!("contents of {content_bytes} bytes by its header")));
        }
        Ok(())
    }

    /// Returns the number of chunks that hold bytes of buffers.
    pub(crate) fn chunks(&self) -> u64 {
        if self.length > HEADER { self.length.div_ceil(CHUNK) } else { 0 }
    }

    /// Returns the first byte of a chunk in the file, and the byte after its last.
    pub(crate) fn range(&self, chunk: u64) -> (u64, u64) {
        let start = chunk * CHUNK;
        (start, (start + CHUNK).min(self.length))
    }

    /// Returns the pieces of a chunk, in file order.
    pub(crate) fn pieces(&self, chunk: u64) -> impl Iterator<Item = Piece> {
        let (start, end) = self.range(chunk);
        let first = self.stretches.partition_point(|stretch| stretch.start + stretch.bytes <= start);
        let inside = self.stretches[first..].iter().take_while(move |stretch| stretch.start < end);
        inside.filter(|stretch| stretch.bytes > 0).map(move |stretch| {
            let offset = stretch.start.max(start);
            let bytes = (stretch.start + stretch.bytes).min(end) - offset;
            Piece { buffer: stretch.buffer, at: offset - stretch.start, offset, bytes }
        })
    }

    /// Returns the buffers in file order.
    pub(crate) fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }
}

/// The buffers of a file, and its length.
type Layout = (Vec<Stretch>, u64);

fn of_gpu(image: &KfdImage, gpu: u32) -> Layout {
    let (stretches, length) = image.pages(gpu);
    let stretches = stretches.iter().map(|stretch| Stretch {
        buffer: stretch.buffer,
        start: stretch.file_offset,
        bytes: image.buffers[stretch.buffer].size,
    });
    (stretches.collect(), length)
}

fn of_buffer(contents: &RenderContents, buffer: usize) -> Layout {
    let bytes = contents.buffers[buffer].size;
    let start = RenderContents::PAGES_OFFSET;
    (vec![Stretch { buffer, start, bytes }], start.saturating_add(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rewake_criu_images::amdgpu::KfdBuffer;

    use super::*;

    /// Creates an image with buffers of these sizes. Every third buffer is on GPU 8, the others on GPU 7.
    fn image(sizes: &[u64]) -> KfdImage {
        let buffer = |(index, size): (usize, &u64)| KfdBuffer {
            size: *size,
            gpu_id: if index % 3 == 2 { 8 } else { 7 },
            alloc_flags: 1,
            ..KfdBuffer::default()
        };
        KfdImage { buffers: sizes.iter().enumerate().map(buffer).collect(), ..KfdImage::default() }
    }

    fn new_file(sizes: &[u64]) -> (tempfile::TempDir, GpuPagesFile) {
        let folder = tempfile::tempdir().unwrap();
        let open = File::open(folder.path()).unwrap();
        let file = GpuPagesFile::create(open.as_fd(), 3, &image(sizes), 7, 128).unwrap();
        (folder, file)
    }

    #[test]
    fn every_byte_of_every_buffer_is_in_one_chunk() {
        let sizes = [4096, 5 * CHUNK, 1, CHUNK - 4104, 4096, 9, 12288];
        let (_folder, file) = new_file(&sizes);
        let mut next = vec![0; sizes.len()];
        let mut offset = HEADER;
        for chunk in 0..file.chunks() {
            let (start, end) = file.range(chunk);
            for piece in file.pieces(chunk) {
                assert!(piece.offset >= start && piece.offset + piece.bytes <= end);
                assert_eq!((piece.offset, piece.at), (offset, next[piece.buffer]), "pieces are adjacent");
                offset += piece.bytes;
                next[piece.buffer] += piece.bytes;
            }
        }
        assert_eq!(offset, file.length);
        assert_eq!(next, [4096, 5 * CHUNK, 0, CHUNK - 4104, 4096, 0, 12288], "bytes on GPU 7");
        let mut in_chunks = vec![0; sizes.len()];
        for stretch in file.stretches() {
            in_chunks[stretch.buffer] = stretch.chunks().unwrap().count();
        }
        assert_eq!(in_chunks, [1, 6, 0, 1, 1, 0, 1], "one buffer ends at the end of its chunk");
    }

    #[test]
    fn a_process_without_memory_on_a_gpu_has_a_file_without_chunks() {
        let (_folder, file) = new_file(&[]);
        assert_eq!((file.chunks(), file.length), (0, HEADER));
    }

    #[test]
    fn a_buffer_without_bytes_is_in_no_chunk() {
        let (_folder, file) = new_file(&[0, 4096, 9, 0, 4096]);
        assert_eq!(file.pieces(0).map(|piece| piece.buffer).collect::<Vec<_>>(), [1, 4]);
        let chunks: Vec<_> = file.stretches().iter().map(Stretch::chunks).collect();
        assert_eq!(chunks, [None, Some(0..=0), None, Some(0..=0)]);
    }

    #[test]
    fn a_file_of_another_length_is_refused_with_both_lengths() {
        let sizes = [4096, 8192];
        let (folder, file) = new_file(&sizes);
        let open = || {
            let folder = File::open(folder.path()).unwrap();
            GpuPagesFile::open(folder.as_fd(), 3, &image(&sizes), 7, 128).map_err(|error| {
                let cause = std::error::Error::source(&error).unwrap();
                format!("{error}: {cause}")
            })
        };
        open().unwrap();
        let written = File::options().write(true).open(folder.path().join(&file.name)).unwrap();
        written.write_all_at(&4096_u64.to_le_bytes(), 0).unwrap();
        let error = open().unwrap_err();
        assert!(error.contains("contents of 4096 bytes by its header, where buffers need 12296"), "{error}");
        written.set_len(100).unwrap();
        let error = open().unwrap_err();
        assert!(error.starts_with("read amdgpu-pages-3-0007.img"), "{error}");
        assert!(error.contains("100 bytes, where buffers need 12296"), "{error}");
    }
}
