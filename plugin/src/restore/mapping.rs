// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the file and offset that replace a mapping of a GPU device. On its GPU, a buffer's offset identifies
//! it for every process that maps it.

use std::collections::BTreeSet;

use nix::sys::memfd::{MFdFlags, memfd_create};
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, Properties};
use rewake_criu_images::rewake::FreedMapping;
use rewake_criu_plugin::{Answer, Host, MapSource, Refusal};

use super::Restore;
use super::gpu_assignment::gpus;
use super::shared_state::MmapOffset;
use crate::buffers::{gpu_of_minor, has_buffer_at_address};
use crate::device::DeviceFile;

/// The position of the GPU id in offsets of `/dev/kfd` (`kfd_priv.h`, KFD_MMAP_GPU_ID).
const GPU_SHIFT: u32 = 46;
const GPU_MASK: u64 = 0xffff << GPU_SHIFT;
/// Flags of buffers that are mapped through `/dev/kfd`: doorbells and registers.
const KFD_MAPPED: u32 = 8 | 16;
const HAD_BUFFER: &str = ", and it had one at the dump: the image is damaged, or another plugin dumped into \
                          the directory of an earlier dump (then remove rewake-shared.img)";

#[derive(Debug, thiserror::Error)]
enum MappingError {
    #[error("a mapping of {path} at {address:#x}, offset {offset:#x}: the image has no buffer for it{why}")]
    NoBuffer { path: String, address: u64, offset: u64, why: &'static str },
    #[error("a mapping of {path} at {address:#x}: the image does not describe GPU {gpu:#x}")]
    NoGpu { path: String, address: u64, gpu: u32 },
    #[error(
        "a mapping of {path} at {address:#x}: the buffer belongs to another GPU, and the driver maps it \
         through that GPU's render node only"
    )]
    OtherGpu { path: String, address: u64 },
}

/// Returns what a task maps in the place of a mapping of `path`.
pub(super) fn replace(
    restore: &mut Restore,
    host: &Host,
    path: &str,
    address: u64,
    offset: u64,
) -> Answer<MapSource> {
    match DeviceFile::of_path(path).ok_or(Refusal::NotMine)? {
        DeviceFile::Kfd => kfd_mapping(restore, path, address, offset),
        DeviceFile::Render(minor) => {
            let compute = process_mapping(restore, host, path, minor, address, offset)?;
            let found = compute.map_or_else(
                || node_mapping(restore, host, path, minor, address, offset),
                |found| Ok(Some(found)),
            )?;
            if let Some(found) = found {
                return Ok(found);
            }
            let own = restore.own.map(|own| &restore.images.kfd[own]);
            let recorded = own.and_then(|(id, _)| restore.freed_mappings.get(id));
            check_freed(own.map(|(_, image)| image), recorded, FreedMapping { minor, address, offset })
                .map_err(|why| MappingError::NoBuffer { path: path.to_owned(), address, offset, why })?;
            host.warn(format_args!(
                "a mapping of {path} at {address:#x}: the image has no buffer for it, because it was freed \
                 before the dump; an access before it is unmapped gets SIGBUS"
            ));
            Ok(freed_mapping()?)
        }
    }
}

/// Checks that a mapping without a buffer is one of a freed buffer, and returns the reason if it is not.
///
/// The mapping must be of a GPU that the task, `own`, computes on. An image of this plugin lists the mappings
/// without a buffer, `recorded`. In other images the GPU must not have a buffer at the mapping's address.
fn check_freed(
    own: Option<&KfdImage>,
    recorded: Option<&BTreeSet<FreedMapping>>,
    mapping: FreedMapping,
) -> Result<(), &'static str> {
    let computes = own.and_then(|image| Some((image, gpu_of_minor(image, mapping.minor)?)));
    let (image, (_, gpu_id)) = computes.ok_or("")?;
    if recorded.is_some_and(|recorded| recorded.contains(&mapping)) {
        return Ok(());
    }
    if has_buffer_at_address(image, gpu_id, mapping.address) {
        return Err("; the one at this address has another offset: the image is damaged");
    }
    if recorded.is_none() { Ok(()) } else { Err(HAD_BUFFER) }
}

