// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the buffer of a CPU mapping: a render node belongs to one GPU, and an offset in it to one buffer.

use std::collections::BTreeMap;

use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage};

/// Flags of buffers whose offset is one of `/dev/kfd` (doorbells, registers) or an address of the process
/// (userptr).
const NOT_ON_RENDER_NODES: u32 = 4 | 8 | 16;

/// A process's buffers, by GPU id and mmap offset.
#[derive(Debug)]
pub(crate) struct Buffers(BTreeMap<u32, Vec<OffsetRange>>);

/// The mmap offsets of one buffer.
#[derive(Debug)]
struct OffsetRange {
    start: u64,
    end: u64,
    /// The highest end of this range and of all before it.
    max_end: u64,
    /// Index in the image.
    buffer: usize,
}

impl Buffers {
    pub(crate) fn of(image: &KfdImage) -> Self {
        let mut all: BTreeMap<u32, Vec<OffsetRange>> = BTreeMap::new();
        for (buffer, bo) in image.buffers.iter().enumerate() {
            if bo.alloc_flags & NOT_ON_RENDER_NODES == 0 {
                let (start, end) = (bo.offset, bo.offset.saturating_add(bo.size));
                all.entry(bo.gpu_id).or_default().push(OffsetRange { start, end, max_end: end, buffer });
            }
        }
        for ranges in all.values_mut() {
            ranges.sort_by_key(|range| (range.start, range.end));
            ranges.dedup_by_key(|range| (range.start, range.end));
            let mut max_end = 0;
            for range in ranges {
                max_end = range.end.max(max_end);
                range.max_end = max_end;
            }
        }
        Self(all)
    }

    /// Returns whether the process has such buffers.
    pub(crate) fn has_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Returns the image's first buffer of a GPU that has `offset`.
    pub(crate) fn at(&self, gpu_id: u32, offset: u64) -> Option<usize> {
        let all = self.0.get(&gpu_id)?;
        // The driver gives each buffer its own offsets. So usually one range is compared.
        let before = &all[..all.partition_point(|range| range.start <= offset)];
        let near = before.iter().rev().take_while(|range| offset < range.max_end);
        near.filter(|range| offset < range.end).map(|range| range.buffer).min()
    }
}

/// Returns the GPU of a render node: its index among the image's nodes, and its id.
pub(crate) fn gpu_of_minor(image: &KfdImage, minor: u32) -> Option<(usize, u32)> {
    let is = |gpu_id: u32, of: u32| gpu_id != 0 && of == minor;
    let mut nodes = image.nodes.iter().map(|node| &node.properties).enumerate();
    let (node, properties) = nodes.find(|(_, gpu)| is(gpu.gpu_id, gpu.drm_render_minor))?;
    Some((node, properties.gpu_id))
}

/// Returns whether a GPU has a buffer at an address of the process. ROCm's library maps buffers at their GPU
/// addresses.
pub(crate) fn has_buffer_at_address(image: &KfdImage, gpu_id: u32, address: u64) -> bool {
    let here = |buffer: &&KfdBuffer| buffer.gpu_id == gpu_id && buffer.alloc_flags & NOT_ON_RENDER_NODES == 0;
    let covers =
        |buffer: &KfdBuffer| (buffer.address..buffer.address.saturating_add(buffer.size)).contains(&address);
    image.buffers.iter().filter(here).any(covers)
}

/// Returns the minor numbers of a GPU's render nodes: one, except in a damaged image.
pub(crate) fn minors_of(image: &KfdImage, gpu_id: u32) -> impl Iterator<Item = u32> {
    let gpus = image.nodes.iter().map(|node| &node.properties).filter(|gpu| gpu.gpu_id != 0);
    gpus.filter(move |gpu| gpu.gpu_id == gpu_id).map(|gpu| gpu.drm_render_minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VRAM: u32 = 1;
    const USERPTR: u32 = 4;

    fn buffers(all: &[(u32, u64, u64, u32)]) -> Buffers {
        let buffer = |&(gpu_id, offset, size, alloc_flags): &_| KfdBuffer {
            gpu_id,
            offset,
            size,
            alloc_flags,
            ..KfdBuffer::default()
        };
        Buffers::of(&KfdImage { buffers: all.iter().map(buffer).collect(), ..KfdImage::default() })
    }

    #[test]
    fn a_buffer_is_found_by_each_of_its_offsets() {
        let buffers = buffers(&[(1, 300, 100, VRAM), (1, 100, 100, VRAM)]);
        let found = [99, 100, 199, 200, 299, 300, 399, 400].map(|offset| buffers.at(1, offset));
        assert_eq!(found, [None, Some(1), Some(1), None, None, Some(0), Some(0), None]);
    }

    #[test]
    fn gpus_may_have_the_same_offsets() {
        let buffers = buffers(&[(1, 100, 100, VRAM), (2, 100, 100, VRAM)]);
        assert_eq!([1, 2, 3].map(|gpu| buffers.at(gpu, 150)), [Some(0), Some(1), None]);
    }

    #[test]
    fn of_several_buffers_at_an_offset_the_first_of_the_image_is_found() {
        let all = [(1, 150, 100, VRAM), (1, 0, 1000, VRAM), (1, 150, 500, VRAM), (1, 160, 1, VRAM)];
        let buffers = buffers(&all);
        let first =
            |offset| all.iter().position(|(_, start, size, _)| (*start..start + size).contains(&offset));
        for offset in 0..1001 {
            assert_eq!(buffers.at(1, offset), first(offset), "{offset}");
        }
    }

    #[test]
    fn addresses_of_the_process_are_no_offsets() {
        assert_eq!(buffers(&[(1, 100, 100, USERPTR)]).at(1, 100), None);
    }
}
