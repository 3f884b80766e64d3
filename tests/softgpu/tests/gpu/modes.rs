// SPDX-License-Identifier: MIT OR Apache-2.0
//! In every mode of the workload at the dump, it runs before its memory is resident, and all its answers are
//! right. Each mode is restored by both versions of CRIU: by one with GPU memory lazy, by the other with all
//! memory lazy.

use std::fs;

use clap::ValueEnum as _;
use gpu_app::shape::{Mode, Shape};
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_skip::need;
use softgpu_tests::criu::Version;
use softgpu_tests::dumped::{Behind, Dumped};
use softgpu_tests::isolated;
use softgpu_tests::server::small;

/// Whether the kernel reports the buffers of a render node.
fn reports_bos() -> bool {
    !fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().starts_with("6.12")
}

/// Whether this machine has what the mode needs. Elsewhere other tests check that it is refused.
fn can(mode: Mode) -> bool {
    let all = |have: fn(&Node) -> bool| Topology::read().unwrap().gpus().all(have);
    match mode {
        Mode::CpuReads => all(Node::has_large_bar),
        Mode::Svm => all(Node::has_svm),
        Mode::RenderOnly => reports_bos(),
        _ => true,
    }
}

/// Restores it with this memory lazy.
fn dump_and_restore(mode: Mode, behind: Behind, version: Version) {
    let processes = if mode == Mode::SharedBo { 2 } else { 1 };
    // Layers large enough for a placeholder where CPUs can access it; one for each process.
    let shape = Shape { mode, processes, gpus: 2, layers: 2, layer_kib: 2048, ..small() };
    let dumped = need!(Dumped::of(&shape, version));
    eprintln!("{mode:?}, {behind:?}, {version:?}");
    let mut streamer = dumped.streamer_of(behind);
    let restored = dumped.restore_command(behind).status().unwrap();
    assert!(restored.success(), "{}\n{}", dumped.criu.log("restore"), streamer.said());
    assert!(streamer.end().unwrap().success(), "{}", streamer.said());
    let said = streamer.said();
    assert!(said.contains("the driver lets queues run") && said.contains("queues resumed"), "{said}");
    assert!(dumped.criu.left_buffers(), "{}", dumped.criu.log("restore"));
    dumped.server.ends_well();
}

fn every_mode(behind: Behind, version: Version) {
    for mode in Mode::value_variants().iter().filter(|mode| can(**mode)) {
        dump_and_restore(*mode, behind, version);
    }
}

#[test]
fn with_all_of_its_memory_lazy() {
    isolated(2, |_| every_mode(Behind::Both, Version::V4_2));
}

#[test]
fn with_its_gpu_memory_lazy_by_an_older_criu() {
    isolated(2, |_| every_mode(Behind::Gpus, Version::V4_1));
}
