// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line is CRIU's.

use std::fs;
use std::process::Stdio;

use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
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
