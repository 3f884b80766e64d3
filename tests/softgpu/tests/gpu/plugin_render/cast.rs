// SPDX-License-Identifier: MIT OR Apache-2.0
//! One process of a test, in a role, dumped and restored. The test sends it requests over a socket.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Child;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_testkit::{PATIENCE, until};
use softgpu_tests::Scene;
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};

use crate::plugin_render::stage::Stage;

/// The process.
#[derive(Debug)]
pub(crate) struct Cast {
    folder: tempfile::TempDir,
    pid: u32,
    /// None once it has been dumped: the restored process is no child.
    child: Option<Child>,
}

/// Runs `act` with a process in a role, or is that process.
pub(crate) fn play(scene: &Scene, role: &str, act: impl FnOnce(&mut Cast)) {
    if let Some(own) = scene.role() {
        let (role, socket) = own.split_once(' ').unwrap();
        serve(role, Path::new(socket));
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let log = File::create(folder.path().join("log")).unwrap();
    let child = scene.apart(&format!("{role} {}", socket.display()), log);
    let mut cast = Cast { pid: child.id(), folder, child: Some(child) };
    assert!(cast.starts_up(), "{role}: {}", std::fs::read_to_string(cast.folder.path().join("log")).unwrap());
    act(&mut cast);
}

/// The process's body: builds what its role needs, and answers until it is killed.
fn serve(role: &str, socket: &Path) -> ! {
    let mut stage = Stage::new(role).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    loop {
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        let answer = match line.trim() {
            // A probe of whether this process answers yet.
            "" => continue,
            "look" => stage.look(),
            "use" => stage.use_all(),
            other => panic!("{other:?} is no request"),
        };
        let answer = answer.unwrap_or_else(|error| format!("failed {error:#}"));
        writeln!(stream, "{}", answer.replace('\n', " ")).unwrap();
    }
}

impl Cast {
    /// Waits until it answers; false if it ends before that, or takes too long.
    fn starts_up(&mut self) -> bool {
        let socket = self.socket();
        let mut has_ended = || self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_some());
        let up = || UnixStream::connect(&socket).is_ok().then_some(true);
        until(PATIENCE, || up().or_else(|| has_ended().then_some(false))).unwrap_or(false)
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.folder.path().join("images")
    }

    /// Its answer.
    pub(crate) fn ask(&self, what: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        writeln!(stream, "{what}").unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        let answer = answer.trim();
        assert!(!answer.is_empty() && !answer.starts_with("failed"), "{what}: {answer}");
        answer.to_owned()
    }

    fn criu(&self, version: Version) -> Criu {
        Criu::with(Plugin::Ours, version, &self.images()).unwrap()
    }

    pub(crate) fn restore_by(&self, plugin: Plugin, version: Version) {
        Criu::with(plugin, version, &self.images()).unwrap().restore().unwrap();
    }

    pub(crate) fn dump(&mut self, version: Version) {
        self.criu(version).dump(self.pid).unwrap();
        self.gone();
    }

    /// Dumps the process, which must fail; returns the reason. The process continues.
    pub(crate) fn refused(&self, version: Version) -> String {
        self.dump_error(version).unwrap()
    }

    /// Dumps the process; returns the reason if that fails, and the process continues.
    pub(crate) fn dump_error(&self, version: Version) -> Option<String> {
        self.criu(version).dump(self.pid).err().map(|error| error.to_string())
    }

    pub(crate) fn restore(&self, version: Version) {
        self.restore_by(Plugin::Ours, version);
    }

    /// Restores the process, and returns the warnings in CRIU's log.
    pub(crate) fn restore_with_warnings(&self, version: Version) -> Vec<String> {
        let criu = self.criu(version);
        criu.restore().unwrap();
        criu.log("restore").lines().filter(|line| line.contains("Warn ")).map(str::to_owned).collect()
    }

    pub(crate) fn kill(&mut self) {
        // It may have ended.
        let _ = kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGKILL);
        self.gone();
    }

    fn gone(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.wait().unwrap();
        }
        wait_for_the_end_of(self.pid).unwrap();
    }
}

impl Drop for Cast {
    fn drop(&mut self) {
        self.kill();
    }
}
