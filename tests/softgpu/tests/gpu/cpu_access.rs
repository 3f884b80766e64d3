// SPDX-License-Identifier: MIT OR Apache-2.0
//! CPUs access device memory while it is missing: they wait for that buffer, and read its contents. Changes
//! to its mappings while it is missing have the same effect as with resident memory.

use std::fs;
use std::path::Path;
use std::time::Duration;

use gpu_app::shape::{Mode, Shape};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_criu_images::ImageDir;
use rewake_criu_images::rewake::SHARED_NAME;
use rewake_skip::{need, skip};
use softgpu_tests::accessor::{Large, pattern};
use softgpu_tests::criu::{Criu, Version, wait_for_the_end_of};
use softgpu_tests::dumped::{self, ONE_RING, is_paused, soon, waits_for_memory};
use softgpu_tests::server::small;
use softgpu_tests::streamer::recover;
use softgpu_tests::{Accessor, DelayedCopies, Machine, REAL_GPUS, Streamer, isolated};

const TWO: Large = Large { count: 2, mib: 64, full: false };
/// Copies and fills of one of [`TWO`], by chunks of 2 MiB, those in flight at the page fault, and some more.
const FIRST: u32 = 32 + 10 + 4;
const FOUR: Large = Large { count: 4, mib: 16, full: false };
/// More copies and fills than [`FOUR`] need, by chunks of 2 MiB.
const ALL: u32 = 1000;
/// Loading takes 1.4 seconds.
const SLOW: [(&str, &str); 2] = [("copy_mbps", "6"), ("sdma_rings", "1")];
/// What the kernel writes to a buffer.
static GIVEN: [u8; 700_001] = [0x5a; 700_001];

/// What the streamer logs of a demand load: it swapped the placeholder, or first filled it.
const SWAPPED: &str = "accessed buffer";
const COPIED: &str = "a copy for process";

/// A dumped accessor.
struct Dumped {
    accessor: Accessor,
    criu: Criu,
    folder: tempfile::TempDir,
    /// Restores the machine's parameters when dropped.
    _machine: Machine,
}

/// The reason where GPUs are real: no module holds their copies.
fn dumped(version: Version) -> Result<Dumped, &'static str> {
    dumped_on(&ONE_RING, None, version)
}

/// An accessor that got an order before the dump.
fn dumped_after(order: &str) -> Result<Dumped, &'static str> {
    dumped_on_after(&ONE_RING, None, Version::V4_2, Some(order))
}

/// With large buffers, if given.
fn dumped_on(
    machine: &[(&str, &str)],
    large: Option<Large>,
    version: Version,
) -> Result<Dumped, &'static str> {
    dumped_on_after(machine, large, version, None)
}

fn dumped_on_after(
    machine: &[(&str, &str)],
    large: Option<Large>,
    version: Version,
    order: Option<&str>,
) -> Result<Dumped, &'static str> {
    let found = Machine::find().ok_or(REAL_GPUS)?;
    found.becomes(machine);
    let folder = tempfile::tempdir().unwrap();
    let mut accessor = Accessor::start(env!("CARGO_BIN_EXE_accessor"), folder.path(), large).unwrap();
    order.into_iter().for_each(|order| accessor.asked(order).unwrap());
    let criu = accessor.dump(version).unwrap();
    fs::write(folder.path().join("in"), GIVEN).unwrap();
    Ok(Dumped { accessor, criu, folder, _machine: found })
}

impl Dumped {
    /// Restores it; it runs, and its memory is placeholders for as long as copies are held.
    fn restores(&self) -> (Streamer, DelayedCopies) {
        let back = self.restores_by(Streamer::start);
        let said = self.criu.log("restore");
        assert!(said.contains("2 mappings are placeholders until then"), "{said}");
        back
    }

    fn restores_by(&self, streamer: impl Fn(&Path) -> anyhow::Result<Streamer>) -> (Streamer, DelayedCopies) {
        let (streamer, delayed) = (streamer(self.criu.images()).unwrap(), DelayedCopies::streamers());
        self.criu.restore().unwrap();
        assert!(is_paused(self.accessor.pid()), "{}", streamer.said());
        (streamer, delayed)
    }

