// SPDX-License-Identifier: MIT OR Apache-2.0
//! One test: its own process, and further ones in other roles.

use std::any::type_name;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};

use rewake_amdgpu_uapi::topology::Topology;
use rewake_testkit::process::wait_child;
use rewake_testkit::{PATIENCE, soon};

use crate::delayed_copies::DelayedCopies;
use crate::faults::Faults;
use crate::judge::Judge;
use crate::kept::LastPid;

/// Names the test whose body a process runs.
const TEST: &str = "SOFTGPU_TEST";
/// Names the role of a further process of a test.
const ROLE: &str = "SOFTGPU_ROLE";
/// Set where a GPU must exist: a skipped test fails.
const REQUIRED: &str = "SOFTGPU_REQUIRED";
/// Starts a line from a peer, among lines of the test harness.
const MARK: &str = "@ ";
/// What a process prints when its body has run to its end.
const RAN: &str = "the body ran";

/// What a test's body gets.
#[derive(Debug)]
pub struct Scene {
    name: &'static str,
    role: Option<String>,
}

/// Another process of the same test, in another role.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// Runs `body`, a closure of the test's own function, in a new process. The machine has at least `gpus` GPUs.
///
/// # Panics
/// The body panics, does not end in time, breaks a rule of the judge, or leaves something alive. Also if GPUs
/// are missing that [`REQUIRED`] demands.
pub fn isolated<F: Fn(&Scene)>(gpus: usize, body: F) {
    isolate(test_of(type_name::<F>()), gpus, &body);
}

