// SPDX-License-Identifier: MIT OR Apache-2.0
//! `amdgpu-kfd-ID.img`: the KFD state of one process.

use std::path::Path;

use prost::Message;

use super::contents::{HEADER, file_of};
use super::record::{Contents, MissingField, record};
use crate::error::Result;
use crate::generated::amdgpu as raw;

/// The most buffers that an image may have.
pub const MAX_BUFFERS: usize = 1 << 20;
/// The most nodes that a machine may have.
pub const MAX_NODES: usize = 1 << 10;

/// `KFD_IOC_ALLOC_MEM_FLAGS_VRAM` and `_GTT`: buffers with their own contents.
const WITH_CONTENTS: u32 = 1 | 2;

/// The KFD state of one process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KfdImage {
    /// The pid of the process, in its own pid namespace.
    pub pid: u32,
    /// Number of GPUs that the process can use: at most the number of `nodes`.
    pub gpus: u32,
    /// The topology of the dumped machine, CPUs included.
    pub nodes: Vec<NodeImage>,
    /// All buffers, in the order of their contents in the pages files.
    pub buffers: Vec<KfdBuffer>,
    /// Number of queues, events and ranges in `private`.
    pub objects: u32,
    /// Size in bytes of the runtime's shared memory; 0 without it.
    pub shared_memory_size: u64,
    /// The first word of that memory.
    pub shared_memory_magic: u32,
    /// The private data that the kernel gave at the dump and gets back at the restore.
    pub private: Vec<u8>,
}

/// A node of the topology.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeImage {
    /// Its properties in `/sys/class/kfd/kfd/topology/nodes`.
    pub properties: Properties,
    /// Its links to other nodes.
    pub links: Vec<Link>,
}

record! {
    /// Properties of a node in `/sys/class/kfd/kfd/topology/nodes`.
    Properties = raw::Node {
        /// Number of the node.
        node_id: u32,
        /// KFD's id of the GPU, as the process knows it; 0 for a CPU.
        gpu_id: u32,
        /// CPU cores.
        cpu_cores_count: u32,
        /// SIMD units.
        simd_count: u32,
        /// Memory banks.
        mem_banks_count: u32,
        /// Caches.
        caches_count: u32,
        /// Links to other nodes.
        io_links_count: u32,
        /// Most waves of one SIMD unit.
        max_waves_per_simd: u32,
        /// Local data share, in KiB.
        lds_size_in_kb: u32,
        /// Global data share, in KiB.
        gds_size_in_kb: u32,
        /// Global wave sync resources.
        num_gws: u32,
        /// Threads in a wave.
        wave_front_size: u32,
        /// Shader arrays.
        array_count: u32,
        /// Shader arrays per engine.
        simd_arrays_per_engine: u32,
        /// Compute units per shader array.
        cu_per_simd_array: u32,
        /// SIMD units per compute unit.
        simd_per_cu: u32,
        /// Scratch waves per compute unit.
        max_slots_scratch_cu: u32,
        /// PCI vendor.
        vendor_id: u32,
        /// PCI device.
        device_id: u32,
        /// PCI domain.
        domain: u32,
        /// N of `/dev/dri/renderDN`.
        drm_render_minor: u32,
        /// The XGMI hive; 0 without one.
        hive_id: u64,
        /// Copy engines.
        num_sdma_engines: u32,
        /// Copy engines for XGMI.
        num_sdma_xgmi_engines: u32,
        /// Queues per copy engine.
        num_sdma_queues_per_engine: u32,
        /// Compute queues.
        num_cp_queues: u32,
        /// Version of the compute firmware.
        fw_version: u32,
        /// Capability bits.
        capability: u32,
        /// Version of the copy engines' firmware.
        sdma_fw_version: u32,
        /// Whether the CPU sees all of the VRAM: 0 or 1.
        vram_public: u32,
        /// VRAM in bytes.
        vram_size: u64,
    }
}

record! {
    /// A link from a node.
    Link = raw::Link {
        /// Kind (`CRAT_IOLINK_TYPE_*`: 2 PCIe, 11 XGMI).
        kind: u32,
        /// The node at its other end.
        to_node: u32,
    }
}

/// A buffer object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KfdBuffer {
    /// Address on the GPU, and on the CPU where it is mapped there.
    pub address: u64,
    /// Size in bytes, at least 1.
    pub size: u64,
    /// Offset of its CPU mappings at the dump.
    pub offset: u64,
    /// `KFD_IOC_ALLOC_MEM_FLAGS_*`
    pub alloc_flags: u32,
    /// [`Properties::gpu_id`] of its GPU.
    pub gpu_id: u32,
    /// Its handle in KFD; `None` in images of CRIU up to 4.2.1.
    pub handle: Option<u32>,
}

/// The place of one buffer's contents in a pages file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentsRange {
    /// Index in [`KfdImage::buffers`].
    pub buffer: usize,
    /// Byte offset in the file; the length is the buffer's size.
    pub file_offset: u64,
}

impl KfdBuffer {
    /// Whether its contents are in the GPU's pages file.
    #[must_use]
    pub fn has_contents(&self) -> bool {
        self.alloc_flags & WITH_CONTENTS != 0
    }
}

impl KfdImage {
    /// Returns the places of contents in the pages file of a GPU, and the file's length in bytes.
    #[must_use]
    pub fn pages(&self, gpu_id: u32) -> (Vec<ContentsRange>, u64) {
        let mut end = HEADER;
        let mut ranges = Vec::new();
        for (buffer, entry) in self.buffers.iter().enumerate() {
            if entry.gpu_id == gpu_id && entry.has_contents() {
                ranges.push(ContentsRange { buffer, file_offset: end });
                // No overflow in an image that was read: see `check_sizes`.
                end += entry.size;
            }
        }
        (ranges, end)
    }

