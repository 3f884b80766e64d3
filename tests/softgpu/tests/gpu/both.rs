// SPDX-License-Identifier: MIT OR Apache-2.0
//! Background load of CPU and GPU memory. Host pages that GPUs can access are resident before queues run.
//! Memory that a program registers later is loaded on demand.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use gpu_app::shape::{Mode, Shape};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_skip::need;
use rewake_testkit::trace;
use serde_json::Value;
use softgpu_tests::accessor::{BYTES, Large, OWN_PARTS};
use softgpu_tests::criu::{Criu, Plugin, Version, queues, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, ONE_RING, soon, unreached, waits_for_memory};
use softgpu_tests::server::small;
use softgpu_tests::streamer::number_after;
use softgpu_tests::{
    Accessor, DelayedCopies, Machine, REAL_GPUS, Streamer, gpus_retry_faults, isolated, script,
};

/// Allowance for blocks at the ends of zero regions, and for what the file system keeps.
const SLACK: u64 = 256 << 10;

/// What the plugin logs where all memory must be resident before queues run.
const RETRIES: &str = "its GPUs can access all of its memory";

/// Restores the process. Returns how many CPU pages were awaited before any task ran.
fn restores(criu: &Criu) -> u64 {
    criu.restore_lazily().unwrap();
    criu.pages_waited_for()
}

/// Dumps and restores. Save areas of queues alone are 60 MiB of registered memory.
fn dump_and_restore(shape: &Shape) {
    let dumped = need!(Dumped::of(shape, Version::V4_2));
    let mut both = Streamer::of_both(dumped.criu.images()).unwrap();
    let waited = restores(&dumped.criu);
    assert!(both.end().unwrap().success(), "{}", both.said());
    assert!(dumped.criu.left_buffers(), "{}", dumped.criu.log("restore"));
    let said = both.said();
    let lazy = number_after(&said, " lazy_pages=");
    let back = said
        .lines()
        .find(|line| line.contains("all CPU memory is resident"))
        .unwrap_or_else(|| panic!("{said}"));
    let faults = number_after(back, " faults=");
    if gpus_retry_faults() {
        assert!(dumped.criu.log("restore").contains(RETRIES), "{}", dumped.criu.log("restore"));
    } else {
        assert!(waited < lazy, "all CPU memory was loaded first: {waited} of {lazy} pages");
        // Save areas are half of it. The background load decides how much of them is awaited. Page by page
        // must not be.
        assert!(faults < lazy / 2, "single pages were awaited: {faults} of {lazy}, {waited} at first");
    }
    is_whole(&left(dumped.criu.images()).unwrap(), &said);
    dumped.server.ends_well();
}

/// Bytes of CPU memory, or of GPU memory, as a timeline file has them.
fn bytes(processes_or_record: &[&Value], of_cpus: bool, name: &str) -> u64 {
    let memory = processes_or_record.iter().flat_map(|of| of["memory"].as_array().unwrap());
    memory.filter(|of| of["minor"].is_null() == of_cpus).map(|of| of[name].as_u64().unwrap()).sum()
}

/// All CPU and GPU memory of each process became resident, and the samples end there.
fn is_whole(record: &Value, said: &str) {
    assert_eq!(record["state"], "complete", "{record}");
    let back = said.lines().find(|line| line.contains("all CPU memory is resident")).unwrap();
    assert_eq!(bytes(&[record], true, "resident"), number_after(back, " pages=") * 4096, "{record}");
    for kind in [true, false] {
        assert_eq!(bytes(&[record], kind, "bytes"), bytes(&[record], kind, "resident"), "{record}");
    }
    let memory = record["memory"].as_array().unwrap();
    for (place, process) in record["processes"].as_array().unwrap().iter().enumerate() {
        let kinds = |cpus: bool| {
            memory.iter().filter(move |of| of["process"] == place && of["minor"].is_null() == cpus)
        };
        assert_eq!(
            (kinds(true).count(), kinds(false).count() < 2, &process["gate"]),
            (1, true, &true.into()),
            "{record}"
        );
    }
    for of in memory {
        assert!(of["resident_us"].as_u64() <= record["elapsed_us"].as_u64(), "{record}");
        let samples: Vec<u64> =
            of["samples"].as_array().unwrap().iter().map(|sample| sample.as_u64().unwrap()).collect();
        assert!(samples.is_sorted() && samples.last().copied() == of["resident"].as_u64(), "{record}");
    }
    let faults = record["processes"].as_array().unwrap().iter().map(|of| of["page_faults"].as_u64().unwrap());
    assert_eq!(faults.sum::<u64>(), number_after(back, " faults="), "{record}");
}

/// Memory left for programs; none yet.
fn left(images: &Path) -> Option<Value> {
    let text = fs::read_to_string(images.join("rewake-timeline.json")).ok()?;
    Some(serde_json::from_str(&text).unwrap())
}

