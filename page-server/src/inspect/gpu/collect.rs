// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the GPU part of an image directory: all that can be read, and a message for all that cannot.

use std::collections::BTreeMap;

use rewake_amdgpu_uapi::criu::blob::{Private, Queue};
use rewake_criu_images::amdgpu::{
    GpuFile, KfdImage, Properties, RenderBuffer, RenderContents, kfd_name, pages_name,
};
use rewake_criu_images::{ImageDir, ImageError, PAGE, PagesFile};

use super::super::collect::Damage;
use super::pending::{AQL, BufferMemory, COMPUTE};
use super::{
    BufferKind, BufferReport, DmabufReport, GpuReport, GpuUse, KernelReport, KindReport, ProcessReport,
    QueueReport, RangeReport, RenderBufferReport, RenderReport,
};

/// `enum kfd_queue_type` (`kfd_priv.h`, the same in Linux 6.12 and 7.2). The driver uses 2 itself.
const SDMA: u32 = 1;
const SDMA_XGMI: u32 = 3;
const SDMA_BY_ENGINE: u32 = 4;

/// Reads the files of these names.
pub(in crate::inspect) fn collect<'a>(
    images: &ImageDir,
    names: impl Iterator<Item = &'a str>,
    damage: &mut Damage,
) -> GpuReport {
    let mut report = GpuReport::default();
    for name in names {
        let file = name.to_owned();
        match GpuFile::of_name(name) {
            Some(GpuFile::Kfd(id)) => {
                let image = damage.value_or_note(images.kfd(id)).flatten();
                report.processes.extend(image.map(|image| process(images, id, &image, damage)));
            }
            Some(GpuFile::Render(id)) => {
                let Some(image) = damage.value_or_note(images.render_node(id)).flatten() else { continue };
                let contents = image.contents.as_ref();
                report.render_nodes.push(RenderReport {
                    file,
                    gpu_id: image.gpu_id,
                    minor: contents.map(|contents| contents.minor),
                    buffers: contents.map(|contents| render_buffers(images, contents, damage)),
                });
            }
            Some(GpuFile::Dmabuf(id)) => {
                let image = damage.value_or_note(images.dmabuf(id)).flatten();
                report.dmabufs.extend(image.map(|image| DmabufReport { file, handle: image.handle }));
            }
            None => {}
        }
    }
    report
}

fn process(images: &ImageDir, id: u32, image: &KfdImage, damage: &mut Damage) -> ProcessReport {
    let nodes = image.nodes.iter().map(|node| node.properties);
    let gpus: Vec<Properties> = nodes.filter(|node| node.gpu_id != 0).collect();
    let mut files = BTreeMap::new();
    for gpu in &gpus {
        let opened = match images.gpu_pages(id, image, gpu.gpu_id) {
            // The file would be empty.
            Err(ImageError::Missing { .. }) if image.pages(gpu.gpu_id).0.is_empty() => continue,
            other => damage.value_or_note(other),
        };
        files.extend(opened.map(|file| (gpu.gpu_id, file)));
    }
    let zeros = zeros(image, &files, damage);
    let private = private(images, id, image, damage);
    let mapped = |index: usize| private.as_ref().and_then(|private| Some(private.bos().get(index)?.mapped()));
    let buffer = |(index, buffer): (usize, &rewake_criu_images::amdgpu::KfdBuffer)| BufferReport {
        address: buffer.address,
        bytes: buffer.size,
        kind: BufferKind::of(buffer.alloc_flags),
        gpu_id: buffer.gpu_id,
        mapped_on: mapped(index),
        zero_bytes: zeros[index],
    };
    let buffers: Vec<BufferReport> = image.buffers.iter().enumerate().map(buffer).collect();
    ProcessReport {
        file: kfd_name(id),
        pid: image.pid,
        gpus: gpus.iter().map(|gpu| gpu_use(id, image, gpu, &buffers, &files)).collect(),
        kinds: kinds(&buffers),
        buffers,
        shared_memory_bytes: image.shared_memory_size,
        kernel: private.map(|private| kernel(&private, &BufferMemory::new(image, &files))),
    }
}

/// Returns the zero bytes in each buffer's contents, where they could be counted.
fn zeros(image: &KfdImage, files: &BTreeMap<u32, PagesFile>, damage: &mut Damage) -> Vec<Option<u64>> {
    let mut zeros = vec![None; image.buffers.len()];
    for (gpu_id, file) in files {
        for range in image.pages(*gpu_id).0 {
            let end = range.file_offset + image.buffers[range.buffer].size;
            zeros[range.buffer] = damage.value_or_note(file.zero_bytes(range.file_offset, end));
        }
    }
    zeros
}

