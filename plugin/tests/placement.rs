// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests the placement of GPUs: placements that always exist, those that never do, and the errors.

mod machines;

use std::time::Duration;

use amdgpu_plugin::placement::{NoPlacement, Placement};
use machines::{PCIE, XGMI, among, change, fits_by_hand, machine, renamed, small};
use nix::time::{ClockId, clock_gettime};
use proptest::prelude::*;
use rewake_criu_images::amdgpu::settings::{Checks, Switch};
use rewake_criu_images::amdgpu::{Link, NodeImage};

fn gpu_ids(nodes: &[NodeImage]) -> Vec<u32> {
    nodes.iter().map(|node| node.properties.gpu_id).filter(|id| *id != 0).collect()
}

fn find(image: &[NodeImage], machine: &[NodeImage]) -> Result<Placement, NoPlacement> {
    Placement::find(image, &gpu_ids(image), machine, Checks::default())
}

fn refusal(image: &[NodeImage], machine: &[NodeImage]) -> String {
    find(image, machine).unwrap_err().to_string()
}

/// Returns the machine with one GPU changed by `change`.
fn with(nodes: &[NodeImage], gpu: u32, change: impl FnOnce(&mut NodeImage)) -> Vec<NodeImage> {
    let mut nodes = nodes.to_vec();
    change(nodes.iter_mut().find(|node| node.properties.gpu_id == gpu).expect("the machine has the GPU"));
    nodes
}

proptest! {
    #[test]
    fn a_machine_takes_its_own_image_under_the_same_names(
        cpus in 1_usize..4,
        hives in prop::collection::vec(1_usize..9, 0..4),
    ) {
        let nodes = machine(cpus, &hives);
        let mapping = find(&nodes, &nodes).unwrap();
        prop_assert!(mapping.pairs().iter().all(|pair| pair.old == pair.new));
        prop_assert_eq!(mapping.pairs().len(), hives.iter().sum::<usize>());
    }

    #[test]
    fn a_permuted_machine_takes_the_image(
        cpus in 1_usize..4,
        hives in prop::collection::vec(1_usize..9, 1..4),
        seed: u64,
    ) {
        let image = machine(cpus, &hives);
        let here = renamed(&image, seed);
        let mapping = find(&image, &here).unwrap();
        let pairs: Vec<_> = mapping.pairs().iter().map(|pair| (pair.old, pair.new)).collect();
        prop_assert!(fits_by_hand(&image, &here, &pairs, Checks::default()));
        for pair in mapping.pairs() {
            let node = here.iter().find(|node| node.properties.gpu_id == pair.new).unwrap();
            prop_assert_eq!(pair.render_minor, node.properties.drm_render_minor);
        }
    }

    #[test]
    fn a_machine_with_one_gpu_less_does_not(
        cpus in 1_usize..4,
        hives in prop::collection::vec(1_usize..9, 1..4),
        gone in any::<prop::sample::Index>(),
    ) {
        let image = machine(cpus, &hives);
        let gone = *gone.get(&gpu_ids(&image));
        let stays = |node: &&NodeImage| node.properties.gpu_id != gone;
        let here: Vec<NodeImage> = image.iter().filter(stays).cloned().collect();
        find(&image, &here).unwrap_err();
    }

    /// Compares with a test of every choice: a placement is found if and only if one exists, and it passes
    /// every check.
    #[test]
    fn a_placement_is_found_where_there_is_one(
        (image, here) in (small(), small()),
        related in any::<bool>(),
        changes in prop::collection::vec(change(), 0..3),
        seed: u64,
        off in prop::collection::vec(prop::sample::select(Switch::ALL.to_vec()), 0..3),
    ) {
        let checks = off.iter().fold(Checks::default(), |checks, switch| checks.without(*switch));
        let mut here = if related { image.clone() } else { here };
        changes.iter().for_each(|change| change.make(&mut here));
        let here = renamed(&here, seed);
        let found = Placement::find(&image, &gpu_ids(&image), &here, checks);
        let choices = among(&gpu_ids(&image), &gpu_ids(&here));
        let by_hand = choices.iter().any(|pairs| fits_by_hand(&image, &here, pairs, checks));
        prop_assert_eq!(found.is_ok(), by_hand, "{:?}", found);
        if let Ok(mapping) = &found {
            let pairs: Vec<_> = mapping.pairs().iter().map(|pair| (pair.old, pair.new)).collect();
            prop_assert!(fits_by_hand(&image, &here, &pairs, checks));
        }
    }
}