/// The test's name, as the test harness has it, of a closure's type: `program::module::test::{{closure}}`.
fn test_of(closure: &'static str) -> &'static str {
    let path = closure.split_once("::{{closure}}").map(|(path, _)| path);
    path.and_then(|path| path.split_once("::")).expect("the type of a closure in a function").1
}

fn isolate(name: &'static str, gpus: usize, body: &dyn Fn(&Scene)) {
    static ALONE: Mutex<()> = Mutex::new(());
    if std::env::var(TEST).is_ok_and(|test| test == name) {
        let scene = Scene { name, role: std::env::var(ROLE).ok() };
        body(&scene);
        scene.say(RAN);
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(reason) = found(gpus) {
        assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set, but {reason}");
        rewake_skip::report(reason);
        return;
    }
    let judge = Judge::find();
    if let Some(judge) = &judge {
        judge.clear();
    }
    // Objects of an earlier test may still be alive.
    drop(Faults::find());
    DelayedCopies::none();
    let before = judge.as_ref().map(Judge::alive);
    let _last_pid = judge.as_ref().map(|_| LastPid::read());
    let mut peer = Peer::start(&mut Command::new(this_program()), name, None, Stdio::inherit());
    peer.listen_to_the_end();
    if let (Some(judge), Some(before)) = (judge, before) {
        assert_eq!(judge.violations(), Vec::<String>::new(), "the judge's list after {name}");
        // The driver cleans up processes in the background.
        assert!(
            soon(|| judge.alive() == before),
            "left alive by {name}: {:?}, before it {before:?}",
            judge.alive()
        );
    }
}

/// Whether this machine has the GPUs that a test needs; the reason if not.
///
/// # Errors
/// What is missing.
pub fn found(gpus: usize) -> Result<(), String> {
    if !Path::new("/dev/kfd").exists() {
        return Err(
            "no /dev/kfd: `cargo xtask vm test` runs these tests in a machine that has one".to_owned()
        );
    }
    if !nix::unistd::geteuid().is_root() {
        return Err("checkpoint operations need root".to_owned());
    }
    let count = Topology::read().map_err(|error| error.to_string())?.gpus().count();
    if count < gpus { Err(format!("{gpus} GPUs are needed, this machine has {count}")) } else { Ok(()) }
}

impl Scene {
    /// Which of the test's processes this is; None for the first.
    #[must_use]
    pub fn role(&self) -> Option<&str> {
        self.role.as_deref()
    }

    /// Starts the same test's body in another role.
    #[must_use]
    pub fn peer(&self, role: &str) -> Peer {
        Peer::start(&mut Command::new(this_program()), self.name, Some(role), Stdio::piped())
    }

    /// As [`Scene::peer`], for a process whose image another peer restores into itself. The process maps
    /// memory from the bottom of the address space upwards, as `setarch` has it, so that its buffers lie
    /// where the other peer has nothing, also on a machine that gives all programs the same addresses.
    #[must_use]
    pub fn donor(&self) -> Peer {
        let mut command = Command::new("setarch");
        command.arg("--addr-compat-layout").arg(this_program());
        Peer::start(&mut command, self.name, Some("donor"), Stdio::piped())
    }

    /// Starts the same test's body in another role. It leads a session of its own, without a terminal, as
    /// CRIU needs for a dump.
    ///
    /// # Panics
    /// It cannot be started.
    #[must_use]
    pub fn apart(&self, role: &str, output: File) -> Child {
        let mut command = Command::new("setsid");
        command.arg(this_program()).args(arguments(self.name)).env(TEST, self.name).env(ROLE, role);
        let errors = output.try_clone().expect("a copy of a descriptor");
        command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn().expect("setsid can be started")
    }

    /// Prints a line for the process that started this one.
    ///
    /// # Panics
    /// The reader has ended.
    pub fn say(&self, line: &str) {
        let mut output = std::io::stdout().lock();
        writeln!(output, "\n{MARK}{line}").expect("standard output is open");
        output.flush().expect("standard output is open");
    }

    /// Waits for a line from the process that started this one.
    ///
    /// # Panics
    /// It has ended.
    #[must_use]
    pub fn hear(&self) -> String {
        let mut line = String::new();
        let length = std::io::stdin().lock().read_line(&mut line).expect("standard input can be read");
        assert!(length > 0, "{}: the first process has ended", self.name);
        line.trim().to_owned()
    }
}

fn this_program() -> PathBuf {
    std::env::current_exe().expect("this program's path")
}

/// Arguments of a test program that runs one test.
fn arguments(name: &str) -> [&str; 4] {
    ["--exact", name, "--nocapture", "--test-threads=1"]
}

impl Peer {
    fn start(command: &mut Command, name: &str, role: Option<&str>, input: Stdio) -> Self {
        command.args(arguments(name)).env(TEST, name);
        if let Some(role) = role {
            command.env(ROLE, role);
        }
        let mut child =
            command.stdin(input).stdout(Stdio::piped()).spawn().expect("this program can be started");
        let output = BufReader::new(child.stdout.take().expect("a piped output"));
        Self { input: child.stdin.take(), child, output }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a line.
    ///
    /// # Panics
    /// It has ended.
    pub fn say(&mut self, line: &str) {
        let input = self.input.as_mut().expect("a peer with an input");
        writeln!(input, "{line}").expect("the peer listens");
    }

    /// Waits for its next line.
    ///
    /// # Panics
    /// It ends first.
    #[must_use]
    pub fn hear(&mut self) -> String {
        self.next().unwrap_or_else(|| panic!("the peer ended: {:?}", self.child.wait()))
    }

    fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line).expect("the peer's output can be read") == 0 {
                return None;
            }
            if let Some(said) = line.strip_prefix(MARK) {
                return Some(said.trim().to_owned());
            }
        }
    }

    /// Waits until its body has run and it has ended.
    ///
    /// # Panics
    /// The body failed or never ran.
    pub fn finish(mut self) {
        drop(self.input.take());
        self.listen_to_the_end();
    }

    /// Waits for its end, with any status.
    pub fn end(mut self) -> ExitStatus {
        self.wait()
    }

    fn listen_to_the_end(&mut self) {
        let mut last = None;
        while let Some(line) = self.next() {
            last = Some(line);
        }
        let status = self.wait();
        assert!(status.success(), "the test's process: {status}");
        assert_eq!(last.as_deref(), Some(RAN), "the test's process ran no test of that name");
    }

    /// Kills it, as a crash would.
    pub fn kill(mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        self.wait();
    }

    fn wait(&mut self) -> ExitStatus {
        wait_child(&mut self.child, PATIENCE).unwrap_or_else(|| {
            // Best effort: a panic reports it.
            let _ = self.child.kill();
            panic!("process {} did not end", self.child.id());
        })
    }
}
