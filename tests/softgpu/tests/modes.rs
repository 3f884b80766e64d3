// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whatever the workload does at the dump, it runs before its memory is there, and all its answers are right: with its GPUs' memory
//! behind it, and with its CPUs', too; by both versions of CRIU.

use std::fs;

use clap::ValueEnum as _;
use gpu_app::shape::{Mode, Shape};
use rewake_kfd::topology::{Node, Topology};
use rewake_skip::need;
use softgpu_tests::criu::Version;
use softgpu_tests::dumped::{Behind, Dumped};
use softgpu_tests::isolated;
use softgpu_tests::server::small;

/// Whether the kernel tells what a render node has.
fn told() -> bool {
    !fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().starts_with("6.12")
}

/// Whether this machine has what the mode needs. Elsewhere the workload's own tests, and for render nodes the plugin's, see it refused.
fn can(mode: Mode) -> bool {
    let all = |have: fn(&Node) -> bool| Topology::read().unwrap().gpus().all(have);
    match mode {
        Mode::CpuReads => all(Node::has_large_bar),
        Mode::Svm => all(Node::has_svm),
        Mode::RenderOnly => told(),
        _ => true,
    }
}

/// Restores it with each of these behind it, from one image.
fn there_and_back(mode: Mode, all: &[Behind], version: Version) {
    let processes = if mode == Mode::SharedBo { 2 } else { 1 };
    // Large enough for a placeholder where CPUs reach them.
    let shape = Shape { mode, processes, gpus: 2, layer_kib: 2048, ..small() };
    let dumped = need!(Dumped::of(&shape, version));
    for (round, behind) in all.iter().enumerate() {
        eprintln!("{mode:?}, {behind:?}, {version:?}");
        let mut streamer = dumped.streamer_of(*behind);
        let restored = dumped.restore_command(*behind).status().unwrap();
        assert!(restored.success(), "{}\n{}", dumped.criu.log("restore"), streamer.said());
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        let said = streamer.said();
        assert!(said.contains("the driver lets queues run") && said.contains("GPUs go on"), "{said}");
        assert!(dumped.criu.left_buffers(), "{}", dumped.criu.log("restore"));
        if round + 1 < all.len() {
            dumped.server.works();
            dumped.ends();
        }
    }
    dumped.server.ends_well();
}

fn every_mode(all: &[Behind], version: Version) {
    for mode in Mode::value_variants().iter().filter(|mode| can(**mode)) {
        there_and_back(*mode, all, version);
    }
}

#[test]
fn with_memory_of_gpus_behind_it_and_with_all_of_it() {
    isolated("with_memory_of_gpus_behind_it_and_with_all_of_it", 2, |_| {
        every_mode(&[Behind::Gpus, Behind::Both], Version::V4_2);
    });
}

#[test]
fn with_all_of_its_memory_behind_it_by_an_older_criu() {
    isolated("with_all_of_its_memory_behind_it_by_an_older_criu", 2, |_| {
        every_mode(&[Behind::Both], Version::V4_1);
    });
}
