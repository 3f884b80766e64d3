// SPDX-License-Identifier: MIT OR Apache-2.0
//! Machines for the tests of the placement, and a plain version of its rules.

use proptest::prelude::*;
use rewake_criu_images::amdgpu::settings::{Checks, Switch};
use rewake_criu_images::amdgpu::{Link, NodeImage, Properties};

pub(super) const PCIE: u32 = 2;
pub(super) const XGMI: u32 = 11;

fn gpu(number: usize, hive: usize) -> NodeImage {
    let small = u32::try_from(number).unwrap();
    let properties = Properties {
        gpu_id: 0x1000 + 7 * small,
        drm_render_minor: 127 + small,
        hive_id: hive as u64 + 1,
        simd_count: 416,
        mem_banks_count: 1,
        caches_count: 129,
        max_waves_per_simd: 8,
        lds_size_in_kb: 64,
        num_gws: 64,
        wave_front_size: 64,
        array_count: 8,
        simd_arrays_per_engine: 1,
        cu_per_simd_array: 14,
        simd_per_cu: 4,
        max_slots_scratch_cu: 32,
        vendor_id: 0x1002,
        device_id: 0x740c,
        num_sdma_engines: 2,
        num_sdma_xgmi_engines: 3,
        num_sdma_queues_per_engine: 8,
        num_cp_queues: 24,
        fw_version: 72,
        capability: 0x0800_8280,
        sdma_fw_version: 8,
        vram_public: 1,
        vram_size: 65_520 << 20,
        ..Properties::default()
    };
    NodeImage { properties, links: Vec::new() }
}

/// Returns a machine with CPUs, and GPUs in hives of these sizes. The GPUs of a hive are all linked, and
/// spread over the CPUs.
pub(super) fn machine(cpus: usize, hives: &[usize]) -> Vec<NodeImage> {
    let count: usize = hives.iter().sum();
    let mut nodes = vec![
        NodeImage {
            properties: Properties { cpu_cores_count: 8, ..Properties::default() },
            links: Vec::new()
        };
        cpus
    ];
    let of_hive = hives.iter().enumerate().flat_map(|(hive, size)| vec![hive; *size]);
    nodes.extend(of_hive.zip(1..).map(|(hive, number)| gpu(number, hive)));
    for (number, node) in nodes.iter_mut().enumerate() {
        node.properties.node_id = u32::try_from(number).unwrap();
    }
    for number in 0..count {
        link(&mut nodes, PCIE, cpus + number, number * cpus / count);
        link(&mut nodes, PCIE, number * cpus / count, cpus + number);
        for other in (0..count).filter(|other| *other != number) {
            if nodes[cpus + number].properties.hive_id == nodes[cpus + other].properties.hive_id {
                link(&mut nodes, XGMI, cpus + number, cpus + other);
            }
        }
    }
    for node in &mut nodes {
        node.properties.io_links_count = u32::try_from(node.links.len()).unwrap();
    }
    nodes
}

fn link(nodes: &mut [NodeImage], kind: u32, from: usize, to: usize) {
    let to_node = nodes[to].properties.node_id;
    nodes[from].links.push(Link { kind, to_node });
}

prop_compose! {
    /// Generates a few nodes with any links.
    pub(super) fn small()(cpus in 0_usize..3, gpus in 0_usize..5)(
        nodes in Just((cpus, machine(cpus.max(1), &vec![1; gpus]))),
        links in prop::collection::vec(
            (prop::sample::select(vec![PCIE, XGMI, XGMI, 4]), 0_usize..8, 0_usize..8),
            0..12,
        ),
        hives in prop::collection::vec(0_u64..3, 8),
    ) -> Vec<NodeImage> {
        let (cpus, mut nodes) = nodes;
        for (node, hive) in nodes.iter_mut().zip(hives) {
            node.properties.hive_id = hive;
        }
        if cpus == 0 {
            nodes.remove(0);
        }
        let count = nodes.len().max(1);
        for (kind, from, to) in links {
            if !nodes.is_empty() && from % count != to % count {
                link(&mut nodes, kind, from % count, to % count);
            }
        }
        nodes
    }
}

/// A change of one node.
#[derive(Debug, Clone)]
pub(super) struct Change {
    place: usize,
    what: u32,
    more: bool,
}

