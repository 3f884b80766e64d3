// SPDX-License-Identifier: MIT OR Apache-2.0
//! A restore records what a program accesses first. Later restores load that before the rest, also over a
//! slow link. A restore can load nothing else for a while.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use rewake_testkit::programs::rewake;
use rewake_testkit::trace;
use rewake_tests::daemon::restore;
use rewake_tests::export::{
    ImageExport, messages, restore_from, seal, streamer_ended, verify, with_messages_in_file, workers,
};
use rewake_tests::process::{output, until};
use rewake_tests::relay::SlowLink;
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, need};
use serde_json::Value;

const MIB: u64 = 16;
/// Bytes of a slow link in a second: the memory of a scene takes 4 s.
const SLOW: u64 = 4 << 20;
const FILE: &str = "rewake-working-set.json";

/// A sealed image of a program that uses a quarter of its memory.
fn sealed(criu: &Criu) -> Scene {
    let scene = Scene::dumped(criu, "quarter", usize::try_from(MIB).unwrap()).unwrap();
    seal(&scene).unwrap();
    scene
}

/// `rewake restore` with these options, and CRIU's `-d`. Returns when it has ended.
fn restored(scene: &Scene, images: &Path, options: &[&str]) {
    let mut command = restore(scene.criu(), images).unwrap();
    command.args(options).arg("-W").arg(scene.work()).args(["--", "-d", "-v4"]);
    ends_well(scene, &mut command);
}

fn ends_well(scene: &Scene, command: &mut Command) {
    with_messages_in_file(command, scene).unwrap();
    assert!(command.status().unwrap().success(), "{}{}", messages(scene), scene.logs());
}

/// Lets the program use its quarter.
fn answers(scene: &Scene) {
    scene.go().unwrap();
    has_answered(scene);
}

fn has_answered(scene: &Scene) {
    let answered = scene.files().join("answered");
    let found = until(ACT, || answered.exists().then_some(()));
    assert!(found.is_some(), "{}{}", messages(scene), scene.logs());
}

/// Waits until all memory is resident, and checks it. Returns the record of the restore.
fn is_right(scene: &Scene) -> Value {
    streamer_ended(scene).unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    let record = fs::read(scene.work().join("rewake-timeline.json")).unwrap();
    serde_json::from_slice(&record).unwrap()
}

/// Restores and records; the scene is ready for another round.
fn record(scene: &mut Scene, images: &Path) {
    // The program acts as soon as it runs: a recording ends some seconds after a page fault.
    scene.go().unwrap();
    restored(scene, images, &["--record", "--wait", "alive"]);
    has_answered(scene);
    is_right(scene);
    scene.next_round().unwrap();
}

/// Bytes of CPU memory that are resident, as `rewake status` shows them.
fn resident(scene: &Scene) -> u64 {
    let mut status = Command::new(rewake().unwrap());
    let status = output(status.args(["status", "--json", "-W"]).arg(scene.work())).unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    let memory = &status["processes"][0]["memory"][0];
    let [all, resident] = ["bytes", "resident"].map(|at| memory[at].as_u64().unwrap());
    assert!(all >= MIB << 20, "{status}");
    resident
}

fn faults(record: &Value) -> u64 {
    record["processes"][0]["page_faults"].as_u64().unwrap()
}

/// Bytes that the file names.
fn recorded(images: &Path) -> u64 {
    let file: Value = serde_json::from_slice(&fs::read(images.join(FILE)).unwrap()).unwrap();
    file["pages"].as_array().unwrap().iter().map(|run| run[2].as_u64().unwrap() << 12).sum()
}

/// A restore that must not begin: what it says.
fn refused(scene: &Scene, options: &[&str]) -> String {
    let mut command = restore(scene.criu(), &scene.images()).unwrap();
    command.args(options).arg("-W").arg(scene.work()).args(["--", "-d"]);
    let Output { status, stderr, .. } = command.output().unwrap();
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert!(!status.success() && workers(scene).is_empty(), "{said}");
    assert!(!scene.work().join("restore.log").exists(), "CRIU was started: {said}");
    said
}

/// An image on a server, behind a slow link.
struct Remote {
    scene: Scene,
    link: SlowLink,
    _server: ImageExport,
}

impl Remote {
    fn new(scene: Scene) -> Self {
        let server = ImageExport::start(scene.images().parent().unwrap(), &[]).unwrap();
        let link = SlowLink::to(server.port(), SLOW).unwrap();
        Self { scene, link, _server: server }
    }

    /// Restores it over the link into a new directory, which is returned.
    fn restored(&self, copy: &str, wait: &str) -> PathBuf {
        let copy = self.scene.files().join(copy);
        let options = ["--wait", wait];
        let mut command =
            restore_from(self.scene.criu(), &self.scene, self.link.port(), &copy, &options).unwrap();
        ends_well(&self.scene, &mut command);
        copy
    }
}