    /// Restores it without a page fault, and ends it. Returns the image's numbers of buffers, in the order in
    /// which they became resident, and the streamer's log.
    fn restores_without_faults(&self) -> (Vec<usize>, String) {
        let (mut streamer, delayed) = self.restores_by(Streamer::start);
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        let said = streamer.said();
        assert!(!said.contains(SWAPPED), "{said}");
        self.ends();
        (there(&said), said)
    }

    /// Sends it an order that waits for memory, and waits until it does.
    fn waits(&self, streamer: &Streamer, order: &str) {
        self.accessor.ask(order).unwrap();
        let waits = soon(|| waits_for_memory(self.accessor.pid()));
        assert!(waits, "{order} does not wait: {}", streamer.said());
    }

    /// Restores it, and sends an order before its memory is loaded; returns the streamer's log.
    fn does_while_loading(&self, order: &str) -> String {
        let (mut streamer, delayed) = self.restores();
        self.waits(&streamer, order);
        drop(delayed);
        self.accessor.answer().unwrap_or_else(|error| panic!("{order}: {error:#}\n{}", streamer.said()));
        assert!(streamer.end().unwrap().success(), "{order}: {}", streamer.said());
        streamer.said()
    }

    /// Whether it runs with its gate open, since all memory was resident when its streamer was killed; or
    /// else it ends.
    fn continues(&self) -> bool {
        let task = Path::new("/proc").join(self.accessor.pid().to_string());
        let decided = soon(|| !is_paused(self.accessor.pid()));
        assert!(decided, "its queues stay evicted, and no process kills it");
        // A process that ends loses its gate first, and then its program.
        task.join("exe").exists()
    }

    fn ends(&self) {
        self.accessor.ends();
    }

    /// Sends each of these orders while memory is missing, then checks all of it, in restores of one image.
    fn obeys(&self, orders: &[&str], how: &str) {
        let mut faults = 0;
        for order in orders {
            let said = self.does_while_loading(order);
            assert!(said.contains(how), "{order}: {said}");
            let timeline = fs::read_to_string(self.criu.images().join("rewake-timeline.json")).unwrap();
            let timeline: serde_json::Value = serde_json::from_str(&timeline).unwrap();
            faults += timeline["processes"][0]["faults"].as_u64().unwrap();
            for buffer in ["check 0", "check 1"] {
                self.accessor
                    .asked(buffer)
                    .unwrap_or_else(|error| panic!("after {order}: {error:#}\n{said}"));
            }
            self.ends();
        }
        // A fault whose buffer became resident before the streamer read it is none that was served.
        assert!(faults > 0, "none of {orders:?} was served by a page fault");
    }
}

/// The buffers that a streamer logs as resident, in that order.
fn there(said: &str) -> Vec<usize> {
    let number = |line: &str| {
        let (_, rest) = line.split_once("resident: Buffer { process: 0, number: ")?;
        rest.split_once(' ')?.0.parse().ok()
    };
    said.lines().filter_map(number).collect()
}

#[test]
fn the_recorded_working_set_is_loaded_first_in_later_restores() {
    isolated(1, |_| {
        let dumped = need!(dumped_on(&ONE_RING, Some(FOUR), Version::V4_2));
        let (before, _) = dumped.restores_without_faults();
        assert_eq!(before.len(), FOUR.count, "{before:?}");
        assert!(before.is_sorted(), "as in the file: {before:?}");

        let (mut streamer, delayed) = dumped.restores_by(Streamer::recording);
        dumped.waits(&streamer, "tail 3");
        delayed.release(ALL);
        dumped.accessor.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", streamer.said()));
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        assert!(streamer.said().contains("added 1 of 1 buffers that CPUs accessed"), "{}", streamer.said());
        dumped.ends();
        let record = dumped.criu.images().join("rewake-working-set.json");
        let recorded: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&record).unwrap()).unwrap();
        assert_eq!(recorded["buffers"][0][1], before[3], "{recorded}");

        let (after, said) = dumped.restores_without_faults();
        assert_eq!(after, [before[3], before[0], before[1], before[2]], "{said}");

        // A nonsensical file is reported, and has no effect.
        fs::write(&record, "{").unwrap();
        let (damaged, said) = dumped.restores_without_faults();
        assert_eq!(damaged, before, "{said}");
        assert!(said.contains("remove it, or restore with --record"), "{said}");
    });
}

