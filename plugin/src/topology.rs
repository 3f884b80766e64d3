// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine's nodes as images describe them.

use rewake_amdgpu_uapi::abi::{HSA_IOLINK_TYPE_PCIEXPRESS, HSA_IOLINK_TYPE_XGMI};
use rewake_amdgpu_uapi::topology;
use rewake_criu_images::amdgpu::{Link, NodeImage, Properties};

/// Converts a node of the machine for an image. As the stock plugin, it keeps only PCIe and XGMI links.
#[must_use]
pub fn to_image(node: &topology::Node) -> NodeImage {
    let number = |name| u32::try_from(node.property(name)).unwrap_or(u32::MAX);
    let links = node.links.iter().map(|link| Link { kind: link.kind(), to_node: link.to() });
    let kept = |link: &Link| matches!(link.kind, HSA_IOLINK_TYPE_PCIEXPRESS | HSA_IOLINK_TYPE_XGMI);
    let properties = Properties {
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
    };
    NodeImage { properties, links: links.filter(kept).collect() }
}
