// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore URL`: an agent brings an image of a store into its cache, once for all restores. It
//! survives its own end, that of its fetchers, a full cache and wrong bytes.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use rewake_testkit::programs::rewake;
use rewake_tests::daemon::{Daemon, DaemonOptions, has_namespaces, in_namespaces, timeline};
use rewake_tests::export::{messages, streamer_ended, verify, with_messages_in_file, workers};
use rewake_tests::images::{LAZY, PARENT, split};
use rewake_tests::node_cache::{StoredScene, said};
use rewake_tests::process::{PATIENCE, until};
use rewake_tests::relay::SlowLink;
use rewake_tests::restore_gate::Gate;
use rewake_tests::scene::{ACT, Scene};
use rewake_tests::seaweedfs::SeaweedServer;
use rewake_tests::{Criu, Verdict, need, skip};

const MIB: usize = 32;
/// Bytes of a slow link in a second: the memory of a scene takes 4 s.
const SLOW: u64 = 8 << 20;
/// Time for an agent to end.
const END: Duration = Duration::from_secs(8);
const WORKING_SET: &str = "rewake-working-set.json";
/// Restores at once.
const REPLICAS: usize = 8;

/// Restores a scene from the cache: it sees right bytes.
fn restores(stored: &StoredScene, options: &[&str]) {
    let scene = &stored.scene;
    scene.go().unwrap();
    timeline(&stored.restore(options).unwrap().output().unwrap()).unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", stored.daemon.logs());
}

/// A restore that fails with one line.
fn refused(stored: &StoredScene, options: &[&str]) -> String {
    let output = stored.restore(options).unwrap().output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    said(&output)
}

