// SPDX-License-Identifier: MIT OR Apache-2.0
//! Both plugins in one folder, as CRIU loads them, with a session that the test itself provides: a note, and
//! an fd store whose queue holds a userfaultfd.

use std::ffi::OsStr;
use std::fs;
use std::io::IoSlice;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair};
use nix::sys::stat::fstat;
use nix::unistd::Pid;
use rewake_plugin_protocol::{
    ANY_TASK, FileId, Phase, ProcessId, SESSIONS, SessionNote, Store, own_pid_namespace,
};
use rewake_ptrace_inject::with_stopped;
use rewake_tests::plugins::{amdgpu, rewake};
use rewake_tests::process::{run, session, until};
use rewake_tests::scene::{ACT, END};
use rewake_tests::server::Setup;
use rewake_tests::sessions::own_sessions;
use rewake_tests::{Criu, Scene, Verdict, need, need_no_gpu};
use rewake_uffd::Uffd;

/// How long a thread may take to stop on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
const WAITS: &str = "has memory that streamer";

/// A session.
struct Session {
    note: SessionNote,
    /// The store, and the socket that the userfaultfd was sent from.
    sockets: (OwnedFd, OwnedFd),
}

impl Session {
    /// A session whose page server listens in `work`.
    fn new(work: &Path) -> Self {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let (other, store) = socketpair(AddressFamily::Unix, kind, None, flags).unwrap();
        let uffd = Uffd::open(0).unwrap();
        let rights = [uffd.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&rights)];
        sendmsg::<()>(other.as_raw_fd(), &[IoSlice::new(b"u")], &rights, MsgFlags::empty(), None).unwrap();
        let starter = ProcessId::of(std::process::id().cast_signed()).unwrap().unwrap();
        let of_note = Store { number: store.as_raw_fd(), inode: fstat(&store).unwrap().st_ino };
        let note = SessionNote {
            folder: starter.to_string(),
            starter,
            pid_namespace: own_pid_namespace().unwrap(),
            work: FileId::of(work).unwrap(),
            phase: Phase::Running,
            stores: vec![(ANY_TASK, of_note)],
        };
        note.write(Path::new(SESSIONS)).unwrap();
        Self { note, sockets: (store, other) }
    }

    /// Parks the store in a process.
    fn park(&self, pid: Pid) {
        let store = self.sockets.0.as_fd();
        with_stopped(pid.as_raw(), PATIENCE, |stopped| stopped.give(store)).unwrap().unwrap();
    }

    /// Unparks it, as when all is resident.
    fn unpark(&self, pid: Pid) {
        let number = self.held_by(pid).unwrap_or_else(|| panic!("process {pid} does not hold the store"));
        with_stopped(pid.as_raw(), PATIENCE, |stopped| stopped.close(number)).unwrap().unwrap();
    }

    fn held_by(&self, pid: Pid) -> Option<i32> {
        self.note.held_by(pid.as_raw()).unwrap()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.note.remove(Path::new(SESSIONS));
    }
}

/// A folder with both plugins.
fn plugins(folder: &Path) -> PathBuf {
    let plugins = folder.join("plugins");
    fs::create_dir_all(&plugins).unwrap();
    fs::copy(amdgpu().unwrap(), plugins.join("amdgpu_plugin.so")).unwrap();
    fs::copy(rewake().unwrap(), plugins.join("rewake_plugin.so")).unwrap();
    plugins
}

/// Lines of a log of CRIU that hold a text.
fn lines(log: &Path, text: &str) -> Vec<String> {
    let log = String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned();
    log.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
}

/// Restores a scene with both plugins.
fn restore(criu: &Criu, scene: &Scene) {
    let plugins = plugins(&scene.files());
    criu.restore_with(&scene.images(), &scene.work(), &[OsStr::new("-L"), plugins.as_os_str()]).unwrap();
}

