// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks an image before a task exists. The kernel would answer most damage with EINVAL only.

use std::os::fd::BorrowedFd;

use rewake_amdgpu_uapi::criu::blob::Private;
use rewake_amdgpu_uapi::criu::queues::{QueueSupport, restored_by};
use rewake_bo_contents::GpuPagesFile;
use rewake_criu_images::amdgpu::{KfdImage, kfd_name, render_name};
use rewake_criu_plugin::{Answer, Host};

use super::gpu_assignment::{AssignedGpu, GpuAssignment, gpus};
use crate::image::Images;

/// A file of the image has invalid contents.
#[derive(Debug, thiserror::Error)]
#[error("{file} in the image directory is damaged")]
struct DamagedFile {
    file: String,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
}

#[derive(Debug, thiserror::Error)]
enum Defect {
    #[error("{what} on GPU {gpu:#x}, expected one of the process's GPUs")]
    Elsewhere { what: String, gpu: u32 },
    #[error("buffers at {first:#x} and {second:#x} overlap on GPU {gpu:#x}")]
    Overlap { gpu: u32, first: u64, second: u64 },
}

#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} has queues on GPU {gpu:#x}, which are to be restored on GPU {actual:#x}: GFX11 and newer \
     run queues by firmware, and the driver cannot restore them there"
)]
struct MesQueues {
    pid: u32,
    gpu: u32,
    actual: u32,
}

/// Restored, the queue would never run, and its program would wait for ever.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} has queues that were spread over the {xccs} XCCs of GPU {gpu:#x}, and the image has the \
     state of fewer, because the kernel of the dump saves one only: they would never run; {}",
    restored_by()
)]
struct PartOfQueue {
    pid: u32,
    gpu: u32,
    xccs: u64,
}

/// Refuses an image that no task could restore.
pub(super) fn check_images(host: &Host, images: &Images, assignment: &GpuAssignment) -> Answer {
    let folder = host.image_dir()?;
    for (id, image) in &images.kfd {
        let damaged = |source| DamagedFile { file: kfd_name(*id), source };
        let private = check_private(image).map_err(damaged)?;
        check_queues(host, image, &private, assignment)?;
        check_pages_files(folder, *id, image)?;
    }
    for (id, image) in &images.render {
        assignment
            .of_render(image)
            .map_err(|source| DamagedFile { file: render_name(*id), source: source.into() })?;
    }
    Ok(())
}

/// Checks that the assigned GPUs can restore all queues.
fn check_queues(host: &Host, image: &KfdImage, private: &Private, assignment: &GpuAssignment) -> Answer {
    let pid = image.pid;
    let mut warned = Vec::new();
    for queue in private.queues() {
        let Some(gpu) = gpus(image).find(|gpu| gpu.gpu_id == queue.gpu) else { continue };
        let AssignedGpu { actual, queues, xccs, .. } = assignment.of(gpu)?;
        if queues == QueueSupport::Firmware {
            return Err(MesQueues { pid, gpu: queue.gpu, actual }.into());
        }
        if queue.is_of_part(xccs) {
            return Err(PartOfQueue { pid, gpu: queue.gpu, xccs }.into());
        }
        // No refusal: distributions have drivers that are newer than their kernel's release.
        if queues == QueueSupport::FirstXccSaved && queue.is_spread(xccs) && !warned.contains(&actual) {
            warned.push(actual);
            host.warn(format_args!(
                "process {pid} has queues that are spread over the {xccs} XCCs of GPU {actual:#x}: with the \
                 driver of this kernel's release they never run; {}",
                restored_by()
            ));
        }
    }
    Ok(())
}

/// Checks that the pages files of all buffers exist and are long enough.
fn check_pages_files(folder: BorrowedFd<'_>, id: u32, image: &KfdImage) -> Answer {
    for gpu in gpus(image) {
        GpuPagesFile::open(folder, id, image, gpu.gpu_id, gpu.drm_render_minor)?;
    }
    Ok(())
}

/// Reads the kernel's private data. Checks that it is complete, names GPUs of the process, and has each
/// address once.
fn check_private(image: &KfdImage) -> Result<Private, Box<dyn std::error::Error + Send + Sync>> {
    let names: Vec<u32> = gpus(image).map(|gpu| gpu.gpu_id).collect();
    let known = |gpu: u32, what: String| match names.contains(&gpu) {
        true => Ok(()),
        false => Err(Defect::Elsewhere { what, gpu }),
    };
    let private = Private::read(&image.private, names.len(), image.buffers.len(), image.objects as usize)?;
    for queue in private.queues() {
        known(queue.gpu, format!("queue {}", queue.id))?;
    }
    let mut ranges = Vec::new();
    for (buffer, bo) in image.buffers.iter().zip(private.bos()) {
        for gpu in bo.mapped() {
            known(gpu, format!("the buffer at {:#x} is mapped", buffer.address))?;
            // Cannot overflow: reading the image has checked it.
            ranges.push((gpu, buffer.address, buffer.address + buffer.size));
        }
    }
    ranges.sort_unstable();
    let overlap = |two: &&[(u32, u64, u64)]| two[0].0 == two[1].0 && two[1].1 < two[0].2;
    match ranges.windows(2).find(overlap) {
        Some(two) => Err(Defect::Overlap { gpu: two[0].0, first: two[0].1, second: two[1].1 }.into()),
        None => Ok(private),
    }
}
