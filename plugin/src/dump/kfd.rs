// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the compute state of a process.

use std::os::fd::{AsFd as _, BorrowedFd};

use rewake_amdgpu_uapi::abi::{kfd_criu_bo_bucket, kfd_criu_device_bucket};
use rewake_amdgpu_uapi::criu::blob::Queue;
use rewake_amdgpu_uapi::criu::queues::{QueueSupport, restored_by};
use rewake_amdgpu_uapi::criu::{self, Checkpoint, Counts};
use rewake_amdgpu_uapi::topology::{GfxVersion, Topology};
use rewake_bo_contents::{GpuPagesFile, ProcessBuffers, folder};
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, NodeImage, kfd_name};
use rewake_criu_plugin::{Answer, Host};

use super::dmabuf;
use super::shared::DumpSharing;
use crate::{contents, hsakmt, topology};

/// The two ids of a GPU. They differ in a process that was restored on another GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GpuName {
    /// The id in the machine's topology.
    pub(super) actual: u32,
    /// The id that the process uses.
    pub(super) user: u32,
}

/// No kernel could restore the process.
#[derive(Debug, thiserror::Error)]
enum UnrestorableQueue {
    #[error(
        "process {pid} has queues on GPU {gpu:#x} ({gfx}), whose firmware (MES) runs them: no kernel up to \
         7.3 restores such queues, so the process is not dumped, and continues"
    )]
    Firmware { pid: u32, gpu: u32, gfx: GfxVersion },
    #[error(
        "process {pid} has queues that are spread over the {xccs} XCCs of GPU {gpu:#x}, and this kernel \
         saves the state of one: restored, they would never run, so the process is not dumped, and \
         continues; {}",
        restored_by()
    )]
    FirstXcc { pid: u32, gpu: u32, xccs: u64 },
}

#[derive(Debug, thiserror::Error)]
#[error("the process uses GPU {0:#x}, and the driver's topology does not list it: is it hidden from CRIU?")]
struct UnknownGpu(u32);

/// A process's compute state as it was written.
#[derive(Debug)]
pub(super) struct KfdDump {
    pub(super) names: Vec<GpuName>,
    pub(super) image: KfdImage,
}

/// Writes the state of the process that opened `file` and whose queues are evicted.
pub(super) fn dump(
    host: &Host,
    file: BorrowedFd<'_>,
    id: u32,
    counts: &Counts,
    shared: &mut DumpSharing,
) -> Answer<KfdDump> {
    let state = criu::checkpoint(file, counts)?;
    let folder = host.image_dir()?;
    let machine = Topology::read()?;
    check_queues(host, counts.pid, &state, &machine)?;
    let mut image = KfdImage {
        pid: counts.pid,
        gpus: counts.devices,
        nodes: nodes(&machine, &state.devices)?,
        buffers: state.bos.iter().map(buffer).collect(),
        objects: counts.objects,
        shared_memory_size: 0,
        shared_memory_magic: 0,
        private: state.private.clone(),
    };
    let inodes = state.dmabufs.iter().map(|dmabuf| dmabuf.as_ref().map(|fd| dmabuf::inode(fd.as_fd())));
    shared.add_process(
        id,
        &mut image.buffers,
        &inodes.map(Option::transpose).collect::<Result<Vec<_>, _>>()?,
    );
    let image = hsakmt::add_to_image(image)?;
    host.info(format_args!(
        "process {}: {} GPUs, {} buffers, {} queues, events and ranges",
        counts.pid, counts.devices, counts.bos, counts.objects
    ));
    save(host, folder, id, &image, &state, &machine)?;
    folder::write(folder, &kfd_name(id), &image.to_bytes())?;
    let name =
        |bucket: &kfd_criu_device_bucket| GpuName { actual: bucket.actual_gpu_id, user: bucket.user_gpu_id };
    Ok(KfdDump { names: state.devices.iter().map(name).collect(), image })
}

/// Refuses a process whose queues no kernel could restore, and warns where it is this one that cannot.
fn check_queues(host: &Host, pid: u32, state: &Checkpoint, machine: &Topology) -> Answer {
    let private = state.private()?;
    for bucket in &state.devices {
        let Some(gpu) = machine.gpus().find(|gpu| gpu.gpu_id == bucket.actual_gpu_id) else { continue };
        let support = QueueSupport::here(gpu);
        let (gpu, xccs, gfx) = (gpu.gpu_id, gpu.property("num_xcc"), gpu.gfx_version());
        let queues: Vec<&Queue> = private.queues().filter(|queue| queue.gpu == bucket.user_gpu_id).collect();
        if queues.is_empty() {
            continue;
        }
        if support == QueueSupport::Firmware {
            return Err(UnrestorableQueue::Firmware { pid, gpu, gfx }.into());
        }
        if queues.iter().any(|queue| queue.is_of_part(xccs)) {
            return Err(UnrestorableQueue::FirstXcc { pid, gpu, xccs }.into());
        }
        if support == QueueSupport::Refused && queues.iter().any(|queue| queue.is_spread(xccs)) {
            host.warn(format_args!(
                "process {pid} has queues that are spread over the {xccs} XCCs of GPU {gpu:#x}, which this \
                 kernel refuses to restore; {}",
                restored_by()
            ));
        }
    }
    Ok(())
}

/// Returns all nodes with the GPU ids that the process uses, in reverse order as the stock plugin writes
/// them.
fn nodes(machine: &Topology, gpus: &[kfd_criu_device_bucket]) -> Result<Vec<NodeImage>, UnknownGpu> {
    let is_unknown =
        |bucket: &&kfd_criu_device_bucket| machine.gpus().all(|gpu| gpu.gpu_id != bucket.actual_gpu_id);
    if let Some(unknown) = gpus.iter().find(is_unknown) {
        return Err(UnknownGpu(unknown.actual_gpu_id));
    }
    let node = |node: &rewake_amdgpu_uapi::topology::Node| {
        let bucket = gpus.iter().find(|bucket| bucket.actual_gpu_id == node.gpu_id);
        let mut node = topology::to_image(node);
        node.properties.gpu_id = bucket.map_or(0, |bucket| bucket.user_gpu_id);
        node
    };
    Ok(machine.nodes.iter().rev().map(node).collect())
}

fn buffer(bo: &kfd_criu_bo_bucket) -> KfdBuffer {
    KfdBuffer {
        address: bo.addr,
        size: bo.size,
        offset: bo.offset,
        alloc_flags: bo.alloc_flags,
        gpu_id: bo.gpu_id,
        handle: None,
    }
}

/// Writes the memory of all buffers, one file for each GPU.
fn save(
    host: &Host,
    folder: BorrowedFd<'_>,
    id: u32,
    image: &KfdImage,
    state: &Checkpoint,
    machine: &Topology,
) -> Answer {
    let mut files = Vec::new();
    for bucket in &state.devices {
        let Some(gpu) = machine.gpus().find(|gpu| gpu.gpu_id == bucket.actual_gpu_id) else { continue };
        files.push(GpuPagesFile::create(folder, id, image, bucket.user_gpu_id, gpu.render_minor())?);
    }
    contents::save(host, &[ProcessBuffers { files: &files, dmabufs: &state.dmabufs }])
}
