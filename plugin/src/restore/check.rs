// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can be told of an image before there is a task. The kernel's own word for most of it is EINVAL.

use std::os::fd::BorrowedFd;

use rewake_amdgpu_uapi::criu::blob::Private;
use rewake_bo_contents::PagesFile;
use rewake_criu_images::amdgpu::{KfdImage, kfd_name, render_name};
use rewake_criu_plugin::{Answer, Host};

use super::gpu_assignment::{GpuAssignment, gpus};
use crate::image::Images;

/// A file of the image makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("{file} in the image directory is damaged")]
struct Damaged {
    file: String,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
}

#[derive(Debug, thiserror::Error)]
enum Why {
    #[error("{what} on GPU {gpu:#x}, expected one of the process's GPUs")]
    Elsewhere { what: String, gpu: u32 },
    #[error("buffers at {first:#x} and {second:#x} overlap on GPU {gpu:#x}")]
    Overlap { gpu: u32, first: u64, second: u64 },
}

#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} has queues on GPU {gpu:#x}, whose place GPU {actual:#x} takes: GFX11 and newer run queues by firmware, and \
     the driver cannot give it saved ones"
)]
struct Mes {
    pid: u32,
    gpu: u32,
    actual: u32,
}

/// Refuses what no task can be given.
pub(super) fn all(host: &Host, images: &Images, places: &GpuAssignment) -> Answer {
    let folder = host.image_dir()?;
    for (id, image) in &images.kfd {
        let damaged = |source| Damaged { file: kfd_name(*id), source };
        let private = private(image).map_err(damaged)?;
        queues(image, &private, places)?;
        pages(folder, *id, image)?;
    }
    for (id, image) in &images.render {
        places
            .of_render(image)
            .map_err(|source| Damaged { file: render_name(*id), source: source.into() })?;
    }
    Ok(())
}

/// Whether all queues can come back where they are to be.
fn queues(image: &KfdImage, private: &Private, places: &GpuAssignment) -> Answer {
    for queue in private.queues() {
        let Some(gpu) = gpus(image).find(|gpu| gpu.gpu_id == queue.gpu) else { continue };
        let place = places.of(gpu)?;
        if !place.takes_queues {
            return Err(Mes { pid: image.pid, gpu: queue.gpu, actual: place.actual }.into());
        }
    }
    Ok(())
}

/// The files with the bytes of all buffers: there, and as long as these want.
fn pages(folder: BorrowedFd<'_>, id: u32, image: &KfdImage) -> Answer {
    for gpu in gpus(image) {
        PagesFile::open(folder, id, image, gpu.gpu_id, gpu.drm_render_minor)?;
    }
    Ok(())
}

/// What the kernel gave to be given back: whole, on GPUs of the process, every address once.
fn private(image: &KfdImage) -> Result<Private, Box<dyn std::error::Error + Send + Sync>> {
    let names: Vec<u32> = gpus(image).map(|gpu| gpu.gpu_id).collect();
    let known = |gpu: u32, what: String| match names.contains(&gpu) {
        true => Ok(()),
        false => Err(Why::Elsewhere { what, gpu }),
    };
    let private = Private::read(&image.private, names.len(), image.buffers.len(), image.objects as usize)?;
    for queue in private.queues() {
        known(queue.gpu, format!("queue {}", queue.id))?;
    }
    let mut ranges = Vec::new();
    for (buffer, bo) in image.buffers.iter().zip(private.bos()) {
        for gpu in bo.mapped() {
            known(gpu, format!("the buffer at {:#x} is mapped", buffer.address))?;
            // No overflow in an image that was read.
            ranges.push((gpu, buffer.address, buffer.address + buffer.size));
        }
    }
    ranges.sort_unstable();
    let overlap = |two: &&[(u32, u64, u64)]| two[0].0 == two[1].0 && two[1].1 < two[0].2;
    match ranges.windows(2).find(overlap) {
        Some(two) => Err(Why::Overlap { gpu: two[0].0, first: two[0].1, second: two[1].1 }.into()),
        None => Ok(private),
    }
}
