// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve` and images with GPU memory, as far as possible without GPUs: each has a streamer, which
//! outlives the daemon. With GPUs: `tests/softgpu/tests/gpu/serve.rs`.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, UnixAddr};
use nix::unistd::Pid;
use rewake_tests::daemon::{Daemon, processes_naming, timeline};
use rewake_tests::process::{children, kill_all, until, write_program};
use rewake_tests::scene::{ACT, END};
use rewake_tests::{Criu, Scene, Verdict, need};

/// An image of a process without GPUs, with files that look like GPU state.
fn dumped(criu: &Criu) -> Scene {
    let scene = Scene::dumped(criu, "plain", 16).unwrap();
    fs::write(scene.images().join("amdgpu-kfd-1.img"), "").unwrap();
    scene
}

/// The same, of a process that ends when it runs.
fn scene(criu: &Criu) -> Scene {
    let scene = dumped(criu);
    scene.go().unwrap();
    scene
}

/// `rewake restore` in the scene's work directory, by a CRIU that begins when `starter` exists.
fn late(daemon: &Daemon, criu: &Criu, scene: &Scene, starter: &Path) -> Command {
    let program = criu.command("").get_program().to_owned();
    let text = format!(
        "#!/bin/sh\nwhile [ ! -e {} ]; do sleep 0.01; done\nexec {} \"$@\"\n",
        starter.display(),
        program.display()
    );
    let late = scene.work().join("criu");
    write_program(&late, &text).unwrap();
    let mut command = daemon.restore(criu, &scene.images()).unwrap();
    command.arg("-W").arg(scene.work()).arg("--criu").arg(late).args(["--", "-d", "-v4"]);
    // No plugin: it would read those files as images of its own.
    command.env("CRIU_LIBS_DIR", scene.work());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn has_no_streamer(scene: &Scene) {
    let work = format!("streamer -W {}", scene.work().display());
    until(END, || processes_naming(&work).is_empty().then_some(())).expect("no streamer is left");
}

#[test]
fn the_streamer_of_an_image_with_gpu_memory_outlives_the_agent() {
    let criu = need!(Criu::main());
    let (scene, mut daemon) = (scene(&criu), Daemon::start().unwrap());
    let starter = scene.work().join("starter");
    let restoring = late(&daemon, &criu, &scene, &starter).spawn().unwrap();
    let open = |daemon: &Daemon| daemon.status().ok()?["sessions"].as_array()?.first().cloned();
    let session = until(ACT, || open(&daemon)).expect("a session with a streamer");
    assert_eq!(session["work_dir"], scene.work().to_str().unwrap());
    daemon.replace().unwrap();
    until(ACT, || open(&daemon)).expect("the next agent has it, too");
    fs::write(&starter, "").unwrap();
    let result = timeline(&restoring.wait_with_output().unwrap()).unwrap();
    assert_eq!(result["session"], 1);
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    let ended = until(END, || daemon.status().unwrap()["recent"].as_array()?.first().cloned()).unwrap();
    assert_eq!((&ended["session"], &ended["reason"]), (&1.into(), &serde_json::Value::Null), "{ended}");
    has_no_streamer(&scene);
}

#[test]
fn a_restore_that_fails_leaves_no_streamer() {
    let criu = need!(Criu::main());
    let (scene, daemon) = (scene(&criu), Daemon::start().unwrap());
    fs::remove_file(scene.images().join(format!("fs-{}.img", scene.pid()))).unwrap();
    let starter = scene.work().join("starter");
    fs::write(&starter, "").unwrap();
    let output = late(&daemon, &criu, &scene, &starter).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("criu restore failed"), "{said}");
    has_no_streamer(&scene);
    let none = || daemon.status().unwrap()["sessions"].as_array().unwrap().is_empty().then_some(());
    until(END, none).expect("the session ends");
}

#[test]
fn an_error_of_a_streamer_is_the_agent_s_answer() {
    let criu = need!(Criu::main());
    let (scene, daemon) = (scene(&criu), Daemon::start().unwrap());
    // A streamer of another restore already listens there.
    let path = scene.work().join("rewake-gpu.socket");
    let listener = socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None).unwrap();
    socket::bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    socket::listen(&listener, Backlog::new(1).unwrap()).unwrap();
    let output = late(&daemon, &criu, &scene, &scene.work().join("never")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nothing was started") && said.contains("another server listens there"), "{said}");
    assert_eq!(daemon.status().unwrap()["sessions"].as_array().unwrap().len(), 0);
}

#[test]
fn a_tree_that_outlives_the_daemon_ends_with_its_own_status() {
    let criu = need!(Criu::main());
    let (scene, mut daemon) = (dumped(&criu), Daemon::start().unwrap());
    let mut command = daemon.restore(&criu, &scene.images()).unwrap();
    command.arg("-W").arg(scene.work()).args(["--", "-v4"]).env("CRIU_LIBS_DIR", scene.work());
    let restoring = command.spawn().unwrap();
    let log = || fs::read_to_string(scene.work().join("restore.log")).unwrap_or_default();
    until(ACT, || log().contains("Restore finished successfully").then_some(())).expect("the tree runs");
    // No process depends on it: the streamer got no handoff.
    daemon.terminate().unwrap();
    assert!(daemon.ended(END).unwrap().success(), "{}", daemon.logs());
    scene.go().unwrap();
    let result = timeline(&restoring.wait_with_output().unwrap()).unwrap();
    assert_eq!(result["criu_exit_code"], 0);
    assert_eq!(scene.written(), "OK\n");
}

/// Kills the daemon or the client: no other process would end the streamer.
#[test]
fn a_streamer_without_a_restore_is_ended() {
    let criu = need!(Criu::main());
    let never = Path::new("/never");
    let scenes = [dumped(&criu), dumped(&criu)];
    let [daemon, killed] = [Daemon::start().unwrap(), Daemon::start().unwrap()];
    for (daemon, scene) in [&daemon, &killed].into_iter().zip(&scenes) {
        let mut client = late(daemon, &criu, scene, never).spawn().unwrap();
        until(ACT, || daemon.status().ok()?["sessions"].as_array()?.first().cloned()).expect("a session");
        // The client, and the process that becomes its CRIU.
        let waiting = children(Pid::from_raw(client.id().cast_signed()));
        client.kill().unwrap();
        client.wait().unwrap();
        kill_all(&waiting);
    }
    drop(killed);
    let works = scenes.each_ref().map(|scene| format!("streamer -W {}", scene.work().display()));
    for work in &works {
        assert!(!processes_naming(work).is_empty(), "it waits for one");
    }
    for work in works {
        until(2 * END, || processes_naming(&work).is_empty().then_some(())).expect("no streamer is left");
    }
    let status = daemon.status().unwrap();
    assert_eq!(status["sessions"].as_array().unwrap().len(), 0, "{status}");
    let reason = status["recent"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("no `criu restore` connected within 60 s"), "{status}");
}
