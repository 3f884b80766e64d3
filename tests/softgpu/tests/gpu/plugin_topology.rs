// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process is restored on another machine's GPUs if they can replace its own. If not, nothing is begun, and
//! the log says what is missing.

use std::path::Path;

use gpu_app::shape::Shape;
use rewake_amdgpu_uapi::topology::Topology;
use rewake_skip::need;
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version, queues, wait_for_the_end_of};
use softgpu_tests::{Machine, REAL_GPUS, isolated};

/// What CRIU logs when it makes the first task.
const FORKING: &str = "Forking task with";

/// A dumped server, and the machine that it was dumped on.
struct Travel {
    machine: Machine,
    folder: tempfile::TempDir,
    app: App,
    pid: u32,
    dumps: u32,
}

impl Travel {
    /// A server on `gpus` GPUs, which are all GPUs of the machine.
    fn start(gpus: usize) -> Result<Self, &'static str> {
        let machine = Machine::find().ok_or(REAL_GPUS)?;
        queues()?;
        machine.becomes(&[("gpus", &gpus.to_string())]);
        let folder = tempfile::tempdir().unwrap();
        let shape = Shape { gpus, layers: 2, layer_kib: 64, cache_mib: 1, queues: 1, ..Shape::small() };
        let app = App::start(&shape, folder.path()).unwrap();
        app.answers(&[1, 2], 2).unwrap();
        let pid = app.pid().unwrap();
        Ok(Self { machine, folder, app, pid, dumps: 0 })
    }

    fn criu(&self) -> Criu {
        let images = self.folder.path().join(format!("images-{}", self.dumps));
        Criu::with(Plugin::Ours, Version::V4_2, &images).unwrap()
    }

    fn dump(&mut self) {
        self.dumps += 1;
        self.criu().dump(self.pid).unwrap();
        self.app.was_dumped();
        wait_for_the_end_of(self.pid).unwrap();
    }

    /// Restores the server, which computes as before.
    fn restores(&self, criu: &Criu) {
        criu.restore().unwrap();
        assert!(criu.log("restore").contains(FORKING));
        self.app.answers(&[200, 3], 2).unwrap();
    }

    /// Checks that the restore is refused before a task exists, for a reason that has these words.
    fn is_refused(&self, words: &[&str]) {
        let criu = self.criu();
        let error = criu.restore().unwrap_err().to_string();
        let reasons: Vec<&str> = error.lines().filter(|line| line.contains("(amdgpu_plugin)")).collect();
        assert!(
            reasons.len() == 1 && words.iter().all(|word| reasons[0].contains(word)),
            "{words:?}: {error}"
        );
        let log = criu.log("restore");
        assert!(!log.contains(FORKING), "{log}");
        assert!(!Path::new("/proc").join(self.pid.to_string()).exists());
    }

    fn end(self) {
        self.app.quit().unwrap();
        wait_for_the_end_of(self.pid).unwrap();
    }
}

/// Names of the machine's GPUs, in the order of its nodes.
fn names() -> Vec<u32> {
    Topology::read().unwrap().gpus().map(|gpu| gpu.gpu_id).collect()
}

#[test]
fn gpus_of_other_names() {
    isolated(2, |_| {
        let mut travel = need!(Travel::start(2));
        let first = names();
        travel.dump();
        travel.machine.becomes(&[("seed", "11")]);
        let second = names();
        assert!(second.iter().all(|name| !first.contains(name)), "{first:x?} {second:x?}");
        travel.restores(&travel.criu());
        // The process and its image keep the first names of the GPUs.
        travel.dump();
        travel.machine.becomes(&[("seed", "12")]);
        travel.restores(&travel.criu());
        travel.dump();
        travel.machine.becomes(&[]);
        assert_eq!(names(), first);
        travel.restores(&travel.criu());
        travel.end();
    });
}

#[test]
fn gpus_in_another_order() {
    isolated(2, |_| {
        let mut travel = need!(Travel::start(2));
        let first = names();
        travel.dump();
        travel.machine.becomes(&[("reverse", "1")]);
        let second = names();
        assert_eq!(second, [first[1], first[0]]);
        travel.restores(&travel.criu());
        let log = travel.criu().log("restore");
        for name in &first {
            assert!(log.contains(&format!("GPU {name:#x} of the image is GPU {name:#x} here")), "{log}");
        }
        travel.dump();
        travel.machine.becomes(&[]);
        travel.restores(&travel.criu());
        travel.end();
    });
}

#[test]
fn less_memory_is_refused_unless_it_is_accepted() {
    isolated(1, |_| {
        let mut travel = need!(Travel::start(1));
        travel.dump();
        let less: u64 = travel.machine.found("vram_mib").parse::<u64>().unwrap() / 2;
        travel.machine.becomes(&[("gpus", "1"), ("vram_mib", &less.to_string())]);
        let found = format!("has {less} MiB: set KFD_VRAM_SIZE_CHECK=0 to accept");
        travel.is_refused(&[&format!("VRAM {} MiB wanted", 2 * less), &found]);
        travel.restores(&travel.criu().variable("KFD_VRAM_SIZE_CHECK", "0"));
        travel.end();
    });
}

#[test]
fn memory_that_does_not_suffice() {
    isolated(1, |_| {
        let mut travel = need!(Travel::start(1));
        travel.dump();
        travel.machine.becomes(&[("gpus", "1"), ("vram_mib", "1")]);
        let criu = travel.criu().variable("KFD_VRAM_SIZE_CHECK", "0");
        let error = criu.restore().unwrap_err().to_string();
        assert!(error.contains("CRIU_OP RESTORE") && error.contains("Cannot allocate memory"), "{error}");
        wait_for_the_end_of(travel.pid).unwrap();
        travel.machine.becomes(&[("gpus", "1")]);
        travel.restores(&travel.criu());
        travel.end();
    });
}

#[test]
fn a_missing_gpu_is_named() {
    isolated(2, |_| {
        let mut travel = need!(Travel::start(2));
        let first = names();
        travel.dump();
        travel.machine.becomes(&[("gpus", "1")]);
        travel.is_refused(&[&format!("GPU {:#x}", first[1])]);
        travel.machine.becomes(&[]);
        travel.restores(&travel.criu());
        travel.end();
    });
}

#[test]
fn more_gpus_than_at_the_dump() {
    isolated(2, |_| {
        let mut travel = need!(Travel::start(1));
        travel.dump();
        // Without links between GPUs: a GPU that has more links is not the same.
        travel.machine.becomes(&[("gpus", "2"), ("xgmi", "0")]);
        let error = travel.criu().restore().unwrap_err().to_string();
        assert!(
            error.contains("had 1 GPUs, and its task sees 2") && error.contains("device cgroup"),
            "{error}"
        );
        wait_for_the_end_of(travel.pid).unwrap();
        travel.machine.becomes(&[("gpus", "2"), ("xgmi", "1")]);
        travel.is_refused(&["links to other nodes 1 wanted", "has 2"]);
        travel.machine.becomes(&[("gpus", "1")]);
        travel.restores(&travel.criu());
        travel.end();
    });
}
