// SPDX-License-Identifier: MIT OR Apache-2.0
//! The GPU part of an image, as CRIU's amdgpu plugin and ours write it. The numbers' meaning: `docs/inspect.md`.
//!
//! * [`collect`]: reads it.
//! * [`pending`]: what queues had not done yet.
//! * [`text`]: the tables.

pub mod collect;
pub mod pending;
pub mod text;

use serde::Serialize;

use super::hexadecimal;

/// The GPU part of an image; empty lists where there is none.
#[derive(Debug, Default, Serialize)]
pub struct GpuReport {
    /// One for each process that had `/dev/kfd` open.
    pub processes: Vec<ProcessReport>,
    /// Open render nodes.
    pub render_nodes: Vec<RenderReport>,
    /// Open dma-bufs.
    pub dmabufs: Vec<DmabufReport>,
}

impl GpuReport {
    /// True where the image has no GPU part.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty() && self.render_nodes.is_empty() && self.dmabufs.is_empty()
    }
}

/// What a process had on its GPUs.
#[derive(Debug, Serialize)]
pub struct ProcessReport {
    /// The file that says so.
    pub file: String,
    /// The process, in its pid namespace.
    pub pid: u32,
    /// GPUs of the dumped machine.
    pub gpus: Vec<GpuUse>,
    /// Sums by kind, of kinds that there are.
    pub kinds: Vec<KindReport>,
    /// All buffers, in the image's order.
    pub buffers: Vec<BufferReport>,
    /// Memory that processes share through the runtime; 0 without.
    pub shared_memory_bytes: u64,
    /// What the kernel keeps; null when it could not be read.
    pub kernel: Option<KernelReport>,
}

/// What the kernel keeps of a process beside its buffers.
#[derive(Debug, Serialize)]
pub struct KernelReport {
    /// Whether GPU page faults are retried.
    pub xnack: bool,
    /// Queues.
    pub queues: Vec<QueueReport>,
    /// Events.
    pub events: usize,
    /// Those that are signalled.
    pub events_signalled: usize,
    /// Ranges of ordinary memory that GPUs reach.
    pub svm_ranges: Vec<RangeReport>,
}

/// A GPU of the dumped machine, and what the process had there.
#[derive(Debug, Serialize)]
pub struct GpuUse {
    /// Its name in this image.
    pub gpu_id: u32,
    /// PCI device.
    pub device_id: u32,
    /// N of `/dev/dri/renderDN`.
    pub render_minor: u32,
    /// Its memory.
    pub vram_bytes: u64,
    /// Buffers on it, of all kinds.
    pub buffers: usize,
    /// Contents of buffers in its pages file.
    pub content_bytes: u64,
    /// Of these, pages of 4096 bytes with nothing but zeros; null when they could not be read.
    pub zero_bytes: Option<u64>,
    /// Its pages file, when that has what the image says.
    pub pages_file: Option<String>,
}

/// Where a buffer's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// In the GPU.
    Vram,
    /// In the machine, the driver's.
    Gtt,
    /// In the machine, the process's.
    Userptr,
    /// The GPU's doorbells.
    Doorbell,
    /// Registers of the GPU.
    Mmio,
    /// Unknown.
    Other,
}

impl Kind {
    /// By `KFD_IOC_ALLOC_MEM_FLAGS_*` (`include/uapi/linux/kfd_ioctl.h`).
    #[must_use]
    pub fn of(alloc_flags: u32) -> Self {
        let kinds = [Self::Vram, Self::Gtt, Self::Userptr, Self::Doorbell, Self::Mmio];
        let bit = usize::try_from(alloc_flags.trailing_zeros()).unwrap_or(usize::MAX);
        kinds.get(bit).copied().unwrap_or(Self::Other)
    }

    /// Its name, in text and in JSON.
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
    pub kind: Kind,
    /// How many.
    pub buffers: usize,
    /// Sum of their sizes.
    pub bytes: u64,
    /// Zeros in their contents; null where the image has none, or they could not be read.
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
    pub kind: Kind,
    /// Its GPU.
    pub gpu_id: u32,
    /// GPUs that have it mapped; null when that could not be read.
    pub mapped_on: Option<Vec<u32>>,
    /// Zeros in its contents; null where the image has none, or they could not be read.
    pub zero_bytes: Option<u64>,
}

/// A queue.
#[derive(Debug, Serialize)]
pub struct QueueReport {
    /// The process's number for it.
    pub id: u32,
    /// Its GPU.
    pub gpu_id: u32,
    /// "aql", "pm4", "sdma", "sdma-xgmi", "sdma-engine" or "other".
    pub kind: &'static str,
    /// Address of its ring.
    #[serde(serialize_with = "hexadecimal")]
    pub ring: u64,
    /// Bytes of its ring.
    pub ring_bytes: u64,
    /// Its share of time, in percent; at 0 it does not run.
    pub percent: u32,
    /// 0 to 15.
    pub priority: u32,
    /// Bytes in the ring that the GPU had not taken; null where its pointers are not in the image's buffers.
    pub pending_bytes: Option<u64>,
}

/// A range of ordinary memory that GPUs reach.
#[derive(Debug, Serialize)]
pub struct RangeReport {
    /// First address.
    #[serde(serialize_with = "hexadecimal")]
    pub start: u64,
    /// Its length.
    pub bytes: u64,
}

/// An open render node.
#[derive(Debug, Serialize)]
pub struct RenderReport {
    /// The file that says so.
    pub file: String,
    /// Its GPU, as in [`GpuUse::gpu_id`].
    pub gpu_id: u32,
    /// N of `/dev/dri/renderDN`; null in images of CRIU up to 4.2.1, which keeps nothing but the GPU.
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
    pub kind: Kind,
    /// Whether it came from another process or driver.
    pub imported: bool,
    /// Where it is in the render node's address space: how many places.
    pub mappings: usize,
    /// Zeros in its contents; null where a restore reads none, or they could not be read.
    pub zero_bytes: Option<u64>,
}

/// An open dma-buf.
#[derive(Debug, Serialize)]
pub struct DmabufReport {
    /// The file that says so.
    pub file: String,
    /// [`RenderBufferReport::handle`] of the buffer.
    pub handle: u32,
}

#[cfg(test)]
mod tests;