#[test]
fn status_counts_cpu_and_gpu_memory_until_all_is_resident() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&Shape { processes: 2, ..unreached() }, Version::V4_2));
        let (mut both, delayed) =
            (Streamer::of_both(dumped.criu.images()).unwrap(), DelayedCopies::streamers());
        restores(&dumped.criu);
        assert!(soon(|| both.said().contains("all CPU memory is resident")), "{}", both.said());
        // CPU memory is resident, and GPU memory is missing.
        let now = dumped.criu.status();
        let processes: Vec<&Value> = now["processes"].as_array().unwrap().iter().collect();
        assert_eq!((now["state"].as_str(), processes.len()), (Some("running"), 2), "{now}");
        let there = |kind: bool| (bytes(&processes, kind, "resident"), bytes(&processes, kind, "bytes"));
        let ((of_cpus, all_of_cpus), (of_gpus, all_of_gpus)) = (there(true), there(false));
        assert!(of_cpus == all_of_cpus && of_cpus > 0 && of_gpus < all_of_gpus, "{now}");
        assert_eq!(left(dumped.criu.images()), None);
        drop(delayed);
        assert!(both.end().unwrap().success(), "{}", both.said());
        is_whole(&left(dumped.criu.images()).unwrap(), &both.said());
        let trace = trace::events(dumped.criu.images()).unwrap();
        let of_cpus = trace::last_bytes(&trace, "resident CPUs");
        assert_eq!((of_cpus.len(), of_cpus.values().sum()), (2, all_of_cpus), "{of_cpus:?}");
        dumped.server.ends_well();
    });
}

#[test]
fn a_working_set_has_both_kinds_of_memory() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let folder = tempfile::tempdir().unwrap();
        let four = Large { count: 4, mib: 16, full: false };
        let mut accessor =
            Accessor::start(env!("CARGO_BIN_EXE_accessor"), folder.path(), Some(four)).unwrap();
        let criu = accessor.dump(Version::V4_2).unwrap();
        let (mut both, delayed) =
            (Streamer::recording_both(criu.images()).unwrap(), DelayedCopies::streamers());
        restores(&criu);
        accessor.ask("tail 3").unwrap();
        assert!(soon(|| waits_for_memory(accessor.pid())), "{}", both.said());
        drop(delayed);
        accessor.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", both.said()));
        assert!(both.end().unwrap().success(), "{}", both.said());
        accessor.ends();
        let recorded = fs::read_to_string(criu.images().join("rewake-working-set.json")).unwrap();
        let recorded: Value = serde_json::from_str(&recorded).unwrap();
        let [pages, buffers] = ["pages", "buffers"].map(|kind| recorded[kind].as_array().unwrap().len());
        assert!(pages > 0 && buffers == 1, "{recorded}");
        assert_eq!(left(criu.images()).unwrap()["working_set_us"], Value::Null, "nothing was loaded first");

        let mut both = Streamer::of_both(criu.images()).unwrap();
        restores(&criu);
        assert!(both.end().unwrap().success(), "{}", both.said());
        let record = left(criu.images()).unwrap();
        is_whole(&record, &both.said());
        let resident = record["working_set_us"].as_u64().unwrap_or_else(|| panic!("{record}"));
        assert!(resident <= record["elapsed_us"].as_u64().unwrap(), "{record}");
        assert!(both.said().contains("buffers that are loaded first: 1"), "{}", both.said());
        accessor.asked("tail 3").unwrap();
        accessor.ends();
    });
}

#[test]
fn gpu_memory_is_loaded_after_cpu_memory() {
    isolated(1, |_| {
        dump_and_restore(&unreached());
        dump_and_restore(&Shape { processes: 2, ..small() });
    });
}

#[test]
fn a_dump_by_rewake_has_holes_for_zeros() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let mut accessor = Accessor::start(env!("CARGO_BIN_EXE_accessor"), folder.path(), None).unwrap();
        accessor.asked(&format!("allocate {OWN_PARTS}")).unwrap();
        accessor.asked("clear 0").unwrap();
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("images")).unwrap();
        criu.dump_by_rewake(accessor.pid()).unwrap();
        accessor.was_dumped().unwrap();
        let files = fs::read_dir(criu.images()).unwrap().map(|file| file.unwrap());
        let pages: Vec<_> =
            files.filter(|file| file.file_name().to_string_lossy().starts_with("pages-")).collect();
        let on_disk: u64 = pages.iter().map(|file| file.metadata().unwrap().blocks() * 512).sum();
        let all: u64 = pages.iter().map(|file| file.metadata().unwrap().len()).sum();
        assert!(on_disk + (BYTES as u64) < all + SLACK, "{on_disk} bytes on the disk of {all}");
        let mut both = Streamer::of_both(criu.images()).unwrap();
        criu.restore_lazily().unwrap();
        accessor.ask("register 0").unwrap();
        registers(&accessor, &mut both);
    });
}

