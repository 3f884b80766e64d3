// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores from a page server whose link is slow or is cut, whose server, fetcher or streamer is killed:
//! targets see right bytes or are killed, and a program that was dumped for them is resumed or killed, but
//! never runs while they run.
//!
//! `REWAKE_KILLS` is the number of kills (default 12), `REWAKE_SEED` repeats the moments of another run.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_tests::lazy_source::{LazyDump, NamespacedRestore, PipeLimit};
use rewake_tests::page_server::{PageServer, client_options};
use rewake_tests::process::{children, until, wait_child};
use rewake_tests::random::{count, is_share, moment, seed};
use rewake_tests::relay::SlowLink;
use rewake_tests::scene::{ACT, END};
use rewake_tests::server::{Server, rewake};
use rewake_tests::sessions::{own_sessions, parked, recover};
use rewake_tests::{Criu, Random, Scene, Verdict, images, need};

const MIB: usize = 24;
/// Bytes of a slow link in a second: the background load of a scene takes seconds.
const SLOW: u64 = 4 << 20;

fn served(scene: &Scene) -> std::path::PathBuf {
    let served = scene.files().join("served");
    images::copy(&scene.images(), &served).unwrap();
    images::spoil_lazy_pages(&scene.images()).unwrap();
    served
}

fn client(scene: &Scene, port: u16) -> Server {
    let setup = scene.setup().unwrap();
    client_options(port).iter().fold(setup, |setup, option| setup.with(option)).listening().unwrap()
}

/// Waits until `bytes` bytes have passed a link.
fn passed(link: &SlowLink, bytes: u64) {
    assert!(until(ACT, || (link.passed() >= bytes).then_some(())).is_some(), "{}", link.passed());
}

/// The line that says why a session ended.
fn complaint(client: &Server) -> String {
    let text = client.text();
    let line = text.lines().find(|line| line.contains("ending the restored processes of"));
    line.unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[test]
fn a_demanded_page_overtakes_a_slow_background_load() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "exit-early", MIB).unwrap();
    let mut server = PageServer::ours(&served(&scene), &["--lazy-pages"]).unwrap();
    let link = SlowLink::to(server.port(), SLOW / 4).unwrap();
    let mut client = client(&scene, link.port());
    scene.restore().unwrap();
    passed(&link, 1 << 20);
    let began = Instant::now();
    scene.go().unwrap();
    scene.expect_good_end(&mut client).unwrap();
    // All of it takes 24 s.
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
}

#[test]
fn a_page_server_that_is_killed_ends_the_session_with_one_line() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let server = PageServer::ours(&served(&scene), &["--lazy-pages"]).unwrap();
    let link = SlowLink::to(server.port(), SLOW).unwrap();
    let mut client = client(&scene, link.port());
    scene.go().unwrap();
    scene.restore().unwrap();
    passed(&link, 1 << 20);
    server.signal(Signal::SIGKILL).unwrap();
    let verdict = scene.verdict(ACT).unwrap();
    assert!(verdict.killed(), "{verdict:?}");
    assert_eq!(client.ended(END).unwrap().code(), Some(1));
    let line = complaint(&client);
    assert!(line.contains("page server 127.0.0.1:"), "{line}");
}

/// The cache file of a session whose memory comes from a page server: it has no name.
fn cache_file(client: &mut Server) -> fs::File {
    let mut open = client.processes().into_iter().flat_map(|pid| {
        let folder = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
        folder.flatten().map(|entry| entry.path()).collect::<Vec<_>>()
    });
    let is_cache = |path: &std::path::PathBuf| {
        let link = fs::read_link(path).unwrap_or_default();
        link.to_string_lossy().ends_with("(deleted)")
            && fs::metadata(path).is_ok_and(|of| of.is_file() && of.len() >= (MIB as u64) << 20)
    };
    let path = open.find(is_cache).unwrap();
    fs::OpenOptions::new().write(true).open(path).unwrap()
}

/// A disk that loses what was written to it: here another program writes zeros over it.
#[test]
fn bytes_that_the_disk_has_lost_end_the_session() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let server = PageServer::ours(&served(&scene), &["--lazy-pages"]).unwrap();
    let link = SlowLink::to(server.port(), SLOW).unwrap();
    let mut client = client(&scene, link.port());
    let disk = cache_file(&mut client);
    scene.go().unwrap();
    scene.restore().unwrap();
    let zeros = vec![0; 1 << 20];
    let end = Instant::now() + ACT;
    while !client.text().contains("ending the restored processes of") {
        assert!(Instant::now() < end, "{}", client.text());
        (0..MIB as u64).for_each(|at| disk.write_all_at(&zeros, at << 20).unwrap());
    }
    assert_eq!(client.ended(END).unwrap().code(), Some(1));
    let verdict = scene.verdict(ACT).unwrap();
    assert!(verdict.killed(), "{verdict:?}");
    let line = complaint(&client);
    assert!(line.contains("pages of the page server") && line.contains("not those that arrived"), "{line}");
}

