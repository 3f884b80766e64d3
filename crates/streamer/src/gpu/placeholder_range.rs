// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the range of a process's placeholders' file for each buffer.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, ensure};
use rewake_plugin_protocol::proto;
use rewake_ptrace_inject::Swap;

/// A buffer that has placeholders.
#[derive(Debug)]
pub(super) struct PlaceholderBuffer<'a> {
    /// The image's number of the buffer.
    pub(super) number: usize,
    /// The buffer's GPU: the name in the image, and N of `/dev/dri/renderDN`.
    pub(super) gpu: (u32, u32),
    pub(super) dmabuf: BorrowedFd<'a>,
    pub(super) bytes: u64,
}

/// The range of the placeholders' file for one buffer: from its first to its last mapped byte.
#[derive(Debug)]
pub(super) struct PlaceholderRange<'a> {
    pub(super) buffer: PlaceholderBuffer<'a>,
    /// The index among the process's render node files.
    render: usize,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// The offset on the render node that belongs to `offset`, and the one in the buffer.
    device_offset: u64,
    within: u64,
    pub(super) swapped: bool,
}

/// Returns the ranges of all buffers, ordered by offset, without overlaps. `mappings` are the process's;
/// `renders` are its render node files, by the GPUs' names in the image.
///
/// # Errors
/// The plugin's mappings are inconsistent.
pub(super) fn parts<'a>(
    mappings: &[proto::Mapping],
    renders: &[(u32, OwnedFd)],
    buffers: Vec<PlaceholderBuffer<'a>>,
) -> anyhow::Result<Vec<PlaceholderRange<'a>>> {
    let mut of: BTreeMap<usize, Vec<&proto::Mapping>> = BTreeMap::new();
    for mapping in mappings {
        of.entry(mapping.buffer as usize).or_default().push(mapping);
    }
    let part = |buffer: PlaceholderBuffer<'a>| {
        let of = of.get(&buffer.number).context("a buffer without placeholders")?;
        PlaceholderRange::new(buffer, of, renders)
    };
    let mut parts = buffers.into_iter().map(part).collect::<anyhow::Result<Vec<_>>>()?;
    parts.sort_by_key(|part| part.offset);
    for two in parts.windows(2) {
        let (one, next) = (&two[0], &two[1]);
        ensure!(
            one.offset + one.length <= next.offset,
            "the placeholders of buffers {} and {} overlap",
            one.buffer.number,
            next.buffer.number
        );
    }
    Ok(parts)
}

impl<'a> PlaceholderRange<'a> {
    fn new(
        buffer: PlaceholderBuffer<'a>,
        of: &[&proto::Mapping],
        renders: &[(u32, OwnedFd)],
    ) -> anyhow::Result<Self> {
        let number = buffer.number;
        let first =
            of.iter().min_by_key(|mapping| mapping.offset).context("a buffer without placeholders")?;
        let end = of.iter().map(|mapping| mapping.offset + mapping.length).max().unwrap_or(first.offset);
        let (offset, device_offset) = (first.offset, first.device_offset);
        let straight = of
            .iter()
            .all(|mapping| mapping.device_offset.checked_sub(device_offset) == Some(mapping.offset - offset));
        ensure!(straight, "the placeholders of buffer {number} make no sense");
        let render = renders.iter().position(|(gpu, _)| *gpu == buffer.gpu.0);
        let render = render.with_context(|| format!("the plugin sent no render node for buffer {number}"))?;
        let (length, within) = (end - offset, first.within);
        ensure!(
            within.checked_add(length).is_some_and(|end| end <= buffer.bytes),
            "a placeholder of buffer {number} goes beyond it"
        );
        Ok(Self { buffer, render, offset, length, device_offset, within, swapped: false })
    }

    /// Returns the offset in the buffer for an offset in the file.
    pub(super) fn within(&self, offset: u64) -> u64 {
        self.within + (offset - self.offset)
    }

    /// Returns the swap that replaces the placeholder by the buffer's mapping.
    pub(super) fn swap<'r>(&self, renders: &'r [(u32, OwnedFd)]) -> Swap<'r> {
        let &PlaceholderRange { offset, length, device_offset, render, .. } = self;
        Swap { offset, length, device: renders[render].1.as_fd(), device_offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rewake_uffd::PAGE_SIZE as PAGE;

    const GPU: u32 = 4711;
    const DEVICE: u64 = 1 << 40;

    /// Maps pages of a buffer that begins at page `start` of the file, and at `DEVICE` plus that on the
    /// device.
    fn mapping(buffer: u32, start: u64, within: u64, pages: u64) -> proto::Mapping {
        let offset = (start + within) * PAGE;
        let (length, device_offset, within) = (pages * PAGE, DEVICE + offset, within * PAGE);
        proto::Mapping { address: offset, length, offset, buffer, device_offset, within }
    }

    fn parts_of(
        mappings: &[proto::Mapping],
        buffers: &[usize],
    ) -> anyhow::Result<Vec<(usize, u64, u64, u64)>> {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let of = |number: &usize| PlaceholderBuffer {
            number: *number,
            gpu: (GPU, 128),
            dmabuf: file.as_fd(),
            bytes: 8 * PAGE,
        };
        let renders = [(GPU, file.try_clone().unwrap())];
        let parts = parts(mappings, &renders, buffers.iter().map(of).collect())?;
        let found = parts.iter().map(|part| {
            (part.buffer.number, part.offset / PAGE, part.length / PAGE, part.within(part.offset) / PAGE)
        });
        Ok(found.collect())
    }

    #[test]
    fn a_buffer_has_the_part_from_its_first_to_its_last_mapped_byte() {
        // The mappings of one buffer are neither adjacent nor in the order of the file.
        let mappings = [mapping(7, 0, 5, 2), mapping(3, 8, 0, 8), mapping(7, 0, 1, 1), mapping(5, 16, 2, 1)];
        let parts = parts_of(&mappings, &[3, 5, 7]).unwrap();
        assert_eq!(parts, [(7, 1, 6, 1), (3, 8, 8, 0), (5, 18, 1, 2)]);
    }

    #[test]
    fn parts_that_overlap_are_refused() {
        let error = parts_of(&[mapping(7, 0, 0, 8), mapping(3, 7, 0, 8)], &[3, 7]).unwrap_err();
        assert_eq!(error.to_string(), "the placeholders of buffers 7 and 3 overlap");
    }

    #[test]
    fn mappings_that_are_not_where_the_buffer_is_are_refused() {
        let mut mappings = [mapping(7, 0, 0, 2), mapping(7, 0, 4, 2)];
        mappings[1].device_offset += PAGE;
        let error = parts_of(&mappings, &[7]).unwrap_err();
        assert_eq!(error.to_string(), "the placeholders of buffer 7 make no sense");
        assert!(parts_of(&[mapping(7, 0, 7, 2)], &[7]).is_err(), "beyond its end");
    }
}
