// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files of an image that hold memory: where their chunks begin, and which memory an offset is.
//!
//! A chunk is what a store of images keeps once. CPU memory is cut at multiples of [`CHUNK`] of the address:
//! pages files are packed, so by file offset one page more would shift every chunk after it. GPU memory is
//! cut at each buffer object, and at multiples of [`CHUNK`] of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::amdgpu::{GpuFile, KfdImage, RenderContents, pages_name as gpu_pages_name};
use crate::dir::ImageDir;
use crate::error::Result;
use crate::frame;
use crate::pagemap::{PageFlags, PagemapReader};
use crate::plan::pages_name;

/// The most bytes of a chunk.
pub const CHUNK: u64 = 2 << 20;

/// Bytes before the first buffer of a file of GPU memory.
pub const GPU_HEADER: u64 = RenderContents::PAGES_OFFSET;

/// Whether a file of this name holds memory, of CPUs or GPUs. No other place decides that.
fn holds_memory(name: &str) -> bool {
    let starts = ["pages-", "amdgpu-pages-", "amdgpu-drm-pages-"];
    name.ends_with(".img") && starts.iter().any(|start| name.starts_with(start))
}

/// Whether a file of this name holds the memory of a compute process on a GPU. Files of render nodes are not
/// among them.
#[must_use]
pub fn is_gpu_pages_file(name: &str) -> bool {
    name.ends_with(".img") && name.starts_with("amdgpu-pages-")
}

/// The memory files of an image directory, by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryFiles(BTreeMap<String, Vec<u64>>);

impl MemoryFiles {
    /// Returns whether the file holds memory.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Returns the offsets at which a chunk must begin, in ascending order: none without such offsets. From
    /// each on, and from the start of the file, chunks have [`CHUNK`] bytes up to the next offset.
    #[must_use]
    pub fn starts(&self, name: &str) -> &[u64] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }
}

/// The memory that is at an offset of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryPlace {
    /// Memory of a task.
    Task {
        /// Its pid at the dump.
        pid: u32,
        /// The address.
        address: u64,
    },
    /// Shared memory of several tasks.
    Shared {
        /// Its id in the image.
        id: String,
        /// The offset in it, in bytes.
        offset: u64,
    },
    /// A buffer object of a process.
    Buffer {
        /// The pid of the process, in its own pid namespace.
        pid: u32,
        /// The id of the GPU.
        gpu: u32,
        /// The address of the byte.
        address: u64,
    },
}

impl fmt::Display for MemoryPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Task { pid, address } => write!(f, "process {pid}, address {address:#x}"),
            Self::Shared { id, offset } => write!(f, "shared memory {id}, offset {offset:#x}"),
            Self::Buffer { pid, gpu, address } => {
                write!(f, "GPU memory of process {pid} on GPU {gpu:#x}, address {address:#x}")
            }
        }
    }
}

impl ImageDir {
    /// Finds the memory files among the files of this directory, and where their chunks begin.
    ///
    /// # Errors
    /// A pagemap or an image of a GPU process is damaged or cannot be read.
    pub fn memory_files(&self, names: &BTreeSet<String>) -> Result<MemoryFiles> {
        let memory = names.iter().filter(|name| holds_memory(name));
        let mut files: BTreeMap<String, Vec<u64>> = memory.map(|name| (name.clone(), Vec::new())).collect();
        for name in names {
            for (pages, starts) in self.starts_in(name)? {
                files.entry(pages).and_modify(|of| *of = starts);
            }
        }
        Ok(MemoryFiles(files))
    }

    /// Returns what a file says of memory files: where their chunks begin.
    fn starts_in(&self, name: &str) -> Result<Vec<(String, Vec<u64>)>> {
        if name.starts_with("amdgpu-drm-pages-") {
            return Ok(vec![(name.to_owned(), vec![GPU_HEADER])]);
        }
        if pagemap_owner(name).is_some() {
            return Ok(self.pagemap_starts(name)?.into_iter().collect());
        }
        let Some(GpuFile::Kfd(id)) = GpuFile::of_name(name) else { return Ok(Vec::new()) };
        let Some(image) = self.kfd(id)? else { return Ok(Vec::new()) };
        let of = |gpu| (gpu_pages_name(id, gpu), buffer_starts(&image, gpu));
        Ok(gpus(&image).into_iter().map(of).collect())
    }