/// Returns a mapping beyond the end of an empty file, for a mapping of a freed buffer.
///
/// ROCm's library frees a buffer before it unmaps it (`__fmm_release`). A process that was dumped between the
/// two has a mapping whose bytes only the driver had. The program can unmap it, and any other access gets
/// SIGBUS.
fn freed_mapping() -> Result<MapSource, nix::errno::Errno> {
    let file = memfd_create(c"rewake-freed", MFdFlags::MFD_CLOEXEC)?;
    Ok(MapSource { offset: 0, file: Some(file) })
}

/// Returns the replacement of a mapping of `/dev/kfd`: doorbells, registers or events. Only the GPU's id in
/// the offset changes.
///
/// The offset has the id in the machine's topology, and not the process's. The process's buffers of that kind
/// have the same offsets, and so identify the GPU. A task opens `/dev/kfd` itself: the driver refuses to map
/// another process's file.
fn kfd_mapping(restore: &Restore, path: &str, address: u64, offset: u64) -> Answer<MapSource> {
    let gpu = u32::try_from((offset & GPU_MASK) >> GPU_SHIFT).unwrap_or(0);
    if gpu == 0 {
        return Ok(MapSource { offset, file: None });
    }
    let properties = gpu_by_machine_name(&restore.images.kfd, gpu);
    let properties = properties.ok_or_else(|| MappingError::NoGpu { path: path.to_owned(), address, gpu })?;
    let actual = u64::from(restore.assignment.of(properties)?.actual);
    Ok(MapSource { offset: offset & !GPU_MASK | (actual << GPU_SHIFT) & GPU_MASK, file: None })
}

/// Returns a GPU of the dumped machine by its id in that machine's topology.
fn gpu_by_machine_name(images: &[(u32, KfdImage)], gpu: u32) -> Option<&Properties> {
    let of = |buffer: &KfdBuffer| u32::try_from((buffer.offset & GPU_MASK) >> GPU_SHIFT).unwrap_or(0);
    let is = |buffer: &&KfdBuffer| buffer.alloc_flags & KFD_MAPPED != 0 && of(buffer) == gpu;
    let by_buffer = images.iter().find_map(|(_, image)| Some((image, image.buffers.iter().find(is)?.gpu_id)));
    match by_buffer {
        Some((image, name)) => gpus(image).find(|properties| properties.gpu_id == name),
        // Without such buffers the process's id is used. It is the same until a process is restored on
        // another machine.
        None => images.iter().flat_map(|(_, image)| gpus(image)).find(|known| known.gpu_id & 0xffff == gpu),
    }
}

/// Returns the replacement of a mapping of a process's buffer: of this task, or of one that it shares the
/// buffer with.
fn process_mapping(
    restore: &mut Restore,
    host: &Host,
    path: &str,
    minor: u32,
    address: u64,
    offset: u64,
) -> Answer<Option<MapSource>> {
    let others = (0..restore.images.kfd.len()).filter(|index| restore.own != Some(*index));
    for index in restore.own.into_iter().chain(others) {
        let (_, image) = &restore.images.kfd[index];
        let Some((node, name)) = gpu_of_minor(image, minor) else { continue };
        // If two buffers have one offset, only the process distinguishes them, by their addresses. Use the
        // first.
        let Some(buffer) = restore.buffers[index].at(name, offset) else { continue };
        host.debug(format_args!("mapping at {address:#x}: buffer {buffer} of process {}", image.pid));
        restore.shared_state.wait(index, image.pid)?;
        let MmapOffset::Offset(start) = restore.shared_state.buffer(index, buffer) else {
            return Err(MappingError::OtherGpu { path: path.to_owned(), address }.into());
        };
        let within = offset - image.buffers[buffer].offset;
        if restore.own == Some(index)
            && let Some(placeholder) = restore.lazy_plan.placeholder(index, buffer, address, within)
        {
            return restore.placeholder(host, index, buffer, placeholder).map(Some);
        }
        let file = host.stored_fd(restore.shared_state.render(index, node))?;
        return Ok(Some(MapSource { offset: start + within, file: Some(file) }));
    }
    Ok(None)
}

/// Returns the replacement of a mapping of a render node's own buffer.
fn node_mapping(
    restore: &Restore,
    host: &Host,
    path: &str,
    minor: u32,
    address: u64,
    offset: u64,
) -> Answer<Option<MapSource>> {
    let mut nodes = restore.nodes.iter().enumerate();
    let found = nodes.find_map(|(index, node)| Some((index, node, node.mapped_at(minor, offset)?)));
    let Some((index, node, buffer)) = found else { return Ok(None) };
    let file = host.stored_fd(restore.shared_state.wait_node(index, node.id)?)?;
    let MmapOffset::Offset(start) = restore.shared_state.node_buffer(index, buffer) else {
        return Err(MappingError::NoBuffer { path: path.to_owned(), address, offset, why: "" }.into());
    };
    let offset = start + (offset - node.contents.buffers[buffer].offset);
    Ok(Some(MapSource { offset, file: Some(file) }))
}