#[test]
fn after_a_cut_the_load_continues_over_a_new_connection() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let server = PageServer::ours(&served(&scene), &["--lazy-pages", "--keep-listening"]).unwrap();
    let link = SlowLink::to(server.port(), SLOW).unwrap();
    let mut client = client(&scene, link.port());
    scene.go().unwrap();
    scene.restore().unwrap();
    for step in 1..4 {
        passed(&link, step << 21);
        link.cut();
    }
    scene.stop().unwrap();
    scene.expect_good_end(&mut client).unwrap();
    // At most what was in flight was sent twice.
    let most = (MIB as u64 + 4) << 20;
    assert!(link.passed() < most, "{} bytes for {MIB} MiB", link.passed());
    assert!(client.text().matches("starting another fetcher").count() >= 3, "{}", client.text());
}

#[test]
fn a_fetcher_killed_at_random_moments_costs_no_byte() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let served = served(&scene);
    let server = PageServer::ours(&served, &["--lazy-pages", "--keep-listening"]).unwrap();
    let mut random = Random::new(seed());
    let (mut hits, rounds) = (0, count("REWAKE_KILLS", 2));
    for _ in 0..rounds {
        let link = SlowLink::to(server.port(), SLOW * 8).unwrap();
        let mut client = client(&scene, link.port());
        scene.go().unwrap();
        scene.stop().unwrap();
        std::thread::scope(|scope| {
            let restore = scope.spawn(|| scene.restore());
            moment(Duration::from_millis(1500), &mut random);
            // It may have ended.
            let fetcher = client.fetcher();
            fetcher.into_iter().for_each(|pid| {
                let _ = kill(pid, Signal::SIGKILL);
            });
            restore.join().unwrap().unwrap();
        });
        scene.expect_good_end(&mut client).unwrap();
        hits += usize::from(client.text().contains("starting another fetcher"));
        scene.next_round().unwrap();
    }
    assert!(is_share(hits, 8, rounds), "{hits} of {rounds} kills came while a fetcher ran");
}

#[test]
fn a_successor_of_a_killed_worker_uses_the_same_connection() {
    let _limit = need!(PipeLimit::raised());
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let mut server = PageServer::stock(&criu, &served(&scene), &["--lazy-pages"]).unwrap();
    let link = SlowLink::to(server.port(), SLOW).unwrap();
    let mut client = client(&scene, link.port());
    scene.go().unwrap();
    scene.stop().unwrap();
    scene.restore().unwrap();
    for step in 1..3 {
        passed(&link, step << 21);
        assert!(client.kill_worker());
    }
    scene.expect_good_end(&mut client).unwrap();
    assert!(client.text().contains("starting a successor"), "{}", client.text());
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
}

#[test]
fn recover_uses_the_fetcher_of_a_dead_streamer() {
    let criu = need!(Criu::main());
    own_sessions().unwrap();
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let mut server = PageServer::ours(&served(&scene), &["--lazy-pages"]).unwrap();
    let link = SlowLink::to(server.port(), SLOW).unwrap();
    let mut client = client(&scene, link.port());
    scene.go().unwrap();
    scene.stop().unwrap();
    scene.restore().unwrap();
    assert!(parked(scene.pid(), || client.text().contains("all CPU memory is resident")).unwrap());
    client.signal_group(Signal::SIGKILL).unwrap();
    client.all_ended(END).unwrap();
    let output = recover().unwrap().output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
}

/// A dump that waits, and the restore of its program, whose memory comes over a slow link.
struct Migration {
    scene: Scene,
    dump: LazyDump,
    link: SlowLink,
    client: Server,
}

impl Migration {
    fn waiting(criu: &Criu) -> Self {
        let scene = Scene::started(criu, "random", MIB).unwrap();
        let dump = LazyDump::listening(&scene).unwrap();
        let link = SlowLink::to_one(dump.port(), SLOW).unwrap();
        let client = client(&scene, link.port());
        Self { scene, dump, link, client }
    }

    fn restore(&self) -> NamespacedRestore {
        let Self { scene, .. } = self;
        NamespacedRestore::start(scene.criu(), &scene.images(), &scene.work()).unwrap()
    }