/// The real page server is the session here: the plugin parks in every task, and the page server unparks.
fn restored_with_the_store(scenario: &str) {
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::dumped(&criu, scenario, 16).unwrap();
        let mut server = scene.serve().unwrap();
        restore(&criu, &scene);
        let tasks = session(scene.pid());
        assert!(tasks.contains(&scene.pid()), "{tasks:?}");
        let log = scene.work().join("restore.log");
        let said = lines(&log, "is parked, as descriptor");
        assert_eq!(said.len(), tasks.len(), "{said:?}");
        assert!(lines(&log, "Warn  (rewake_plugin)").is_empty(), "{:?}", lines(&log, "rewake_plugin"));
        scene.go().unwrap();
        scene.expect_good_end(&mut server).unwrap();
    }
}

#[test]
fn a_restored_task_has_the_fd_store_when_it_first_runs() {
    restored_with_the_store("plain");
}

#[test]
fn a_task_with_threads_has_the_fd_store_too() {
    restored_with_the_store("threads");
}

#[test]
fn every_task_of_a_tree_has_the_fd_store() {
    restored_with_the_store("tree");
}

#[test]
fn a_restore_that_no_session_serves_is_left_alone() {
    let criu = need!(Criu::main());
    own_sessions().unwrap();
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    // The note of another restore.
    let elsewhere = Session::new(&scene.images());
    let mut command = criu.command("restore");
    command.args(["-d", "-v4", "-o", "restore.log", "-D"]).arg(scene.images()).arg("-W").arg(scene.work());
    command.arg("-L").arg(plugins(&scene.files()));
    assert!(run(&mut command, ACT).unwrap().success());
    assert_eq!(elsewhere.held_by(scene.pid()), None);
    let said = lines(&scene.work().join("restore.log"), "rewake_plugin: ");
    assert!(said.is_empty(), "{said:?}");
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

/// A restored scene whose tasks hold the store of a session, and a folder for its next image.
struct Restored {
    scene: Scene,
    session: Session,
    plugins: PathBuf,
    image: PathBuf,
}

impl Restored {
    fn new(criu: &Criu, scenario: &str) -> Self {
        // A streamer has one note, and other tests of this program write theirs.
        own_sessions().unwrap();
        let scene = Scene::dumped(criu, scenario, 16).unwrap();
        let mut server = scene.serve().unwrap();
        scene.restore().unwrap();
        // The page server loads all memory and ends; then the test plays a session that has some left.
        assert!(server.ended(END).unwrap().success(), "{}", server.text());
        let session = Session::new(&scene.work());
        rewake_tests::process::session(scene.pid()).into_iter().for_each(|task| session.park(task));
        let plugins = plugins(&scene.files());
        let image = scene.files().join("image");
        fs::create_dir(&image).unwrap();
        Self { scene, session, plugins, image }
    }

    /// `criu dump` with plugins from a folder, or `criu pre-dump`.
    fn dump(&self, criu: &Criu, act: &str, plugins: &Path) -> Command {
        let mut command = criu.command(act);
        command.args(["-t", &self.scene.pid().to_string(), "-v4", "-o", "dump.log", "-D"]).arg(&self.image);
        command.arg("-L").arg(plugins).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn log(&self, text: &str) -> Vec<String> {
        lines(&self.image.join("dump.log"), text)
    }

    /// Checks that every task runs and has no tracer.
    fn runs(&self) {
        for task in session(self.scene.pid()) {
            let status = fs::read_to_string(format!("/proc/{task}/status")).unwrap();
            assert!(status.contains("TracerPid:\t0\n") && !status.contains("State:\tT"), "{status}");
        }
    }

    /// Waits until a dump waits.
    fn waits(&self, dump: &mut Child) {
        let said = || {
            assert_eq!(dump.try_wait().unwrap(), None, "{:?}", self.log("Error"));
            (!self.log("the dump waits until").is_empty()).then_some(())
        };
        until(ACT, said).unwrap_or_else(|| panic!("it does not say that it waits: {:?}", self.log("")));
    }
}

#[test]
fn a_dump_waits_for_missing_memory_of_the_whole_tree() {
    need_no_gpu!();
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut of = Restored::new(&criu, "tree");
        let tasks = session(of.scene.pid());
        let mut dump = of.dump(&criu, "dump", &of.plugins).spawn().unwrap();
        of.waits(&mut dump);
        // The last of them that has missing memory is a child.
        let (last, others) = tasks.split_last().unwrap();
        others.iter().for_each(|task| of.session.unpark(*task));
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(dump.try_wait().unwrap(), None);
        of.runs();
        assert!(of.log("Seized task").is_empty() && of.log("PAUSE_DEVICES").is_empty(), "nothing is stopped");
        of.session.unpark(*last);
        assert!(dump.wait().unwrap().success(), "{:?}", of.log("Error"));
        assert_eq!(
            of.log("all memory of the tree is resident after").len(),
            1,
            "{:?}",
            of.log("rewake_plugin")
        );
        of.scene.kill_restored();
        of.scene.next_round().unwrap();
        let mut server = Setup::new(&criu, &of.image, &of.scene.work()).unwrap().listening().unwrap();
        of.scene.restore_from(&criu, &of.image).unwrap();
        of.scene.go().unwrap();
        of.scene.expect_good_end(&mut server).unwrap();
    }
}

#[test]
fn after_the_time_limit_a_dump_fails_with_either_plugin() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let of = Restored::new(&criu, "plain");
        for name in ["amdgpu_plugin", "rewake_plugin"] {
            let alone = of.image.join(name);
            fs::create_dir(&alone).unwrap();
            let file = format!("{name}.so");
            fs::copy(of.plugins.join(&file), alone.join(&file)).unwrap();
            let status = of.dump(&criu, "dump", &alone).env("REWAKE_DUMP_WAIT", "1").status().unwrap();
            assert!(!status.success());
            let said = of.log(&format!("Error ({name}): init: "));
            let expected = format!("process {} (target) {WAITS} {}", of.scene.pid(), std::process::id());
            assert!(said.len() == 1 && said[0].contains(&expected), "{said:?} in {:#?}", of.log("Error"));
            assert!(said[0].contains("REWAKE_DUMP_WAIT allows no more: dump it later"), "{said:?}");
            of.runs();
        }
        of.scene.go().unwrap();
        assert_eq!(of.scene.verdict(ACT).unwrap(), Verdict::Ok);
    }
}