#[cfg(test)]
mod tests {
    use rewake_criu_images::amdgpu::NodeImage;

    use super::*;

    const VRAM: u32 = 1;
    const DOORBELL: u32 = 8;

    fn image(names: [u32; 2], doorbells: &[(u32, u64)]) -> (u32, KfdImage) {
        let node = |gpu_id| NodeImage {
            properties: Properties { gpu_id, ..Properties::default() },
            links: Vec::new(),
        };
        let buffer = |(gpu_id, machine): &(u32, u64)| KfdBuffer {
            gpu_id: *gpu_id,
            offset: 3 << 62 | machine << GPU_SHIFT,
            alloc_flags: DOORBELL,
            ..KfdBuffer::default()
        };
        let buffers = doorbells.iter().map(buffer).collect();
        (6, KfdImage { nodes: names.map(node).to_vec(), buffers, ..KfdImage::default() })
    }

    fn name(images: &[(u32, KfdImage)], machine: u32) -> Option<u32> {
        gpu_by_machine_name(images, machine).map(|properties| properties.gpu_id)
    }

    #[test]
    fn doorbell_offsets_identify_a_gpu() {
        // Restored on a machine where other GPUs have these ids.
        let restored = image([0x11, 0x22], &[(0x11, 0x22), (0x22, 0x11)]);
        let other = image([0x33, 0x44], &[]);
        assert_eq!(name(&[other, restored.clone()], 0x22), Some(0x11));
        assert_eq!(name(&[restored], 0x11), Some(0x22));
    }

    #[test]
    fn an_address_with_a_buffer_is_no_freed_mapping() {
        let (_, mut image) = image([0x11, 0x22], &[]);
        (image.nodes[0].properties.drm_render_minor, image.nodes[1].properties.drm_render_minor) = (128, 129);
        let buffer = |gpu_id, alloc_flags, address| KfdBuffer {
            gpu_id,
            alloc_flags,
            address,
            size: 0x2000,
            offset: 1 << 32,
            ..KfdBuffer::default()
        };
        image.buffers = vec![buffer(0x11, VRAM, 0x10_0000), buffer(0x11, DOORBELL, 0x20_0000)];
        let at = |minor, address| FreedMapping { minor, address, offset: 1 << 40 };
        let freed = |minor, address| check_freed(Some(&image), None, at(minor, address));
        assert_eq!(freed(128, 0x30_0000), Ok(()));
        for address in [0x10_0000, 0x10_1000] {
            assert!(freed(128, address).unwrap_err().contains("has another offset"), "{address:#x}");
            assert_eq!(freed(129, address), Ok(()), "another GPU's");
        }
        assert_eq!(freed(128, 0x10_2000), Ok(()), "after it");
        assert_eq!(freed(128, 0x20_0000), Ok(()), "a buffer that no render node maps");
        assert_eq!(freed(130, 0x30_0000), Err(""), "a GPU that only renders");
        assert_eq!(check_freed(None, None, at(128, 0x30_0000)), Err(""), "a task that does not compute");
        let recorded = BTreeSet::from([at(128, 0x10_0000), at(128, 0x40_0000)]);
        let freed = |minor, address| check_freed(Some(&image), Some(&recorded), at(minor, address));
        assert_eq!(freed(128, 0x40_0000), Ok(()));
        assert_eq!(
            [freed(128, 0x30_0000), freed(129, 0x40_0000)],
            [Err(HAD_BUFFER); 2],
            "not recorded at the dump"
        );
        assert_eq!(
            freed(128, 0x10_0000),
            Ok(()),
            "another buffer was allocated there, and is not mapped yet"
        );
        assert!(freed(128, 0x10_1000).unwrap_err().contains("has another offset"), "not recorded");
    }

    #[test]
    fn without_doorbells_the_id_identifies_a_gpu() {
        let images = [image([0x11, 0x22], &[])];
        assert_eq!((name(&images, 0x22), name(&images, 0x33)), (Some(0x22), None));
    }
}