#[test]
fn by_its_own_code() {
    isolated(1, |_| {
        let dumped = need!(dumped(Version::V4_2));
        dumped.obeys(&["check 0"], SWAPPED);
    });
}

#[test]
fn demand_loads_are_before_the_background_load() {
    isolated(1, |_| {
        let dumped = need!(dumped_on(&ONE_RING, Some(TWO), Version::V4_2));
        let (mut streamer, delayed) = dumped.restores();
        dumped.waits(&streamer, "tail 1");
        // Without a page fault it would be the last.
        delayed.release(FIRST);
        dumped.accessor.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", streamer.said()));
        assert!(is_paused(dumped.accessor.pid()), "the rest is held: {}", streamer.said());
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        dumped.ends();
    });
}

#[test]
fn the_kernel_accesses_missing_memory_for_the_only_thread() {
    isolated(1, |_| {
        let dumped = need!(dumped(Version::V4_2));
        // It reads from a buffer; it writes, and the device has that afterwards.
        dumped.obeys(&["write 1", "read 0"], COPIED);
        assert_eq!(fs::read(dumped.folder.path().join("out")).unwrap(), pattern(1));
        // A copy that would go beyond the rest of its mapping.
        dumped.obeys(&["halve-write 0"], COPIED);
    });
}

#[test]
fn mappings_may_change_while_their_buffer_is_missing() {
    isolated(1, |_| {
        let dumped = need!(dumped(Version::V4_2));
        dumped.obeys(&["move 1", "halve 0", "protect 1", "fork 0"], SWAPPED);
    });
}

#[test]
fn access_rights_to_missing_memory_cannot_be_added() {
    isolated(1, |_| {
        let dumped = need!(dumped_after("hide 0"));
        let (mut streamer, delayed) = dumped.restores_by(Streamer::start);
        let refused = format!("{:#}", dumped.accessor.asked("protect 0").unwrap_err());
        assert!(refused.contains("Resource temporarily unavailable"), "{refused}\n{}", streamer.said());
        // It is the device itself, and shows nothing.
        dumped.accessor.asked("hide 0").unwrap();
        dumped.waits(&streamer, "check 1");
        drop(delayed);
        dumped.accessor.answer().unwrap();
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        dumped.accessor.asked("protect 0").unwrap();
        dumped.ends();
    });
}

#[test]
fn a_mapping_whose_buffer_was_freed_can_be_unmapped() {
    isolated(1, |_| {
        let dumped = need!(dumped_after("free 1"));
        let looks = || {
            assert!(
                dumped.criu.log("restore").contains("the image has no buffer for it, because it was freed")
            );
            dumped.accessor.asked("check 0").unwrap();
            // By the kernel: the program itself gets SIGBUS.
            let read = format!("{:#}", dumped.accessor.asked("write 1").unwrap_err());
            assert!(read.contains("Bad address"), "{read}");
            dumped.accessor.asked("unmap 1").unwrap();
            dumped.ends();
        };
        dumped.criu.restore().unwrap();
        looks();
        let (mut streamer, delayed) = dumped.restores_by(Streamer::start);
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        looks();
    });
}

#[test]
fn a_mapping_whose_buffer_the_image_lost_is_no_freed_one() {
    isolated(1, |_| {
        let dumped = need!(dumped_after("free 1"));
        let path = dumped.criu.images().join(SHARED_NAME);
        let mut shared = ImageDir::open(dumped.criu.images()).unwrap().shared().unwrap().unwrap();
        let counts: Vec<usize> = shared.freed_mappings.iter().map(|of| of.mappings.len()).collect();
        assert_eq!(counts, [1], "of one process one mapping");
        // As if the buffer had been in the image, and were missing now.
        shared.freed_mappings[0].mappings.clear();
        fs::write(&path, shared.to_bytes()).unwrap();
        let error = dumped.criu.restore().unwrap_err().to_string();
        assert!(error.contains("it had one at the dump"), "{error}");
        wait_for_the_end_of(dumped.accessor.pid()).unwrap();
        // Other plugins report nothing.
        fs::remove_file(&path).unwrap();
        dumped.criu.restore().unwrap();
        dumped.accessor.asked("unmap 1").unwrap();
        dumped.ends();
    });
}