#[test]
fn registered_memory_is_resident_before_queues_start() {
    isolated(1, |_| {
        dump_and_restore(&Shape { mode: Mode::Userptr, ..small() });
        if Topology::read().unwrap().gpus().all(Node::has_svm) {
            dump_and_restore(&Shape { mode: Mode::Svm, ..small() });
        }
    });
}

/// A program with memory of its own that it is about to register.
fn about_to_register(version: Version, folder: &Path) -> (Accessor, Criu) {
    Accessor::about_to_register(env!("CARGO_BIN_EXE_accessor"), folder, version).unwrap()
}

/// It has registered the right bytes, and the streamer loads all memory.
fn registers(accessor: &Accessor, both: &mut Streamer) {
    accessor.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", both.said()));
    assert!(both.end().unwrap().success(), "{}", both.said());
    accessor.ends();
}

#[test]
fn a_registration_of_missing_memory_waits_for_it() {
    isolated(1, |_| {
        for version in [Version::V4_2, Version::V4_1] {
            let folder = tempfile::tempdir().unwrap();
            let (accessor, criu) = about_to_register(version, folder.path());
            let mut both = Streamer::of_both(criu.images()).unwrap();
            let (waited, log) = (restores(&criu), criu.log("restore"));
            if gpus_retry_faults() {
                assert!(log.contains(RETRIES), "{log}");
                // The streamer may have been faster than the plugin. The test checks that nothing is missing
                // now.
                let now = criu.status();
                let processes: Vec<&Value> = now["processes"].as_array().unwrap().iter().collect();
                assert_eq!(bytes(&processes, true, "resident"), bytes(&processes, true, "bytes"), "{now}");
            } else {
                assert_eq!(waited, 0, "it has registered nothing yet: {log}");
            }
            registers(&accessor, &mut both);
        }
    });
}

#[test]
fn asked_to_stop_again_and_again_it_brings_all_to_its_end() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let (accessor, criu) = about_to_register(Version::V4_2, folder.path());
        let mut both = Streamer::of_both(criu.images()).unwrap();
        restores(&criu);
        for _ in 0..3 {
            both.workers().into_iter().chain([both.pid()]).for_each(|pid| asked(pid, Signal::SIGTERM));
        }
        registers(&accessor, &mut both);
    });
}

#[test]
fn without_lazy_pages_it_ends_when_queues_are_resumed() {
    isolated(1, |_| {
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let mut both = Streamer::of_both(dumped.criu.images()).unwrap();
        dumped.criu.restore().unwrap();
        assert!(both.end().unwrap().success(), "{}", both.said());
        dumped.server.ends_well();
    });
}

/// Collects a process that may have ended.
fn asked(pid: u32, signal: Signal) {
    let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
}

/// What the plugin logs when its page server has died: no task has run, and CRIU fails.
const PLUGIN_KILLS: &str = "cannot be started, all restored tasks are killed: the peer has closed the socket";
/// What the supervisor logs when its worker has died after the handoff: the plugin has no part any more.
const SUPERVISOR_KILLS: &str = "killed 1 restored processes whose GPUs were not resumed yet";

/// Workers are killed at each step of a restore before the target runs. Copies are held: no gate opens.
#[test]
fn a_target_without_a_streamer_is_killed() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        need!(queues());
        let folder = tempfile::tempdir().unwrap();
        let (accessor, criu) = about_to_register(Version::V4_2, folder.path());
        for (moment, restored, code, words) in [
            (script::BEFORE, false, 0, PLUGIN_KILLS),
            (script::RESTORED, false, 0, PLUGIN_KILLS),
            (script::ABOUT_TO_RUN, true, 1, SUPERVISOR_KILLS),
        ] {
            let (mut both, delayed) = (Streamer::of_both(criu.images()).unwrap(), DelayedCopies::streamers());
            let workers: Vec<String> = both.workers().iter().map(u32::to_string).collect();
            let kills = script::at(&criu, moment, &format!("kill -KILL {}", workers.join(" ")));
            let mut restore = criu.command(&["restore", "--restore-detached", "--lazy-pages"]);
            let status = restore.arg("--action-script").arg(kills).status().unwrap();
            let ended = both.end().unwrap().code();
            drop(delayed);
            let said = [both.said(), criu.log("restore")].concat();
            assert_eq!((status.success(), ended), (restored, Some(code)), "{moment}: {said}");
            assert!(said.contains(words), "{moment}: no {words:?}: {said}");
            wait_for_the_end_of(accessor.pid()).unwrap();
            assert_eq!(accessor.answered(), None, "{moment}: it has run");
        }
    });
}

#[test]
fn a_streamer_without_sessions_ends_when_asked() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let (_accessor, criu) = about_to_register(Version::V4_2, folder.path());
        let mut both = Streamer::of_both(criu.images()).unwrap();
        kill(Pid::from_raw(both.pid().cast_signed()), Signal::SIGTERM).unwrap();
        assert_eq!(both.end().unwrap().code(), Some(128 + Signal::SIGTERM as i32), "{}", both.said());
    });
}
