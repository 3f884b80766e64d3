// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore --from`: programs run while the memory of their image arrives from `rewake export` over a
//! slow link, which is cut, or lies. They see right bytes or are killed. The copy becomes an image, or is
//! completed later.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_testkit::authority::Authority;
use rewake_tests::daemon::{processes_naming, restore, timeline};
use rewake_tests::export::{
    ImageExport, fetchers, messages, pull, restore_from, seal, streamer_ended, verify, with_messages_in_file,
    workers,
};
use rewake_tests::page_server::tls_options;
use rewake_tests::printed::{HOST_A, PrintedBlock, PrintedCommand, Terminals, recipe};
use rewake_tests::process::{PATIENCE, parent, until};
use rewake_tests::relay::SlowLink;
use rewake_tests::scene::ACT;
use rewake_tests::sessions::{own_sessions, parked, recover, served_again};
use rewake_tests::{Criu, Scene, Verdict, need};

const MIB: usize = 16;
/// Bytes of a slow link in a second: the memory of a scene takes 2 s.
const SLOW: u64 = 8 << 20;
/// The name of a manifest while some of the image is missing.
const PARTIAL: &str = "rewake-manifest.partial";
const WHOLE: &str = "rewake-manifest";

/// A sealed image, its server, and a link to it.
struct Remote {
    scene: Scene,
    server: ImageExport,
    link: SlowLink,
}

impl Remote {
    /// The link lies until the streamer has ended. One lie is not enough: a block that both connections bring
    /// is used once.
    fn lies_to_the_end(&self) {
        let work = self.scene.work().display().to_string();
        let ended = until(PATIENCE, || {
            self.link.lie();
            processes_naming(&work).is_empty().then_some(())
        });
        assert!(ended.is_some(), "{}", messages(&self.scene));
    }

    fn new(criu: &Criu, scenario: &str, rate: u64) -> Self {
        Self::with(criu, scenario, rate, &[])
    }

    /// [`Remote::new`] with options for the server.
    fn with(criu: &Criu, scenario: &str, rate: u64, options: &[String]) -> Self {
        let scene = Scene::dumped(criu, scenario, MIB).unwrap();
        seal(&scene).unwrap();
        let server = ImageExport::start(scene.images().parent().unwrap(), options).unwrap();
        let link = SlowLink::to(server.port(), rate).unwrap();
        Self { scene, server, link }
    }

    fn copy(&self) -> PathBuf {
        self.scene.files().join("copy")
    }

    /// Restores it. Returns when the program runs.
    fn restore(&self) {
        let scene = &self.scene;
        let port = self.link.port();
        let mut command =
            restore_from(scene.criu(), scene, port, &self.copy(), &["--wait", "alive"]).unwrap();
        with_messages_in_file(&mut command, scene).unwrap();
        assert!(command.status().unwrap().success(), "{}{}", messages(scene), scene.logs());
    }

    /// Waits until `bytes` bytes have passed the link.
    fn passed(&self, bytes: u64) {
        let passed = until(ACT, || (self.link.passed() >= bytes).then_some(()));
        assert!(passed.is_some(), "{} {}", self.link.passed(), messages(&self.scene));
    }

    /// Supervisor and worker.
    fn streamers(&self) -> Vec<Pid> {
        let streamers = processes_naming(&self.scene.work().display().to_string());
        assert!(streamers.len() >= 2, "{}", messages(&self.scene));
        streamers
    }

    /// The program has seen right bytes, and the copy is an image.
    fn ends_well(&self) {
        assert_eq!(self.scene.verdict(ACT).unwrap(), Verdict::Ok);
        streamer_ended(&self.scene).unwrap();
        assert!(self.copy().join(WHOLE).exists(), "{}", messages(&self.scene));
        assert!(!self.copy().join(PARTIAL).exists());
        verify(&self.copy()).unwrap();
    }

    /// The copy is not complete, and `rewake pull` completes it.
    fn pull_completes(&self) {
        assert!(self.copy().join(PARTIAL).exists() && !self.copy().join(WHOLE).exists());
        let refused = restore(self.scene.criu(), &self.copy()).unwrap().output().unwrap();
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && message.contains("is not complete"), "{message}");
        let (pulled, message) = pull(self.server.port(), "images", &self.copy(), &[]).unwrap();
        assert!(pulled && !message.contains(" 0 B were here"), "{message}");
        verify(&self.copy()).unwrap();
    }
}