#[test]
fn only_the_gpus_that_are_used_need_a_place() {
    let image = machine(1, &[4]);
    let ids = gpu_ids(&image);
    let here: Vec<NodeImage> =
        image.iter().filter(|node| node.properties.gpu_id != ids[0]).cloned().collect();
    let used = [ids[3], ids[1], ids[3]];
    let mapping = Placement::find(&image, &used, &here, Checks::default()).unwrap();
    let pairs: Vec<_> = mapping.pairs().iter().map(|pair| (pair.old, pair.new)).collect();
    assert_eq!(pairs, [(ids[1], ids[1]), (ids[3], ids[3])]);
    assert_eq!(mapping.get(ids[3]).unwrap().render_minor, 131);
    assert_eq!(mapping.get(ids[0]), None);
}

/// In the image of a container, its own GPUs have ids; this machine shows a container its own GPUs only.
#[test]
fn a_gpu_that_nobody_uses_is_no_cpu() {
    let host = machine(2, &[2]);
    let (had, gets) = (gpu_ids(&host)[0], gpu_ids(&host)[1]);
    let image = with(&host, gets, |node| node.properties.gpu_id = 0);
    let is_shown = |node: &&NodeImage| [0, gets].contains(&node.properties.gpu_id);
    let shown: Vec<NodeImage> = host.iter().filter(is_shown).cloned().collect();
    let placement = Placement::find(&image, &[had], &shown, Checks::default()).unwrap();
    assert_eq!(placement.get(had).unwrap().new, gets);
}

#[test]
fn without_used_gpus_the_placement_is_empty() {
    assert_eq!(find(&[], &[]).unwrap(), Placement::default());
    assert_eq!(find(&machine(2, &[]), &machine(1, &[4])).unwrap(), Placement::default());
}

#[test]
fn invalid_nodes_are_refused() {
    let good = machine(1, &[2]);
    let ids = gpu_ids(&good);
    let twice = [&good[..], &good[2..]].concat();
    assert_eq!(refusal(&twice, &good), "the image has two nodes of the number 2");
    let same = with(&good, ids[1], |node| node.properties.gpu_id = ids[0]);
    assert_eq!(refusal(&good, &same), format!("this machine has two GPUs {:#x}", ids[0]));
    let error = Placement::find(&good, &[7], &good, Checks::default()).unwrap_err().to_string();
    assert_eq!(error, "the image uses GPU 0x7 and does not describe it");
    assert_eq!(refusal(&machine(1, &[300]), &good), "the image has 301 nodes, at most 128 are supported");
}

/// Far more time than a pruned search takes.
const A_MINUTE: Duration = Duration::from_secs(60);

/// Returns the CPU time of this thread only.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

#[test]
fn sixty_four_gpus_of_one_hive_are_mapped_at_once() {
    for hives in [&[64][..], &[16; 4], &[8; 8], &[1; 64]] {
        let image = machine(2, hives);
        let here = renamed(&image, 5);
        let start = cpu_time();
        find(&image, &here).unwrap();
        let took = cpu_time() - start;
        // It takes milliseconds; the margin is for a slow machine.
        assert!(took < A_MINUTE, "{hives:?}: {took:?}");
    }
}

#[test]
fn an_impossible_placement_fails_soon() {
    let unfit = |reason: &NoPlacement| matches!(reason, NoPlacement::NoCompatibleGpu(_));
    let crowded = |reason: &NoPlacement| matches!(reason, NoPlacement::NotEnoughGpus { .. });
    let unlinked = |reason: &NoPlacement| matches!(reason, NoPlacement::Links { .. });
    let ended = |reason: &NoPlacement| matches!(reason, NoPlacement::Steps);
    type Case<'a> = (&'a [usize], &'a [usize], fn(&NoPlacement) -> bool);
    // A hive is split here, and in all other properties each GPU alone is compatible.
    let cases: [Case; 5] = [
        (&[16], &[8, 8], unfit),
        (&[64], &[32, 32], unfit),
        (&[8; 8], &[8, 8, 8, 8, 8, 8, 7, 9], crowded),
        (&[3; 5], &[4; 4], unlinked),
        (&[3; 20], &[4; 15], ended),
    ];
    for (wanted, there, expected) in cases {
        let alike = |mut nodes: Vec<NodeImage>| {
            nodes.iter_mut().for_each(|node| node.properties.io_links_count = 9);
            nodes
        };
        let (image, here) = (alike(machine(2, wanted)), alike(renamed(&machine(2, there), 5)));
        let start = cpu_time();
        let reason = find(&image, &here).unwrap_err();
        assert!(expected(&reason), "{wanted:?} on {there:?}: {reason}");
        let took = cpu_time() - start;
        assert!(took < A_MINUTE, "{wanted:?} on {there:?}: {took:?}");
    }
}

