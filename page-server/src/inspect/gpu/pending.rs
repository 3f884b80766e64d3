// SPDX-License-Identifier: MIT OR Apache-2.0
//! Computes how much a queue's GPU had not taken yet. The queue's pointers are in memory that may be in the
//! image.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;

use rewake_amdgpu_uapi::criu::blob::Queue;
use rewake_criu_images::PagesFile;
use rewake_criu_images::amdgpu::KfdImage;

/// `KFD_QUEUE_TYPE_COMPUTE` (`kfd_priv.h`, the same in Linux 6.12 and 7.2).
pub(super) const COMPUTE: u32 = 0;
/// `KFD_QUEUE_FORMAT_AQL` (`kfd_priv.h`).
pub(super) const AQL: u32 = 1;
/// Bytes of an AQL packet: an AQL queue's pointers count packets. The pointers of PM4 queues count words, and
/// the pointers of copy engines count bytes.
const PACKET: u64 = 64;
const WORD: u64 = 4;

/// A process's memory in the contents of its buffers.
#[derive(Debug)]
pub(super) struct BufferMemory<'a> {
    files: &'a BTreeMap<u32, PagesFile>,
    /// Each buffer's address, size, GPU and offset in the GPU's file, sorted by address.
    ranges: Vec<(u64, u64, u32, u64)>,
}

impl<'a> BufferMemory<'a> {
    /// Collects the buffers in these files; `files` are by GPU.
    pub(super) fn new(image: &KfdImage, files: &'a BTreeMap<u32, PagesFile>) -> Self {
        let of_gpu = |gpu: &u32| {
            let gpu = *gpu;
            image.pages(gpu).0.into_iter().map(move |range| {
                let buffer = image.buffers[range.buffer];
                (buffer.address, buffer.size, gpu, range.file_offset)
            })
        };
        let mut ranges: Vec<_> = files.keys().flat_map(of_gpu).collect();
        ranges.sort_unstable();
        Self { files, ranges }
    }

    /// Reads eight bytes at an address, if they are in a file.
    fn long(&self, address: u64) -> Option<u64> {
        let end = self.ranges.partition_point(|(start, ..)| *start <= address);
        let (start, size, gpu, offset) = *self.ranges.get(end.checked_sub(1)?)?;
        let mut bytes = [0; size_of::<u64>()];
        let at = address - start;
        if at.checked_add(bytes.len() as u64)? > size {
            return None;
        }
        self.files.get(&gpu)?.file.read_exact_at(&mut bytes, offset + at).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Returns the bytes that a queue's GPU had not taken, or `None` if its pointers are not in the image.
    pub(super) fn pending(&self, queue: &Queue) -> Option<u64> {
        let unit = match (queue.kind, queue.format) {
            (COMPUTE, AQL) => PACKET,
            (COMPUTE, _) => WORD,
            _ => 1,
        };
        let (read, write) = (self.long(queue.read_pointer)?, self.long(queue.write_pointer)?);
        write.checked_sub(read)?.checked_mul(unit)
    }
}
