// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image with the memory of one GPU, as CRIU's plugin writes it, and memory of the same shape to load it
//! into.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use memmap2::{MmapMut, MmapOptions};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rewake_bo_contents::{GpuPagesFile, MemoryDevice, ProcessBuffers};
use rewake_criu_images::ImageDir;
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, NodeImage, Properties, kfd_name, pages_name};
use rewake_testkit::Random;

/// The process's number in the image.
pub(super) const ID: u32 = 1;
pub(super) const GPU: u32 = 7;
/// N of a render node that is not opened.
pub(super) const MINOR: u32 = 128;
/// `KFD_IOC_ALLOC_MEM_FLAGS_VRAM`
const VRAM: u32 = 1;
/// The header before the buffers' bytes in a pages file: their length.
pub(super) const HEADER: u64 = 8;
/// Bytes that are generated, and compared, at a time.
pub(super) const PIECE: usize = 2 << 20;
const KIB: u64 = 1 << 10;
pub(super) const MIB: u64 = 1 << 20;

/// An image directory, and memory for its buffers.
pub(super) struct Image {
    directory: PathBuf,
    kfd: KfdImage,
    pub(super) files: Vec<GpuPagesFile>,
    pub(super) memfds: Vec<Option<OwnedFd>>,
    device: Arc<MemoryDevice>,
}

/// Sizes of buffers, as inference servers have them: 256 pages, 32 of 64 KiB, 8 of 2 MiB and some bytes that
/// end inside a chunk, and large ones for the rest.
fn sizes(mib: u64) -> Vec<u64> {
    let groups = [(256, 4 * KIB), (32, 64 * KIB), (8, 2 * MIB + 4 * KIB)];
    let mut sizes: Vec<u64> = groups.iter().flat_map(|(count, size)| vec![*size; *count]).collect();
    let mut left = (mib * MIB).saturating_sub(sizes.iter().sum());
    while left > 0 {
        let size = left.min(64 * MIB);
        sizes.push(size);
        left -= size;
    }
    sizes
}

/// The driver's state of a process with buffers of these sizes.
pub(super) fn kfd(sizes: impl IntoIterator<Item = u64>) -> KfdImage {
    let mut address = 0x7000_0000_0000;
    let buffer = |size: u64| {
        let buffer = KfdBuffer { address, size, gpu_id: GPU, alloc_flags: VRAM, ..KfdBuffer::default() };
        address += size.next_multiple_of(2 * MIB);
        buffer
    };
    let node =
        NodeImage { properties: Properties { gpu_id: GPU, ..Properties::default() }, links: Vec::new() };
    let buffers = sizes.into_iter().map(buffer).collect();
    KfdImage { pid: 1, gpus: 1, nodes: vec![node], buffers, ..KfdImage::default() }
}

/// Random bytes, the same ones each time.
pub(super) struct Words(Random);

impl Words {
    pub(super) fn new() -> Self {
        Self(Random::new(1))
    }

    /// Fills whole words.
    pub(super) fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&self.0.number().to_ne_bytes());
        }
    }
}

impl Image {
    /// Writes an image, of the GPU of a render node that is not opened, to an empty directory. All of it is
    /// on the disk then.
    pub(super) fn make(directory: &Path, mib: u64, minor: u32) -> anyhow::Result<Self> {
        let kfd = kfd(sizes(mib));
        std::fs::write(directory.join(kfd_name(ID)), kfd.to_bytes()).context("write the driver's state")?;
        write_pages(&directory.join(pages_name(ID, GPU)), &kfd).context("write the buffers' memory")?;
        Self::open(directory, minor)
    }

    /// The image as the streamer reads it, with memory that is resident.
    fn open(directory: &Path, minor: u32) -> anyhow::Result<Self> {
        let kfd =
            ImageDir::open(directory)?.kfd(ID)?.context("the image that was just written is missing")?;
        let folder = File::open(directory).context("open the image directory")?;
        let file = GpuPagesFile::open(folder.as_fd(), ID, &kfd, GPU, minor)?;
        let memfds: Vec<OwnedFd> =
            kfd.buffers.iter().map(|buffer| memory(buffer.size)).collect::<anyhow::Result<_>>()?;
        let device = MemoryDevice::new(memfds.iter().map(|memfd| memfd.as_fd())).context("map the memory")?;
        let memfds = memfds.into_iter().map(Some).collect();
        Ok(Self { directory: directory.to_owned(), kfd, files: vec![file], memfds, device })
    }

