// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replicas of one image at once: what they share, and how a hook makes them differ before they run
//! (`docs/serve.md`).

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::scope;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rewake_testkit::authority::Authority;
use rewake_testkit::process::{output, wait_child, write_program};
use rewake_testkit::{Daemon, PATIENCE, until};
use rewake_tests::daemon::{has_namespaces, in_namespaces};
use rewake_tests::{Criu, need, skip};

const REPLICAS: usize = 8;

/// A dumped TLS server.
struct TlsServer {
    dir: tempfile::TempDir,
    criu: Criu,
    daemon: Daemon,
}

/// What a client has received of a replica.
#[derive(Debug)]
struct Greeting {
    /// The random bytes of its first TLS message.
    hello: String,
    /// The name that it gave to the session.
    session: String,
}

fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name)
}

impl TlsServer {
    fn dumped(criu: Criu) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        let issued = authority.issue(|request| request.common_name("replica"));
        let folder = dir.path().join("files");
        fs::create_dir(&folder).unwrap();
        let mut server = Command::new("setsid");
        server.arg("python3").arg(program("tls_server.py")).arg(&folder);
        server.arg(&issued.certificate).arg(&issued.key).current_dir("/");
        server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = server.spawn().unwrap();
        until(PATIENCE, || folder.join("ready").exists().then_some(())).expect("the server is ready");
        fs::create_dir(dir.path().join("images")).unwrap();
        let pid = Pid::from_raw(server.id().cast_signed());
        criu.dump(pid, &dir.path().join("images")).unwrap();
        server.wait().unwrap();
        Self { dir, criu, daemon: Daemon::start().unwrap() }
    }

    fn files(&self) -> PathBuf {
        self.dir.path().join("files")
    }

    /// Restores it into namespaces of their own, with this hook at CRIU's `pre-resume`.
    fn replica(&self, number: usize, hook: &str) -> Replica {
        let folder = self.dir.path().join(format!("replica-{number}"));
        fs::create_dir(&folder).unwrap();
        let script = self.dir.path().join(format!("hook-{number}"));
        let text = format!("#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = pre-resume ] || exit 0\n{hook}\n");
        write_program(&script, &text).unwrap();
        let mut inner = self.daemon.restore(&self.criu, &self.dir.path().join("images")).unwrap();
        inner.args(["--", "--action-script"]).arg(&script);
        let mut command = in_namespaces(&inner, &self.files(), &folder);
        Replica { restore: command.process_group(0).spawn().unwrap(), folder }
    }
}

/// A restored server. `rewake restore` ends with it.
struct Replica {
    restore: Child,
    folder: PathBuf,
}

impl Replica {
    fn greeting(&self) -> Greeting {
        let ask = || {
            let mut client = Command::new("python3");
            output(client.arg(program("tls_client.py")).arg(self.folder.join("socket"))).ok()
        };
        let said = until(PATIENCE, ask).expect("a replica that answers");
        let (hello, session) = said.trim().split_once(' ').unwrap();
        Greeting { hello: hello.to_owned(), session: session.to_owned() }
    }

    fn end(&mut self) {
        fs::write(self.folder.join("stop"), "").unwrap();
        drop(UnixStream::connect(self.folder.join("socket")).unwrap());
        let status = wait_child(&mut self.restore, PATIENCE).expect("it ends with its server");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // Its group has the first process of the pid namespace. When that ends, the kernel kills all others.
        if let Ok(None) = self.restore.try_wait() {
            let _ = killpg(Pid::from_raw(self.restore.id().cast_signed()), Signal::SIGKILL);
            let _ = self.restore.wait();
        }
    }
}

/// Restores that many at once, and asks each.
fn greetings(server: &TlsServer, count: usize, hook: &str) -> Vec<Greeting> {
    let mut replicas: Vec<Replica> = (0..count).map(|number| server.replica(number, hook)).collect();
    let greetings = scope(|scope| {
        let asked: Vec<_> = replicas.iter().map(|of| scope.spawn(|| of.greeting())).collect();
        asked.into_iter().map(|one| one.join().unwrap()).collect()
    });
    replicas.iter_mut().for_each(Replica::end);
    greetings
}

#[test]
fn replicas_without_a_hook_have_the_same_secrets() {
    let criu = need!(Criu::main());
    if !has_namespaces() {
        skip!("no new pid namespaces here (unshare --pid)");
    }
    let server = TlsServer::dumped(criu);
    let [one, other]: [Greeting; 2] = greetings(&server, 2, "exit 0").try_into().unwrap();
    assert_eq!((one.hello, one.session), (other.hello, other.session), "as docs/serve.md explains");
}

#[test]
fn a_hook_with_the_generation_id_makes_replicas_differ() {
    let criu = need!(Criu::main());
    if !has_namespaces() {
        skip!("no new pid namespaces here (unshare --pid)");
    }
    let server = TlsServer::dumped(criu);
    let files = server.files().display().to_string();
    // The signal is delivered before the program's next instruction.
    let hook =
        format!("echo \"$REWAKE_GENERATION_ID\" > {files}/generation && kill -USR1 \"$CRTOOLS_INIT_PID\"");
    let greetings = greetings(&server, REPLICAS, &hook);
    let different = |of: fn(&Greeting) -> &str| greetings.iter().map(of).collect::<BTreeSet<_>>().len();
    let (hellos, sessions) = (different(|of| &of.hello), different(|of| &of.session));
    assert_eq!((hellos, sessions), (REPLICAS, REPLICAS), "{greetings:?}");
}