    /// Waits until `bytes` bytes have passed the link.
    fn passed(&self, bytes: u64) {
        let Self { dump, link, client, .. } = self;
        let passed = until(ACT, || (link.passed() >= bytes).then_some(()));
        assert!(passed.is_some(), "{} bytes\n{}\n{}", link.passed(), client.text(), dump.text());
    }

    /// The dump has failed, and its program runs again and has right bytes.
    fn source_is_resumed(mut self) {
        assert_eq!(self.dump.ended().unwrap().code(), Some(1), "{}", self.dump.text());
        self.scene.go().unwrap();
        self.scene.stop().unwrap();
        assert_eq!(self.scene.verdict(ACT).unwrap(), Verdict::Ok);
    }
}

/// Whether a process is stopped or traced.
fn is_held(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:\tT") || line.starts_with("State:\tt"))
}

#[test]
fn a_copy_without_fetcher_is_killed_and_its_source_resumed() {
    let _limit = need!(PipeLimit::raised());
    for criu in Criu::both() {
        let mut migration = Migration::waiting(&need!(criu));
        let mut restore = migration.restore();
        migration.passed(1 << 20);
        let Migration { scene, client, .. } = &mut migration;
        assert!(is_held(scene.pid()), "the source waits while the copy is loaded");
        kill(client.fetcher().unwrap(), Signal::SIGKILL).unwrap();
        // A new connection is tried for 5 s.
        std::thread::sleep(Duration::from_secs(1));
        assert!(is_held(scene.pid()), "the source waits while its copy lives");
        assert_eq!(client.ended(END).unwrap().code(), Some(1));
        assert!(complaint(client).contains("connecting again"), "{}", complaint(client));
        restore.ended().unwrap();
        migration.source_is_resumed();
    }
}

#[test]
fn a_restore_that_fails_early_leaves_the_dump_waiting() {
    let _limit = need!(PipeLimit::raised());
    for criu in Criu::both() {
        let Migration { mut scene, mut dump, link, mut client } = Migration::waiting(&need!(criu));
        // The frozen program has its pid.
        scene.restore().unwrap_err();
        assert_eq!(client.ended(END).unwrap().code(), Some(1), "{}", client.text());
        assert!(is_held(scene.pid()), "{}", dump.text());
        scene.next_work().unwrap();
        let mut client = self::client(&scene, link.port());
        scene.go().unwrap();
        scene.stop().unwrap();
        let mut restore = NamespacedRestore::start(scene.criu(), &scene.images(), &scene.work()).unwrap();
        assert_eq!(client.ended(END).unwrap().code(), Some(0), "{}", client.text());
        assert_eq!(dump.ended().unwrap().code(), Some(0), "{}", dump.text());
        restore.ended().unwrap();
        assert!(scene.written().contains("OK"), "{}", scene.written());
    }
}

/// A client that uses a connected unix socket.
struct SocketClient(Child);

impl SocketClient {
    fn listening(scene: &Scene, socket: UnixStream) -> Self {
        let mut command = Command::new(rewake().unwrap());
        command.args(["lazy-pages", "--page-server", "--ps-socket", "0", "-o", "lazy.log", "-D"]);
        command.arg(scene.images()).arg("-W").arg(scene.work());
        command.stdin(OwnedFd::from(socket)).stderr(Stdio::null());
        let client = Self(command.spawn().unwrap());
        drop(command);
        let socket = scene.work().join("lazy-pages.socket");
        until(ACT, || socket.exists().then_some(())).expect("a client that listens");
        client
    }

    fn fetcher(&self) -> Option<Pid> {
        let is_fetcher = |pid: &Pid| {
            fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"\0fetcher\0"))
        };
        children(Pid::from_raw(self.0.id().cast_signed())).into_iter().flat_map(children).find(is_fetcher)
    }
}

impl Drop for SocketClient {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A unix socket has no setting for that: CRIU would take its end for success, and kill the program.
#[test]
fn a_failed_restore_over_a_unix_socket_resumes_the_source() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::started(&criu, "random", 64).unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let mut dump = LazyDump::through(&scene, near.into()).unwrap();
        let mut client = SocketClient::listening(&scene, far);
        let mut restore = NamespacedRestore::start(scene.criu(), &scene.images(), &scene.work()).unwrap();
        let fetcher = until(ACT, || client.fetcher()).expect("a fetcher");
        kill(fetcher, Signal::SIGKILL).unwrap();
        assert_eq!(wait_child(&mut client.0, END).unwrap().code(), Some(1));
        restore.ended().unwrap();
        assert_eq!(dump.ended().unwrap().code(), Some(1), "{}", dump.text());
        scene.go().unwrap();
        scene.stop().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    }
}
