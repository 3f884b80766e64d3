// SPDX-License-Identifier: MIT OR Apache-2.0
//! In every mode of the workload at the dump, it runs before its memory is resident, and all its answers are
//! right, whether its GPU memory or all of its memory is lazy.

use std::fs;

use clap::ValueEnum as _;
use gpu_app::client;
use gpu_app::shape::{Mode, Shape};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::gettid;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_skip::{need, skip};
use rewake_testkit::soon;
use softgpu_tests::criu::{Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Behind, Dumped};
use softgpu_tests::faults::{Calls, Faults};
use softgpu_tests::server::small;
use softgpu_tests::{DelayedCopies, REAL_GPUS, isolated};

/// The name of a task that CRIU restores, until it has the program's.
const RESTORING: &str = "criu";

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

/// A server in this mode, dumped by this CRIU.
fn dumped(mode: Mode, version: Version) -> Result<Dumped, &'static str> {
    let processes = if mode == Mode::SharedBo { 2 } else { 1 };
    // Layers large enough for a placeholder where CPUs can access it; one for each process.
    let shape = Shape { mode, processes, gpus: 2, layers: 2, layer_kib: 2048, ..small() };
    Dumped::of(&shape, version)
}

/// Restores it with this memory lazy; it works, and ends.
fn restores(dumped: &Dumped, behind: Behind) {
    restores_while(dumped, behind, || {});
}

/// As [`restores`], and calls this while CRIU restores it.
fn restores_while(dumped: &Dumped, behind: Behind, meanwhile: impl FnOnce()) {
    let mut streamer = dumped.streamer_of(behind);
    let mut restoring = dumped.restore_command(behind).spawn().unwrap();
    meanwhile();
    let restored = restoring.wait().unwrap();
    assert!(restored.success(), "{}\n{}", dumped.criu.log("restore"), streamer.said());
    assert!(streamer.end().unwrap().success(), "{}", streamer.said());
    let said = streamer.said();
    assert!(said.contains("the driver lets queues run") && said.contains("queues resumed"), "{said}");
    assert!(dumped.criu.left_buffers(), "{}", dumped.criu.log("restore"));
    dumped.server.works();
    // Its further processes end before it.
    client::ask(dumped.server.app.socket(), "quit").unwrap();
    wait_for_the_end_of(dumped.server.pid).unwrap();
}

#[test]
fn with_its_gpu_memory_or_all_of_its_memory_lazy() {
    isolated(2, |_| {
        for mode in Mode::value_variants().iter().filter(|mode| can(**mode)) {
            let dumped = need!(dumped(*mode, Version::V4_2));
            for behind in [Behind::Both, Behind::Gpus] {
                eprintln!("{mode:?}, {behind:?}");
                restores(&dumped, behind);
            }
        }
    });
}

/// CRIU sets the restored task's clocks back to the time of the dump, as a time namespace does. The kernel's
/// deadlines are of the first namespace's clock, and an hour after the dump all of the task's are over.
#[test]
fn an_hour_after_the_dump_it_waits_for_submissions() {
    isolated(2, |_| {
        if !reports_bos() {
            skip!("this kernel does not report the buffers of a render node");
        }
        let faults = need!(Faults::find(), REAL_GPUS);
        let dumped = need!(dumped(Mode::RenderOnly, Version::V4_2));
        unshare(CloneFlags::from_bits_retain(libc::CLONE_NEWTIME)).unwrap();
        let offsets = format!("/proc/{}/timens_offsets", gettid());
        fs::write(offsets, "monotonic 3600 0\nboottime 3600 0\n").unwrap();

        let held = need!(DelayedCopies::of(RESTORING), REAL_GPUS);
        faults.count(Calls { comm: Some(RESTORING), call: Some("amdgpu/WAIT_CS") });
        restores_while(&dumped, Behind::Gpus, || {
            assert!(soon(|| faults.seen() > 1), "no task waits for the submissions");
            drop(held);
        });
    });
}

/// CRIU's own part is the same in each mode: with one process, and with two that share a buffer.
#[test]
fn with_its_gpu_memory_lazy_by_an_older_criu() {
    isolated(2, |_| {
        for mode in [Mode::MidDispatch, Mode::SharedBo] {
            let dumped = need!(dumped(mode, Version::V4_1));
            restores(&dumped, Behind::Gpus);
        }
    });
}
