// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports the GPU part of an image, as CRIU's amdgpu plugin and ours write it. `docs/diagnose.md` explains
//! the numbers.
//!
//! * [`collect`]: reads it.
//! * [`pending`]: computes what queues had not done yet.
//! * [`text`]: writes the tables.

pub mod collect;
pub mod pending;
pub mod text;

use serde::Serialize;

use super::hexadecimal;

/// The GPU part of an image; the lists are empty if the image has none.
#[derive(Debug, Default, Serialize)]
pub struct GpuReport {
    /// The processes that had `/dev/kfd` open.
    pub processes: Vec<ProcessReport>,
    /// Open render nodes.
    pub render_nodes: Vec<RenderReport>,
    /// Open dma-bufs.
    pub dmabufs: Vec<DmabufReport>,
}

impl GpuReport {
    /// Returns whether the image has no GPU part.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty() && self.render_nodes.is_empty() && self.dmabufs.is_empty()
    }
}

/// What a process had on its GPUs.
#[derive(Debug, Serialize)]
pub struct ProcessReport {
    /// The image file.
    pub file: String,
    /// The process's pid in its pid namespace.
    pub pid: u32,
    /// The GPUs of the dumped machine.
    pub gpus: Vec<GpuUse>,
    /// Sums of each kind of buffer that the process has.
    pub kinds: Vec<KindReport>,
    /// All buffers, in the image's order.
    pub buffers: Vec<BufferReport>,
    /// The size of the memory that processes share through the runtime; 0 without.
    pub shared_memory_bytes: u64,
    /// The kernel's state of the process; null if it could not be read.
    pub kernel: Option<KernelReport>,
}

/// The kernel's state of a process, without its buffers.
#[derive(Debug, Serialize)]
pub struct KernelReport {
    /// Whether GPU page faults are retried.
    pub xnack: bool,
    /// The queues.
    pub queues: Vec<QueueReport>,
    /// The number of events.
    pub events: usize,
    /// The number of events that are signalled.
    pub events_signalled: usize,
    /// Ranges of ordinary memory that GPUs can access.
    pub svm_ranges: Vec<RangeReport>,
}

/// A GPU of the dumped machine, and what the process had there.
#[derive(Debug, Serialize)]
pub struct GpuUse {
    /// Its id in this image.
    pub gpu_id: u32,
    /// Its PCI device id.
    pub device_id: u32,
    /// N of `/dev/dri/renderDN`.
    pub render_minor: u32,
    /// The size of its memory.
    pub vram_bytes: u64,
    /// The number of buffers on it, of all kinds.
    pub buffers: usize,
    /// The bytes of buffers' contents in its pages file.
    pub content_bytes: u64,
    /// The bytes of these in pages (4096 bytes) that are all zeros; null if they could not be read.
    pub zero_bytes: Option<u64>,
    /// Its pages file, if that matches the image.
    pub pages_file: Option<String>,
}

/// Where a buffer's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BufferKind {
    /// In the GPU's memory.
    Vram,
    /// In host memory of the driver.
    Gtt,
    /// In host memory of the process.
    Userptr,
    /// The GPU's doorbells.
    Doorbell,
    /// Registers of the GPU.
    Mmio,
    /// Unknown.
    Other,
}

impl BufferKind {
    /// Returns the kind for `KFD_IOC_ALLOC_MEM_FLAGS_*` (`include/uapi/linux/kfd_ioctl.h`).
    #[must_use]
    pub fn of(alloc_flags: u32) -> Self {
        let kinds = [Self::Vram, Self::Gtt, Self::Userptr, Self::Doorbell, Self::Mmio];
        let bit = usize::try_from(alloc_flags.trailing_zeros()).unwrap_or(usize::MAX);
        kinds.get(bit).copied().unwrap_or(Self::Other)
    }

    /// Returns the kind's name in text and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Vram => "vram",
            Self::Gtt => "gtt",
            Self::Userptr => "userptr",
            Self::Doorbell => "doorbell",
            Self::Mmio => "mmio",
            Self::Other => "other",
        }
    }
}

/// Buffers of one kind.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct KindReport {
    /// The kind.
    pub kind: BufferKind,
    /// The number of buffers.
    pub buffers: usize,
    /// The sum of their sizes.
    pub bytes: u64,
    /// Zero bytes in their contents; null if the image has no contents, or they could not be read.
    pub zero_bytes: Option<u64>,
}

/// A buffer.
#[derive(Debug, Serialize)]
pub struct BufferReport {
    /// Its address, the same on GPU and CPU.
    #[serde(serialize_with = "hexadecimal")]
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// Where its memory is.
    pub kind: BufferKind,
    /// Its GPU.
    pub gpu_id: u32,
    /// The GPUs that map it; null if that could not be read.
    pub mapped_on: Option<Vec<u32>>,
    /// Zero bytes in its contents; null if the image has no contents, or they could not be read.
    pub zero_bytes: Option<u64>,
}

/// A queue.
#[derive(Debug, Serialize)]
pub struct QueueReport {
    /// The queue's number in the process.
    pub id: u32,
    /// Its GPU.
    pub gpu_id: u32,
    /// "aql", "pm4", "sdma", "sdma-xgmi", "sdma-engine" or "other".
    pub kind: &'static str,
    /// The address of its ring.
    #[serde(serialize_with = "hexadecimal")]
    pub ring: u64,
    /// The size of its ring in bytes.
    pub ring_bytes: u64,
    /// Its share of time, in percent; at 0 it does not run.
    pub percent: u32,
    /// Its priority, 0 to 15.
    pub priority: u32,
    /// The bytes in the ring that the GPU had not taken; null if its pointers are not in the image's buffers.
    pub pending_bytes: Option<u64>,
}

/// A range of ordinary memory that GPUs can access.
#[derive(Debug, Serialize)]
pub struct RangeReport {
    /// Its first address.
    #[serde(serialize_with = "hexadecimal")]
    pub start: u64,
    /// Its length.
    pub bytes: u64,
}

/// An open render node.
#[derive(Debug, Serialize)]
pub struct RenderReport {
    /// The image file.
    pub file: String,
    /// Its GPU, as in [`GpuUse::gpu_id`].
    pub gpu_id: u32,
    /// N of `/dev/dri/renderDN`; null in images of CRIU up to 4.2.1, which have the GPU only.
    pub minor: Option<u32>,
    /// Its buffers; null as `minor`.
    pub buffers: Option<Vec<RenderBufferReport>>,
}

/// A buffer of a render node.
#[derive(Debug, Serialize)]
pub struct RenderBufferReport {
    /// Its handle.
    pub handle: u32,
    /// Its size.
    pub bytes: u64,
    /// "vram", "gtt" or "other".
    pub kind: BufferKind,
    /// Whether it was imported from another process or driver.
    pub imported: bool,
    /// The number of its mappings in the render node's address space.
    pub mappings: usize,
    /// Zero bytes in its contents; null if a restore reads none, or they could not be read.
    pub zero_bytes: Option<u64>,
}

/// An open dma-buf.
#[derive(Debug, Serialize)]
pub struct DmabufReport {
    /// The image file.
    pub file: String,
    /// [`RenderBufferReport::handle`] of the buffer.
    pub handle: u32,
}

#[cfg(test)]
mod tests;
