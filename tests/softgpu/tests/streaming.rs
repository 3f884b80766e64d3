// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that run before their GPUs' memory is there: the gate is shut until it is, and nobody waits for ever.

use std::fs::{self, OpenOptions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use gpu_app::shape::Shape;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_kfd::criu;
use softgpu_tests::criu::{Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, ONE_RING, Restoring, is_paused, pages, unreached};
use softgpu_tests::{Held, Judge, Machine, Streamer, isolated, sys};

/// Exit code of a streamer that was asked to stop and had taken nothing over.
const STOPPED: i32 = 143;

/// Since the start of `criu restore`.
#[derive(Debug, Clone, Copy)]
struct Times {
    runs: Duration,
    gpus_run: Duration,
    /// The answer that was begun before the dump, and another.
    answers: Duration,
}

/// Restores it, asks it something, and ends it.
fn time(dumped: &Dumped, streamer: Option<&mut Streamer>) -> Times {
    let start = Instant::now();
    dumped.criu.restore().unwrap();
    let runs = start.elapsed();
    if let Some(streamer) = streamer {
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
    }
    let gpus_run = start.elapsed();
    dumped.server.answers().unwrap();
    let answers = start.elapsed();
    dumped.ends();
    Times { runs, gpus_run, answers }
}

fn there_and_back(shape: &Shape) {
    let Some(dumped) = Dumped::of(shape, Version::V4_2) else { return };
    let said = dumped.comes_back();
    assert!(said.contains("the driver lets queues run") && said.contains("GPUs go on"), "{said}");
    dumped.server.ends_well();
}

#[test]
fn a_process_runs_before_its_memory_is_there_and_its_gpus_when_it_is() {
    isolated("a_process_runs_before_its_memory_is_there_and_its_gpus_when_it_is", 1, |_| {
        let Some(_machine) = Machine::with(&ONE_RING) else { return };
        let Some(dumped) = Dumped::of(&unreached(), Version::V4_2) else { return };
        let (mut streamer, held) = dumped.comes_back_paused();
        let said = dumped.criu.log("restore");
        assert!(said.contains("buffers come later"), "{said}");
        drop(held);
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
fn how_long_a_restore_takes_does_not_grow_with_memory_that_only_gpus_reach() {
    isolated("how_long_a_restore_takes_does_not_grow_with_memory_that_only_gpus_reach", 1, |_| {
        let sizes = [2 << 10, 32 << 10];
        let dumped = sizes.map(|layer_kib| Dumped::of(&Shape { layer_kib, ..unreached() }, Version::V4_2));
        let [Some(small), Some(large)] = dumped else { return };
        let mut least = [Duration::MAX; 2];
        // Two rounds where nothing else runs; more where the machine has other things to do now and then.
        for round in 0..6 {
            for (size, dumped) in [&small, &large].into_iter().enumerate() {
                let eager = time(dumped, None);
                let mut streamer = dumped.streamer();
                let behind = time(dumped, Some(&mut streamer));
                for (how, Times { runs, gpus_run, answers }) in [("at once", eager), ("behind", behind)] {
                    eprintln!(
                        "{} KiB {how}: runs after {runs:?}, GPUs after {gpus_run:?}, answered {answers:?}",
                        3 * sizes[size]
                    );
                }
                least[size] = least[size].min(behind.runs);
            }
            // All at once it takes more than twice as long.
            if round > 0 && least[1] < least[0] * 3 / 2 {
                return;
            }
        }
        panic!("{:?} with 6 MiB, {:?} with 96", least[0], least[1]);
    });
}

#[test]
fn by_one_command() {
    isolated("by_one_command", 1, |_| {
        let Some(_machine) = Machine::with(&ONE_RING) else { return };
        let Some(dumped) = Dumped::of(&unreached(), Version::V4_2) else { return };
        let held = Held::streamers();
        let mut restoring = Restoring::with(&dumped.criu, &["--json", "--", "-d", "-v4"]);
        restoring.says("process is alive");
        assert!(is_paused(dumped.server.pid), "its memory is there");
        drop(held);
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
    isolated("a_second_time_from_one_image", 1, |_| {
        let Some(dumped) = Dumped::of(&unreached(), Version::V4_2) else { return };
        dumped.comes_back();
        dumped.server.answers().unwrap();
        dumped.ends();
        dumped.comes_back();
        dumped.server.ends_well();
    });
}

#[test]
fn two_processes_on_two_gpus() {
    isolated("two_processes_on_two_gpus", 2, |_| {
        there_and_back(&Shape { gpus: 2, processes: 2, layers: 5, layer_kib: 64, ..unreached() });
    });
}

/// Takes a process's queues off its GPUs once more, as whoever dumps it does, and forgets them.
fn holds_queues_of(pid: u32) {
    let is_driver = |path: &Path| fs::read_link(path).is_ok_and(|of| of == Path::new("/dev/kfd"));
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|file| file.unwrap().path());
    let driver = files.filter(|path| is_driver(path)).min().unwrap();
    let number = driver.file_name().unwrap().to_str().unwrap().parse().unwrap();
    let once = || {
        sys::seize(pid).unwrap();
        criu::process_info(sys::descriptor_of(pid, number).unwrap().as_fd()).unwrap();
    };
    // Who traces lets go when it ends.
    thread::scope(|scope| scope.spawn(once).join().unwrap());
}

#[test]
fn queues_that_are_held_when_the_gate_is_open_are_told_of() {
    isolated("queues_that_are_held_when_the_gate_is_open_are_told_of", 1, |_| {
        let Some(_machine) = Machine::with(&ONE_RING) else { return };
        let Some(dumped) = Dumped::of(&unreached(), Version::V4_2) else { return };
        let (mut streamer, held) = dumped.comes_back_paused();
        holds_queues_of(dumped.server.pid);
        drop(held);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        let said = streamer.said();
        let told = format!("the driver holds the queues of process {} on GPU ", dumped.server.pid);
        assert!(said.contains(&told) && said.contains(", 1 times"), "{said}");
        assert!(!said.contains("the driver lets queues run"), "{said}");
        // It is left alone.
        dumped.ends();
        // That was this test's doing.
        Judge::find().unwrap().take("unpause-out-of-turn");
    });
}

#[test]
fn an_image_that_gets_shorter_meanwhile_is_never_zeros() {
    isolated("an_image_that_gets_shorter_meanwhile_is_never_zeros", 1, |_| {
        let Some(_machine) = Machine::with(&ONE_RING) else { return };
        // More than the 16 MiB that are read ahead.
        let shape = Shape { layer_kib: 12 << 10, ..unreached() };
        let Some(dumped) = Dumped::of(&shape, Version::V4_2) else { return };
        let (mut streamer, held) = dumped.comes_back_paused();
        for file in pages(dumped.criu.images()) {
            OpenOptions::new().write(true).open(file).unwrap().set_len(1 << 20).unwrap();
        }
        drop(held);
        assert!(!streamer.end().unwrap().success());
        wait_for_the_end_of(dumped.server.pid).unwrap();
        assert!(streamer.said().contains("read amdgpu-pages-"), "{}", streamer.said());
    });
}

#[test]
fn an_image_that_is_written_meanwhile_is_not_gone_on_with() {
    isolated("an_image_that_is_written_meanwhile_is_not_gone_on_with", 1, |_| {
        let Some(_machine) = Machine::with(&ONE_RING) else { return };
        let Some(dumped) = Dumped::of(&unreached(), Version::V4_2) else { return };
        let (mut streamer, held) = dumped.comes_back_paused();
        for file in pages(dumped.criu.images()) {
            OpenOptions::new().write(true).open(file).unwrap().write_all_at(&[1], 1 << 20).unwrap();
        }
        drop(held);
        assert!(!streamer.end().unwrap().success());
        wait_for_the_end_of(dumped.server.pid).unwrap();
        assert!(streamer.said().contains("it was written while it was loaded"), "{}", streamer.said());
    });
}

fn damage(images: &Path) {
    for file in pages(images) {
        let file = OpenOptions::new().write(true).open(file).unwrap();
        file.write_all_at(&1_u64.to_le_bytes(), 0).unwrap();
    }
}

#[test]
fn an_image_that_cannot_be_streamed_is_refused_before_anything_runs() {
    isolated("an_image_that_cannot_be_streamed_is_refused_before_anything_runs", 1, |_| {
        let Some(dumped) = Dumped::of(&unreached(), Version::V4_2) else { return };
        let mut streamer = dumped.streamer();
        damage(dumped.criu.images());
        let error = dumped.criu.restore().unwrap_err().to_string();
        assert!(error.contains("contents of 1 bytes by its header"), "{error}");
        wait_for_the_end_of(dumped.server.pid).unwrap();
        kill(Pid::from_raw(streamer.pid().cast_signed()), Signal::SIGTERM).unwrap();
        // It refused, or was asked to stop and had taken nothing over.
        assert!(matches!(streamer.end().unwrap().code(), Some(1 | STOPPED)), "{}", streamer.said());
    });
}

#[test]
fn a_streamer_to_which_nobody_comes_ends_when_asked() {
    isolated("a_streamer_to_which_nobody_comes_ends_when_asked", 1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let mut streamer = Streamer::start(folder.path()).unwrap();
        assert!(!streamer.has_ended().unwrap());
        let second = Streamer::start(folder.path()).unwrap_err();
        assert!(format!("{second:#}").contains("somebody listens there"), "{second:#}");
        kill(Pid::from_raw(streamer.pid().cast_signed()), Signal::SIGTERM).unwrap();
        assert_eq!(streamer.end().unwrap().code(), Some(STOPPED));
        assert!(!folder.path().join("rewake-gpu.socket").exists());
    });
}
