// SPDX-License-Identifier: MIT OR Apache-2.0
//! A hostile image, or a process that dies, ends one restore and no other. In each test the same agent also
//! serves another restore, whose target sees right bytes only.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Output};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_tests::daemon::{Daemon, detached, timeline};
use rewake_tests::fuse::SilentMount;
use rewake_tests::limit::MemoryLimit;
use rewake_tests::process::{children, output, processes_naming, until};
use rewake_tests::restore_gate::Gate;
use rewake_tests::scene::{ACT, END};
use rewake_tests::server::Setup;
use rewake_tests::{Criu, Scene, Verdict, need};

/// Descriptors that a worker may open for the children of a target that forks without end.
const ROOM: usize = 3;
/// Workers that die within ten seconds until a supervisor gives up.
const DEATHS: usize = 8;

/// An agent with two scenes: a restore of one must not harm the other's.
struct Pair {
    criu: Criu,
    daemon: Daemon,
    good: Scene,
    bad: Scene,
}

impl Pair {
    fn new(criu: &Criu) -> Self {
        Self::with(criu, "plain", 64)
    }

    fn with(criu: &Criu, bad: &str, mib: usize) -> Self {
        let [good, bad] = [("random", 64), (bad, mib)].map(|(of, mib)| Scene::dumped(criu, of, mib).unwrap());
        Self { criu: criu.clone(), daemon: Daemon::start().unwrap(), good, bad }
    }

    fn restoring_bad(&self) -> Child {
        detached(&self.daemon, &self.criu, &self.bad).unwrap().spawn().unwrap()
    }

    /// Restores the other scene, from its first page to the verdict.
    fn play_good(&self) {
        self.good.go().unwrap();
        self.good.stop().unwrap();
        timeline(&detached(&self.daemon, &self.criu, &self.good).unwrap().output().unwrap()).unwrap();
        assert_eq!(self.good.verdict(ACT).unwrap(), Verdict::Ok);
    }

    /// The planner of the bad scene's image.
    fn planner(&self) -> Option<Pid> {
        processes_naming(&format!("planner {}", self.bad.images().display())).first().copied()
    }

    /// The worker of the bad scene's streamer.
    fn worker(&self) -> Option<Pid> {
        let line = format!("streamer -W {}", self.bad.work().display());
        // The worker has the streamer's command line.
        let all = processes_naming(&line);
        all.iter().flat_map(|pid| children(*pid)).find(|child| all.contains(child))
    }
}

/// A refused restore writes one line with all of `parts`, and fails.
fn assert_refused(output: &Output, parts: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(parts.iter().all(|part| said.contains(part)), "{said}");
}

/// Writes a process tree that takes 8 bytes of memory for each byte of the file. Most of the file are holes.
fn write_swelling_tree(images: &Path) {
    /// Numbers of threads in one task: one more than a power of two, so that the vector has twice the room.
    const THREADS: u32 = (16 << 20) + 1;
    const TASKS: u32 = 64;
    let mut file = File::create(images.join("pstree.img")).unwrap();
    let mut at = 8;
    file.write_all(&[0x5456_4319_u32, 0x5027_3030].map(u32::to_le_bytes).concat()).unwrap();
    for pid in 1..=TASKS {
        // Fields 1 and 5, the second packed; its length takes four bytes.
        let length: Vec<u8> = (0..4).map(|step| (THREADS >> (7 * step)).to_le_bytes()[0] | 0x80).collect();
        let mut head = vec![0x08, u8::try_from(pid).unwrap(), 0x2a];
        head.extend(length);
        head[6] &= 0x7f;
        let record = u32::try_from(head.len()).unwrap() + THREADS;
        file.write_all(&[&record.to_le_bytes()[..], &head].concat()).unwrap();
        at += 4 + u64::from(record);
        file.set_len(at).unwrap();
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(at)).unwrap();
    }
}

#[test]
fn an_image_whose_plan_takes_too_much_memory_is_one_clear_line() {
    let pair = Pair::new(&need!(Criu::main()));
    write_swelling_tree(&pair.bad.images());
    let restoring = pair.restoring_bad();
    pair.play_good();
    let output = restoring.wait_with_output().unwrap();
    assert_refused(&output, &["images: the planner", "memory allocation of", "4096 MiB"]);
}

#[test]
fn an_image_on_a_file_system_that_hangs_is_one_clear_line() {
    let pair = Pair::new(&need!(Criu::main()));
    let mut mount = need!(SilentMount::new(&pair.bad.files().join("silent")));
    symlink(mount.path(), pair.bad.images().join("parent")).unwrap();
    let restoring = pair.restoring_bad();
    // From here on the planner cannot be killed before the file system answers.
    mount.take_request(ACT).unwrap();
    pair.play_good();
    let output = restoring.wait_with_output().unwrap();
    assert_refused(&output, &["images: the planner of this image did nothing for 20 s", "file system"]);
    assert!(pair.planner().is_some(), "it waits in the kernel");
}

