// SPDX-License-Identifier: MIT OR Apache-2.0
//! A node as images describe it.

use rewake_amdgpu_uapi::topology;

/// A CPU or GPU with the properties that images have: `kfd_device_entry` of CRIU's `criu-amdgpu.proto`. They
/// are the driver's properties of the same names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Node {
    /// The number in the topology.
    pub node_id: u32,
    /// The GPU's id in the driver, or 0 for a CPU.
    pub gpu_id: u32,
    /// CPU cores.
    pub cpu_cores_count: u32,
    /// SIMD units.
    pub simd_count: u32,
    /// Memory banks.
    pub mem_banks_count: u32,
    /// Caches.
    pub caches_count: u32,
    /// Links to other nodes, including hidden ones.
    pub io_links_count: u32,
    /// The most waves of one SIMD unit.
    pub max_waves_per_simd: u32,
    /// Local data share, in KiB.
    pub lds_size_in_kb: u32,
    /// Global data share, in KiB.
    pub gds_size_in_kb: u32,
    /// Global wave sync resources.
    pub num_gws: u32,
    /// Threads in a wave.
    pub wave_front_size: u32,
    /// Shader arrays.
    pub array_count: u32,
    /// Shader arrays per engine.
    pub simd_arrays_per_engine: u32,
    /// Compute units per shader array.
    pub cu_per_simd_array: u32,
    /// SIMD units per compute unit.
    pub simd_per_cu: u32,
    /// Scratch waves per compute unit.
    pub max_slots_scratch_cu: u32,
    /// PCI vendor.
    pub vendor_id: u32,
    /// PCI device, which with the vendor determines the instruction set.
    pub device_id: u32,
    /// PCI domain.
    pub domain: u32,
    /// The N of `/dev/dri/renderDN`.
    pub drm_render_minor: u32,
    /// The XGMI hive, or 0.
    pub hive_id: u64,
    /// Copy engines.
    pub num_sdma_engines: u32,
    /// Copy engines for XGMI.
    pub num_sdma_xgmi_engines: u32,
    /// Queues per copy engine.
    pub num_sdma_queues_per_engine: u32,
    /// Compute queues.
    pub num_cp_queues: u32,
    /// Version of the compute firmware.
    pub fw_version: u32,
    /// Capability bits.
    pub capability: u32,
    /// Version of the copy engines' firmware.
    pub sdma_fw_version: u32,
    /// Whether the CPU can access all of the VRAM: 0 or 1.
    pub vram_public: u32,
    /// VRAM in bytes.
    pub vram_size: u64,
    /// Links from this node.
    pub links: Vec<Link>,
}

/// A link from a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Link {
    /// `HSA_IOLINK_TYPE_*`: 2 is PCIe, 11 is XGMI.
    pub kind: u32,
    /// The [`Node::node_id`] of the other end.
    pub to_node: u32,
}

impl From<&topology::Node> for Node {
    fn from(node: &topology::Node) -> Self {
        let number = |name| u32::try_from(node.property(name)).unwrap_or(u32::MAX);
        Self {
            node_id: node.number,
            gpu_id: node.gpu_id,
            cpu_cores_count: number("cpu_cores_count"),
            simd_count: number("simd_count"),
            mem_banks_count: number("mem_banks_count"),
            caches_count: number("caches_count"),
            io_links_count: number("io_links_count"),
            max_waves_per_simd: number("max_waves_per_simd"),
            lds_size_in_kb: number("lds_size_in_kb"),
            gds_size_in_kb: number("gds_size_in_kb"),
            num_gws: number("num_gws"),
            wave_front_size: number("wave_front_size"),
            array_count: number("array_count"),
            simd_arrays_per_engine: number("simd_arrays_per_engine"),
            cu_per_simd_array: number("cu_per_simd_array"),
            simd_per_cu: number("simd_per_cu"),
            max_slots_scratch_cu: number("max_slots_scratch_cu"),
            vendor_id: number("vendor_id"),
            device_id: number("device_id"),
            domain: number("domain"),
            drm_render_minor: number("drm_render_minor"),
            hive_id: node.property("hive_id"),
            num_sdma_engines: number("num_sdma_engines"),
            num_sdma_xgmi_engines: number("num_sdma_xgmi_engines"),
            num_sdma_queues_per_engine: number("num_sdma_queues_per_engine"),
            num_cp_queues: number("num_cp_queues"),
            fw_version: number("fw_version"),
            capability: number("capability"),
            sdma_fw_version: number("sdma_fw_version"),
            vram_public: u32::from(node.has_large_bar()),
            vram_size: node.vram(),
            links: node.links.iter().map(|l| Link { kind: l.kind(), to_node: l.to() }).collect(),
        }
    }
}