#[test]
fn a_program_answers_before_its_memory_has_arrived() {
    let criu = need!(Criu::main());
    let remote = Remote::new(&criu, "exit-early", SLOW / 8);
    let began = Instant::now();
    remote.restore();
    remote.scene.go().unwrap();
    assert_eq!(remote.scene.verdict(ACT).unwrap(), Verdict::Ok);
    // All of it takes 16 s.
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    streamer_ended(&remote.scene).unwrap();
    remote.pull_completes();
}

#[test]
fn the_copy_becomes_an_image_that_needs_no_server() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut remote = Remote::new(&criu, "random", SLOW * 4);
        let before = remote.link.passed();
        remote.scene.go().unwrap();
        remote.scene.stop().unwrap();
        let options: &[&str] = &[];
        let mut first =
            restore_from(&criu, &remote.scene, remote.link.port(), &remote.copy(), options).unwrap();
        timeline(&first.output().unwrap()).unwrap();
        remote.ends_well();
        let passed = remote.link.passed() - before;
        assert!(passed < (MIB as u64 + 6) << 20, "{passed} bytes for {MIB} MiB: nothing is sent twice");

        remote.scene.next_round().unwrap();
        remote.link.cut();
        fs::rename(remote.scene.images(), remote.scene.files().join("away")).unwrap();
        remote.scene.go().unwrap();
        remote.scene.stop().unwrap();
        let mut second = restore_from(&criu, &remote.scene, 1, &remote.copy(), options).unwrap();
        timeline(&second.output().unwrap()).unwrap();
        assert_eq!(remote.scene.verdict(ACT).unwrap(), Verdict::Ok);
    }
}

#[test]
fn after_a_cut_memory_arrives_over_new_connections() {
    let criu = need!(Criu::main());
    let remote = Remote::new(&criu, "random", SLOW);
    remote.restore();
    remote.scene.go().unwrap();
    for step in 1..4 {
        remote.passed(step << 22);
        remote.link.cut();
    }
    remote.scene.stop().unwrap();
    remote.ends_well();
    assert!(remote.link.has_shown_clear_text(), "it travels as it is");
    assert!(messages(&remote.scene).matches("starting another fetcher").count() >= 3);
    let passed = remote.link.passed();
    assert!(passed < (MIB as u64 + 3 * 10) << 20, "at most what was in flight was sent twice: {passed}");
}

#[test]
fn a_fetcher_that_is_killed_costs_no_byte() {
    let criu = need!(Criu::main());
    let remote = Remote::new(&criu, "random", SLOW);
    remote.restore();
    remote.scene.go().unwrap();
    for step in 1..4 {
        remote.passed(step << 22);
        let fetchers = fetchers(&remote.scene);
        assert!(!fetchers.is_empty(), "{}", messages(&remote.scene));
        fetchers.into_iter().for_each(|pid| kill(pid, Signal::SIGKILL).unwrap());
    }
    remote.scene.stop().unwrap();
    remote.ends_well();
}

#[test]
fn a_successor_of_a_killed_worker_uses_the_same_fetcher() {
    let criu = need!(Criu::main());
    let remote = Remote::new(&criu, "random", SLOW);
    remote.restore();
    remote.scene.go().unwrap();
    remote.passed(6 << 20);
    let before = fetchers(&remote.scene);
    let streamers = remote.streamers();
    let worker = streamers.iter().find(|pid| parent(**pid).is_some_and(|parent| streamers.contains(&parent)));
    kill(*worker.unwrap(), Signal::SIGKILL).unwrap();
    remote.passed(10 << 20);
    // The fetcher belongs to another process now.
    assert!(before.len() == 1 && kill(before[0], None).is_ok());
    assert!(remote.streamers().iter().all(|pid| Some(pid) != worker));
    remote.scene.stop().unwrap();
    remote.ends_well();
    assert!(!messages(&remote.scene).contains("starting another fetcher"));
}