#[test]
fn an_incompatible_gpu_is_named_with_the_most_similar_one() {
    let image = machine(1, &[1, 1]);
    let ids = gpu_ids(&image);
    let [a, b] = [ids[0], ids[1]];
    let less = with(&image, b, |node| node.properties.vram_size = 32_752 << 20);
    let alone: Vec<NodeImage> = less.iter().filter(|node| node.properties.gpu_id != a).cloned().collect();
    assert_eq!(
        Placement::find(&image, &[a], &alone, Checks::default()).unwrap_err().to_string(),
        format!(
            "GPU {a:#x} of the image: VRAM 65520 MiB wanted, GPU {b:#x} has 32752 MiB: \
             set KFD_VRAM_SIZE_CHECK=0 to accept"
        )
    );
    Placement::find(&image, &[a], &alone, Checks::default().without(Switch::Vram)).unwrap();

    let older = with(&alone, b, |node| {
        (node.properties.fw_version, node.properties.capability) = (node.properties.fw_version - 1, 0);
    });
    let reason = Placement::find(&image, &[a], &older, Checks::default()).unwrap_err().to_string();
    let hint = "set KFD_VRAM_SIZE_CHECK=0 and KFD_CAPABILITY_CHECK=0 and KFD_FW_VER_CHECK=0 to accept";
    assert!(reason.ends_with(hint), "{reason}");

    let other = with(&alone, b, |node| node.properties.device_id = 0x74a1);
    let reason = Placement::find(&image, &[a], &other, Checks::default()).unwrap_err().to_string();
    let expected =
        format!("GPU {a:#x} of the image: PCI device 0x740c wanted, GPU {b:#x} has 0x74a1 (and 1 more)");
    assert_eq!(reason, expected, "no hint where switches do not help");

    let none: Vec<NodeImage> = image.iter().filter(|node| node.properties.gpu_id == 0).cloned().collect();
    let reason = refusal(&image, &none);
    let missing =
        |gpu: u32| format!("GPU {gpu:#x} of the image: this machine has no GPU that this process can use");
    assert_eq!(reason, [missing(a), missing(b)].join("; "));
}

