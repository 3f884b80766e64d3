// SPDX-License-Identifier: MIT OR Apache-2.0
//! What users see of a background load: while it runs, and afterwards.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpu_app::shape::{Mode, Shape};
use rewake_criu_images::ImageDir;
use rewake_skip::need;
use rewake_testkit::trace;
use serde_json::Value;
use softgpu_tests::criu::{Criu, Plugin, Version, queues, wait_for_the_end_of};
use softgpu_tests::dumped::{ONE_RING, Restoring, soon};
use softgpu_tests::server::small;
use softgpu_tests::streamer::children;
use softgpu_tests::{DelayedCopies, Judge, Machine, REAL_GPUS, Server, Streamer, isolated};

/// Bytes that no CPU can access.
const UNREACHED: u64 = 12 << 20;
/// Chunks of them that become resident one by one.
const STEPS: usize = 4;

/// A dumped server.
struct Dumped {
    server: Server,
    criu: Criu,
    _folder: tempfile::TempDir,
}

/// The reason where queues cannot be restored: other tests check that.
fn dumped(shape: &Shape) -> Result<Dumped, &'static str> {
    queues()?;
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(shape, folder.path());
    let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("images")).unwrap();
    criu.dump(server.pid).unwrap();
    server.was_dumped(&criu);
    Ok(Dumped { server, criu, _folder: folder })
}

fn unreached() -> Shape {
    Shape { mode: Mode::NoAccess, layer_kib: 4096, ..small() }
}

impl Dumped {
    /// What `rewake status` prints to stdout and stderr, and whether it succeeded.
    fn status(&self, options: &[&str]) -> (String, bool) {
        let rewake = self.criu.of_rewake("status").unwrap().get_program().to_owned();
        let mut command = Command::new(rewake);
        command.args(["status", "-W"]).arg(self.criu.images());
        let done = command.args(options).output().unwrap();
        let text = [done.stdout, done.stderr].concat();
        (String::from_utf8(text).unwrap(), done.status.success())
    }

    /// Bytes of its memory that are resident now.
    fn resident(&self) -> u64 {
        let (said, _) = self.status(&["--json"]);
        sum(&serde_json::from_str::<Value>(&said).unwrap()["processes"][0], "resident")
    }