    /// Encodes the whole file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let node = |node: &NodeImage| {
            let links = node.links.iter().map(|link| link.to_raw().encode_to_vec()).collect();
            raw::Node { links, ..node.properties.to_raw() }.encode_to_vec()
        };
        let buffer = |buffer: &KfdBuffer| {
            raw::KfdBuffer {
                address: Some(buffer.address),
                size: Some(buffer.size),
                offset: Some(buffer.offset),
                alloc_flags: Some(buffer.alloc_flags),
                gpu_id: Some(buffer.gpu_id),
                handle: buffer.handle,
            }
            .encode_to_vec()
        };
        let nodes = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
        let image = raw::KfdImage {
            pid: Some(self.pid),
            gpus: Some(self.gpus),
            cpus: Some(nodes.saturating_sub(self.gpus)),
            nodes: self.nodes.iter().map(node).collect(),
            buffer_count: Some(self.buffers.len() as u64),
            buffers: self.buffers.iter().map(buffer).collect(),
            objects: Some(self.objects),
            shared_memory_size: Some(self.shared_memory_size),
            shared_memory_magic: Some(self.shared_memory_magic),
            private_data: Some(self.private.clone()),
        };
        file_of(&image.encode_to_vec())
    }
}

pub(crate) fn parse(file: &Path, bytes: &[u8]) -> Result<KfdImage> {
    let contents = Contents(file);
    let image: raw::KfdImage = contents.decode("the KFD state", bytes)?;
    let nodes = image.gpus.zip(image.cpus).map(|(gpus, cpus)| u64::from(gpus) + u64::from(cpus));
    contents.count("nodes", nodes, image.nodes.len(), ("MAX_NODES", MAX_NODES))?;
    contents.count("buffers", image.buffer_count, image.buffers.len(), ("MAX_BUFFERS", MAX_BUFFERS))?;
    let need = |name, value: Option<u32>| contents.whole("a state", value.ok_or(MissingField(name)));
    let image = KfdImage {
        pid: need("pid", image.pid)?,
        gpus: need("num_of_gpus", image.gpus)?,
        objects: need("num_of_objects", image.objects)?,
        nodes: image.nodes.iter().map(|bytes| node(contents, bytes)).collect::<Result<_>>()?,
        buffers: image.buffers.iter().map(|bytes| buffer(contents, bytes)).collect::<Result<_>>()?,
        shared_memory_size: contents
            .whole("a state", image.shared_memory_size.ok_or(MissingField("shared_mem_size")))?,
        shared_memory_magic: need("shared_mem_magic", image.shared_memory_magic)?,
        private: contents.whole("a state", image.private_data.ok_or(MissingField("priv_data")))?,
    };
    check_sizes(contents, &image)?;
    Ok(image)
}

fn node(contents: Contents<'_>, bytes: &[u8]) -> Result<NodeImage> {
    let raw: raw::Node = contents.decode("a node of the topology", bytes)?;
    let properties = contents.whole("a node", Properties::from_raw(&raw))?;
    let link = |bytes: &Vec<u8>| {
        let raw: raw::Link = contents.decode("a link of a node", bytes)?;
        contents.whole("a link", Link::from_raw(&raw))
    };
    Ok(NodeImage { properties, links: raw.links.iter().map(link).collect::<Result<_>>()? })
}

fn buffer(contents: Contents<'_>, bytes: &[u8]) -> Result<KfdBuffer> {
    let raw: raw::KfdBuffer = contents.decode("a buffer", bytes)?;
    let whole = || {
        Ok(KfdBuffer {
            address: raw.address.ok_or(MissingField("addr"))?,
            size: raw.size.ok_or(MissingField("size"))?,
            offset: raw.offset.ok_or(MissingField("offset"))?,
            alloc_flags: raw.alloc_flags.ok_or(MissingField("alloc_flags"))?,
            gpu_id: raw.gpu_id.ok_or(MissingField("gpu_id"))?,
            handle: raw.handle,
        })
    };
    let buffer = contents.whole("a buffer", whole())?;
    if buffer.size == 0 || buffer.address.checked_add(buffer.size).is_none() {
        let found = format!("{} bytes at {:#x}", buffer.size, buffer.address);
        return Err(contents.damaged("a buffer inside the address space", found));
    }
    Ok(buffer)
}

/// Checks that every buffer belongs to a GPU of the topology, and that one GPU's contents fit into a file.
fn check_sizes(contents: Contents<'_>, image: &KfdImage) -> Result<()> {
    let gpus = image.nodes.iter().map(|node| node.properties.gpu_id).filter(|gpu_id| *gpu_id != 0);
    let mut lengths: std::collections::BTreeMap<u32, u64> = gpus.map(|gpu_id| (gpu_id, HEADER)).collect();
    for buffer in &image.buffers {
        let Some(length) = lengths.get_mut(&buffer.gpu_id) else {
            let found = format!("one of GPU {:#x} at {:#x}", buffer.gpu_id, buffer.address);
            return Err(contents.damaged("buffers of the GPUs of its topology", found));
        };
        if buffer.has_contents() {
            let sum = length.checked_add(buffer.size).filter(|sum| i64::try_from(*sum).is_ok());
            let Some(sum) = sum else {
                let found = format!("more with the {} bytes at {:#x}", buffer.size, buffer.address);
                return Err(contents.damaged("contents of less than 2^63 bytes for one GPU", found));
            };
            *length = sum;
        }
    }
    Ok(())
}
