// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads a valid topology completely, and checks that an invalid one never panics.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rewake_amdgpu_uapi::topology::{GfxVersion, Topology};

/// Writes a topology of two GPUs like MI200 and one CPU.
fn write_topology(root: &Path) {
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("generation_id", "3\n");
    write("nodes/0/gpu_id", "0\n");
    write("nodes/0/name", "\n");
    write("nodes/0/properties", "cpu_cores_count 2\nsimd_count 0\n");
    write("nodes/0/mem_banks/0/properties", "heap_type 0\nsize_in_bytes 8589934592\nflags 0\n");
    for (node, id) in [(1, 51_234), (2, 5)] {
        let properties = "cpu_cores_count 0\nsimd_count 416\nsimd_per_cu 4\narray_count \
             8\nsimd_arrays_per_engine 1\n\
             capability 134250112\ngfx_target_version 90010\ndrm_render_minor 128\nnum_xcc 1\nunique_id -1\n";
        write(&format!("nodes/{node}/gpu_id"), &format!("{id}\n"));
        write(&format!("nodes/{node}/name"), "aldebaran\n");
        write(&format!("nodes/{node}/properties"), properties);
        write(
            &format!("nodes/{node}/mem_banks/0/properties"),
            "heap_type 1\nsize_in_bytes 4294967296\nflags 0\nwidth 4096\nmem_clk_max 1600\n",
        );
        write(&format!("nodes/{node}/caches/0/properties"), "level 1\nsize 16\nsibling_map 1,0,0,0\n");
        write(&format!("nodes/{node}/io_links/0/properties"), "type 2\nnode_from 1\nnode_to 0\n");
        write(&format!("nodes/{node}/io_links/1/properties"), "type 11\nnode_from 1\nnode_to 2\n");
    }
}

#[test]
fn a_machine_with_two_gpus_is_read_completely() {
    let root = tempfile::tempdir().unwrap();
    write_topology(root.path());
    let topology = Topology::read_from(root.path()).unwrap();
    assert_eq!((topology.generation, topology.nodes.len(), topology.gpus().count()), (3, 3, 2));
    let gpu = topology.gpus().next().unwrap();
    assert_eq!(
        (gpu.number, gpu.gpu_id, gpu.name.as_str(), gpu.render_minor()),
        (1, 51_234, "aldebaran", 128)
    );
    assert_eq!(gpu.gfx_version(), GfxVersion { major: 9, minor: 0, step: 10 });
    assert!(gpu.has_svm() && gpu.has_large_bar());
    assert_eq!((gpu.vram(), gpu.caches[0].size(), gpu.property("unique_id")), (4 << 30, 16, u64::MAX));
    assert_eq!((gpu.links[0].to(), gpu.links[0].is_xgmi(), gpu.links[1].is_xgmi()), (0, false, true));
    // The size that `kfd_queue_ctx_save_restore_size` gives for 104 units of GFX 9.0.10.
    let sizes = gpu.save_area().unwrap();
    assert_eq!((sizes.control_stack, sizes.area), (36_864, 36_864 + 104 * 0x9_5000));
    assert_eq!(sizes.total, u64::from(sizes.area) + 4096 * 32);
}

#[test]
fn a_hidden_node_is_omitted_and_an_invalid_one_is_named() {
    let root = tempfile::tempdir().unwrap();
    write_topology(root.path());
    fs::write(root.path().join("nodes/2/properties"), "simd_count many\n").unwrap();
    let error = Topology::read_from(root.path()).unwrap_err().to_string();
    assert!(error.contains("nodes/2/properties: line 1: \"simd_count many\""), "{error}");
    fs::write(root.path().join("nodes/2/properties"), "x".repeat(5000)).unwrap();
    let error = Topology::read_from(root.path()).unwrap_err().to_string();
    assert!(error.contains("longer than 4096 bytes"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_topology_panics(
        file in prop::sample::select(vec![
            "generation_id", "nodes/1/gpu_id", "nodes/1/properties", "nodes/1/mem_banks/0/properties",
            "nodes/2/io_links/1/properties", "nodes/1/caches/0/properties", "nodes/2/name",
        ]),
        text in prop_oneof![
            "[a-z_]{0,12} [0-9,-]{0,30}\n?",
            "(simd_count|simd_per_cu|array_count|simd_arrays_per_engine|num_xcc|gfx_target_version) \
             [0-9]{1,20}\n",
            ".{0,200}",
        ],
    ) {
        let root = tempfile::tempdir().unwrap();
        write_topology(root.path());
        fs::write(root.path().join(file), text).unwrap();
        if let Ok(topology) = Topology::read_from(root.path()) {
            for node in &topology.nodes {
                let _ = (node.save_area(), node.gfx_version(), node.vram(), node.render_minor());
            }
        }
    }
}