    fn timeline(&self) -> Value {
        let text = fs::read_to_string(self.criu.images().join("rewake-timeline.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

fn is_paused(pid: u32) -> bool {
    let gates = Judge::find().map_or_else(Vec::new, |judge| judge.gates());
    gates.iter().any(|gate| gate.pid == pid && gate.paused)
}

/// Bytes of all buffers of the image.
fn of_buffers(images: &Path) -> u64 {
    let images = ImageDir::open(images).unwrap();
    let kfd = (0..1000).filter_map(|id| images.kfd(id).unwrap());
    kfd.flat_map(|image| image.buffers).map(|buffer| buffer.size).sum()
}

/// Sum over the memory of all processes and GPUs.
fn sum(of: &Value, name: &str) -> u64 {
    of["memory"].as_array().unwrap().iter().map(|memory| memory[name].as_u64().unwrap()).sum()
}

#[test]
fn status_answers_during_the_load_and_the_timeline_stays() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(dumped(&unreached()));
        let mut streamer = Streamer::start(dumped.criu.images()).unwrap();
        let (said, _) = dumped.status(&[]);
        assert_eq!(said, "waiting for criu\n");
        let delayed = DelayedCopies::streamers();
        dumped.criu.restore().unwrap();
        let (said, done) = dumped.status(&["--json"]);
        assert!(is_paused(dumped.server.pid), "{}", streamer.said());
        assert!(done, "{said}");
        let now: Value = serde_json::from_str(&said).unwrap();
        let process = &now["processes"][0];
        assert_eq!(
            (now["state"].as_str(), process["pid"].as_u64()),
            (Some("running"), Some(dumped.server.pid.into()))
        );
        assert!(process["runs_us"].as_u64() > Some(0) && process["gate_open_us"] == 0, "{said}");
        let (bytes, resident) = (sum(process, "bytes"), sum(process, "resident"));
        assert!(
            bytes >= UNREACHED && bytes <= of_buffers(dumped.criu.images()) && resident < bytes,
            "{said}"
        );
        let (said, _) = dumped.status(&[]);
        assert!(said.contains(" renderD128 ") && said.contains("0 of 1 gates open"), "{said}");
        // Values of progress that the test sees.
        for _ in 0..STEPS {
            let before = dumped.resident();
            delayed.release(1);
            assert!(soon(|| dumped.resident() > before), "{}", streamer.said());
        }
        drop(delayed);

        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        let (said, done) = dumped.status(&[]);
        assert!(!done && said.contains("no streamer serves a restore"), "{said}");
        is_whole(&dumped.timeline(), bytes);
        let (pid, timeline) = (dumped.server.pid, dumped.timeline());
        let trace = trace::events(dumped.criu.images()).unwrap();
        let resident = trace::last_bytes(&trace, "resident renderD128");
        assert_eq!(resident, BTreeMap::from([(pid, bytes)]));
        let [runs, opened] = ["runs_us", "gate_open_us"].map(|at| timeline["processes"][0][at].as_u64());
        let closed: Vec<_> = trace.iter().filter(|event| event.name == "gate closed").collect();
        let [closed] = closed[..] else { panic!("{closed:?}") };
        let lasted = opened.zip(runs).map(|(opened, runs)| opened - runs);
        assert_eq!((closed.ph.as_str(), closed.pid, Some(closed.ts), closed.dur), ("X", pid, runs, lasted));
        dumped.server.ends_well();
    });
}

/// All of it was resident before its process's gate opened, and became so chunk by chunk.
fn is_whole(timeline: &Value, bytes: u64) {
    assert_eq!(timeline["state"], "complete", "{timeline}");
    assert_eq!((sum(timeline, "bytes"), sum(timeline, "resident")), (bytes, bytes), "{timeline}");
    let opened = timeline["processes"][0]["gate_open_us"].as_u64().unwrap();
    for memory in timeline["memory"].as_array().unwrap() {
        let resident = memory["resident_us"].as_u64().unwrap();
        assert!(resident > 0 && opened >= resident, "{timeline}");
        let samples: Vec<u64> =
            memory["samples"].as_array().unwrap().iter().map(|sample| sample.as_u64().unwrap()).collect();
        assert!(samples.is_sorted(), "{samples:?}");
        assert_eq!(samples.last().copied(), memory["bytes"].as_u64());
        let mut steps = samples;
        steps.dedup();
        assert!(steps.len() > STEPS, "{steps:?}");
    }
}

#[test]
fn one_command_shows_it_all() {
    isolated(2, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(dumped(&Shape { gpus: 2, processes: 2, layers: 6, ..unreached() }));
        let delayed = DelayedCopies::streamers();
        let mut restoring = Restoring::with(&dumped.criu, &["--", "-d", "-v4"]);
        restoring.says("0 of 2 gates open");
        drop(delayed);
        let (well, said) = restoring.end();
        assert!(well, "{said}");
        let line = |part: &str| {
            said.lines().position(|line| line.contains(part)).unwrap_or_else(|| panic!("no {part:?}: {said}"))
        };
        let course = [
            "0 of 2 gates open",
            "memory loaded while the processes run, since",
            "all memory is resident",
            "its GPUs run, the last of 2",
            " 100              after ",
        ];
        let places = course.map(line);
        assert!(places.is_sorted(), "{said}");
        let timeline = dumped.timeline();
        let pids: Vec<u64> =
            timeline["processes"].as_array().unwrap().iter().map(|of| of["pid"].as_u64().unwrap()).collect();
        let mut both = children(dumped.server.pid);
        both.push(dumped.server.pid);
        assert!(
            pids.len() == 2 && both.iter().all(|pid| pids.contains(&u64::from(*pid))),
            "{pids:?} {both:?}"
        );
        for pid in pids {
            let shown = |line: &str| line.starts_with(&format!("{pid} gpu-app ")) && line.contains(" after ");
            assert!(said.lines().skip(places[3]).any(shown), "process {pid}: {said}");
        }
        dumped.server.ends_well();
    });
}

#[test]
fn buffers_that_become_the_device_are_in_it() {
    isolated(1, |_| {
        let dumped = need!(dumped(&small()));
        let mut streamer = Streamer::start(dumped.criu.images()).unwrap();
        dumped.criu.restore().unwrap();
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        let timeline = dumped.timeline();
        let process = &timeline["processes"][0];
        let swaps = timeline["longest_swaps"].as_array().unwrap();
        assert!(!swaps.is_empty() && Some(swaps.len() as u64) == process["swaps"].as_u64(), "{timeline}");
        let stopped: u64 = swaps.iter().map(|swap| swap["stopped_us"].as_u64().unwrap()).sum();
        assert!(stopped > 0 && Some(stopped) == process["stopped_us"].as_u64(), "{timeline}");
        dumped.server.ends_well();
    });
}

#[test]
fn a_failed_load_leaves_its_reason_in_the_timeline() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(dumped(&unreached()));
        let (mut streamer, delayed) =
            (Streamer::start(dumped.criu.images()).unwrap(), DelayedCopies::streamers());
        dumped.criu.restore().unwrap();
        for file in pages(dumped.criu.images()) {
            fs::OpenOptions::new().write(true).open(file).unwrap().set_len(1 << 20).unwrap();
        }
        drop(delayed);
        assert!(!streamer.end().unwrap().success());
        wait_for_the_end_of(dumped.server.pid).unwrap();
        let timeline = dumped.timeline();
        let reason = timeline["reason"].as_str().unwrap_or_default();
        assert!(timeline["state"] == "failed" && reason.contains("amdgpu-pages-"), "{timeline}");
        assert!(timeline["processes"][0]["gate_open_us"].is_null(), "{timeline}");
    });
}

/// The files with BO contents.
fn pages(images: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(images).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("amdgpu-pages-")).collect()
}