/// A property, a function that sets it, whether another GPU may have more of it, and the switch of its check.
type Rule = (&'static str, fn(&mut NodeImage, bool), bool, Option<Switch>);

macro_rules! rules {
    ($($name:literal $field:ident $more:literal $switch:expr;)*) => {
        [$((
            $name,
            |node, more| {
                let value = node.properties.$field;
                node.properties.$field = if more { value + 1 } else { value - 1 };
            },
            $more,
            $switch,
        ),)*]
    };
}

#[test]
fn every_property_is_compared_as_the_stock_plugin_does() {
    let rules: [Rule; 25] = rules! {
        "PCI vendor" vendor_id false None;
        "PCI device" device_id false None;
        "SIMD units" simd_count false None;
        "shader arrays" array_count false None;
        "shader arrays of an engine" simd_arrays_per_engine false None;
        "compute units of a shader array" cu_per_simd_array false None;
        "SIMD units of a compute unit" simd_per_cu false None;
        "threads of a wave" wave_front_size false None;
        "waves of a SIMD unit" max_waves_per_simd false None;
        "scratch waves of a compute unit" max_slots_scratch_cu false None;
        "local data share" lds_size_in_kb false None;
        "global data share" gds_size_in_kb true None;
        "memory banks" mem_banks_count false None;
        "VRAM" vram_size true Some(Switch::Vram);
        "all VRAM in reach of the CPU" vram_public false None;
        "copy engines" num_sdma_engines false None;
        "copy engines for XGMI" num_sdma_xgmi_engines false None;
        "queues of a copy engine" num_sdma_queues_per_engine false None;
        "compute queues" num_cp_queues false None;
        "links to other nodes" io_links_count false None;
        "caches" caches_count true Some(Switch::Caches);
        "global wave sync resources" num_gws true Some(Switch::Gws);
        "capability bits" capability false Some(Switch::Capability);
        "compute firmware version" fw_version true Some(Switch::Firmware);
        "copy engine firmware version" sdma_fw_version true Some(Switch::SdmaFirmware);
    };
    let image = with(&machine(1, &[1]), 0x1007, |node| node.properties.gds_size_in_kb = 64);
    for (name, set, more_fits, switch) in rules {
        for more in [false, true] {
            let here = with(&image, 0x1007, |node| set(node, more));
            if more && more_fits {
                find(&image, &here).unwrap();
                continue;
            }
            let reason = refusal(&image, &here);
            assert!(reason.starts_with(&format!("GPU 0x1007 of the image: {name} ")), "{name}: {reason}");
            for other in Switch::ALL {
                let found = Placement::find(&image, &[0x1007], &here, Checks::default().without(other));
                assert_eq!(found.is_ok(), switch == Some(other), "{name} without {other:?}");
            }
            let hint = switch.map(|switch| format!(": set {}=0 to accept", switch.variable()));
            assert!(reason.ends_with(&hint.unwrap_or_default()), "{reason}");
            assert_eq!(reason.contains("=0 to accept"), switch.is_some(), "{reason}");
        }
    }
}

#[test]
fn too_few_places_are_named_with_the_most_similar_gpu() {
    let image = machine(1, &[1, 1]);
    let ids = gpu_ids(&image);
    let [a, b] = [ids[0], ids[1]];
    let less = with(&image, b, |node| node.properties.vram_size = 32_752 << 20);
    assert_eq!(
        refusal(&image, &less),
        format!(
            "GPU {a:#x}, GPU {b:#x} of the image can only take the place of GPU {a:#x} here; GPU {a:#x} of \
             the image: VRAM 65520 MiB wanted, GPU {b:#x} has 32752 MiB: set KFD_VRAM_SIZE_CHECK=0 to accept"
        )
    );
}

#[test]
fn a_missing_link_is_named() {
    let image = machine(1, &[2]);
    let ids = gpu_ids(&image);
    let pcie = |nodes: Vec<NodeImage>| {
        nodes
            .into_iter()
            .map(|mut node| {
                node.properties.hive_id = 0;
                node.links.iter_mut().for_each(|link| link.kind = PCIE);
                node
            })
            .collect::<Vec<_>>()
    };
    let here = pcie(image.clone());
    let reason = |gpu: u32| {
        format!("GPU {gpu:#x} of the image: an XGMI link with other GPUs: 1 wanted, GPU {:#x} has 0", ids[0])
    };
    assert_eq!(refusal(&image, &here), [reason(ids[0]), reason(ids[1])].join("; "));
    find(&here, &image).expect("XGMI does what PCIe does");
    assert_eq!(image[1].links.iter().filter(|link| link.kind == XGMI).count(), 1);
}

#[test]
fn a_link_both_ways_is_not_replaced_by_one_way() {
    let image = machine(1, &[2]);
    let ids = gpu_ids(&image);
    let one_way = with(&image, ids[1], |node| node.links.retain(|link| link.kind == PCIE));
    assert!(matches!(find(&image, &one_way), Err(NoPlacement::NoCompatibleGpu(_))));
    find(&one_way, &image).expect("two ways do what one way does");
}

#[test]
fn gpus_of_one_hive_stay_in_one_hive() {
    let unlinked = |mut nodes: Vec<NodeImage>| {
        nodes.iter_mut().for_each(|node| node.links.retain(|link| link.kind == PCIE));
        nodes
    };
    let image = unlinked(machine(1, &[2]));
    let apart = with(&image, gpu_ids(&image)[1], |node| node.properties.hive_id = 99);
    assert!(
        refusal(&image, &apart).contains("a common XGMI hive with other GPUs: 1 wanted"),
        "{}",
        refusal(&image, &apart)
    );
    find(&apart, &image).expect("the image does not need two hives");
}

#[test]
fn gpus_stay_with_their_cpus_unless_numa_is_switched_off() {
    // Two GPUs of the image are near different CPUs; here both are near the same.
    let image = machine(2, &[1, 1]);
    let here = with(&image, gpu_ids(&image)[1], |node| node.links = vec![Link { kind: PCIE, to_node: 0 }]);
    let here: Vec<NodeImage> = here
        .into_iter()
        .map(|mut node| {
            let to_second = node.properties.node_id == 1;
            node.links.retain(|_| !to_second);
            if node.properties.node_id == 0 {
                node.links = vec![Link { kind: PCIE, to_node: 2 }, Link { kind: PCIE, to_node: 3 }];
            }
            node
        })
        .collect();
    let reason = refusal(&image, &here);
    assert!(reason.ends_with(": set KFD_NUMA_CHECK=0 to accept other CPUs"), "{reason}");
    let checks = Checks::default().without(Switch::Numa);
    Placement::find(&image, &gpu_ids(&image), &here, checks).unwrap();

    let reason = refusal(&image, &with(&image, gpu_ids(&image)[1], |node| node.links.clear()));
    assert!(reason.contains("can only take the place of"), "{reason}");
    assert!(reason.contains("a PCIe link to a CPU wanted"), "{reason}");
}
