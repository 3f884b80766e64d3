// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of CPUs that comes lazily (`criu restore --lazy-pages`) in programs that use GPUs: the driver, which waits for no page, finds
//! all of it, whether it is registered before the dump or after the restore.

use gpu_app::shape::{Mode, Shape};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_kfd::topology::{Node, Topology};
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, dies, soon, unreached};
use softgpu_tests::server::small;
use softgpu_tests::{Streamer, Toucher, isolated};

/// What CRIU says when tasks are whole, and when they run.
const WHOLE: &str = "Run late stage hook";
const GOES_ON: &str = "Restore finished successfully";
/// What the plugin says when it waits.
const WAITS: &str = "pages of its memory that come lazily";

/// Restores it, and stops its page server when tasks are whole and much is missing still, until CRIU waits for that.
fn comes_back(criu: &Criu, pages: &mut Streamer) {
    let mut restoring = criu.command(&["restore", "--restore-detached", "--lazy-pages"]).spawn().unwrap();
    let mut comes_to = |said: &str| {
        let mut ended = || restoring.try_wait().unwrap().is_some();
        soon(|| criu.log("restore").contains(said) || ended()) && !ended()
    };
    let signalled = |signal| {
        for pid in [pages.pid()].into_iter().chain(pages.workers()) {
            kill(Pid::from_raw(pid.cast_signed()), signal).unwrap();
        }
    };
    assert!(comes_to(WHOLE));
    signalled(Signal::SIGSTOP);
    let waits = comes_to(WAITS) && !criu.log("restore").contains(GOES_ON);
    signalled(Signal::SIGCONT);
    assert!(restoring.wait().unwrap().success(), "{}\n{}", criu.log("restore"), pages.said());
    assert!(waits, "nothing was missing, or nobody waited for it: {}", criu.log("restore"));
    assert!(pages.end().unwrap().success(), "{}", pages.said());
}

/// Its memory comes lazily, and that of its GPUs behind it if that is wanted.
fn there_and_back(shape: &Shape, version: Version, behind: bool) {
    let Some(dumped) = Dumped::of(shape, version) else { return };
    let mut pages = Streamer::of_cpus(dumped.criu.images()).unwrap();
    let mut gpus = behind.then(|| dumped.streamer());
    comes_back(&dumped.criu, &mut pages);
    if let Some(gpus) = &mut gpus {
        assert!(gpus.end().unwrap().success(), "{}", gpus.said());
    }
    dumped.server.ends_well();
}

#[test]
fn registered_memory_is_there_before_queues_start() {
    isolated("registered_memory_is_there_before_queues_start", 1, |_| {
        there_and_back(&Shape { mode: Mode::Userptr, ..small() }, Version::V4_2, false);
    });
}

#[test]
fn memory_with_attributes_is_there_before_queues_start() {
    isolated("memory_with_attributes_is_there_before_queues_start", 1, |_| {
        if Topology::read().unwrap().gpus().all(Node::has_svm) {
            there_and_back(&Shape { mode: Mode::Svm, ..small() }, Version::V4_2, false);
        }
    });
}

#[test]
fn memory_of_gpus_comes_later_still() {
    isolated("memory_of_gpus_comes_later_still", 1, |_| {
        there_and_back(&Shape { mode: Mode::Userptr, ..unreached() }, Version::V4_2, true);
        there_and_back(&Shape { processes: 2, ..small() }, Version::V4_2, true);
    });
}

#[test]
fn memory_that_is_registered_at_once_is_there() {
    isolated("memory_that_is_registered_at_once_is_there", 1, |_| {
        for version in [Version::V4_2, Version::V4_1] {
            let folder = tempfile::tempdir().unwrap();
            let mut toucher = Toucher::start(env!("CARGO_BIN_EXE_toucher"), folder.path(), None).unwrap();
            toucher.asked("allocate 0").unwrap();
            let criu = Criu::with(Plugin::Ours, version, &folder.path().join("images")).unwrap();
            criu.dump(toucher.pid()).unwrap();
            toucher.was_dumped().unwrap();
            toucher.ask("register 0").unwrap();
            let mut pages = Streamer::of_cpus(criu.images()).unwrap();
            comes_back(&criu, &mut pages);
            toucher.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", pages.said()));
            dies(toucher.pid());
            wait_for_the_end_of(toucher.pid()).unwrap();
        }
    });
}
