// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is where in a pages file: the length of the contents in 8 bytes, then the buffers' bytes one after the other. A GPU's
//! compute side has one for each process, a render node one for each buffer.

use std::fs::File;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use rewake_criu_images::amdgpu::{KfdImage, RenderContents, drm_pages_name, pages_name};
use rewake_image_io::files::TransferFile;

use crate::duplicate_finder::TWINS;
use crate::folder::{self as image, FileError};

/// Bytes of a chunk: what a slot of staging memory holds.
pub(crate) const CHUNK: u64 = 2 << 20;
/// Bytes of the length at the start.
pub(crate) const HEADER: u64 = 8;

/// The memory of buffers of one GPU.
#[derive(Debug)]
pub struct PagesFile {
    pub(crate) name: String,
    pub(crate) file: Arc<TransferFile>,
    /// The N of the GPU's `/dev/dri/renderDN`.
    pub(crate) minor: u32,
    /// In the file's order.
    stretches: Vec<Stretch>,
    /// Of the whole file.
    pub(crate) length: u64,
    /// Of one that is read: when it had been written.
    written: Option<SystemTime>,
    /// What was last found to be no hole. To look where it ends, the file system goes through all of it.
    data: Mutex<Range<u64>>,
}

/// All of a buffer in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stretch {
    /// Which.
    pub(crate) buffer: usize,
    /// First byte in the file.
    pub(crate) start: u64,
    /// How many.
    pub(crate) bytes: u64,
}

impl Stretch {
    /// The chunks that it has bytes in: none if it has no bytes.
    pub(crate) fn chunks(&self) -> Option<RangeInclusive<u64>> {
        let last = (self.start + self.bytes).checked_sub(1).filter(|_| self.bytes > 0)?;
        Some(self.start / CHUNK..=last / CHUNK)
    }
}

/// Bytes of a buffer in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Which.
    pub(crate) buffer: usize,
    /// First byte in the buffer.
    pub(crate) at: u64,
    /// First byte in the file.
    pub(crate) offset: u64,
    /// How many.
    pub(crate) bytes: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("{found}, where buffers need {expected}: the image is damaged, or not complete")]
struct Length {
    expected: u64,
    found: String,
}

#[derive(Debug, thiserror::Error)]
#[error("it was written while it was loaded: what is loaded may be of two images")]
struct Changed;

impl PagesFile {
    /// A new file of its whole length, all of it a hole but the length of the contents.
    pub fn create(
        folder: BorrowedFd<'_>,
        id: u32,
        image: &KfdImage,
        gpu: u32,
        minor: u32,
    ) -> Result<Self, FileError> {
        Self::new(folder, pages_name(id, gpu), minor, of_gpu(image, gpu))
    }

    /// As [`PagesFile::create`], of one buffer of a render node; `minor` is the GPU's here.
    pub fn create_render(
        folder: BorrowedFd<'_>,
        contents: &RenderContents,
        buffer: usize,
        minor: u32,
    ) -> Result<Self, FileError> {
        let name = drm_pages_name(contents.id, contents.minor, buffer);
        Self::new(folder, name, minor, of_buffer(contents, buffer))
    }

    /// A file that must be as long as the image's buffers want.
    pub fn open(
        folder: BorrowedFd<'_>,
        id: u32,
        image: &KfdImage,
        gpu: u32,
        minor: u32,
    ) -> Result<Self, FileError> {
        let pages = Self::there(folder, pages_name(id, gpu), minor, of_gpu(image, gpu))?;
        pages
            .check_length()
            .and_then(|()| pages.check_header())
            .map_err(FileError::of("read", &pages.name))?;
        Ok(pages)
    }

    /// As [`PagesFile::open`], of one buffer of a render node. CRIU's plugin does not set the header of such files.
    pub fn open_render(
        folder: BorrowedFd<'_>,
        contents: &RenderContents,
        buffer: usize,
        minor: u32,
    ) -> Result<Self, FileError> {
        let name = drm_pages_name(contents.id, contents.minor, buffer);
        let pages = Self::there(folder, name, minor, of_buffer(contents, buffer))?;
        pages.check_length().map_err(FileError::of("read", &pages.name))?;
        Ok(pages)
    }

    fn new(folder: BorrowedFd<'_>, name: String, minor: u32, layout: Layout) -> Result<Self, FileError> {
        image::remove(folder, TWINS)?;
        let file = image::create(folder, &name)?;
        let direct = image::open_direct(folder, &name, true);
        let pages = Self::of(name, (file, direct), minor, layout);
        let file = pages.file.file();
        let made = file.set_len(pages.length);
        let made = made.and_then(|()| file.write_all_at(&(pages.length - HEADER).to_le_bytes(), 0));
        made.map_err(FileError::of("write", &pages.name))?;
        Ok(pages)
    }

