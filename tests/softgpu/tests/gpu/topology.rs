// SPDX-License-Identifier: MIT OR Apache-2.0
//! All interfaces report the same GPUs for this machine.

use std::fs;

use drm::Device as _;
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::abi::{AMDGPU_HW_IP_COMPUTE, AMDGPU_HW_IP_DMA, AMDGPU_HW_IP_GFX};
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::{SYSFS, Topology};
use softgpu_tests::isolated;

/// What the stock CRIU plugin reads of every node.
const WANTED: [&str; 22] = [
    "cpu_cores_count",
    "simd_count",
    "mem_banks_count",
    "caches_count",
    "io_links_count",
    "max_waves_per_simd",
    "lds_size_in_kb",
    "num_gws",
    "wave_front_size",
    "array_count",
    "simd_arrays_per_engine",
    "cu_per_simd_array",
    "simd_per_cu",
    "vendor_id",
    "device_id",
    "drm_render_minor",
    "hive_id",
    "num_sdma_engines",
    "num_cp_queues",
    "fw_version",
    "capability",
    "sdma_fw_version",
];

#[test]
fn every_node_shows_what_the_stock_plugin_reads() {
    isolated(1, |_| {
        let topology = Topology::read().unwrap();
        assert!(topology.nodes.iter().any(|node| !node.is_gpu()), "a CPU");
        for node in topology.gpus() {
            let path = format!("{SYSFS}/nodes/{}/properties", node.number);
            let text = fs::read_to_string(&path).unwrap();
            for name in WANTED {
                assert!(text.lines().any(|line| line.split(' ').next() == Some(name)), "{name} in {path}");
            }
            assert_eq!(node.property("mem_banks_count"), node.banks.len() as u64);
            assert_eq!(node.property("caches_count"), node.caches.len() as u64);
            assert_eq!(node.property("io_links_count"), node.links.len() as u64);
            assert!(node.gpu_id.to_string().len() <= 6, "{}", node.gpu_id);
            assert_eq!(node.property("vendor_id"), 0x1002);
            assert!(!node.name.is_empty() && node.vram() >= 16 << 20);
            assert!(node.save_area().is_some_and(|sizes| sizes.area > 0));
        }
    });
}

#[test]
fn every_gpu_has_a_render_node_of_amdgpu_with_the_same_values() {
    isolated(1, |_| {
        for node in Topology::read().unwrap().gpus() {
            assert!((128..=255).contains(&node.render_minor()), "{}", node.render_minor());
            let render = Render::open(node.render_minor()).unwrap();
            let driver = render.get_driver().unwrap();
            assert_eq!(driver.name().to_str(), Some("amdgpu"));
            assert_eq!(driver.version.0, 3);
            let device = render.device_info().unwrap();
            assert_eq!(u64::from(device.device_id), node.property("device_id"));
            let units = node.property("simd_count") / node.property("simd_per_cu");
            assert_eq!(u64::from(device.cu_active_number), units);
            assert!(device.virtual_address_offset >= 1 << 16);
            assert!(device.virtual_address_max > 1 << 40);
            let memory = render.memory_info().unwrap();
            assert!(memory.vram.total_heap_size >= node.vram());
            assert_eq!(
                memory.cpu_accessible_vram.total_heap_size == memory.vram.total_heap_size,
                node.has_large_bar()
            );
            let copies = render.engine_info(AMDGPU_HW_IP_DMA).unwrap();
            assert_ne!(copies.available_rings, 0);
            assert!(copies.available_rings <= 0b11, "two entities at most: {:#b}", copies.available_rings);
            assert_eq!((copies.ib_start_alignment, copies.ib_size_alignment), (256, 4));
            for engine in [AMDGPU_HW_IP_GFX, AMDGPU_HW_IP_COMPUTE] {
                // Both answers are valid, but there must be one.
                render.engine_info(engine).unwrap();
            }
        }
    });
}

#[test]
fn the_versions_are_those_of_the_kernel() {
    isolated(1, |_| {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let kfd = Kfd::open().unwrap();
        let (major, minor) = kfd.version().unwrap();
        let expected = if release.starts_with("6.12") { 17 } else { 23 };
        assert_eq!((major, minor), (1, expected), "on {release}");
    });
}

#[test]
fn every_gpu_has_apertures_of_its_own() {
    isolated(1, |_| {
        let topology = Topology::read().unwrap();
        let apertures = Kfd::open().unwrap().apertures().unwrap();
        let ids: Vec<u32> = apertures.iter().map(|aperture| aperture.gpu_id).collect();
        assert_eq!(ids, topology.gpus().map(|node| node.gpu_id).collect::<Vec<_>>());
        for aperture in &apertures {
            assert!(aperture.gpuvm_base < aperture.gpuvm_limit, "{aperture:x?}");
            assert_ne!((aperture.lds_base, aperture.scratch_base), (0, 0), "{aperture:x?}");
        }
    });
}

#[test]
fn links_between_two_gpus_go_both_ways() {
    isolated(2, |_| {
        let topology = Topology::read().unwrap();
        for node in &topology.nodes {
            for link in &node.links {
                assert_eq!(link.from(), node.number);
                let other = topology.nodes.iter().find(|other| other.number == link.to()).expect("a node");
                assert!(other.links.iter().any(|back| back.to() == node.number), "back from {}", link.to());
            }
        }
    });
}
