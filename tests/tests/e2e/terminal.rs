// SPDX-License-Identifier: MIT OR Apache-2.0
//! The terminal or the pipe of who runs a command: a daemon releases it, and no work needs it.

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread::spawn;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_tests::daemon::restore;
use rewake_tests::export::STREAMER_LOG;
use rewake_tests::process::{PATIENCE, processes_naming, until, wait_child, wait_pid};
use rewake_tests::scene::{ACT, END};
use rewake_tests::server::{rewake, with_status_fd};
use rewake_tests::{Criu, Scene, Verdict, need};

/// Runs a command that leaves a daemon, as `$(...)` and ssh do: until no process has its output any more.
fn captured(command: &mut Command) -> String {
    let (mut output, end) = io::pipe().unwrap();
    command.stdout(end.try_clone().unwrap()).stderr(end);
    let mut child = command.spawn().unwrap();
    // The command has its ends of the pipe as long as its standard descriptors are kept here.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let (sender, receiver) = channel();
    spawn(move || {
        let mut text = String::new();
        let read = output.read_to_string(&mut text);
        let _ = sender.send(read.map(|_| text));
    });
    let text = receiver.recv_timeout(PATIENCE).expect("no process keeps the output").unwrap();
    assert!(wait_child(&mut child, PATIENCE).unwrap().success(), "{command:?}: {text}");
    text
}

fn descriptor(pid: Pid, number: u32) -> PathBuf {
    fs::read_link(format!("/proc/{pid}/fd/{number}")).unwrap()
}

/// Whether all processes with this path in their command line have released the terminal.
fn have_released(of: &Path, errors_to: &Path) {
    let daemons = processes_naming(of.to_str().unwrap());
    assert!(!daemons.is_empty(), "it serves");
    for pid in daemons {
        assert_eq!(descriptor(pid, 0), Path::new("/dev/null"), "{pid}");
        assert!(!descriptor(pid, 1).starts_with("/dev/pts"), "{pid}");
        assert_eq!(descriptor(pid, 2), errors_to, "{pid}");
    }
}

#[test]
fn a_daemon_releases_the_output_of_who_started_it() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let [images, received, socket] = [scene.images(), at("received"), at("socket")];
    fs::create_dir(&received).unwrap();
    let acts: [&[&str]; 3] = [
        &["lazy-pages", "-D", images.to_str().unwrap(), "-W", folder.path().to_str().unwrap()],
        &["page-server", "-D", received.to_str().unwrap(), "--address", "127.0.0.1"],
        &["serve", "--socket", socket.to_str().unwrap()],
    ];
    for act in acts {
        for log in [Some(at("log")), None] {
            let pidfile = at(&format!("{}-{}", act[0], log.is_some()));
            let mut command = Command::new(rewake().unwrap());
            command
                .args(act)
                .arg("-d")
                .arg("--pidfile")
                .arg(&pidfile)
                .args(log.iter().flat_map(|log| [Path::new("-o").as_os_str(), log.as_os_str()]));
            // The reader of this descriptor waits for its end, too.
            let (mut ready, status) = io::pipe().unwrap();
            captured(&mut with_status_fd(&command, status.into()));
            let mut bytes = Vec::new();
            ready.read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes, [0], "{command:?}");
            let pid: i32 = fs::read_to_string(&pidfile).unwrap().trim().parse().unwrap();
            have_released(&pidfile, log.as_deref().unwrap_or_else(|| Path::new("/dev/null")));
            kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
            until(END, || processes_naming(pidfile.to_str().unwrap()).is_empty().then_some(()))
                .expect("it ends when asked");
        }
    }
}

#[test]
fn a_restore_that_has_returned_keeps_no_output() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let mut command = restore(&criu, &scene.images()).unwrap();
    command.args(["--on-demand-only=3600", "--wait=alive", "-W"]).arg(scene.work()).args(["--", "-d"]);
    captured(&mut command);
    have_released(&scene.work(), &scene.work().join(STREAMER_LOG));
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

/// A command whose standard output and error no process reads.
fn unread(words: &[&str], image: &Path) -> Command {
    let mut command = Command::new(rewake().unwrap());
    command.args(words).arg(image).stdin(Stdio::null());
    let closed = || {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        writer
    };
    command.stdout(closed()).stderr(closed());
    command
}

#[test]
fn work_is_done_though_nobody_reads_what_is_said_of_it() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let other = Scene::started(&criu, "plain", 4).unwrap();
    // The new image replaces an old one.
    let image = scene.images();
    let old = fs::metadata(&image).unwrap().ino();
    let pid = other.pid().to_string();
    let mut dump = unread(&["dump", "-t", &pid, "-D"], &image);
    assert!(dump.env("CRIU", &criu).status().unwrap().success());
    wait_pid(other.pid(), ACT).unwrap();
    assert_ne!(fs::metadata(&image).unwrap().ino(), old);
    let beside = fs::read_dir(image.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name());
    let hidden: Vec<_> = beside.filter(|name| name.as_encoded_bytes().starts_with(b".")).collect();
    assert!(hidden.is_empty(), "{hidden:?}");
    // It is sealed already, which is said.
    for words in [&["seal"][..], &["verify"], &["inspect"], &["inspect", "--json"]] {
        assert!(unread(words, &image).status().unwrap().success(), "{words:?}");
    }
}
