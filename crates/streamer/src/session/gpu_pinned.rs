// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the memory of a process that its GPUs can access as soon as queues run. A restore waits for it, so
//! it is loaded before other memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;

use rewake_amdgpu_uapi::criu::blob::Private;
use rewake_criu_images::ImageDir;
use rewake_criu_images::amdgpu::{GpuFile, KfdImage};
use tracing::debug;

use rewake_criu_images::amdgpu::gpu_files;

/// Returns the sorted address ranges that GPUs can access, by the pid in the names of a process's images.
///
/// A process whose image cannot be read has no entry. The plugin reports that error; here it only affects the
/// order of loads.
#[must_use]
pub fn gpu_registered_ranges(images: &ImageDir) -> BTreeMap<u32, Vec<Range<u64>>> {
    let directory = format!("/proc/self/fd/{}", images.as_fd().as_raw_fd());
    let files = gpu_files(Path::new(&directory)).unwrap_or_default().into_iter();
    let read =
        files.filter_map(|file| if let GpuFile::Kfd(id) = file { Some(id) } else { None }).filter_map(|id| {
            match images.kfd(id) {
                Ok(image) => image,
                Err(error) => {
                    debug!("{error}");
                    None
                }
            }
        });
    read.filter_map(|image| Some((image.pid, ranges(&image)?))).collect()
}

fn ranges(image: &KfdImage) -> Option<Vec<Range<u64>>> {
    let gpus = image.nodes.iter().filter(|node| node.properties.gpu_id != 0).count();
    let private = Private::read(&image.private, gpus, image.buffers.len(), image.objects as usize).ok()?;
    // With XNACK, GPUs retry faults and can access all memory.
    if private.xnack_mode != 0 {
        return Some(vec![Range { start: 0, end: u64::MAX }]);
    }
    Some(private.registered(image.buffers.iter().map(|buffer| (buffer.alloc_flags, buffer.size))))
}

#[cfg(test)]
mod tests {
    use rewake_amdgpu_uapi::abi::KFD_IOC_ALLOC_MEM_FLAGS_USERPTR;
    use rewake_amdgpu_uapi::criu::blob;
    use rewake_criu_images::amdgpu::{KfdBuffer, NodeImage, Properties, kfd_name};

    use super::*;

    /// A process with a userptr buffer of 8 KiB at 0x7000.
    fn image(pid: u32, xnack: u8) -> KfdImage {
        let mut private = vec![0; blob::PROCESS + blob::DEVICE + blob::BO];
        (private[0], private[4]) = (1, xnack);
        let bo = blob::PROCESS + blob::DEVICE;
        private[bo..bo + 8].copy_from_slice(&0x7000_u64.to_le_bytes());
        let properties = Properties { gpu_id: 5, ..Properties::default() };
        let alloc_flags = KFD_IOC_ALLOC_MEM_FLAGS_USERPTR;
        KfdImage {
            pid,
            gpus: 1,
            nodes: vec![NodeImage { properties, ..NodeImage::default() }, NodeImage::default()],
            buffers: vec![KfdBuffer { size: 0x2000, alloc_flags, gpu_id: 5, ..KfdBuffer::default() }],
            private,
            ..KfdImage::default()
        }
    }

    #[test]
    fn registered_ranges_are_found_by_pid() {
        let folder = tempfile::tempdir().unwrap();
        for (id, image) in [(3, image(77, 0)), (4, image(78, 1))] {
            std::fs::write(folder.path().join(kfd_name(id)), image.to_bytes()).unwrap();
        }
        std::fs::write(folder.path().join(kfd_name(9)), b"damaged").unwrap();
        let images = ImageDir::open(folder.path()).unwrap();
        // GPUs can access all memory of the second process.
        let of = [(77, 0x7000..0x9000), (78, 0..u64::MAX)].map(|(pid, range)| (pid, vec![range]));
        assert_eq!(gpu_registered_ranges(&images), BTreeMap::from(of));
    }
}