#[test]
fn the_second_restore_needs_no_store() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut stored = StoredScene::new(&criu, "plain", MIB).unwrap();
        restores(&stored, &[]);
        stored.is_complete().unwrap();
        verify(&stored.cached()).unwrap();
        let read = stored.daemon.read_from_store().unwrap();
        assert!(read <= stored.bytes * 11 / 10, "{read} of {} bytes", stored.bytes);
        let (_, list) = stored.cache(&["ls"]).unwrap();
        assert!(list.starts_with(&format!("{} complete ", stored.id)) && list.lines().count() == 1, "{list}");

        fs::rename(stored.folder().join("store"), stored.folder().join("away")).unwrap();
        stored.scene.next_round().unwrap();
        restores(&stored, &["--id", &stored.id.clone()]);
        stored.scene.next_round().unwrap();
        let said = refused(&stored, &[]);
        let hint =
            format!("the cache has image {id} of this name, which `--id {id}` restores", id = stored.id);
        assert!(said.contains(&hint) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn eight_replicas_at_once_read_the_store_once() {
    let criu = need!(Criu::main());
    if !has_namespaces() {
        skip!("no new pid namespaces here (unshare --pid)");
    }
    let stored = StoredScene::new(&criu, "plain", MIB).unwrap();
    let began = Instant::now();
    let folders: Vec<PathBuf> =
        (0..REPLICAS).map(|number| stored.folder().join(number.to_string())).collect();
    let restores: Vec<Child> = folders.iter().map(|folder| replica(&stored, folder)).collect();
    for (restore, folder) in restores.into_iter().zip(&folders) {
        let result = timeline(&restore.wait_with_output().unwrap()).unwrap();
        eprintln!("alive after {} ms of {:?}", result["alive_ms"], began.elapsed());
        assert_eq!(fs::read_to_string(folder.join("verdict")).unwrap(), "OK\n");
    }
    let read = stored.daemon.read_from_store().unwrap();
    let alone = StoredScene::new(&criu, "plain", MIB).unwrap();
    self::restores(&alone, &[]);
    let once = alone.daemon.read_from_store().unwrap();
    eprintln!("{read} bytes were read from the store for {REPLICAS} restores, {once} for one");
    assert!(read <= once * 11 / 10, "{read} bytes, {once} for one\n{}", stored.daemon.log());
    let status = stored.daemon.status().unwrap();
    assert_eq!(status["agent"]["sessions_served"], REPLICAS, "{status}");
}

/// Starts a restore in namespaces of its own, whose program acts at once and writes into `folder`.
fn replica(stored: &StoredScene, folder: &Path) -> Child {
    fs::create_dir(folder).unwrap();
    fs::write(folder.join("go"), "").unwrap();
    let mut inner = stored.replica(&[]).unwrap();
    inner.args(["--", "-v4"]);
    in_namespaces(&inner, &stored.scene.files(), folder).spawn().unwrap()
}

/// A scene in a store behind a slow link, and an agent that reads it.
struct SlowStore {
    stored: StoredScene,
    link: SlowLink,
    server: SeaweedServer,
}

impl SlowStore {
    fn new(criu: &Criu, weed: &Path) -> Self {
        Self::of(criu, weed, "random")
    }

    fn of(criu: &Criu, weed: &Path, scenario: &str) -> Self {
        let server = SeaweedServer::start(weed).unwrap();
        let link = SlowLink::to(server.port(), SLOW).unwrap();
        let environment = SeaweedServer::environment(link.port()).to_vec();
        let folder = tempfile::Builder::new().prefix("rewake-cache-").tempdir().unwrap();
        let place = (folder, "s3://bucket/web".to_owned());
        let push = |mut command: Command| {
            command.envs(SeaweedServer::environment(server.port()));
            command
        };
        let options = DaemonOptions { environment, ..DaemonOptions::default() };
        let stored = StoredScene::with(criu, scenario, MIB / 2, place, push, options).unwrap();
        Self { stored, link, server }
    }

    /// Restores it. Returns when the program runs.
    fn restore(&self) {
        self.restore_with(&["--wait", "alive"]);
    }

    fn restore_with(&self, options: &[&str]) {
        let mut command = self.stored.restore(options).unwrap();
        with_messages_in_file(&mut command, &self.stored.scene).unwrap();
        assert!(command.status().unwrap().success(), "{}", messages(&self.stored.scene));
    }

    /// Runs `rewake`, which succeeds, against the server without the link. Returns what it wrote.
    fn rewake(&self, arguments: &[&str]) -> String {
        let output = self.server.rewake(arguments).unwrap().output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        said(&output)
    }

    /// Waits until `bytes` bytes have passed the link.
    fn passed(&self, bytes: u64) {
        let passed = until(ACT, || (self.link.passed() >= bytes).then_some(()));
        assert!(passed.is_some(), "{} bytes\n{}", self.link.passed(), self.stored.daemon.logs());
    }

    /// The program has seen right bytes, and the cache has the image.
    fn ends_well(&self) {
        let StoredScene { scene, daemon, .. } = &self.stored;
        scene.stop().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", daemon.logs());
        streamer_ended(scene).unwrap();
        self.stored.is_complete().unwrap();
        verify(&self.stored.cached()).unwrap();
    }

    /// The program uses a quarter of its memory, and looks at the rest when that has arrived. Returns the
    /// record of the restore.
    fn answers(&self) -> serde_json::Value {
        let StoredScene { scene, daemon, .. } = &self.stored;
        let answered = scene.files().join("answered");
        let found = until(ACT, || answered.exists().then_some(()));
        assert!(found.is_some(), "{}{}", messages(scene), daemon.logs());
        streamer_ended(scene).unwrap();
        scene.stop().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", daemon.logs());
        serde_json::from_slice(&fs::read(scene.work().join("rewake-timeline.json")).unwrap()).unwrap()
    }

    /// Restores a copy, and records what the program accesses.
    fn record(&self, copy: &Path) {
        let scene = &self.stored.scene;
        scene.go().unwrap();
        let mut command = rewake_tests::daemon::restore(scene.criu(), copy).unwrap();
        command.args(["--record", "--wait", "alive", "-W"]).arg(scene.work()).args(["--", "-d", "-v4"]);
        with_messages_in_file(&mut command, scene).unwrap();
        assert!(command.status().unwrap().success(), "{}", messages(scene));
        self.answers();
    }
}

#[test]
fn a_working_set_that_is_pushed_later_is_loaded_first() {
    let (criu, weed) = (need!(Criu::main()), need!(SeaweedServer::program()));
    let mut slow = SlowStore::of(&criu, &weed, "quarter");
    let (copy, url) = (slow.stored.folder().join("copy"), slow.stored.url.clone());
    slow.rewake(&["pull", &url, copy.to_str().unwrap()]);
    slow.record(&copy);
    slow.stored.scene.next_round().unwrap();
    let push = || slow.rewake(&["push", copy.to_str().unwrap(), &url]);
    assert!(push().ends_with("; its working set was stored\n"));
    assert!(push().ends_with("under this name already\n"));

    slow.link.slow_to(SLOW / 4);
    slow.restore_with(&["--wait", "working-set"]);
    slow.link.slow_to(SLOW);
    let recorded = [&copy, &slow.stored.cached()].map(|image| fs::read(image.join(WORKING_SET)).unwrap());
    assert!(recorded[0] == recorded[1], "it comes with the image");
    slow.stored.scene.go().unwrap();
    let record = slow.answers();
    // Of requests in flight some of the rest may arrive before the last of the working set.
    let loaded = |of: &serde_json::Value, what: &str| of[what].as_u64().unwrap();
    let all = loaded(&record["loaded"], "working_set");
    let mut samples = record["sampled_loads"].as_array().unwrap().iter();
    let is_there = samples.find(|sample| loaded(sample, "working_set") == all);
    let is_there = is_there.unwrap_or_else(|| &record["loaded"]);
    let [early, rest] = [is_there, &record["loaded"]].map(|of| loaded(of, "background"));
    assert!(all > 0 && early <= rest / 2, "{early} of {rest} other bytes were loaded before\n{record}");
    let faults = record["processes"][0]["page_faults"].as_u64().unwrap();
    assert!(faults <= 16, "{faults} page faults: what the program accesses is resident\n{record}");
    slow.stored.is_complete().unwrap();
    verify(&slow.stored.cached()).unwrap();
}

#[test]
fn a_fetcher_that_is_killed_costs_no_byte() {
    let (criu, weed) = (need!(Criu::main()), need!(SeaweedServer::program()));
    let slow = SlowStore::new(&criu, &weed);
    slow.restore();
    slow.stored.scene.go().unwrap();
    let (began, mut killed) = (slow.link.passed(), None);
    for step in 1..3 {
        slow.passed(began + (step << 21));
        // The link may have carried that for the fetcher before.
        let another = || slow.stored.fetchers().into_iter().find(|fetcher| Some(*fetcher) != killed);
        let another = until(ACT, another);
        assert!(another.is_some(), "{}", slow.stored.daemon.logs());
        kill(another.unwrap(), Signal::SIGKILL).unwrap();
        killed = another;
    }
    slow.ends_well();
    assert!(slow.stored.daemon.log().matches("starting another fetcher").count() >= 2);
}

#[test]
fn a_successor_of_a_killed_worker_shares_the_fetcher() {
    let (criu, weed) = (need!(Criu::main()), need!(SeaweedServer::program()));
    let slow = SlowStore::new(&criu, &weed);
    slow.restore();
    slow.stored.scene.go().unwrap();
    slow.passed(slow.link.passed() + (2 << 20));
    let before = slow.stored.fetchers();
    let workers = workers(&slow.stored.scene);
    assert_eq!(workers.len(), 1, "{}", slow.stored.daemon.logs());
    kill(workers[0], Signal::SIGKILL).unwrap();
    slow.passed(slow.link.passed() + (2 << 20));
    assert_eq!(slow.stored.fetchers(), before);
    slow.ends_well();
}

#[test]
fn memory_waits_for_the_next_agent() {
    let (criu, weed) = (need!(Criu::main()), need!(SeaweedServer::program()));
    let mut slow = SlowStore::new(&criu, &weed);
    slow.restore();
    slow.stored.scene.go().unwrap();
    // Three quarters of the memory: 8 MiB of them at most have not arrived yet.
    slow.passed(slow.link.passed() + (12 << 20));
    slow.stored.daemon.replace().unwrap();
    slow.ends_well();
    let (read, bytes) = (slow.stored.daemon.read_from_store().unwrap(), slow.stored.bytes);
    assert!(read < bytes - (2 << 20), "{read} of {bytes} bytes: what was here was fetched again");
}

#[test]
fn an_agent_that_is_asked_to_end_waits_for_no_store() {
    let (criu, weed) = (need!(Criu::main()), need!(SeaweedServer::program()));
    let mut slow = SlowStore::new(&criu, &weed);
    let mut warm = Command::new(rewake_testkit::programs::rewake().unwrap());
    warm.args(["cache", "warm", &slow.stored.url, "--socket"]).arg(slow.stored.daemon.socket());
    let mut warm = warm.stderr(Stdio::null()).spawn().unwrap();
    slow.passed(slow.link.passed() + (1 << 20));
    slow.link.slow_to(1 << 10);
    ends(&mut slow.stored);
    assert!(!warm.wait().unwrap().success());

    let mut idle = StoredScene::new(&criu, "plain", 8).unwrap();
    assert!(idle.cache(&["warm", &idle.url]).unwrap().0);
    ends(&mut idle);
}

/// Asks an agent to end: it does so soon, and well.
fn ends(stored: &mut StoredScene) {
    stored.daemon.terminate().unwrap();
    let ended = stored.daemon.ended(END).unwrap();
    assert_eq!(ended.code(), Some(0), "{}", stored.daemon.logs());
    assert!(!stored.daemon.socket().exists());
}

#[test]
fn an_image_makes_room_only_if_no_restore_uses_it() {
    let criu = need!(Criu::main());
    let dir = tempfile::tempdir().unwrap();
    let gate = Gate::closed(dir.path().join("gate")).unwrap();
    let size = format!("{}M", MIB + MIB / 2);
    let options = DaemonOptions {
        arguments: ["--cache-size", &size].map(Into::into).to_vec(),
        ..DaemonOptions::default()
    };
    let folder = tempfile::Builder::new().prefix("rewake-cache-").tempdir().unwrap();
    let url = format!("file://{}/store/web", folder.path().display());
    let stored = StoredScene::with(&criu, "plain", MIB, (folder, url), |push| push, options).unwrap();
    let other = StoredScene::new(&criu, "plain", MIB).unwrap();

    stored.scene.go().unwrap();
    let mut command = stored.restore(&[]).unwrap();
    let held = command.arg("--action-script").arg(gate.script()).spawn().unwrap();
    assert!(gate.is_reached_by(1, ACT));
    let (succeeded, text) = stored.cache(&["warm", &other.url]).unwrap();
    assert!(!succeeded && text.contains("no space for image") && text.contains("--cache-size"), "{text}");
    let (succeeded, text) = stored.cache(&["rm", &stored.id]).unwrap();
    assert!(!succeeded && text.contains("is in use"), "{text}");
    gate.open().unwrap();
    timeline(&held.wait_with_output().unwrap()).unwrap();
    assert_eq!(stored.scene.verdict(ACT).unwrap(), Verdict::Ok);
    stored.is_complete().unwrap();

    let warmed = || stored.cache(&["warm", &other.url]).unwrap();
    let done = until(PATIENCE, || Some(warmed()).filter(|(succeeded, _)| *succeeded));
    assert!(done.is_some(), "{}", warmed().1);
    let (_, list) = stored.cache(&["ls"]).unwrap();
    assert!(list.starts_with(&other.id) && list.lines().count() == 1, "{list}");
    assert!(!stored.cached().exists());
}

#[test]
fn a_damaged_block_is_refused_and_fetched_again() {
    let criu = need!(Criu::main());
    let mut stored = StoredScene::new(&criu, "plain", MIB).unwrap();
    let (succeeded, text) = stored.cache(&["warm", &stored.url]).unwrap();
    assert!(succeeded, "{text}");
    let pages = fs::File::options().read(true).write(true).open(stored.cached().join("pages-1.img")).unwrap();
    let at = pages.metadata().unwrap().len() / 2;
    let mut byte = [0];
    pages.read_exact_at(&mut byte, at).unwrap();
    pages.write_all_at(&[byte[0] ^ 0x10], at).unwrap();

    stored.scene.go().unwrap();
    let mut command = stored.restore(&["--wait", "alive"]).unwrap();
    let output = command.output().unwrap();
    if output.status.success() {
        let verdict = stored.scene.verdict(ACT).unwrap();
        assert!(verdict.killed(), "{verdict:?} {}", said(&output));
    } else {
        // The block was met before CRIU had finished.
        assert_eq!((output.status.code(), &*stored.scene.written()), (Some(1), ""), "{}", said(&output));
    }
    let noticed = until(ACT, || stored.daemon.log().contains("has a wrong block").then_some(()));
    assert!(noticed.is_some(), "{}", stored.daemon.log());
    streamer_ended(&stored.scene).unwrap();

    stored.scene.next_round().unwrap();
    restores(&stored, &[]);
    verify(&stored.cached()).unwrap();
}

/// It is found where blocks are decompressed, or by their checksums.
#[test]
fn a_store_with_damaged_blocks_ends_a_restore_and_is_named() {
    let criu = need!(Criu::main());
    let stored = StoredScene::new(&criu, "plain", MIB).unwrap();
    let packs =
        fs::read_dir(stored.folder().join("store/packs")).unwrap().flatten().map(|entry| entry.path());
    let pack = packs.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let right = fs::read(&pack).unwrap();
    let mut wrong = right.clone();
    let middle = right.len() / 2..right.len() * 3 / 4;
    wrong[middle].iter_mut().for_each(|byte| *byte ^= 0x55);
    fs::write(&pack, wrong).unwrap();

    stored.scene.go().unwrap();
    let began = Instant::now();
    let output = stored.restore(&["--wait", "alive"]).unwrap().output().unwrap();
    if output.status.success() {
        let verdict = stored.scene.verdict(ACT).unwrap();
        assert!(verdict.killed(), "{verdict:?} {}", said(&output));
    } else {
        assert_eq!((output.status.code(), &*stored.scene.written()), (Some(1), ""), "{}", said(&output));
    }
    assert!(began.elapsed() < ACT, "{:?}", began.elapsed());
    let says = |log: &str| log.contains("`rewake verify` of its URL") || log.contains("has a wrong block");
    let said_so = until(ACT, || says(&stored.daemon.log()).then_some(()));
    assert!(said_so.is_some(), "{}", stored.daemon.log());
    streamer_ended(&stored.scene).unwrap();
    let url = format!("file://{}/store/web", stored.folder().display());
    let output = Command::new(rewake().unwrap()).args(["verify", &url]).output().unwrap();
    let pack = pack.file_name().unwrap().to_string_lossy();
    assert!(!output.status.success() && said(&output).contains(&*pack), "{}", said(&output));
}

#[test]
fn a_file_that_no_restore_can_use_is_fetched_again() {
    let criu = need!(Criu::main());
    let stored = StoredScene::new(&criu, "plain", 8).unwrap();
    assert!(stored.cache(&["warm", &stored.url]).unwrap().0);
    let files = fs::read_dir(stored.cached()).unwrap().flatten().map(|entry| entry.path());
    let is_pagemap = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("pagemap-");
    let pagemap = files.into_iter().find(is_pagemap).unwrap();
    fs::write(&pagemap, vec![7; fs::metadata(&pagemap).unwrap().len().try_into().unwrap()]).unwrap();

    let said = refused(&stored, &[]);
    assert!(said.contains(&*pagemap.to_string_lossy()) && said.lines().count() == 1, "{said}");
    restores(&stored, &[]);
    verify(&stored.cached()).unwrap();
}

#[test]
fn an_incremental_image_is_refused_and_can_be_pulled() {
    let criu = need!(Criu::main());
    let stored = StoredScene::new(&criu, "plain", 8).unwrap();
    let scene = Scene::dumped(&criu, "random", 8).unwrap();
    split(&scene.images(), "before", scene.pid(), PARENT | LAZY, false).unwrap();
    let rewake = |arguments: [&str; 3]| {
        let mut command = Command::new(rewake_testkit::programs::rewake().unwrap());
        let output = command.args(arguments.iter().filter(|argument| !argument.is_empty())).output().unwrap();
        (output.status.success(), said(&output))
    };
    let url = |name: &str| format!("file://{}/store/{name}", stored.folder().display());
    let copy = stored.folder().join("copy");
    let chain = [("before", scene.images().join("before")), ("after", scene.images())];
    for (name, images) in &chain {
        let images = images.to_str().unwrap();
        assert!(rewake(["seal", images, ""]).0 && rewake(["push", images, &url(name)]).0);
    }
    let refused = Command::new(rewake_testkit::programs::rewake().unwrap())
        .args(["restore", &url("after"), "--socket"])
        .arg(stored.daemon.socket())
        .output()
        .unwrap();
    let text = said(&refused);
    assert!(!refused.status.success() && text.lines().count() == 1, "{text}");
    assert!(text.contains("the image is incremental: copy its parent, and then the image itself"), "{text}");
    assert_eq!(stored.cache(&["ls"]).unwrap().1, "");

    for (name, place) in [("before", copy.join("before")), ("after", copy.clone())] {
        let (succeeded, text) = rewake(["pull", &url(name), place.to_str().unwrap()]);
        assert!(succeeded, "{text}");
    }
    scene.go().unwrap();
    let mut command = rewake_tests::daemon::restore(scene.criu(), &copy).unwrap();
    command.arg("-W").arg(scene.work()).args(["--", "-d", "-v4"]);
    timeline(&command.output().unwrap()).unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn a_restore_without_a_cache_says_what_to_do() {
    let criu = need!(Criu::main());
    let stored = StoredScene::new(&criu, "plain", 8).unwrap();
    let with_socket = |socket: &Path| {
        let mut command = Command::new(rewake_testkit::programs::rewake().unwrap());
        command.args(["restore", &stored.url, "--socket"]).arg(socket).args(["--", "-d"]);
        said(&command.output().unwrap())
    };
    let none = with_socket(&stored.folder().join("none"));
    assert!(none.contains("start `rewake serve --cache DIR`") && none.lines().count() == 1, "{none}");
    let plain = Daemon::start().unwrap();
    let none = with_socket(&plain.socket());
    assert!(none.contains("has no cache: start it with --cache DIR"), "{none}");

    let other = "0123456789abcdef".repeat(2);
    let text = refused(&stored, &["--id", &other]);
    assert!(text.contains(&format!("expected {other}")) && text.lines().count() == 1, "{text}");
    let (succeeded, text) = stored.cache(&["warm", &format!("{}-none", stored.url)]).unwrap();
    assert!(!succeeded && text.contains("no image of this name") && text.lines().count() == 1, "{text}");
    let (succeeded, text) = stored.cache(&["rm", &other]).unwrap();
    assert!(!succeeded && text.contains(&format!("the cache has no image {other}")), "{text}");
    let few = &stored.id[..16];
    for given in [&["rm", few][..], &["warm", &stored.url, "--id", few]] {
        let (succeeded, text) = stored.cache(given).unwrap();
        assert!(!succeeded && text.contains("or the first 32 at least"), "{text}");
    }
    let shared = stored.folder().join("shared");
    fs::create_dir(&shared).unwrap();
    let mut serve = Command::new(rewake_testkit::programs::rewake().unwrap());
    serve.arg("serve").arg("--socket").arg(stored.folder().join("s")).arg("--cache").arg(&shared);
    let text = said(&serve.output().unwrap());
    assert!(text.contains("`chmod 700`") && text.lines().count() == 1, "{text}");
    let taken = stored.folder().join("cache");
    serve = Command::new(rewake_testkit::programs::rewake().unwrap());
    serve.arg("serve").arg("--socket").arg(stored.folder().join("s")).arg("--cache").arg(&taken);
    let text = said(&serve.output().unwrap());
    assert!(text.contains("another `rewake serve` uses it"), "{text}");
}
