// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake export` and `rewake pull`: an image is copied to another directory, and restored there.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rewake_testkit::programs::rewake;
use rewake_tests::daemon::{restore, timeline};
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, need};

/// `rewake export`; ended when dropped.
struct Server {
    child: Child,
    port: String,
}

impl Server {
    fn start(root: &Path) -> Self {
        let mut command = Command::new(rewake().unwrap());
        command.arg("export").arg(root).args(["--port", "0"]).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("rewake: listening on 127.0.0.1:");
        let port = port.unwrap_or_else(|| panic!("{line}")).to_owned();
        Self { child, port }
    }

    /// Runs `rewake pull`. Returns whether it succeeded, and what it wrote.
    fn pull(&self, image: &str, to: &Path) -> (bool, String) {
        let mut command = Command::new(rewake().unwrap());
        command.args(["pull", "--port", &self.port, &format!("127.0.0.1:{image}")]).arg(to);
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_copied_image_is_restored() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 32).unwrap();
    let server = Server::start(scene.images().parent().unwrap());
    let name = scene.images().file_name().unwrap().to_str().unwrap().to_owned();
    let copies = tempfile::tempdir().unwrap();
    let copy = copies.path().join("copy");

    let (copied, message) = server.pull(&name, &copy);
    assert!(!copied && message.contains("run `rewake seal"), "{message}");
    let sealed = Command::new(rewake().unwrap()).arg("seal").arg(scene.images()).output().unwrap();
    assert!(sealed.status.success(), "{sealed:?}");
    let (copied, message) = server.pull(&name, &copy);
    assert!(copied && message.contains(" were sent, 0 B were here; image "), "{message}");
    let verified = Command::new(rewake().unwrap()).arg("verify").arg(&copy).output().unwrap();
    assert!(verified.status.success(), "{verified:?}");

    fs::remove_dir_all(scene.images()).unwrap();
    scene.go().unwrap();
    let mut command = restore(&criu, &copy).unwrap();
    timeline(&command.arg("-W").arg(scene.work()).args(["--", "-d"]).output().unwrap()).unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn addresses_of_other_hosts_need_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(rewake().unwrap());
    let output = command.arg("export").arg(dir.path()).args(["--address", "0.0.0.0"]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && message.contains("add --insecure"), "{message}");
}