    fn there(folder: BorrowedFd<'_>, name: String, minor: u32, layout: Layout) -> Result<Self, FileError> {
        let file = image::open(folder, &name)?;
        let direct = image::open_direct(folder, &name, false);
        let written = modified(&file).map_err(FileError::of("read", &name))?;
        Ok(Self { written: Some(written), ..Self::of(name, (file, direct), minor, layout) })
    }

    fn of(name: String, (file, direct): (File, Option<File>), minor: u32, layout: Layout) -> Self {
        let file = TransferFile::new(&name, file, direct);
        let (stretches, length) = layout;
        Self { name, file, minor, stretches, length, written: None, data: Mutex::default() }
    }

    pub(crate) fn check_length(&self) -> io::Result<()> {
        let length = self.file.file().metadata()?.len();
        if length < self.length {
            let found = format!("{length} bytes");
            return Err(io::Error::other(Length { expected: self.length, found }));
        }
        Ok(())
    }

    /// What was read of it so far is of one image. That it has been removed, or has other names, makes no difference: whoever
    /// asked for the restore may have done that once it ran.
    pub(crate) fn check_unchanged(&self) -> io::Result<()> {
        // One that got shorter looked like a hole from there on.
        self.check_length()?;
        match self.written {
            Some(written) if modified(self.file.file())? != written => Err(io::Error::other(Changed)),
            _ => Ok(()),
        }
    }

    fn check_header(&self) -> io::Result<()> {
        let wrong = |found| io::Error::other(Length { expected: self.length, found });
        let mut header = [0; 8];
        self.file.file().read_exact_at(&mut header, 0)?;
        let says = u64::from_le_bytes(header);
        if says != self.length - HEADER {
            return Err(wrong(format!("contents of {says} bytes by its header")));
        }
        Ok(())
    }

    /// Chunks that buffers have bytes in.
    pub(crate) fn chunks(&self) -> u64 {
        if self.length > HEADER { self.length.div_ceil(CHUNK) } else { 0 }
    }

    /// First byte of a chunk and the byte after its last, in the file.
    pub(crate) fn range(&self, chunk: u64) -> (u64, u64) {
        let start = chunk * CHUNK;
        (start, (start + CHUNK).min(self.length))
    }

    /// The buffers' bytes in a chunk, in order.
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

    /// The buffers, in the file's order.
    pub(crate) fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }

    /// The next bytes from `offset` on, and before `end`, that are not a hole of the file.
    pub(crate) fn data(&self, offset: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
        let seek = |from: u64, whence| match lseek(self.file.file(), from.cast_signed(), whence) {
            Ok(at) => Ok(Some(at.cast_unsigned())),
            Err(Errno::ENXIO) => Ok(None),
            Err(errno) => Err(io::Error::from(errno)),
        };
        let mut known = self.data.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(&offset) {
            return Ok(Some((offset, known.end.min(end))));
        }
        let Some(start) = seek(offset, Whence::SeekData)?.filter(|start| *start < end) else {
            return Ok(None);
        };
        let stop = seek(start, Whence::SeekHole)?.unwrap_or(end);
        *known = start..stop;
        Ok(Some((start, stop.min(end))))
    }
}

fn modified(file: &File) -> io::Result<SystemTime> {
    file.metadata()?.modified()
}

