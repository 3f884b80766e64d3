// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a mapped device is now. A buffer's offset names it on its GPU, for every process that maps it.

use std::collections::BTreeSet;

use nix::sys::memfd::{MFdFlags, memfd_create};
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, Properties};
use rewake_criu_images::rewake::FreedMapping;
use rewake_criu_plugin::{Answer, Host, Mapping, Refusal};

use super::Restore;
use super::gpu_assignment::gpus;
use super::shared_state::MmapOffset;
use crate::buffers::{gpu_of_minor, is_address_of_one};
use crate::device::Gpu;

/// Offsets of `/dev/kfd` carry a GPU's name here (`kfd_priv.h`, KFD_MMAP_GPU_ID).
const GPU_SHIFT: u32 = 46;
const GPU_MASK: u64 = 0xffff << GPU_SHIFT;
/// Doorbells and registers.
const OF_KFD: u32 = 8 | 16;
const HAD_ONE: &str = ", and there was one when it was dumped: the image is damaged, or another plugin dumped into the directory of an \
                       earlier dump (remove its rewake-shared.img then)";

#[derive(Debug, thiserror::Error)]
enum Unmapped {
    #[error("a mapping of {path} at {address:#x}, offset {offset:#x}: no buffer of the image was there{why}")]
    NoBuffer { path: String, address: u64, offset: u64, why: &'static str },
    #[error("a mapping of {path} at {address:#x}: the image does not know GPU {gpu:#x}")]
    NoGpu { path: String, address: u64, gpu: u32 },
    #[error(
        "a mapping of {path} at {address:#x}: the buffer is another GPU's, and the driver maps it on that one's render \
         node only"
    )]
    OtherGpu { path: String, address: u64 },
}

/// What a task maps in the place of a mapping of `path`.
pub(super) fn find(
    restore: &mut Restore,
    host: &Host,
    path: &str,
    address: u64,
    offset: u64,
) -> Answer<Mapping> {
    match Gpu::of_path(path).ok_or(Refusal::NotMine)? {
        Gpu::Kfd => of_kfd(restore, path, address, offset),
        Gpu::Render(minor) => {
            let compute = of_render_node(restore, host, path, minor, address, offset)?;
            let found = compute.map_or_else(
                || of_file(restore, host, path, minor, address, offset),
                |found| Ok(Some(found)),
            )?;
            if let Some(found) = found {
                return Ok(found);
            }
            let own = restore.own.map(|own| &restore.images.kfd[own]);
            let told = own.and_then(|(id, _)| restore.bare.get(id));
            was_freed(own.map(|(_, image)| image), told, FreedMapping { minor, address, offset })
                .map_err(|why| Unmapped::NoBuffer { path: path.to_owned(), address, offset, why })?;
            host.warn(format_args!(
                "a mapping of {path} at {address:#x}: the image has no buffer there, as one that had been freed; what touches it before \
                 it is unmapped gets SIGBUS"
            ));
            Ok(nothing()?)
        }
    }
}

/// Whether a mapping without a buffer was one of a buffer that had been freed: of a GPU that the task computes on, `own`, and without one
/// when it was dumped, which only this project's plugin has `told`; by others' images not where the GPU has a buffer still. The reason if it
/// was none.
fn was_freed(
    own: Option<&KfdImage>,
    told: Option<&BTreeSet<FreedMapping>>,
    mapping: FreedMapping,
) -> Result<(), &'static str> {
    let computes = own.and_then(|image| Some((image, gpu_of_minor(image, mapping.minor)?)));
    let (image, (_, gpu_id)) = computes.ok_or("")?;
    if told.is_some_and(|told| told.contains(&mapping)) {
        return Ok(());
    }
    if is_address_of_one(image, gpu_id, mapping.address) {
        return Err("; the one at this address has another offset: the image is damaged");
    }
    if told.is_none() { Ok(()) } else { Err(HAD_ONE) }
}

/// ROCm's library frees a buffer first, and unmaps it then (`__fmm_release`): who is dumped between the two has a mapping of which
/// only the kernel knows the bytes. It is restored as one that ends nowhere else than in its munmap: beyond the end of its file.
fn nothing() -> Result<Mapping, nix::errno::Errno> {
    let file = memfd_create(c"rewake-freed", MFdFlags::MFD_CLOEXEC)?;
    Ok(Mapping { offset: 0, file: Some(file) })
}

/// Doorbells, registers, events: the GPU's name changes, and nothing else. The name is the one in the machine, not in the
/// process: the buffers of that kind, whose offsets are the same, tell which GPU it was. A task opens `/dev/kfd` itself, as
/// the driver lets nobody map another's.
fn of_kfd(restore: &Restore, path: &str, address: u64, offset: u64) -> Answer<Mapping> {
    let gpu = u32::try_from((offset & GPU_MASK) >> GPU_SHIFT).unwrap_or(0);
    if gpu == 0 {
        return Ok(Mapping { offset, file: None });
    }
    let properties = of_machine(&restore.images.kfd, gpu);
    let properties = properties.ok_or_else(|| Unmapped::NoGpu { path: path.to_owned(), address, gpu })?;
    let actual = u64::from(restore.places.of(properties)?.actual);
    Ok(Mapping { offset: offset & !GPU_MASK | (actual << GPU_SHIFT) & GPU_MASK, file: None })
}