    /// The files to load, and the memory for them.
    pub(super) fn to_load(&self) -> ([ProcessBuffers<'_>; 1], &Arc<MemoryDevice>) {
        ([ProcessBuffers { files: &self.files, dmabufs: &self.memfds }], &self.device)
    }

    /// The file that has all buffers' bytes.
    pub(super) fn pages(&self) -> PathBuf {
        self.directory.join(pages_name(ID, GPU))
    }

    /// The bytes of all buffers.
    pub(super) fn bytes(&self) -> u64 {
        self.kfd.buffers.iter().map(|buffer| buffer.size).sum()
    }

    /// Buffers.
    pub(super) fn buffers(&self) -> usize {
        self.kfd.buffers.len()
    }

    /// Each buffer's first byte in the file, and its memory.
    pub(super) fn views(&self) -> anyhow::Result<Vec<(u64, MmapMut)>> {
        let mut offset = HEADER;
        let view = |(buffer, memfd): (&KfdBuffer, &Option<OwnedFd>)| {
            let view = view(memfd.as_ref().context("every buffer has memory")?)?;
            let at = offset;
            offset += buffer.size;
            Ok((at, view))
        };
        self.kfd.buffers.iter().zip(&self.memfds).map(view).collect()
    }

    /// Overwrites all memory with bytes that the image does not have.
    pub(super) fn poison(&self) -> anyhow::Result<()> {
        self.views()?.iter_mut().for_each(|(_, view)| view.fill(0));
        Ok(())
    }

    /// Compares all memory with the bytes of the image.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let (mut words, mut right) = (Words::new(), vec![0; PIECE]);
        for (offset, view) in self.views()? {
            for (index, piece) in view.chunks(PIECE).enumerate() {
                let right = &mut right[..piece.len()];
                words.fill(right);
                let at = offset + (index * PIECE) as u64;
                ensure!(piece == right, "the loaded bytes differ from the image from {at:#x} on");
            }
        }
        Ok(())
    }
}

fn write_pages(path: &Path, kfd: &KfdImage) -> anyhow::Result<()> {
    let mut file = std::io::BufWriter::with_capacity(PIECE, File::create(path)?);
    let (_, length) = kfd.pages(GPU);
    file.write_all(&(length - HEADER).to_le_bytes())?;
    let (mut words, mut piece) = (Words::new(), vec![0; PIECE]);
    for buffer in &kfd.buffers {
        let mut left = usize::try_from(buffer.size)?;
        while left > 0 {
            let part = &mut piece[..left.min(PIECE)];
            words.fill(part);
            file.write_all(part)?;
            left -= part.len();
        }
    }
    file.into_inner().context("write the last bytes")?.sync_all().context("sync")
}

/// A memfd of `bytes` bytes, all resident.
pub(super) fn memory(bytes: u64) -> anyhow::Result<OwnedFd> {
    let memfd = memfd_create(c"bench memory", MFdFlags::MFD_CLOEXEC).context("memfd_create")?;
    fallocate(&memfd, FallocateFlags::empty(), 0, bytes.cast_signed())
        .context("get memory: does the machine have enough?")?;
    Ok(memfd)
}

/// The memory of a memfd, mapped and resident from the start.
pub(super) fn view(memfd: &OwnedFd) -> anyhow::Result<MmapMut> {
    // SAFETY: only this program has the memfd. Nothing makes it shorter, and the engine writes to it only
    // while no view is used.
    unsafe { MmapOptions::new().populate().map_mut(memfd) }.context("mmap")
}

/// Reads as many bytes from `offset` on as `into` has.
pub(super) fn read(file: &File, offset: u64, into: &mut [u8]) -> anyhow::Result<()> {
    file.read_exact_at(into, offset).context("read the pages file")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_loads_the_image_and_a_wrong_word_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let image = Image::make(directory.path(), 24, MINOR).unwrap();
        assert_eq!(image.bytes(), 24 * MIB);
        assert_eq!(image.files.len(), 1, "its length was checked when it was opened");
        image.check().unwrap_err();
        let file = File::open(image.pages()).unwrap();
        let mut views = image.views().unwrap();
        views.iter_mut().for_each(|(offset, view)| read(&file, *offset, view).unwrap());
        image.check().unwrap();
        let (offset, last) = views.last_mut().unwrap();
        *last.last_mut().unwrap() ^= 1;
        let error = image.check().unwrap_err().to_string();
        assert!(
            error
                .contains(&format!("{:#x}", (last.len() as u64 - 1) / PIECE as u64 * PIECE as u64 + *offset)),
            "{error}"
        );
    }

    #[test]
    fn sizes_are_mixed_and_add_up() {
        let sizes = sizes(100);
        assert_eq!(sizes.iter().sum::<u64>(), 100 * MIB);
        assert!(sizes.contains(&(4 * KIB)) && sizes.iter().any(|size| *size > 32 * MIB));
    }
}