    /// Finds the memory at an offset of a file among `names`; `None` where the image does not say.
    ///
    /// # Errors
    /// A pagemap or an image of a GPU process is damaged or cannot be read.
    pub fn memory_at(
        &self,
        names: &BTreeSet<String>,
        file: &str,
        offset: u64,
    ) -> Result<Option<MemoryPlace>> {
        if let Some(rest) = file.strip_prefix("amdgpu-pages-") {
            let id = rest.split('-').next().and_then(|id| id.parse().ok());
            return id.map_or(Ok(None), |id| self.buffer_at(id, file, offset));
        }
        if !file.starts_with("pages-") {
            return Ok(None);
        }
        for name in names {
            if let Some(owner) = pagemap_owner(name)
                && let Some(address) = self.address_at(name, file, offset)?
            {
                return Ok(Some(match owner.parse() {
                    Ok(pid) => MemoryPlace::Task { pid, address },
                    Err(_) => MemoryPlace::Shared { id: owner.to_owned(), offset: address },
                }));
            }
        }
        Ok(None)
    }

    /// Reads where chunks begin in the pages file of a pagemap.
    fn pagemap_starts(&self, name: &str) -> Result<Option<(String, Vec<u64>)>> {
        let Some(records) = self.records(name, &frame::PAGEMAP)? else { return Ok(None) };
        let mut read = PagemapReader::new(records)?;
        let (mut starts, mut last) = (Vec::new(), None);
        while let Some((_, entry)) = read.next()? {
            if !entry.flags.has(PageFlags::PRESENT) {
                continue;
            }
            if last != Some(entry.vaddr / CHUNK) {
                starts.push(entry.file_offset);
            }
            let border = (entry.vaddr / CHUNK + 1).saturating_mul(CHUNK);
            if border < entry.end() {
                starts.push(entry.file_offset + (border - entry.vaddr));
            }
            last = Some((entry.end() - 1) / CHUNK);
        }
        Ok(Some((pages_name(read.pages_id), starts)))
    }

    /// Finds the address of an offset of a pages file in a pagemap.
    fn address_at(&self, pagemap: &str, file: &str, offset: u64) -> Result<Option<u64>> {
        let Some(records) = self.records(pagemap, &frame::PAGEMAP)? else { return Ok(None) };
        let mut read = PagemapReader::new(records)?;
        if pages_name(read.pages_id) != file {
            return Ok(None);
        }
        while let Some((_, entry)) = read.next()? {
            let length = entry.end() - entry.vaddr;
            if entry.flags.has(PageFlags::PRESENT) && offset.wrapping_sub(entry.file_offset) < length {
                return Ok(Some(entry.vaddr + (offset - entry.file_offset)));
            }
        }
        Ok(None)
    }

    fn buffer_at(&self, id: u32, file: &str, offset: u64) -> Result<Option<MemoryPlace>> {
        let Some(image) = self.kfd(id)? else { return Ok(None) };
        let Some(gpu) = gpus(&image).into_iter().find(|gpu| gpu_pages_name(id, *gpu) == file) else {
            return Ok(None);
        };
        let (ranges, _) = image.pages(gpu);
        let place = ranges.iter().find_map(|range| {
            let buffer = image.buffers[range.buffer];
            let inside = offset.checked_sub(range.file_offset).filter(|inside| *inside < buffer.size)?;
            let address = buffer.address.wrapping_add(inside);
            Some(MemoryPlace::Buffer { pid: image.pid, gpu, address })
        });
        Ok(place)
    }
}

/// Returns the owner in the name of a pagemap: a pid, or the id of shared memory after a word.
pub(crate) fn pagemap_owner(name: &str) -> Option<&str> {
    name.strip_prefix("pagemap-")?.strip_suffix(".img")
}

fn gpus(image: &KfdImage) -> BTreeSet<u32> {
    image.nodes.iter().map(|node| node.properties.gpu_id).filter(|gpu| *gpu != 0).collect()
}