/// What is where in a file, and its whole length.
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

    /// Buffers of these sizes, of GPU 7 but every third one.
    fn image(sizes: &[u64]) -> KfdImage {
        let buffer = |(index, size): (usize, &u64)| KfdBuffer {
            size: *size,
            gpu_id: if index % 3 == 2 { 8 } else { 7 },
            alloc_flags: 1,
            ..KfdBuffer::default()
        };
        KfdImage { buffers: sizes.iter().enumerate().map(buffer).collect(), ..KfdImage::default() }
    }

    fn made(sizes: &[u64]) -> (tempfile::TempDir, PagesFile) {
        let folder = tempfile::tempdir().unwrap();
        let open = File::open(folder.path()).unwrap();
        let file = PagesFile::create(open.as_fd(), 3, &image(sizes), 7, 128).unwrap();
        (folder, file)
    }

    #[test]
    fn every_byte_of_every_buffer_is_in_one_chunk() {
        let sizes = [4096, 5 * CHUNK, 1, CHUNK - 4104, 4096, 9, 12288];
        let (_folder, file) = made(&sizes);
        let mut next = vec![0; sizes.len()];
        let mut offset = HEADER;
        for chunk in 0..file.chunks() {
            let (start, end) = file.range(chunk);
            for piece in file.pieces(chunk) {
                assert!(piece.offset >= start && piece.offset + piece.bytes <= end);
                assert_eq!((piece.offset, piece.at), (offset, next[piece.buffer]), "no gaps, nothing twice");
                offset += piece.bytes;
                next[piece.buffer] += piece.bytes;
            }
        }
        assert_eq!(offset, file.length);
        assert_eq!(next, [4096, 5 * CHUNK, 0, CHUNK - 4104, 4096, 0, 12288], "of GPU 7");
        let mut in_chunks = vec![0; sizes.len()];
        for stretch in file.stretches() {
            in_chunks[stretch.buffer] = stretch.chunks().unwrap().count();
        }
        assert_eq!(in_chunks, [1, 6, 0, 1, 1, 0, 1], "one ends with its chunk");
    }

    #[test]
    fn a_process_without_memory_on_a_gpu_has_a_file_without_chunks() {
        let (_folder, file) = made(&[]);
        assert_eq!((file.chunks(), file.length), (0, HEADER));
    }

    #[test]
    fn a_buffer_without_bytes_is_in_no_chunk() {
        let (_folder, file) = made(&[0, 4096, 9, 0, 4096]);
        assert_eq!(file.pieces(0).map(|piece| piece.buffer).collect::<Vec<_>>(), [1, 4]);
        let chunks: Vec<_> = file.stretches().iter().map(Stretch::chunks).collect();
        assert_eq!(chunks, [None, Some(0..=0), None, Some(0..=0)]);
    }

    #[test]
    fn a_file_of_another_length_is_refused_with_both_lengths() {
        let sizes = [4096, 8192];
        let (folder, file) = made(&sizes);
        let open = || {
            let folder = File::open(folder.path()).unwrap();
            PagesFile::open(folder.as_fd(), 3, &image(&sizes), 7, 128).map_err(|error| {
                let cause = std::error::Error::source(&error).unwrap();
                format!("{error}: {cause}")
            })
        };
        open().unwrap();
        file.file.file().write_all_at(&4096_u64.to_le_bytes(), 0).unwrap();
        let error = open().unwrap_err();
        assert!(error.contains("contents of 4096 bytes by its header, where buffers need 12296"), "{error}");
        file.file.file().set_len(100).unwrap();
        let error = open().unwrap_err();
        assert!(error.starts_with("read amdgpu-pages-3-0007.img"), "{error}");
        assert!(error.contains("100 bytes, where buffers need 12296"), "{error}");
    }

    #[test]
    fn a_file_that_is_written_after_it_was_opened_is_refused_and_not_one_that_is_removed() {
        let (folder, file) = made(&[4096]);
        let open = || {
            let folder = File::open(folder.path()).unwrap();
            PagesFile::open(folder.as_fd(), 3, &image(&[4096]), 7, 128).unwrap()
        };
        let opened = open();
        opened.check_unchanged().unwrap();
        // The kernel's clock for this goes by ticks of up to 10 ms.
        std::thread::sleep(std::time::Duration::from_millis(30));
        file.file.file().write_all_at(&[1], 100).unwrap();
        let error = opened.check_unchanged().unwrap_err();
        assert!(error.to_string().contains("was written while it was loaded"), "{error}");
        let opened = open();
        std::fs::remove_file(folder.path().join(&file.name)).unwrap();
        opened.check_unchanged().unwrap();
    }

    #[test]
    fn holes_are_told_from_data() {
        let (_folder, file) = made(&[3 * CHUNK]);
        assert_eq!(file.data(CHUNK, 2 * CHUNK).unwrap(), None);
        file.file.file().write_all_at(&[1; 4096], CHUNK + 65536).unwrap();
        let (start, end) = file.data(CHUNK, 2 * CHUNK).unwrap().unwrap();
        assert!(start <= CHUNK + 65536 && end >= CHUNK + 65536 + 4096, "{start}..{end}");
        assert_eq!(file.data(end.max(CHUNK + (1 << 20)), 2 * CHUNK).unwrap(), None);
        let again = |offset, end| file.data(offset, end).unwrap();
        assert_eq!(again(start + 5, 2 * CHUNK), Some((start + 5, end)), "as it was found before");
        assert_eq!(again(start, start + 9), Some((start, start + 9)));
        assert_eq!(again(CHUNK, 2 * CHUNK), Some((start, end)), "from before it");
    }
}
