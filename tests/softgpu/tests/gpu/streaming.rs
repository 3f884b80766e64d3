// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that run before their GPU memory is resident: the gate is closed until then, and no process
//! waits for ever.

use std::fs::{self, OpenOptions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::thread;

use gpu_app::shape::Shape;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::criu;
use rewake_skip::need;
use softgpu_tests::criu::{Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, ONE_RING, Restoring, is_paused, pages, unreached};
use softgpu_tests::{DelayedCopies, Judge, Machine, REAL_GPUS, Streamer, isolated, sys};

/// Exit code of a streamer that was asked to stop before any handoff.
const STOPPED: i32 = 143;

fn dump_and_restore(shape: &Shape) {
    let dumped = need!(Dumped::of(shape, Version::V4_2));
    let said = dumped.restores();
    assert!(said.contains("the driver lets queues run") && said.contains("queues resumed"), "{said}");
    dumped.server.ends_well();
}

#[test]
fn a_process_runs_with_missing_buffers_and_its_queues_wait() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let (mut streamer, delayed) = dumped.restores_paused();
        let said = dumped.criu.log("restore");
        assert!(said.contains("buffers are loaded in the background"), "{said}");
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        let timeline = fs::read_to_string(dumped.criu.images().join("rewake-timeline.json")).unwrap();
        let timeline: serde_json::Value = serde_json::from_str(&timeline).unwrap();
        let at = |what: &str| timeline["processes"][0][what].as_u64().unwrap();
        assert!(at("gate_open_us") > at("runs_us"), "{timeline}");
        assert!(!is_paused(dumped.server.pid), "{}", streamer.said());
        dumped.server.ends_well();
    });
}

#[test]
fn by_one_command() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let delayed = DelayedCopies::streamers();
        let mut restoring = Restoring::with(&dumped.criu, &["--json", "--", "-d", "-v4"]);
        restoring.says("process is alive");
        assert!(is_paused(dumped.server.pid), "its gate is open");
        drop(delayed);
        let (well, said, timeline) = restoring.ends();
        assert!(well, "{said}");
        assert!(said.contains("GPUs run; all memory resident"), "{said}");
        let at = |name: &str| -> f64 {
            let line = timeline.lines().find_map(|line| line.trim().strip_prefix(&format!("\"{name}\": ")));
            line.unwrap().trim_end_matches(',').parse().unwrap()
        };
        assert!(at("all_resident_ms") > at("alive_ms"), "{timeline}");
        dumped.server.ends_well();
    });
}

#[test]
fn a_second_time_from_one_image() {
    isolated(1, |_| {
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        dumped.restores();
        dumped.server.answers().unwrap();
        dumped.ends();
        dumped.restores();
        dumped.server.ends_well();
    });
}

#[test]
fn two_processes_on_two_gpus() {
    isolated(2, |_| {
        dump_and_restore(&Shape { gpus: 2, processes: 2, layers: 5, layer_kib: 64, ..unreached() });
    });
}

/// Evicts a process's queues once more, as a dump does, and does not resume them.
fn holds_queues_of(pid: u32) {
    let is_driver = |path: &Path| fs::read_link(path).is_ok_and(|of| of == Path::new("/dev/kfd"));
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|file| file.unwrap().path());
    let driver = files.filter(|path| is_driver(path)).min().unwrap();
    let number = driver.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let once = || {
        sys::seize(pid).unwrap();
        criu::process_info(sys::descriptor_of(pid, number).unwrap().as_fd()).unwrap();
    };
    // A tracer that ends releases its tracees.
    thread::scope(|scope| scope.spawn(once).join().unwrap());
}

#[test]
fn queues_still_evicted_after_the_gate_opens_are_reported() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let (mut streamer, delayed) = dumped.restores_paused();
        holds_queues_of(dumped.server.pid);
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        let said = streamer.said();
        let evicted = format!("the driver has evicted the queues of process {} on GPU ", dumped.server.pid);
        assert!(said.contains(&evicted) && said.contains(" 1 times more than"), "{said}");
        assert!(!said.contains("the driver lets queues run"), "{said}");
        // The streamer leaves it alone.
        dumped.ends();
        // This test has caused that violation.
        Judge::find().unwrap().take("unpause-out-of-turn");
    });
}

#[test]
fn an_image_that_gets_shorter_never_reads_as_zeros() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        // More than the 16 MiB that are read ahead.
        let shape = Shape { layer_kib: 12 << 10, ..unreached() };
        let dumped = need!(Dumped::of(&shape, Version::V4_2));
        let (mut streamer, delayed) = dumped.restores_paused();
        for file in pages(dumped.criu.images()) {
            OpenOptions::new().write(true).open(file).unwrap().set_len(1 << 20).unwrap();
        }
        drop(delayed);
        assert!(!streamer.end().unwrap().success());
        wait_for_the_end_of(dumped.server.pid).unwrap();
        let said = streamer.said();
        let shorter = ["the file changed while it was served", "the file ends after"];
        assert!(said.contains("amdgpu-pages-") && shorter.iter().any(|of| said.contains(of)), "{said}");
    });
}

#[test]
fn an_image_that_is_written_meanwhile_ends_the_session() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let (mut streamer, delayed) = dumped.restores_paused();
        for file in pages(dumped.criu.images()) {
            OpenOptions::new().write(true).open(file).unwrap().write_all_at(&[1], 1 << 20).unwrap();
        }
        drop(delayed);
        assert!(!streamer.end().unwrap().success());
        wait_for_the_end_of(dumped.server.pid).unwrap();
        assert!(streamer.said().contains("the file changed while it was served"), "{}", streamer.said());
    });
}

fn damage(images: &Path) {
    for file in pages(images) {
        let file = OpenOptions::new().write(true).open(file).unwrap();
        file.write_all_at(&1_u64.to_le_bytes(), 0).unwrap();
    }
}

#[test]
fn an_image_that_cannot_be_streamed_is_refused_before_it_runs() {
    isolated(1, |_| {
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let mut streamer = dumped.streamer();
        damage(dumped.criu.images());
        let error = dumped.criu.restore().unwrap_err().to_string();
        assert!(error.contains("contents of 1 bytes by its header"), "{error}");
        wait_for_the_end_of(dumped.server.pid).unwrap();
        kill(Pid::from_raw(streamer.pid().cast_signed()), Signal::SIGTERM).unwrap();
        // The streamer refused, or was asked to stop before any handoff.
        assert!(matches!(streamer.end().unwrap().code(), Some(1 | STOPPED)), "{}", streamer.said());
    });
}

#[test]
fn a_streamer_without_a_restore_ends_when_asked() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let mut streamer = Streamer::start(folder.path()).unwrap();
        assert!(!streamer.has_ended().unwrap());
        let second = Streamer::start(folder.path()).unwrap_err();
        assert!(format!("{second:#}").contains("another server listens there"), "{second:#}");
        kill(Pid::from_raw(streamer.pid().cast_signed()), Signal::SIGTERM).unwrap();
        assert_eq!(streamer.end().unwrap().code(), Some(STOPPED));
        assert!(!folder.path().join("rewake-gpu.socket").exists());
    });
}