pub(super) fn change() -> impl Strategy<Value = Change> {
    (0_usize..8, 0_u32..12, any::<bool>()).prop_map(|(place, what, more)| Change { place, what, more })
}

impl Change {
    pub(super) fn make(&self, nodes: &mut [NodeImage]) {
        let count = nodes.len().max(1);
        let Some(node) = nodes.get_mut(self.place % count).filter(|node| node.properties.gpu_id != 0) else {
            return;
        };
        let by = |number: &mut u32| *number = if self.more { *number + 1 } else { *number - 1 };
        match self.what {
            0 => {
                node.properties.vram_size =
                    if self.more { node.properties.vram_size + 1 } else { node.properties.vram_size - 1 }
            }
            1 => by(&mut node.properties.fw_version),
            2 => by(&mut node.properties.sdma_fw_version),
            3 => by(&mut node.properties.caches_count),
            4 => by(&mut node.properties.num_gws),
            5 => by(&mut node.properties.capability),
            6 => by(&mut node.properties.device_id),
            7 => by(&mut node.properties.simd_count),
            8 => node.properties.vram_public = 0,
            9 => node.properties.gds_size_in_kb = 64,
            10 => by(&mut node.properties.drm_render_minor),
            _ => drop(node.links.pop()),
        }
    }
}

/// Returns the same machine in another order, with other numbers, ids and render nodes.
pub(super) fn renamed(nodes: &[NodeImage], seed: u64) -> Vec<NodeImage> {
    let mut nodes = nodes.to_vec();
    let mut state = seed;
    for last in (1..nodes.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        nodes.swap(last, usize::try_from(state >> 33).unwrap() % (last + 1));
    }
    let numbers: Vec<u32> = nodes.iter().map(|node| node.properties.node_id).collect();
    let renumbered = |old: u32| {
        let place = numbers.iter().position(|number| *number == old);
        // A link to a missing node is kept.
        place.map_or(u32::MAX, |place| u32::try_from(place).unwrap())
    };
    for (node, place) in nodes.iter_mut().zip(0_u32..) {
        node.properties.node_id = renumbered(node.properties.node_id);
        node.links.iter_mut().for_each(|link| link.to_node = renumbered(link.to_node));
        if node.properties.gpu_id != 0 {
            // Some GPUs exchange their ids.
            (node.properties.gpu_id, node.properties.drm_render_minor) = (0x1007 + 7 * place, 140 + place);
            node.properties.hive_id =
                if node.properties.hive_id == 0 { 0 } else { node.properties.hive_id + 100 };
        }
    }
    nodes
}

/// Returns all ways to assign each old id a different new one.
pub(super) fn among(old: &[u32], new: &[u32]) -> Vec<Vec<(u32, u32)>> {
    let Some((first, rest)) = old.split_first() else { return vec![Vec::new()] };
    let mut all = Vec::new();
    for choice in new {
        let left: Vec<u32> = new.iter().copied().filter(|other| other != choice).collect();
        for mut pairs in among(rest, &left) {
            pairs.insert(0, (*first, *choice));
            all.push(pairs);
        }
    }
    all
}

/// Returns whether these pairs keep every rule.
pub(super) fn fits_by_hand(
    image: &[NodeImage],
    here: &[NodeImage],
    pairs: &[(u32, u32)],
    checks: Checks,
) -> bool {
    let node = |nodes: &[NodeImage], gpu: u32| {
        nodes.iter().find(|node| node.properties.gpu_id == gpu).unwrap().clone()
    };
    let pairs: Vec<(NodeImage, NodeImage)> =
        pairs.iter().map(|(old, new)| (node(image, *old), node(here, *new))).collect();
    let different = pairs
        .iter()
        .enumerate()
        .all(|(i, a)| pairs[..i].iter().all(|b| a.1.properties.gpu_id != b.1.properties.gpu_id));
    let alike = pairs.iter().all(|(old, new)| alike(&old.properties, &new.properties, checks));
    let linked = pairs.iter().all(|a| pairs.iter().all(|b| linked_alike(a, b) && hived_alike(a, b)));
    let cpus = |nodes: &[NodeImage]| {
        nodes.iter().filter(|node| node.properties.gpu_id == 0).cloned().collect::<Vec<_>>()
    };
    different && alike && linked && cpus_alike(&cpus(image), &cpus(here), &pairs, checks)
}