/// A GPU of the dumped machine, by its name there.
fn of_machine(images: &[(u32, KfdImage)], gpu: u32) -> Option<&Properties> {
    let of = |buffer: &KfdBuffer| u32::try_from((buffer.offset & GPU_MASK) >> GPU_SHIFT).unwrap_or(0);
    let is = |buffer: &&KfdBuffer| buffer.alloc_flags & OF_KFD != 0 && of(buffer) == gpu;
    let by_buffer = images.iter().find_map(|(_, image)| Some((image, image.buffers.iter().find(is)?.gpu_id)));
    match by_buffer {
        Some((image, name)) => gpus(image).find(|properties| properties.gpu_id == name),
        // Without such buffers nothing else is known; until a process was restored on another machine it is true.
        None => images.iter().flat_map(|(_, image)| gpus(image)).find(|known| known.gpu_id & 0xffff == gpu),
    }
}

/// A buffer of this task, or of another one that it was forked from or shares it with.
fn of_render_node(
    restore: &mut Restore,
    host: &Host,
    path: &str,
    minor: u32,
    address: u64,
    offset: u64,
) -> Answer<Option<Mapping>> {
    let others = (0..restore.images.kfd.len()).filter(|index| restore.own != Some(*index));
    for index in restore.own.into_iter().chain(others) {
        let (_, image) = &restore.images.kfd[index];
        let Some((node, name)) = gpu_of_minor(image, minor) else { continue };
        // Only the process itself tells two buffers of one offset apart, and only by the address.
        let Some(buffer) = restore.buffers[index].at(name, offset) else { continue };
        host.debug(format_args!("mapping at {address:#x}: buffer {buffer} of process {}", image.pid));
        restore.board.wait(index, image.pid)?;
        let MmapOffset::Offset(start) = restore.board.buffer(index, buffer) else {
            return Err(Unmapped::OtherGpu { path: path.to_owned(), address }.into());
        };
        let within = offset - image.buffers[buffer].offset;
        if restore.own == Some(index)
            && let Some(placeholder) = restore.later.placeholder(index, buffer, address, within)
        {
            return restore.placeholder(host, index, buffer, placeholder).map(Some);
        }
        let file = host.stored_fd(restore.board.render(index, node))?;
        return Ok(Some(Mapping { offset: start + within, file: Some(file) }));
    }
    Ok(None)
}

/// A buffer of a render node itself.
fn of_file(
    restore: &Restore,
    host: &Host,
    path: &str,
    minor: u32,
    address: u64,
    offset: u64,
) -> Answer<Option<Mapping>> {
    let mut nodes = restore.nodes.iter().enumerate();
    let found = nodes.find_map(|(index, node)| Some((index, node, node.mapped_at(minor, offset)?)));
    let Some((index, node, buffer)) = found else { return Ok(None) };
    let file = host.stored_fd(restore.board.wait_node(index, node.id)?)?;
    let MmapOffset::Offset(start) = restore.board.node_buffer(index, buffer) else {
        return Err(Unmapped::NoBuffer { path: path.to_owned(), address, offset, why: "" }.into());
    };
    let offset = start + (offset - node.contents.buffers[buffer].offset);
    Ok(Some(Mapping { offset, file: Some(file) }))
}

#[cfg(test)]
mod tests {
    use rewake_criu_images::amdgpu::Node;

    use super::*;

    const VRAM: u32 = 1;
    const DOORBELL: u32 = 8;

    fn image(names: [u32; 2], doorbells: &[(u32, u64)]) -> (u32, KfdImage) {
        let node =
            |gpu_id| Node { properties: Properties { gpu_id, ..Properties::default() }, links: Vec::new() };
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
        of_machine(images, machine).map(|properties| properties.gpu_id)
    }

    #[test]
    fn a_gpu_is_known_by_the_doorbells_that_a_process_has_there() {
        // Restored on a machine with the same names for other GPUs.
        let restored = image([0x11, 0x22], &[(0x11, 0x22), (0x22, 0x11)]);
        let other = image([0x33, 0x44], &[]);
        assert_eq!(name(&[other, restored.clone()], 0x22), Some(0x11));
        assert_eq!(name(&[restored], 0x11), Some(0x22));
    }

    #[test]
    fn where_a_gpu_has_a_buffer_still_none_has_been_freed() {
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
        let freed = |minor, address| was_freed(Some(&image), None, at(minor, address));
        assert_eq!(freed(128, 0x30_0000), Ok(()));
        for address in [0x10_0000, 0x10_1000] {
            assert!(freed(128, address).unwrap_err().contains("has another offset"), "{address:#x}");
            assert_eq!(freed(129, address), Ok(()), "another GPU's");
        }
        assert_eq!(freed(128, 0x10_2000), Ok(()), "behind it");
        assert_eq!(freed(128, 0x20_0000), Ok(()), "no buffer of a render node");
        assert_eq!(freed(130, 0x30_0000), Err(""), "a GPU that only renders");
        assert_eq!(was_freed(None, None, at(128, 0x30_0000)), Err(""), "a task that does not compute");
        let told = BTreeSet::from([at(128, 0x10_0000), at(128, 0x40_0000)]);
        let freed = |minor, address| was_freed(Some(&image), Some(&told), at(minor, address));
        assert_eq!(freed(128, 0x40_0000), Ok(()));
        assert_eq!(
            [freed(128, 0x30_0000), freed(129, 0x40_0000)],
            [Err(HAD_ONE); 2],
            "not when it was dumped"
        );
        assert_eq!(freed(128, 0x10_0000), Ok(()), "another has been allocated there, and is not mapped yet");
        assert!(freed(128, 0x10_1000).unwrap_err().contains("has another offset"), "not told");
    }

    #[test]
    fn without_doorbells_a_gpu_is_known_by_its_name() {
        let images = [image([0x11, 0x22], &[])];
        assert_eq!((name(&images, 0x22), name(&images, 0x33)), (Some(0x22), None));
    }
}
