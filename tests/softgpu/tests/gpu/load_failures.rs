// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that cannot be loaded while its processes run: a copy fails, or a disk. Processes that wait for it
//! are killed, none sees zeros in its place, and the page server logs why.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;

use gpu_app::shape::Shape;
use nix::sys::signal::Signal;
use rewake_skip::need;
use rewake_testkit::process::output;
use rewake_testkit::programs::rewake;
use softgpu_tests::accessor::{Large, OWN_PARTS};
use softgpu_tests::criu::{Criu, Version, queues, wait_for_the_end_of};
use softgpu_tests::criu_leftovers::runs;
use softgpu_tests::dumped::{Dumped, ONE_RING, dies, is_paused, signal, soon, unreached};
use softgpu_tests::faults::{Calls, Fault};
use softgpu_tests::{
    Accessor, DelayedCopies, FailingDisk, Faults, Judge, Machine, REAL_GPUS, Streamer, isolated, script,
};

/// KiB of a layer, most of which is not read ahead.
const LARGE: u64 = 12 << 10;
/// GPU memory: more than is read ahead.
const FULL: Large = Large { count: 2, mib: 24, full: true };

/// Waits for the streamer's failure with one of these reasons; returns all that it logged.
fn failed(mut streamer: Streamer, reasons: &[&str]) -> String {
    let status = streamer.end().unwrap();
    assert_eq!(status.code(), Some(1), "{}", streamer.said());
    let said = streamer.said();
    for reason in reasons {
        assert!(said.contains(reason), "no {reason:?}: {said}");
    }
    said
}

#[test]
fn a_copy_that_fails_ends_only_the_processes_that_wait_for_it() {
    isolated(1, |_| {
        let faults = need!(Faults::find(), REAL_GPUS);
        let judge = need!(Judge::find(), REAL_GPUS);
        let machine = need!(Machine::find(), REAL_GPUS);
        machine.becomes(&ONE_RING);
        let shape = Shape { processes: 2, layer_kib: LARGE, ..unreached() };
        let dumped = need!(Dumped::of(&shape, Version::V4_2));
        let alive = judge.alive();
        let (streamer, delayed) =
            (Streamer::of_both(dumped.criu.images()).unwrap(), DelayedCopies::streamers());
        dumped.criu.restore_lazily().unwrap();
        assert!(soon(|| streamer.said().contains("all CPU memory is resident")), "{}", streamer.said());
        let mut both: Vec<u32> = judge.gates().iter().map(|gate| gate.pid).collect();
        both.retain(|pid| is_paused(*pid));
        delayed.release_until_one_is_resident(&dumped.criu, &streamer);
        assert!(soon(|| judge.closed_gates() == 1), "{}", streamer.said());
        let (waits, continues): (Vec<u32>, Vec<u32>) = both.iter().partition(|pid| is_paused(**pid));

        faults.fail(1, Fault::Errno(libc::EIO), Calls { comm: Some("rewake"), call: Some("amdgpu/CS") });
        drop(delayed);
        let said = failed(streamer, &["Input/output error"]);
        assert!(faults.hit());
        faults.off();
        assert!(soon(|| !runs(waits[0])), "{waits:?}");
        assert!(runs(continues[0]), "the gate of {continues:?} was open: {said}");
        dies(dumped.server.pid);
        wait_for_the_end_of(dumped.server.pid).unwrap();
        assert!(soon(|| judge.alive() == alive), "{:?}, before {alive:?}", judge.alive());

        let mut streamer = Streamer::of_both(dumped.criu.images()).unwrap();
        dumped.criu.restore_lazily().unwrap();
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        dumped.server.ends_well();
    });
}

#[test]
fn a_wrong_byte_of_a_sealed_image_reaches_no_queue() {
    isolated(1, |_| {
        let mut dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        output(Command::new(rewake().unwrap()).arg("seal").arg(dumped.criu.images())).unwrap();
        let files = files(&dumped.criu, "amdgpu-pages-");
        let largest = files.into_iter().max_by_key(|file| fs::metadata(file).unwrap().len()).unwrap();
        let (file, mut byte, at) =
            (File::options().read(true).write(true).open(largest).unwrap(), [0], 9 << 20);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        let streamer = dumped.streamer();
        // The streamer may kill the process before CRIU has ended.
        let _ = dumped.criu.restore();
        failed(streamer, &["amdgpu-pages-", "some are not those that were sealed"]);
        assert!(soon(|| !runs(dumped.server.pid)));
        dumped.server.app.is_over();
    });
}

/// The files of an image that hold this kind of memory.
fn files(criu: &Criu, prefix: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(criu.images()).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(prefix)).collect()
}

/// Restores a program from a disk that fails once it runs. The program then accesses this kind of memory.
fn the_disk_fails(accessor: &Accessor, criu: &Criu, kind: &str, order: &str) {
    let files = files(criu, kind);
    let disk = FailingDisk::with(&files).unwrap();
    let streamer = Streamer::of_both(criu.images()).unwrap();
    let stopper = script::at(criu, script::ABOUT_TO_RUN, &script::stops(&streamer));
    let mut restore = criu.command(&["restore", "--restore-detached", "--lazy-pages"]);
    let restored = restore.arg("--action-script").arg(stopper).status().unwrap();
    assert!(restored.success(), "{}", criu.log("restore"));
    assert!(is_paused(accessor.pid()), "{}", streamer.said());
    disk.fails().unwrap();
    accessor.ask(order).unwrap();
    signal(&streamer.processes(), Signal::SIGCONT);
    let said = failed(streamer, &["Input/output error"]);
    let names = files.iter().map(|file| file.file_name().unwrap().to_str().unwrap());
    assert!(names.clone().any(|name| said.contains(name)), "none of {:?}: {said}", names.collect::<Vec<_>>());
    wait_for_the_end_of(accessor.pid()).unwrap();
    assert_eq!(accessor.answered(), None, "it read missing memory");
}

#[test]
fn a_disk_that_fails_is_no_zeros_to_cpus() {
    isolated(1, |_| {
        need!(Judge::find(), REAL_GPUS);
        need!(queues());
        let folder = tempfile::tempdir().unwrap();
        let mut accessor = Accessor::start(env!("CARGO_BIN_EXE_accessor"), folder.path(), None).unwrap();
        accessor.asked(&format!("allocate {OWN_PARTS}")).unwrap();
        let criu = accessor.dump(Version::V4_2).unwrap();
        the_disk_fails(&accessor, &criu, "pages-", "register 0");
    });
}

#[test]
fn a_failing_disk_shows_zeros_to_no_gpu_and_no_page_fault() {
    isolated(1, |_| {
        need!(Judge::find(), REAL_GPUS);
        need!(queues());
        let folder = tempfile::tempdir().unwrap();
        let mut accessor =
            Accessor::start(env!("CARGO_BIN_EXE_accessor"), folder.path(), Some(FULL)).unwrap();
        let criu = accessor.dump(Version::V4_2).unwrap();
        the_disk_fails(&accessor, &criu, "amdgpu-pages-", "tail 1");
    });
}