fn alike(old: &Properties, new: &Properties, checks: Checks) -> bool {
    let same = Properties {
        // These fields may differ, or are compared below.
        node_id: new.node_id,
        gpu_id: new.gpu_id,
        domain: new.domain,
        drm_render_minor: new.drm_render_minor,
        hive_id: new.hive_id,
        gds_size_in_kb: new.gds_size_in_kb,
        vram_size: new.vram_size,
        caches_count: new.caches_count,
        num_gws: new.num_gws,
        fw_version: new.fw_version,
        sdma_fw_version: new.sdma_fw_version,
        capability: if checks.has(Switch::Capability) { old.capability } else { new.capability },
        ..*old
    };
    same == *new
        && old.gds_size_in_kb <= new.gds_size_in_kb
        && (old.vram_size <= new.vram_size || !checks.has(Switch::Vram))
        && (old.caches_count <= new.caches_count || !checks.has(Switch::Caches))
        && (old.num_gws <= new.num_gws || !checks.has(Switch::Gws))
        && (old.fw_version <= new.fw_version || !checks.has(Switch::Firmware))
        && (old.sdma_fw_version <= new.sdma_fw_version || !checks.has(Switch::SdmaFirmware))
}

fn has(from: &NodeImage, to: &NodeImage, kind: u32) -> bool {
    from.properties.node_id != to.properties.node_id
        && from.links.iter().any(|link| link.kind == kind && link.to_node == to.properties.node_id)
}

/// Returns whether the links from `a` to `b` have equivalents.
fn linked_alike(a: &(NodeImage, NodeImage), b: &(NodeImage, NodeImage)) -> bool {
    let xgmi = has(&a.1, &b.1, XGMI);
    (!has(&a.0, &b.0, XGMI) || xgmi) && (!has(&a.0, &b.0, PCIE) || xgmi || has(&a.1, &b.1, PCIE))
}

fn hived_alike(a: &(NodeImage, NodeImage), b: &(NodeImage, NodeImage)) -> bool {
    let together = |a: &NodeImage, b: &NodeImage| {
        a.properties.hive_id == b.properties.hive_id && a.properties.hive_id != 0
    };
    a.0.properties.gpu_id == b.0.properties.gpu_id || !together(&a.0, &b.0) || together(&a.1, &b.1)
}

/// Returns whether each link to a CPU has an equivalent. With the NUMA check, it must lead to the CPU's own
/// replacement.
fn cpus_alike(
    old: &[NodeImage],
    new: &[NodeImage],
    pairs: &[(NodeImage, NodeImage)],
    checks: Checks,
) -> bool {
    let is_linked = |gpu: &NodeImage, cpu: &NodeImage| {
        [PCIE, XGMI].iter().any(|kind| has(gpu, cpu, *kind) || has(cpu, gpu, *kind))
    };
    let both = |gpu: &(NodeImage, NodeImage), cpu: &(NodeImage, NodeImage)| {
        linked_alike(gpu, cpu) && linked_alike(cpu, gpu)
    };
    if !checks.has(Switch::Numa) {
        let replaced = |gpu: &(NodeImage, NodeImage), cpu: &NodeImage| {
            new.iter().any(|other| both(gpu, &(cpu.clone(), other.clone())))
        };
        return pairs
            .iter()
            .all(|gpu| old.iter().filter(|cpu| is_linked(&gpu.0, cpu)).all(|cpu| replaced(gpu, cpu)));
    }
    let old: Vec<&NodeImage> =
        old.iter().filter(|cpu| pairs.iter().any(|gpu| is_linked(&gpu.0, cpu))).collect();
    let numbers = |nodes: &[&NodeImage]| nodes.iter().map(|node| node.properties.node_id).collect::<Vec<_>>();
    let node = |nodes: &[&NodeImage], number| {
        (*nodes.iter().find(|node| node.properties.node_id == number).unwrap()).clone()
    };
    let new: Vec<&NodeImage> = new.iter().collect();
    among(&numbers(&old), &numbers(&new)).iter().any(|cpus| {
        let mut cpus = cpus.iter().map(|(a, b)| (node(&old, *a), node(&new, *b)));
        cpus.all(|cpu| pairs.iter().all(|gpu| both(gpu, &cpu)))
    })
}
