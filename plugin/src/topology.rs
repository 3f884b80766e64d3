// SPDX-License-Identifier: MIT OR Apache-2.0
//! Converts nodes of the driver's topology between images and the search for a GPU assignment.

use rewake_amdgpu_uapi::abi::{HSA_IOLINK_TYPE_PCIEXPRESS, HSA_IOLINK_TYPE_XGMI};
use rewake_amdgpu_uapi::mapping;
use rewake_criu_images::amdgpu::{Link, Node, Properties};

/// Defines both conversions from one list of properties.
macro_rules! same {
    ($($property:ident),* $(,)?) => {
        fn properties(node: &mapping::Node) -> Properties {
            Properties { $($property: node.$property,)* }
        }

        /// Converts a node of an image.
        pub(crate) fn of_image(node: &Node) -> mapping::Node {
            let link = |link: &Link| mapping::Link { kind: link.kind, to_node: link.to_node };
            mapping::Node {
                $($property: node.properties.$property,)*
                links: node.links.iter().map(link).collect(),
            }
        }
    };
}
same! {
    node_id, gpu_id, cpu_cores_count, simd_count, mem_banks_count, caches_count, io_links_count, max_waves_per_simd,
    lds_size_in_kb, gds_size_in_kb, num_gws, wave_front_size, array_count, simd_arrays_per_engine, cu_per_simd_array,
    simd_per_cu, max_slots_scratch_cu, vendor_id, device_id, domain, drm_render_minor, hive_id, num_sdma_engines,
    num_sdma_xgmi_engines, num_sdma_queues_per_engine, num_cp_queues, fw_version, capability, sdma_fw_version,
    vram_public, vram_size,
}

/// Converts a node for an image. As the stock plugin, it keeps only PCIe and XGMI links.
pub(crate) fn to_image(node: &mapping::Node) -> Node {
    let kept = |link: &&mapping::Link| matches!(link.kind, HSA_IOLINK_TYPE_PCIEXPRESS | HSA_IOLINK_TYPE_XGMI);
    let link = |link: &mapping::Link| Link { kind: link.kind, to_node: link.to_node };
    Node { properties: properties(node), links: node.links.iter().filter(kept).map(link).collect() }
}