#[test]
fn a_planner_that_is_killed_is_one_clear_line() {
    let pair = Pair::new(&need!(Criu::main()));
    let mount = need!(SilentMount::new(&pair.bad.files().join("silent")));
    symlink(mount.path(), pair.bad.images().join("parent")).unwrap();
    let mut restoring = pair.restoring_bad();
    let mut planner = None;
    until(ACT, || {
        planner = pair.planner();
        (planner.is_some() || restoring.try_wait().unwrap().is_some()).then_some(())
    });
    if let Some(planner) = planner {
        kill(planner, Signal::SIGKILL).unwrap();
    }
    let output = restoring.wait_with_output().unwrap();
    assert!(planner.is_some(), "no planner was seen: {output:?}");
    assert_refused(&output, &["images: the planner", "was killed by SIGKILL", "restore again"]);
    pair.play_good();
}

#[test]
fn a_restore_of_another_dump_than_the_served_one_is_refused() {
    let criu = need!(Criu::main());
    let [scene, other] = [(); 2].map(|()| Scene::dumped(&criu, "plain", 16).unwrap());
    let mut server = Setup::new(&criu, &other.images(), &scene.work()).unwrap().listening().unwrap();
    scene.go().unwrap();
    scene.restore().unwrap_err();
    assert_eq!(server.ended(END).unwrap().code(), Some(1));
    let text = server.text();
    let parts = [&scene.images().display().to_string(), "give both the same directory (-D)"];
    assert!(text.lines().any(|line| parts.iter().all(|part| line.contains(part))), "{text}");
    assert_eq!(scene.written(), "");
}

/// A restore of the bad scene that has connected. CRIU waits at the gate, and no memory is loaded before it
/// opens.
fn held(pair: &Pair) -> (Child, Gate) {
    let gate = Gate::closed(pair.bad.files().join("gate")).unwrap();
    let mut command = detached(&pair.daemon, &pair.criu, &pair.bad).unwrap();
    let restoring = command.arg("--action-script").arg(gate.script()).spawn().unwrap();
    assert!(gate.is_reached_by(1, ACT), "{}", pair.bad.logs());
    (restoring, gate)
}

#[test]
fn workers_that_die_again_and_again_cost_their_own_session_only() {
    let pair = Pair::new(&need!(Criu::main()));
    pair.bad.go().unwrap();
    let (restoring, gate) = held(&pair);
    let mut killed = Vec::new();
    for _ in 0..DEATHS {
        let fresh = || pair.worker().filter(|pid| !killed.contains(pid));
        let worker = until(ACT, fresh).expect("another worker");
        // A panic aborts a worker: to other processes it is the same.
        kill(worker, Signal::SIGKILL).unwrap();
        killed.push(worker);
    }
    pair.play_good();
    gate.open().unwrap();
    let ended = restoring.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(1), "{}", String::from_utf8_lossy(&ended.stderr));
    assert_eq!(pair.bad.written(), "", "no target runs");
}

#[test]
fn a_worker_that_runs_out_of_memory_costs_no_byte() {
    let pair = Pair::new(&need!(Criu::main()));
    let limit = need!(MemoryLimit::that_kills(0));
    pair.bad.go().unwrap();
    let (restoring, gate) = held(&pair);
    limit.hold(pair.worker().unwrap()).unwrap();
    gate.open().unwrap();
    pair.play_good();
    timeline(&restoring.wait_with_output().unwrap()).unwrap();
    assert_eq!(pair.bad.verdict(ACT).unwrap(), Verdict::Ok);
    let log = fs::read_to_string(pair.bad.work().join("rewake-streamer.log")).unwrap();
    assert!(log.contains("was killed by SIGKILL: starting a successor"), "{log}");
}

#[test]
fn a_program_that_forks_without_end_costs_no_byte() {
    let pair = Pair::with(&need!(Criu::main()), "forks", 640);
    pair.bad.go().unwrap();
    let (restoring, gate) = held(&pair);
    // The streamer has no descriptors for all children: their forks wait until others have all their memory.
    let worker = pair.worker().unwrap();
    let open = fs::read_dir(format!("/proc/{worker}/fd")).unwrap().count();
    let limit = format!("--nofile={}", open + ROOM);
    output(Command::new("prlimit").args(["--pid", &worker.to_string(), &limit])).unwrap();
    gate.open().unwrap();
    pair.play_good();
    timeline(&restoring.wait_with_output().unwrap()).unwrap();
    pair.bad.stop().unwrap();
    assert_eq!(pair.bad.verdict(ACT).unwrap(), Verdict::Ok);
    let log = fs::read_to_string(pair.bad.work().join("rewake-streamer.log")).unwrap();
    assert!(log.contains("a fork waits"), "limit {limit}, open {open}: {log}");
}