#[test]
fn criu_refuses_to_dump_a_task_with_a_parked_userfaultfd() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let of = Restored::new(&criu, "plain");
        let none = of.image.join("none");
        fs::create_dir(&none).unwrap();
        assert!(!of.dump(&criu, "dump", &none).status().unwrap().success());
        assert!(!of.log("[userfaultfd]").is_empty(), "{:?}", of.log("Error"));
        of.runs();
        of.scene.go().unwrap();
        assert_eq!(of.scene.verdict(ACT).unwrap(), Verdict::Ok);
    }
}

#[test]
fn a_pre_dump_does_not_wait() {
    let criu = need!(Criu::main());
    let of = Restored::new(&criu, "plain");
    // It fails where the kernel does not track writes; reaching that point is enough.
    let mut pre_dump = of.dump(&criu, "pre-dump", &of.plugins).spawn().unwrap();
    let ended = until(ACT, || pre_dump.try_wait().unwrap());
    assert!(ended.is_some(), "{:?}", of.log("rewake_plugin"));
    assert!(of.log(WAITS).is_empty() && !of.log("Seized task").is_empty(), "{:?}", of.log(""));
    assert!(of.session.held_by(of.scene.pid()).is_some());
}

#[test]
fn a_signal_ends_a_dump_that_waits_and_nothing_was_stopped() {
    let criu = need!(Criu::main());
    let of = Restored::new(&criu, "plain");
    let mut dump = of.dump(&criu, "dump", &of.plugins).spawn().unwrap();
    of.waits(&mut dump);
    dump.kill().unwrap();
    dump.wait().unwrap();
    of.runs();
    of.scene.go().unwrap();
    assert_eq!(of.scene.verdict(ACT).unwrap(), Verdict::Ok);
}
