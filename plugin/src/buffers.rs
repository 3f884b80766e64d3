// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which buffer of a process a CPU's mapping shows: a render node is one GPU's, and an offset in it one buffer's.

use std::collections::BTreeMap;

use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage};

/// Buffers whose offset is one of `/dev/kfd` (doorbells, registers) or an address of the process (userptr).
const NOT_OF_RENDER_NODES: u32 = 4 | 8 | 16;

/// A process's buffers, by the names of their GPUs and the offsets of their mappings.
#[derive(Debug)]
pub(crate) struct Buffers(BTreeMap<u32, Vec<Stretch>>);

/// Offsets of one buffer.
#[derive(Debug)]
struct Stretch {
    start: u64,
    end: u64,
    /// The furthest end of this one and of all before it.
    furthest: u64,
    /// Index in the image.
    buffer: usize,
}

impl Buffers {
    pub(crate) fn of(image: &KfdImage) -> Self {
        let mut all: BTreeMap<u32, Vec<Stretch>> = BTreeMap::new();
        for (buffer, of) in image.buffers.iter().enumerate() {
            if of.alloc_flags & NOT_OF_RENDER_NODES == 0 {
                let (start, end) = (of.offset, of.offset.saturating_add(of.size));
                all.entry(of.gpu_id).or_default().push(Stretch { start, end, furthest: end, buffer });
            }
        }
        for stretches in all.values_mut() {
            stretches.sort_by_key(|stretch| (stretch.start, stretch.end));
            stretches.dedup_by_key(|stretch| (stretch.start, stretch.end));
            let mut furthest = 0;
            for stretch in stretches {
                furthest = stretch.end.max(furthest);
                stretch.furthest = furthest;
            }
        }
        Self(all)
    }

    /// Whether there are any.
    pub(crate) fn are_some(&self) -> bool {
        !self.0.is_empty()
    }

    /// The image's first buffer of a GPU that has `offset`.
    pub(crate) fn at(&self, gpu_id: u32, offset: u64) -> Option<usize> {
        let all = self.0.get(&gpu_id)?;
        // The driver gives each memory offsets of its own, so that only the last one is looked at.
        let before = &all[..all.partition_point(|stretch| stretch.start <= offset)];
        let near = before.iter().rev().take_while(|stretch| offset < stretch.furthest);
        near.filter(|stretch| offset < stretch.end).map(|stretch| stretch.buffer).min()
    }
}

/// The GPU of a render node, by its index among the image's nodes and its name.
pub(crate) fn gpu_of_minor(image: &KfdImage, minor: u32) -> Option<(usize, u32)> {
    let is = |gpu_id: u32, of: u32| gpu_id != 0 && of == minor;
    let mut nodes = image.nodes.iter().map(|node| &node.properties).enumerate();
    let (node, properties) = nodes.find(|(_, gpu)| is(gpu.gpu_id, gpu.drm_render_minor))?;
    Some((node, properties.gpu_id))
}

/// Whether a GPU has a buffer of render nodes at an address of the process. ROCm's library maps buffers where GPUs have them.
pub(crate) fn is_address_of_one(image: &KfdImage, gpu_id: u32, address: u64) -> bool {
    let here = |buffer: &&KfdBuffer| buffer.gpu_id == gpu_id && buffer.alloc_flags & NOT_OF_RENDER_NODES == 0;
    let covers =
        |buffer: &KfdBuffer| (buffer.address..buffer.address.saturating_add(buffer.size)).contains(&address);
    image.buffers.iter().filter(here).any(covers)
}

/// The render nodes of the GPU of this name: one, unless the image is odd.
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
    fn gpus_have_the_same_offsets() {
        let buffers = buffers(&[(1, 100, 100, VRAM), (2, 100, 100, VRAM)]);
        assert_eq!([1, 2, 3].map(|gpu| buffers.at(gpu, 150)), [Some(0), Some(1), None]);
    }

    #[test]
    fn of_those_at_one_offset_it_is_the_first_of_the_image() {
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