#[test]
fn recover_continues_the_session_of_a_dead_streamer() {
    let criu = need!(Criu::main());
    own_sessions().unwrap();
    let remote = Remote::new(&criu, "random", SLOW);
    remote.restore();
    remote.scene.go().unwrap();
    remote.scene.stop().unwrap();
    assert!(parked(remote.scene.pid(), || remote.copy().join(WHOLE).exists()).unwrap());
    let streamers = remote.streamers();
    streamers.into_iter().for_each(|pid| kill(pid, Signal::SIGKILL).unwrap());
    assert!(!remote.copy().join(WHOLE).exists(), "it is killed too late");
    let output = recover().unwrap().output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && served_again(&output) == 1, "{text}");
    assert_eq!(remote.scene.verdict(ACT).unwrap(), Verdict::Ok);
    verify(&remote.copy()).unwrap();
}

#[test]
fn a_wrong_byte_ends_the_program_and_is_never_seen() {
    let criu = need!(Criu::main());
    let remote = Remote::new(&criu, "random", SLOW);
    remote.restore();
    remote.scene.go().unwrap();
    remote.passed(6 << 20);
    remote.lies_to_the_end();
    let verdict = remote.scene.verdict(ACT).unwrap();
    assert!(verdict.killed(), "{verdict:?}");
    streamer_ended(&remote.scene).unwrap();
    let text = messages(&remote.scene);
    let is_it = |line: &&str| line.contains("ending the restored processes of");
    let line = text.lines().find(is_it).unwrap_or_else(|| panic!("no reason: {text}"));
    assert!(line.contains("some are not those that were sealed"), "{line}");
    remote.pull_completes();
}

#[test]
fn a_copy_whose_session_was_killed_is_completed() {
    let criu = need!(Criu::main());
    let mut remote = Remote::new(&criu, "random", SLOW);
    remote.restore();
    remote.scene.go().unwrap();
    remote.passed(10 << 20);
    remote.streamers().into_iter().for_each(|pid| kill(pid, Signal::SIGKILL).unwrap());
    remote.scene.next_round().unwrap();

    // The next restore fetches only what is missing.
    let before = remote.link.passed();
    remote.scene.go().unwrap();
    remote.scene.stop().unwrap();
    remote.restore();
    remote.ends_well();
    let passed = remote.link.passed() - before;
    assert!(passed < 14 << 20, "{passed}");
}

/// A program that has all of its memory, while five sixths of its image still arrive.
fn all_resident(criu: &Criu) -> Remote {
    let remote = Remote::new(criu, "dense-unmap", SLOW / 2);
    remote.restore();
    remote.scene.go().unwrap();
    let pid = remote.scene.pid();
    let is_socket = |fd: fs::DirEntry| {
        fs::read_link(fd.path()).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))
    };
    let depends_on_no_streamer = || {
        let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let mut descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        (!maps.contains(" um ") && !descriptors.any(is_socket)).then_some(())
    };
    assert!(until(ACT, depends_on_no_streamer).is_some(), "{}", messages(&remote.scene));
    assert!(remote.copy().join(PARTIAL).exists());
    remote
}

#[test]
fn a_dump_does_not_wait_for_the_rest_of_the_image() {
    let criu = need!(Criu::main());
    let remote = all_resident(&criu);
    let again = remote.scene.files().join("again");
    fs::create_dir(&again).unwrap();
    remote.scene.dump_with(&again, &[]).unwrap();
    assert!(remote.copy().join(PARTIAL).exists());
    // The streamer has no more targets, and ends when it is asked to.
    let streamers = processes_naming(&remote.scene.work().display().to_string());
    for pid in streamers {
        // One of them may end with another one.
        let sent = kill(pid, Signal::SIGTERM);
        assert!(matches!(sent, Ok(()) | Err(Errno::ESRCH)), "{sent:?}");
    }
    streamer_ended(&remote.scene).unwrap();
    remote.pull_completes();
}

#[test]
fn a_lie_after_all_is_resident_makes_no_image() {
    let criu = need!(Criu::main());
    let remote = all_resident(&criu);
    remote.lies_to_the_end();
    let text = messages(&remote.scene);
    assert!(text.contains("are not those that the manifest proves: `rewake pull` brings them"), "{text}");
    remote.scene.stop().unwrap();
    assert_eq!(remote.scene.verdict(ACT).unwrap(), Verdict::Ok);
    remote.pull_completes();
}

