// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lazy CPU memory (`criu restore --lazy-pages`) in programs that use GPUs. The driver waits for no page, so
//! registered memory must be resident, whether it was registered before the dump or after the restore.

use std::thread;
use std::time::Duration;

use gpu_app::shape::{Mode, Shape};
use nix::sys::signal::Signal;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_skip::need;
use softgpu_tests::criu::{Criu, Version, WAITS};
use softgpu_tests::dumped::{Dumped, signal, soon, unreached};
use softgpu_tests::server::small;
use softgpu_tests::{Accessor, Streamer, isolated, script};

/// What CRIU logs when tasks run.
const RESUMED: &str = "Restore finished successfully";
/// What the plugin logs while the streamer has not received all userfaultfds. Later it logs [`WAITS`].
const RECEIVES: &str = "waiting until it has received the userfaultfds of all tasks";
/// Minimum time in which no task may be resumed while the streamer is stopped.
const A_WHILE: Duration = Duration::from_millis(200);

/// Restores with a streamer that is stopped when all tasks are restored: no task is resumed meanwhile.
fn restores(criu: &Criu, pages: &mut Streamer) {
    let stopper = script::at(criu, script::RESTORED, &script::stops(pages));
    let mut command = criu.command(&["restore", "--restore-detached", "--lazy-pages"]);
    let mut restoring = command.arg("--action-script").arg(stopper).spawn().unwrap();
    let mut ended = || restoring.try_wait().unwrap().is_some();
    let log = || criu.log("restore");
    let waits =
        soon(|| [RECEIVES, WAITS].iter().any(|text| log().contains(text)) || ended()) && !ended() && {
            thread::sleep(A_WHILE);
            !criu.log("restore").contains(RESUMED)
        };
    signal(&pages.processes(), Signal::SIGCONT);
    assert!(restoring.wait().unwrap().success(), "{}\n{}", criu.log("restore"), pages.said());
    assert!(waits, "the plugin did not wait for the streamer: {}", criu.log("restore"));
    assert!(pages.end().unwrap().success(), "{}", pages.said());
}

/// Both CPU and GPU memory are lazy.
fn dump_and_restore(shape: &Shape, version: Version) {
    let dumped = need!(Dumped::of(shape, version));
    let mut pages = Streamer::of_cpus(dumped.criu.images()).unwrap();
    restores(&dumped.criu, &mut pages);
    dumped.server.ends_well();
}

#[test]
fn registered_memory_is_resident_before_queues_start() {
    isolated(1, |_| {
        dump_and_restore(&Shape { mode: Mode::Userptr, ..small() }, Version::V4_2);
    });
}

#[test]
fn memory_with_attributes_is_resident_before_queues_start() {
    isolated(1, |_| {
        if Topology::read().unwrap().gpus().all(Node::has_svm) {
            dump_and_restore(&Shape { mode: Mode::Svm, ..small() }, Version::V4_2);
        }
    });
}

#[test]
fn gpu_memory_is_loaded_after_cpu_memory() {
    isolated(1, |_| {
        dump_and_restore(&Shape { mode: Mode::Userptr, ..unreached() }, Version::V4_2);
        dump_and_restore(&Shape { processes: 2, ..small() }, Version::V4_2);
    });
}

#[test]
fn memory_that_is_registered_at_once_is_resident() {
    isolated(1, |_| {
        for version in [Version::V4_2, Version::V4_1] {
            let folder = tempfile::tempdir().unwrap();
            let program = env!("CARGO_BIN_EXE_accessor");
            let (accessor, criu) = Accessor::about_to_register(program, folder.path(), version).unwrap();
            let mut pages = Streamer::of_cpus(criu.images()).unwrap();
            restores(&criu, &mut pages);
            accessor.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", pages.said()));
            accessor.ends();
        }
    });
}
