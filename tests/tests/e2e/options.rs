// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line is CRIU's.

use std::fs;
use std::process::Stdio;

use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use rewake_tests::printed::{PrintedCommand, Terminals, recipe};
use rewake_tests::process::{children, kill_all, run, wait_pid};
use rewake_tests::scene::{ACT, END};
use rewake_tests::{Criu, Scene, Verdict, need};

#[test]
fn long_options_with_an_equals_sign_and_in_words_work() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let setup = scene.setup().unwrap().joined();
    let mut server = setup.listening().unwrap();
    scene.go().unwrap();
    scene.restore().unwrap();
    scene.expect_good_end(&mut server).unwrap();
    assert!(fs::metadata(setup.log()).unwrap().len() > 0, "-o names a file below the work directory");
}

#[test]
fn without_a_work_directory_socket_and_log_are_with_the_images() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let mut server = scene.setup().unwrap().without_work_dir().listening().unwrap();
    assert!(fs::exists(scene.images().join("lazy-pages.socket")).unwrap());
    assert!(fs::exists(scene.images().join("lazy.log")).unwrap());
    scene.go().unwrap();
    criu.restore(&scene.images(), &scene.images()).unwrap();
    scene.expect_good_end(&mut server).unwrap();
}

/// Kills a daemon, which no other code ends.
struct Daemon(Pid);

impl Drop for Daemon {
    fn drop(&mut self) {
        let below = children(self.0);
        kill_all(&[self.0]);
        kill_all(&below);
    }
}

#[test]
fn a_detached_server_listens_at_once_and_writes_its_pidfile() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let pidfile = scene.work().join("pid");
    let setup = scene.setup().unwrap().with("-d").with("--pidfile").with(pidfile.to_str().unwrap());
    let status = run(setup.command().stdout(Stdio::null()).stderr(Stdio::null()), END).unwrap();
    assert_eq!(status.code(), Some(0), "{}", setup.text());
    let daemon = Daemon(Pid::from_raw(fs::read_to_string(&pidfile).unwrap().parse().unwrap()));
    scene.go().unwrap();
    scene.restore().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    let ended = wait_pid(daemon.0, END).unwrap();
    assert_eq!(ended, Some(WaitStatus::Exited(daemon.0, 0)));
}

#[test]
fn an_option_that_does_not_exist_is_refused() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let refusal = scene.setup().unwrap().with("--no-such-option").start().unwrap().expect_err("accepted");
    assert!(refusal.status.code().is_some_and(|code| code != 0), "{}", refusal.status);
    assert!(refusal.line_with(&["no-such-option"]), "{}", refusal.text);
}

/// The commands of the README and of the pages about one host, from top to bottom.
#[test]
fn the_printed_commands_of_one_host_work() {
    let criu = need!(Criu::main());
    let mut terminals = Terminals::open(&criu, 4).unwrap();
    let (folder, pid) = (terminals.folder(""), terminals.migration.pid().to_string());
    let place = |name: &str| folder.join(name).display().to_string();
    fs::create_dir(folder.join("IMG")).unwrap();
    let line = format!("criu dump -t {pid} -D IMG --leave-running");
    terminals.run(&PrintedCommand { host: String::new(), line }).unwrap();

    let names = [("PID", &pid[..]), ("/run/rewake.pid", &place("pid"))];
    let commands = recipe("local", &names).commands();
    let [mkdir, dump, restore, lazy, criu_restore, serve, recover] = &commands[..] else {
        panic!("{commands:?}")
    };
    terminals.run(mkdir).unwrap();
    terminals.run(dump).unwrap();
    terminals.run(restore).unwrap();
    assert_eq!(terminals.migration.processes(), (1, 0));
    terminals.end("target").unwrap();
    terminals.run(lazy).unwrap();
    terminals.run(criu_restore).unwrap();
    terminals.migration.expect_right_bytes().unwrap();
    terminals.run(serve).unwrap();
    terminals.run(recover).unwrap();
    terminals.end("rewake").unwrap();

    for command in recipe("inspect", &[]).commands().iter_mut().chain(&mut recipe("doctor", &[]).commands()) {
        command.line = command.line.replace(['[', ']'], "");
        let mut typed = terminals.type_in(command).unwrap();
        let status = typed.ended().unwrap();
        // `rewake doctor` ends with 1 where the machine lacks something.
        assert!(matches!(status.code(), Some(0 | 1)), "{}", typed.text());
        serde_json::from_str::<serde_json::Value>(&typed.text()).expect("JSON");
    }
    for command in &recipe("seal", &[]).commands() {
        terminals.run(command).unwrap();
    }
    let store = format!("file://{}", place("store"));
    for command in &recipe("store", &[("s3://bucket/models", &store)]).commands() {
        terminals.run(command).unwrap();
    }
    let [serve, curl] = &recipe("metrics", &[("/var/lib/rewake/cache", &place("cache"))]).commands()[..]
    else {
        panic!("metrics")
    };
    terminals.run(serve).unwrap();
    assert!(terminals.run(curl).unwrap().contains("# EOF"));
    terminals.end("rewake").unwrap();
}