#[test]
fn a_worker_killed_after_all_is_resident_loses_no_byte() {
    let criu = need!(Criu::main());
    let remote = all_resident(&criu);
    let workers = workers(&remote.scene);
    assert_eq!(workers.len(), 1, "{}", messages(&remote.scene));
    kill(workers[0], Signal::SIGKILL).unwrap();
    streamer_ended(&remote.scene).unwrap();
    remote.scene.stop().unwrap();
    assert_eq!(remote.scene.verdict(ACT).unwrap(), Verdict::Ok);
    let text = messages(&remote.scene);
    assert!(
        text.contains("the image is not complete") && text.contains("`rewake pull` brings them"),
        "{text}"
    );
    remote.pull_completes();
}

#[test]
fn an_image_that_is_replaced_on_the_server_is_served_on() {
    let criu = need!(Criu::main());
    let remote = Remote::new(&criu, "random", SLOW);
    remote.restore();
    let (images, away) = (remote.scene.images(), remote.scene.files().join("away"));
    fs::rename(&images, &away).unwrap();
    fs::create_dir(&images).unwrap();
    fs::copy(away.join("inventory.img"), images.join("inventory.img")).unwrap();
    seal(&remote.scene).unwrap();
    // Its page faults are the first that are requested of the server.
    remote.scene.go().unwrap();
    remote.scene.stop().unwrap();
    remote.ends_well();
}

#[test]
fn memory_travels_encrypted_and_only_from_the_right_host() {
    let criu = need!(Criu::main());
    let authority = Authority::new();
    let [host, client, other] =
        ["127.0.0.1", "host-b", "192.0.2.9"].map(|name| authority.issue(|request| request.address(name)));
    let remote = Remote::with(&criu, "random", SLOW * 4, &tls_options(&authority, &host));
    let client = tls_options(&authority, &client);
    let options: Vec<&str> = client.iter().map(String::as_str).collect();
    remote.scene.go().unwrap();
    remote.scene.stop().unwrap();
    let port = remote.link.port();
    let mut command = restore_from(&criu, &remote.scene, port, &remote.copy(), &options).unwrap();
    timeline(&command.output().unwrap()).unwrap();
    remote.ends_well();
    assert!(!remote.link.has_shown_clear_text(), "it travels encrypted");

    let images = remote.scene.images();
    let imposter = ImageExport::start(images.parent().unwrap(), &tls_options(&authority, &other)).unwrap();
    let empty = remote.scene.files().join("empty");
    let mut command = restore_from(&criu, &remote.scene, imposter.port(), &empty, &options).unwrap();
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && message.contains("(192.0.2.9): expected 127.0.0.1"), "{message}");
    assert!(!empty.join("pages-1.img").exists());
}

/// The printed commands, with each host's own folder in the place of `/srv/images`.
fn printed(block: &PrintedBlock, terminals: &Terminals) -> Vec<PrintedCommand> {
    let mut commands = block.commands();
    for PrintedCommand { host, line } in &mut commands {
        *line = line.replace("/srv/images", &terminals.folder(host).join("images").display().to_string());
    }
    commands
}

#[test]
fn the_printed_commands_bring_an_image_of_another_host() {
    let criu = need!(Criu::main());
    let mut terminals = Terminals::open(&criu, 8).unwrap();
    terminals.make_certificates().unwrap();
    let image = terminals.folder("hostA").join("images/web/1");
    fs::create_dir_all(&image).unwrap();
    let dump = format!("criu dump -t {} -D {}", terminals.migration.pid(), image.display());
    terminals.run(&PrintedCommand { host: "hostA".into(), line: dump }).unwrap();

    let values = [("HOST-A", HOST_A)];
    let [seal, export, pull, restore] = &printed(&recipe("pull", &values), &terminals)[..] else {
        panic!("pull")
    };
    terminals.run(seal).unwrap();
    let mut server = terminals.type_in(export).unwrap();
    terminals.listens(&mut server, "hostA", 7913).unwrap();
    terminals.run(pull).unwrap();
    terminals.run(restore).unwrap();
    terminals.end("target").unwrap();
    terminals.end("rewake").unwrap();
    fs::remove_dir_all(terminals.folder("hostB").join("images")).unwrap();

    let [allow] = &printed(&recipe("allow", &values), &terminals)[..] else { panic!("allow") };
    let mut server = terminals.type_in(allow).unwrap();
    terminals.listens(&mut server, "hostA", 7913).unwrap();
    let [_, restore] = &printed(&recipe("restore-from", &values), &terminals)[..] else {
        panic!("restore-from")
    };
    terminals.run(restore).unwrap();
    terminals.migration.expect_right_bytes().unwrap();
}