fn private(images: &ImageDir, id: u32, image: &KfdImage, damage: &mut Damage) -> Option<Private> {
    let (gpus, objects) = (image.gpus as usize, image.objects as usize);
    let read = Private::read(&image.private, gpus, image.buffers.len(), objects);
    let named = |error| {
        let file = images.path().join(kfd_name(id));
        format!("{}: {error}; the image is damaged: dump again", file.display())
    };
    damage.value_or_note(read.map_err(named))
}

fn gpu_use(
    id: u32,
    image: &KfdImage,
    gpu: &Properties,
    buffers: &[BufferReport],
    files: &BTreeMap<u32, PagesFile>,
) -> GpuUse {
    let ranges = image.pages(gpu.gpu_id).0;
    let zeros = ranges.iter().map(|range| buffers[range.buffer].zero_bytes);
    GpuUse {
        gpu_id: gpu.gpu_id,
        device_id: gpu.device_id,
        render_minor: gpu.drm_render_minor,
        vram_bytes: gpu.vram_size,
        buffers: buffers.iter().filter(|buffer| buffer.gpu_id == gpu.gpu_id).count(),
        content_bytes: ranges.iter().map(|range| image.buffers[range.buffer].size).sum(),
        zero_bytes: zeros.sum(),
        pages_file: files.contains_key(&gpu.gpu_id).then(|| pages_name(id, gpu.gpu_id)),
    }
}

/// Returns the sums by kind. They saturate: a damaged image can claim more than fits in 64 bits.
fn kinds(buffers: &[BufferReport]) -> Vec<KindReport> {
    let mut kinds: BTreeMap<BufferKind, KindReport> = BTreeMap::new();
    for buffer in buffers {
        let kind = buffer.kind;
        let none = KindReport { kind, buffers: 0, bytes: 0, zero_bytes: Some(0) };
        let sum = kinds.entry(kind).or_insert(none);
        sum.buffers += 1;
        sum.bytes = sum.bytes.saturating_add(buffer.bytes);
        sum.zero_bytes = sum.zero_bytes.zip(buffer.zero_bytes).map(|(sum, zeros)| sum.saturating_add(zeros));
    }
    kinds.into_values().collect()
}

fn kernel(private: &Private, memory: &BufferMemory<'_>) -> KernelReport {
    let queue = |queue: &Queue| QueueReport {
        id: queue.id,
        gpu_id: queue.gpu,
        kind: queue_kind(queue.kind, queue.format),
        ring: queue.ring,
        ring_bytes: queue.ring_size,
        percent: queue.percent,
        priority: queue.priority,
        pending_bytes: memory.pending(queue),
    };
    let range = |range: &rewake_amdgpu_uapi::criu::blob::Range| RangeReport {
        start: range.page.saturating_mul(PAGE),
        bytes: range.pages.saturating_mul(PAGE),
    };
    KernelReport {
        xnack: private.xnack_mode != 0,
        queues: private.queues().map(queue).collect(),
        events: private.events().count(),
        events_signalled: private.events().filter(|event| event.signalled != 0).count(),
        svm_ranges: private.ranges().map(range).collect(),
    }
}

fn queue_kind(kind: u32, format: u32) -> &'static str {
    match (kind, format) {
        (COMPUTE, AQL) => "aql",
        (COMPUTE, _) => "pm4",
        (SDMA, _) => "sdma",
        (SDMA_XGMI, _) => "sdma-xgmi",
        (SDMA_BY_ENGINE, _) => "sdma-engine",
        _ => "other",
    }
}

fn render_buffers(
    images: &ImageDir,
    contents: &RenderContents,
    damage: &mut Damage,
) -> Vec<RenderBufferReport> {
    let mut zeros = |index: usize, buffer: &RenderBuffer| {
        let file = damage.value_or_note(images.render_pages(contents, index))?;
        let start = RenderContents::PAGES_OFFSET;
        damage.value_or_note(file.zero_bytes(start, start + buffer.size))
    };
    let report = |(index, buffer): (usize, &RenderBuffer)| RenderBufferReport {
        handle: buffer.handle,
        bytes: buffer.size,
        kind: domain(buffer.preferred_domains),
        imported: buffer.is_import,
        mappings: buffer.mappings.len(),
        zero_bytes: if buffer.has_contents() { zeros(index, buffer) } else { None },
    };
    contents.buffers.iter().enumerate().map(report).collect()
}

/// Returns the kind for `AMDGPU_GEM_DOMAIN_*` (`include/uapi/drm/amdgpu_drm.h`).
fn domain(domains: u32) -> BufferKind {
    match (domains & 4, domains & 2) {
        (4, _) => BufferKind::Vram,
        (_, 2) => BufferKind::Gtt,
        _ => BufferKind::Other,
    }
}