#[test]
fn with_a_working_set_a_remote_program_waits_for_few_pages() {
    for criu in Criu::both() {
        let mut remote = Remote::new(sealed(&need!(criu)));
        remote.restored("without", "alive");
        answers(&remote.scene);
        let without = faults(&is_right(&remote.scene));
        remote.scene.next_round().unwrap();

        let images = remote.scene.images();
        record(&mut remote.scene, &images);
        let bytes = recorded(&images);
        assert!((MIB << 18..MIB << 19).contains(&bytes), "a quarter was accessed, {bytes} bytes recorded");

        let before = remote.link.passed();
        let copy = remote.restored("with", "working-set");
        let passed = remote.link.passed() - before;
        assert!(passed < MIB << 19, "{passed} bytes have arrived: only the working set is awaited");
        assert!(!workers(&remote.scene).is_empty(), "the rest arrives");
        answers(&remote.scene);
        let record = is_right(&remote.scene);
        assert!(without >= 40 && faults(&record) <= without / 4, "{without} faults without, {record}");
        let [working_set, elapsed] = ["working_set_us", "elapsed_us"].map(|at| record[at].as_u64().unwrap());
        assert!(working_set < elapsed * 2 / 3, "{record}");
        let trace = trace::events(&remote.scene.work()).unwrap();
        let resident = trace::last_bytes(&trace, "resident CPUs").into_values().next();
        assert_eq!(resident, record["memory"][0]["bytes"].as_u64(), "{record}");
        let awaited = trace.iter().find(|event| event.name == "working set resident").map(|event| event.ts);
        assert_eq!(awaited, Some(working_set), "{record}");
        assert_eq!(recorded(&copy), bytes, "it travels with the image");
        verify(&copy).unwrap();
    }
}

#[test]
fn nothing_is_loaded_that_is_not_accessed_until_sigterm() {
    let criu = need!(Criu::main());
    let scene = sealed(&criu);
    restored(&scene, &scene.images(), &["--on-demand-only", "3600", "--wait", "alive"]);
    answers(&scene);
    let resident = resident(&scene);
    assert!((MIB << 18..MIB << 19).contains(&resident), "{resident} bytes are resident");
    // The background load would take milliseconds.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(self::resident(&scene), resident, "no thread waits for more");
    workers(&scene).into_iter().for_each(|worker| kill(worker, Signal::SIGTERM).unwrap());
    is_right(&scene);
    assert!(!scene.images().join(FILE).exists(), "no one wanted a record");
}

#[test]
fn a_successor_loads_the_rest_at_once() {
    let criu = need!(Criu::main());
    let scene = sealed(&criu);
    restored(&scene, &scene.images(), &["--on-demand-only", "3600", "--wait", "alive"]);
    answers(&scene);
    workers(&scene).into_iter().for_each(|worker| kill(worker, Signal::SIGKILL).unwrap());
    is_right(&scene);
}

#[test]
fn the_rest_is_loaded_after_the_limit() {
    const LIMIT: Duration = Duration::from_secs(2);
    let criu = need!(Criu::main());
    let scene = sealed(&criu);
    let limit = LIMIT.as_secs().to_string();
    restored(&scene, &scene.images(), &["--on-demand-only", &limit, "--wait", "alive"]);
    answers(&scene);
    let record = is_right(&scene);
    let elapsed = record["elapsed_us"].as_u64().unwrap();
    assert!(u128::from(elapsed) >= LIMIT.as_micros(), "{record}");
}

#[test]
fn a_second_recording_adds_to_the_first() {
    let criu = need!(Criu::main());
    let mut scene = sealed(&criu);
    let images = scene.images();
    record(&mut scene, &images);
    let first = fs::read_to_string(images.join(FILE)).unwrap();
    // The program acts while the command waits until all memory is resident.
    scene.go().unwrap();
    restored(&scene, &images, &["--record"]);
    assert!(messages(&scene).contains(&format!("{FILE}: ")), "{}", messages(&scene));
    is_right(&scene);
    let second = fs::read_to_string(images.join(FILE)).unwrap();
    // The same accesses in the same order, and perhaps a page that only this run accessed.
    let runs = |text: &str| serde_json::from_str::<Value>(text).unwrap()["pages"].as_array().unwrap().clone();
    assert!(runs(&second).starts_with(&runs(&first)), "{first}{second}");
    assert!(recorded(&images) < MIB << 19);
}

#[test]
fn a_working_set_of_another_dump_or_a_damaged_one_is_not_used() {
    let criu = need!(Criu::main());
    let mut scene = sealed(&criu);
    let said = refused(&scene, &["--wait", "working-set"]);
    assert!(
        said.contains("no working set was recorded; record one with `rewake restore --record`"),
        "{said}"
    );
    let images = scene.images();
    record(&mut scene, &images);
    let own = fs::read_to_string(images.join(FILE)).unwrap();
    let (start, dump) = own.split_once("\"dump\":\"").unwrap();
    let other = if dump.starts_with('0') { '1' } else { '0' };
    let other = format!("{start}\"dump\":\"{other}{}", &dump[1..]);
    let cut = own[..own.len() / 2].to_owned();
    for (text, reason) in [(other, "it is of another dump"), (cut, "it is damaged: ")] {
        fs::write(images.join(FILE), text).unwrap();
        let said = refused(&scene, &["--wait", "working-set"]);
        assert!(said.contains(reason), "{said}");
        scene.next_round().unwrap();
        restored(&scene, &images, &["--wait", "alive"]);
        answers(&scene);
        is_right(&scene);
        let line = format!("{FILE} is not used: {reason}");
        assert_eq!(messages(&scene).matches(&line).count(), 1, "{}", messages(&scene));
        scene.next_round().unwrap();
    }
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let criu = need!(Criu::main());
    let scene = sealed(&criu);
    for option in [&["--record"][..], &["--on-demand-only", "5"]] {
        let said = refused(&scene, &[&["--wait", "working-set"], option].concat());
        assert!(said.contains("nothing is loaded first with --record or --on-demand-only"), "{said}");
    }
    let said = refused(&scene, &["--on-demand-only", "0"]);
    assert!(said.contains("1..=86400"), "{said}");
    let mut attached = restore(&criu, &scene.images()).unwrap();
    let said = String::from_utf8(attached.args(["--wait", "working-set"]).output().unwrap().stderr).unwrap();
    assert!(said.contains("--wait=working-set: this command ends with the restored processes"), "{said}");
}