fn buffer_starts(image: &KfdImage, gpu: u32) -> Vec<u64> {
    let (ranges, end) = image.pages(gpu);
    ranges.iter().map(|range| range.file_offset).chain([end]).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::PAGE;
    use crate::amdgpu::{KfdBuffer, NodeImage, Properties, kfd_name};
    use crate::pagemap::{Generation, Pagemap};
    use crate::write;

    const BOTH: PageFlags = PageFlags(6);

    fn names(dir: &Path) -> BTreeSet<String> {
        let entries = fs::read_dir(dir).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// An image with these runs of pages of task 7.
    fn image(runs: &[(u64, u64, PageFlags)]) -> (tempfile::TempDir, ImageDir, BTreeSet<String>) {
        let dir = tempfile::tempdir().unwrap();
        let map = Pagemap::new(3, Generation::Wide, runs.iter().copied());
        write::pagemap(dir.path(), 7, &map).unwrap();
        write::pages(dir.path(), 3, &vec![0; usize::try_from(map.file_len).unwrap()]).unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let names = names(dir.path());
        (dir, images, names)
    }

    fn starts(runs: &[(u64, u64, PageFlags)]) -> Vec<u64> {
        let (_dir, images, names) = image(runs);
        images.memory_files(&names).unwrap().starts("pages-3.img").to_vec()
    }

    #[test]
    fn chunks_of_pages_begin_at_borders_of_addresses() {
        let lone = |vaddr| (vaddr, 1, BOTH);
        assert_eq!(starts(&[(CHUNK - 3 * PAGE, 2, BOTH), (CHUNK - PAGE, 2, BOTH)]), [0, 3 * PAGE]);
        assert_eq!(starts(&[lone(CHUNK), lone(CHUNK + 5 * PAGE), lone(2 * CHUNK)]), [0, 2 * PAGE]);
        // From the border on, chunks have their full size by themselves.
        assert_eq!(starts(&[(CHUNK - PAGE, 1600, BOTH)]), [0, PAGE]);
        // Pages of a parent take no place in the file.
        assert_eq!(starts(&[(0, 9, PageFlags::PARENT), (CHUNK, 1, BOTH)]), [0]);
    }

    #[test]
    fn one_page_more_shifts_no_other_chunk() {
        let run = |pages| [(CHUNK, pages, BOTH), (4 * CHUNK, 512, BOTH), (8 * CHUNK, 512, BOTH)];
        let lengths = |starts: &[u64]| starts.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>();
        let (before, after) = (starts(&run(5)), starts(&run(6)));
        assert_eq!(lengths(&before)[1..], lengths(&after)[1..]);
    }

    #[test]
    fn an_offset_of_a_pages_file_is_an_address_of_its_task() {
        let (_dir, images, names) = image(&[(CHUNK, 2, BOTH), (9 * CHUNK, 1, BOTH)]);
        let at = |offset| images.memory_at(&names, "pages-3.img", offset).unwrap();
        let place = |address| Some(MemoryPlace::Task { pid: 7, address });
        assert_eq!([at(0), at(PAGE + 1)], [place(CHUNK), place(CHUNK + PAGE + 1)]);
        assert_eq!([at(2 * PAGE), at(3 * PAGE)], [place(9 * CHUNK), None]);
        assert_eq!(place(CHUNK).unwrap().to_string(), "process 7, address 0x200000");
    }

    #[test]
    fn shared_memory_has_a_name_of_its_own() {
        let (dir, images, _) = image(&[(CHUNK, 2, BOTH)]);
        fs::rename(dir.path().join("pagemap-7.img"), dir.path().join("pagemap-shmem-12.img")).unwrap();
        let place = images.memory_at(&names(dir.path()), "pages-3.img", PAGE).unwrap().unwrap();
        assert_eq!(place.to_string(), "shared memory shmem-12, offset 0x201000");
    }

    #[test]
    fn a_name_alone_says_that_a_file_holds_memory() {
        let dir = tempfile::tempdir().unwrap();
        let memory = ["pages-9.img", "amdgpu-pages-4-0012.img", "amdgpu-drm-pages-5-128-0000.img"];
        for name in memory.into_iter().chain(["core-1.img", "pages-1.img.old", "ghost-file-1.img"]) {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let names = names(dir.path());
        let files = ImageDir::open(dir.path()).unwrap().memory_files(&names).unwrap();
        let found: Vec<&str> = names.iter().map(String::as_str).filter(|name| files.has(name)).collect();
        assert_eq!(found, [memory[2], memory[1], memory[0]]);
        assert_eq!(files.starts(memory[0]), [0; 0]);
    }

    #[test]
    fn chunks_of_gpu_memory_begin_at_buffers() {
        let dir = tempfile::tempdir().unwrap();
        let buffer = |address, size, gpu_id| KfdBuffer {
            address,
            size,
            gpu_id,
            alloc_flags: 1,
            ..KfdBuffer::default()
        };
        let node = NodeImage {
            properties: Properties { gpu_id: 0x12, ..Properties::default() },
            ..NodeImage::default()
        };
        let buffers = vec![buffer(0x1000, 5 << 20, 0x12), buffer(0x9000_0000, 4096, 0x12)];
        let image = KfdImage { pid: 77, gpus: 1, nodes: vec![node], buffers, ..KfdImage::default() };
        fs::write(dir.path().join(kfd_name(4)), image.to_bytes()).unwrap();
        for name in [gpu_pages_name(4, 0x12), "amdgpu-drm-pages-5-128-0000.img".into(), "core-1.img".into()] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let images = ImageDir::open(dir.path()).unwrap();
        let names = names(dir.path());
        let files = images.memory_files(&names).unwrap();
        let end = 8 + (5 << 20);
        assert_eq!(files.starts("amdgpu-pages-4-0012.img"), [8, end, end + 4096]);
        assert_eq!(files.starts("amdgpu-drm-pages-5-128-0000.img"), [8]);
        assert!(!files.has("core-1.img") && !files.has("amdgpu-kfd-4.img"));
        let place = images.memory_at(&names, "amdgpu-pages-4-0012.img", end + 16).unwrap();
        assert_eq!(place, Some(MemoryPlace::Buffer { pid: 77, gpu: 0x12, address: 0x9000_0010 }));
    }
}