#[test]
fn a_program_that_executes_another_or_ends_is_released() {
    isolated(1, |_| {
        let dumped = need!(dumped(Version::V4_2));
        let (mut streamer, delayed) = dumped.restores();
        dumped.accessor.asked("execute 0").unwrap();
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        dumped.ends();
        let (mut streamer, delayed) = dumped.restores();
        dumped.accessor.ask("end 0").unwrap();
        wait_for_the_end_of(dumped.accessor.pid()).unwrap();
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
    });
}

#[test]
fn a_program_that_forks_with_missing_buffers_is_killed() {
    isolated(1, |_| {
        let dumped = need!(dumped(Version::V4_2));
        let (mut streamer, delayed) = dumped.restores();
        dumped.accessor.ask("bequeath 1").unwrap();
        let noticed = soon(|| streamer.said().contains("has forked with missing device memory"));
        drop(delayed);
        assert!(noticed, "{}", streamer.said());
        assert!(!streamer.end().unwrap().success(), "{}", streamer.said());
        wait_for_the_end_of(dumped.accessor.pid()).unwrap();
        // Whatever it read before it was killed must be right.
        let seen = fs::read_to_string(dumped.folder.path().join("child")).ok();
        assert!(seen.as_deref().is_none_or(|seen| seen == "ok"), "{seen:?}");
        let answer = dumped.accessor.answered();
        assert!(answer.as_deref().is_none_or(|answer| answer == "ok"), "{answer:?}");
    });
}

#[test]
fn killed_while_it_waits() {
    isolated(1, |_| {
        let dumped = need!(dumped(Version::V4_2));
        let (mut streamer, delayed) = dumped.restores();
        dumped.waits(&streamer, "check 1");
        dumped.ends();
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
    });
}

#[test]
fn killed_at_any_moment_a_streamer_leaves_nothing_wrong_to_read() {
    isolated(1, |_| {
        let dumped = need!(dumped_on(&SLOW, None, Version::V4_2));
        let moments = 6;
        let mut ended = 0;
        for moment in 0..moments {
            let (mut streamer, delayed) = dumped.restores();
            // Phases of both: while it is loaded, while its placeholder is swapped.
            dumped.waits(&streamer, if moment % 2 == 0 { "check 1" } else { "write 1" });
            drop(delayed);
            std::thread::sleep(Duration::from_millis(1500) * moment / moments);
            // Its worker, or all its processes.
            let supervisor = (moment % 3 == 2).then(|| streamer.pid());
            for process in supervisor.into_iter().chain(streamer.workers()) {
                let _ = kill(Pid::from_raw(process.cast_signed()), Signal::SIGKILL);
            }
            let well = streamer.end().unwrap().success();
            if supervisor.is_some() {
                // The order waits until this kills the process.
                recover().unwrap();
            }
            if well || dumped.continues() {
                // The kill came too late: all was resident.
                dumped.accessor.answer().unwrap();
                dumped.accessor.asked("check 0").unwrap();
                dumped.accessor.asked("check 1").unwrap();
                dumped.ends();
            } else {
                ended += 1;
                wait_for_the_end_of(dumped.accessor.pid()).unwrap();
            }
            let answer = dumped.accessor.answered();
            assert!(answer.as_deref().is_none_or(|answer| answer == "ok"), "{answer:?}: {}", streamer.said());
        }
        assert!(ended > 0, "the first kill comes before any copy has ended");
    });
}

#[test]
fn with_criu_4_1() {
    isolated(1, |_| {
        let dumped = need!(dumped(Version::V4_1));
        dumped.obeys(&["check 1", "read 0"], SWAPPED);
    });
}

#[test]
fn a_server_that_reads_its_weights_by_cpu_and_gpu() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        if !Topology::read().unwrap().gpus().all(Node::has_large_bar) {
            skip!("CPUs cannot access all memory of these GPUs");
        }
        let shape = Shape { mode: Mode::CpuReads, layer_kib: 4096, ..small() };
        let dumped = need!(dumped::Dumped::of(&shape, Version::V4_2));
        let (mut streamer, delayed) = dumped.restores_paused();
        assert!(
            soon(|| waits_for_memory(dumped.server.pid)),
            "it accesses no missing memory: {}",
            streamer.said()
        );
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        assert!(streamer.said().contains("accessed buffer"), "{}", streamer.said());
        dumped.server.ends_well();
    });
}
