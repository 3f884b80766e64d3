// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a queue had not done yet: its pointers are in memory, which may be in the image.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;

use rewake_amdgpu_uapi::criu::blob::Queue;
use rewake_criu_images::PagesFile;
use rewake_criu_images::amdgpu::KfdImage;

/// `KFD_QUEUE_FORMAT_AQL` (`kfd_priv.h`).
pub(super) const AQL: u32 = 1;
/// Bytes of an AQL packet: its pointers count these. PM4 counts words, copy engines count bytes.
const PACKET: u64 = 64;
const WORD: u64 = 4;

/// Memory of a process as its buffers' contents have it.
#[derive(Debug)]
pub(super) struct Memory<'a> {
    files: &'a BTreeMap<u32, PagesFile>,
    /// Address, size, GPU and place in the GPU's file, in order of address.
    places: Vec<(u64, u64, u32, u64)>,
}

impl<'a> Memory<'a> {
    /// Of the buffers in these files, by GPU.
    pub(super) fn new(image: &KfdImage, files: &'a BTreeMap<u32, PagesFile>) -> Self {
        let of_gpu = |gpu: &u32| {
            let gpu = *gpu;
            image.pages(gpu).0.into_iter().map(move |stretch| {
                let buffer = image.buffers[stretch.buffer];
                (buffer.address, buffer.size, gpu, stretch.file_offset)
            })
        };
        let mut places: Vec<_> = files.keys().flat_map(of_gpu).collect();
        places.sort_unstable();
        Self { files, places }
    }

    /// Eight bytes at an address, if they are in a file.
    fn long(&self, address: u64) -> Option<u64> {
        let behind = self.places.partition_point(|(start, ..)| *start <= address);
        let (start, size, gpu, offset) = *self.places.get(behind.checked_sub(1)?)?;
        let mut bytes = [0; size_of::<u64>()];
        let at = address - start;
        if at.checked_add(bytes.len() as u64)? > size {
            return None;
        }
        self.files.get(&gpu)?.file.read_exact_at(&mut bytes, offset + at).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Bytes that a queue's GPU had not taken; none when they are not known.
    pub(super) fn pending(&self, queue: &Queue) -> Option<u64> {
        let unit = match (queue.kind, queue.format) {
            (super::collect::COMPUTE, AQL) => PACKET,
            (super::collect::COMPUTE, _) => WORD,
            _ => 1,
        };
        let (read, write) = (self.long(queue.read_pointer)?, self.long(queue.write_pointer)?);
        write.checked_sub(read)?.checked_mul(unit)
    }
}
