// SPDX-License-Identifier: MIT OR Apache-2.0
//! The common entry of everything that feeds bytes to the parsers: cargo-fuzz, the replay of the corpus, and
//! the random mutations of the tests.

use std::io::Cursor;
use std::path::Path;

use crate::frame::{self, FileKind, Records};
use crate::{Result, amdgpu, files, inventory, mm, pagemap, rewake, tasks, write};

/// An image file in memory.
type Bytes = Cursor<Vec<u8>>;

/// The parser to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FuzzKind {
    /// `inventory.img`.
    Inventory,
    /// `pstree.img`.
    Pstree,
    /// `core-PID.img`.
    Core,
    /// `mm-PID.img`.
    Mm,
    /// `pagemap-PID.img`.
    Pagemap,
    /// `files.img`.
    Files,
    /// `amdgpu-kfd-ID.img`.
    AmdgpuKfd,
    /// `amdgpu-renderD-ID.img`.
    AmdgpuRender,
    /// `amdgpu-dmabuf_ID.img`.
    AmdgpuDmabuf,
    /// `rewake-shared.img`.
    RewakeShared,
}

impl FuzzKind {
    /// Every kind, with the name of its corpus folder and fuzz target.
    pub const ALL: [(Self, &'static str); 10] = [
        (Self::Inventory, "inventory"),
        (Self::Pstree, "pstree"),
        (Self::Core, "core"),
        (Self::Mm, "mm"),
        (Self::Pagemap, "pagemap"),
        (Self::Files, "files"),
        (Self::AmdgpuKfd, "amdgpu-kfd"),
        (Self::AmdgpuRender, "amdgpu-render"),
        (Self::AmdgpuDmabuf, "amdgpu-dmabuf"),
        (Self::RewakeShared, "rewake-shared"),
    ];
}

/// Parses `bytes` as a file of `kind`. Returns true when the parser accepted them.
///
/// # Panics
/// The accepted bytes violate the parser's guarantees, or read differently when they are written and read
/// again.
pub fn fuzz_one(kind: FuzzKind, bytes: &[u8]) -> bool {
    match kind {
        FuzzKind::Inventory => round_trip(bytes, &frame::INVENTORY, inventory::parse, |value| {
            Some(write::inventory_bytes(value))
        }),
        FuzzKind::Pstree => {
            round_trip(bytes, &frame::PSTREE, tasks::parse_tree, |value| Some(write::tree_bytes(value)))
        }
        FuzzKind::Core => open(bytes, &frame::CORE).and_then(tasks::parse_core).is_ok(),
        FuzzKind::Mm => round_trip(bytes, &frame::MM, mm::parse, |mm| {
            assert!(mm.vmas.windows(2).all(|pair| pair[0].end <= pair[1].start), "mappings are in order");
            assert!(mm.vmas.iter().all(|vma| vma.pages() > 0), "mappings are not empty");
            Some(write::mm_bytes(mm))
        }),
        FuzzKind::Files => {
            round_trip(bytes, &frame::FILES, files::parse, |files| Some(write::files_bytes(files)))
        }
        FuzzKind::Pagemap => round_trip(bytes, &frame::PAGEMAP, pagemap::parse, |map| {
            let entries = &map.entries;
            assert!(entries.windows(2).all(|pair| pair[0].end() <= pair[1].vaddr), "runs are in order");
            assert!(entries.iter().all(|entry| entry.file_offset <= map.file_len), "runs are in the file");
            let stats = map.stats();
            assert_eq!(stats.total, stats.lazy + stats.eager);
            write::pagemap_bytes(map)
        }),
        FuzzKind::AmdgpuKfd => amdgpu_round_trip(bytes, amdgpu::parse_kfd, |image| {
            for node in &image.nodes {
                let (ranges, len) = image.pages(node.properties.gpu_id);
                let end =
                    |range: &amdgpu::ContentsRange| range.file_offset + image.buffers[range.buffer].size;
                let ends = ranges.iter().map(end).max().unwrap_or(8);
                assert_eq!(ends, len, "contents are in the file");
            }
            image.to_bytes()
        }),
        FuzzKind::AmdgpuRender => {
            amdgpu_round_trip(bytes, amdgpu::parse_render, amdgpu::RenderImage::to_bytes)
        }
        FuzzKind::AmdgpuDmabuf => {
            amdgpu_round_trip(bytes, amdgpu::parse_dmabuf, amdgpu::DmabufImage::to_bytes)
        }
        FuzzKind::RewakeShared => {
            amdgpu_round_trip(bytes, rewake::parse_shared, rewake::SharedImage::to_bytes)
        }
    }
}

/// Parses, writes and parses again.
fn amdgpu_round_trip<T: PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    parse: impl Fn(&Path, &[u8]) -> Result<T>,
    write: impl Fn(&T) -> Vec<u8>,
) -> bool {
    let file = Path::new("amdgpu");
    let read = |bytes: &[u8]| {
        let contents = amdgpu::contents::contents(file, Cursor::new(bytes), bytes.len() as u64)?;
        parse(file, &contents)
    };
    let Ok(value) = read(bytes) else { return false };
    assert_eq!(read(&write(&value)).ok(), Some(value), "the written bytes read the same");
    true
}

fn open(bytes: &[u8], kind: &'static FileKind) -> Result<Records<Bytes>> {
    Records::new(kind, Path::new(kind.name), Cursor::new(bytes.to_vec()), bytes.len() as u64)
}

/// Parses, writes and parses again.
fn round_trip<T: PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    kind: &'static FileKind,
    parse: impl Fn(Records<Bytes>) -> Result<T>,
    write: impl Fn(&T) -> Option<Vec<u8>>,
) -> bool {
    let Ok(value) = open(bytes, kind).and_then(&parse) else { return false };
    if let Some(written) = write(&value) {
        let reread = open(&written, kind).and_then(&parse);
        assert_eq!(reread.ok(), Some(value), "the written bytes read the same");
    }
    true
}
