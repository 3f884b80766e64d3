// SPDX-License-Identifier: MIT OR Apache-2.0
//! Twelve kinds of programs, each in every way: dumped, pushed, pulled and restored on demand; dumped and
//! restored by the agent; moved to another host. After each way a program answers with bytes of its own. What
//! CRIU cannot do lazily is restored eagerly with a line, and refused by a migration, after which the program
//! runs on where it was.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rewake_testkit::hosts::{DESTINATION, Host, HostPair};
use rewake_tests::process::{PATIENCE, until};
use rewake_tests::programs::{Kind, Program};
use rewake_tests::server::rewake;
use rewake_tests::{Criu, need};
use tempfile::TempDir;

/// What comes of a program in one way.
#[derive(Debug, Clone, Copy)]
enum Outcome {
    /// Its memory is loaded on demand.
    OnDemand,
    /// Its memory is loaded before it runs, with a line that says why.
    First(&'static str),
    /// It is refused with a line that says why, and runs on.
    Refused(&'static str),
    /// Another test of this suite has this program and this way.
    In(&'static str),
}

use Outcome::{First, In, OnDemand, Refused};

/// A row of the table.
#[derive(Debug)]
struct Row {
    /// Dumped, pushed, pulled, and restored from the copy by a streamer of its own.
    stored: Outcome,
    /// Dumped, and restored by the agent.
    agent: Outcome,
    /// Moved to another host.
    moved: Outcome,
}

const ODD_NAMES: &str = "names::names_that_are_not_utf_8_are_dumped_shown_and_restored";
const ODD_NAMES_MOVE: &str = "migrate::a_program_moves_whose_names_are_not_utf_8";
const RESERVED: &str = "kept_images::what_cannot_be_restored_lazily_is_restored_eagerly";
/// Parts of reasons.
const NO_USERFAULTFD: &str = "vm.unprivileged_userfaultfd is 0, and 1 permits it";
const NO_OVERCOMMIT: &str = "vm.overcommit_memory is 0, and 1 permits it";

const ON_DEMAND: Row = Row { stored: OnDemand, agent: OnDemand, moved: OnDemand };

fn setting_is_0(name: &str) -> bool {
    fs::read(Path::new("/proc/sys/vm").join(name)).is_ok_and(|value| value.trim_ascii() == b"0")
}

fn row(kind: Kind) -> Row {
    match kind {
        Kind::Target("odd-names") => Row { stored: In(ODD_NAMES), moved: In(ODD_NAMES_MOVE), ..ON_DEMAND },
        Kind::Users if setting_is_0("unprivileged_userfaultfd") => Row {
            stored: First(NO_USERFAULTFD),
            agent: First(NO_USERFAULTFD),
            moved: Refused(NO_USERFAULTFD),
        },
        Kind::Target("reserved") if setting_is_0("overcommit_memory") => {
            Row { stored: First(NO_OVERCOMMIT), agent: In(RESERVED), moved: Refused(NO_OVERCOMMIT) }
        }
        _ => ON_DEMAND,
    }
}

/// A program on one of two hosts.
struct Life {
    folder: TempDir,
    hosts: HostPair,
    criu: Criu,
    program: Program,
}

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&text).into_owned()
}

impl Life {
    fn new(criu: Criu, kind: Kind) -> Self {
        let folder = tempfile::Builder::new().prefix("rewake-programs-").tempdir().unwrap();
        let own = folder.path().join("program");
        fs::create_dir(&own).unwrap();
        let hosts = HostPair::start(folder.path()).unwrap();
        let program = Program::start(kind, &own, &hosts.source).unwrap();
        program.prepare(&hosts.destination).unwrap();
        Self { folder, hosts, criu, program }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `rewake` on a host.
    fn rewake(&self, host: &Host, words: &[&str]) -> Command {
        let mut command = host.command(rewake().unwrap());
        command.args(words).env("CRIU", &self.criu);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn done(&self, words: &[&OsStr]) -> String {
        let mut command = self.rewake(&self.hosts.source, &[]);
        let output = command.args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        said(&output)
    }

    /// The number of the program on its host.
    fn pid(&self) -> String {
        let first = self.program.first(&self.hosts.source).unwrap();
        self.hosts.source.own_number(first).unwrap().to_string()
    }

    fn dump(&self, images: &Path) {
        fs::create_dir(images).unwrap();
        self.done(&["dump".as_ref(), "-t".as_ref(), self.pid().as_ref(), "-D".as_ref(), images.as_ref()]);
        let ended = until(PATIENCE, || self.program.processes(&self.hosts.source).is_empty().then_some(()));
        ended.expect("the dumped program ends");
    }

    /// Restores with some options, and asks.
    fn restore(&mut self, images: &Path, options: &[&OsStr], expected: Outcome) {
        let work = images.with_extension("work");
        fs::create_dir(&work).unwrap();
        let mut words =
            vec!["restore".as_ref(), "-D".as_ref(), images.as_os_str(), "-W".as_ref(), work.as_ref()];
        words.extend(options);
        words.extend([OsStr::new("--"), "-d".as_ref()]);
        words.extend(self.program.options());
        let said = self.done(&words);
        let line = said.lines().find(|line| line.starts_with("all CPU memory is loaded before"));
        match (expected, line) {
            (OnDemand, None) => {}
            (First(why), Some(line)) if line.contains(why) => {}
            other => panic!("{other:?}: {said}"),
        }
        self.program.ask(&self.hosts.source).unwrap();
    }

    fn through_a_store(&mut self, expected: Outcome) {
        let [images, store, copy] = ["images", "store", "copy"].map(|name| self.path(name));
        self.dump(&images);
        fs::create_dir(&store).unwrap();
        let name = format!("file://{}/program", store.display());
        self.done(&["push".as_ref(), images.as_ref(), name.as_ref()]);
        fs::remove_dir_all(&images).unwrap();
        self.done(&["pull".as_ref(), name.as_ref(), copy.as_ref()]);
        self.restore(&copy, &[], expected);
    }

    fn by_the_agent(&mut self, expected: Outcome) {
        let (images, socket) = (self.path("served"), self.path("agent"));
        let mut serve = self.rewake(&self.hosts.source, &["serve", "--socket"]);
        let null = || Stdio::null();
        let mut agent = serve.arg(&socket).stdout(null()).stderr(null()).spawn().unwrap();
        self.dump(&images);
        until(PATIENCE, || socket.exists().then_some(())).expect("the agent's socket");
        self.restore(&images, &["--socket".as_ref(), socket.as_ref()], expected);
        let status = self.done(&["status".as_ref(), "--socket".as_ref(), socket.as_ref()]);
        assert!(status.contains(" complete "), "{status}");
        let agent_pid = rewake_testkit::hosts::entered(&agent).unwrap();
        nix::sys::signal::kill(agent_pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        agent.wait().unwrap();
    }

    fn move_away(&mut self, expected: Outcome) {
        let options = [&["--".as_ref()][..], &self.program.options()].concat();
        let receive = ["receive", "--address", DESTINATION, "--port", "7700", "--insecure"];
        let mut receive = self.rewake(&self.hosts.destination, &receive);
        let receive = receive.args(&options).spawn().unwrap();
        let to = format!("{DESTINATION}:7700");
        let pid = self.pid();
        // It waits for a moment until the destination listens.
        let migrated = until(PATIENCE, || {
            let mut migrate =
                self.rewake(&self.hosts.source, &["migrate", "-t", &pid, "--to", &to, "--insecure"]);
            let output = migrate.args(&options).output().unwrap();
            (!said(&output).contains("Connection refused")).then_some(output)
        });
        let migrated = migrated.expect("the destination listens");
        let received = said(&receive.wait_with_output().unwrap());
        let count = |host| self.program.processes(host).len();
        let counts = [count(&self.hosts.source), count(&self.hosts.destination)];
        match expected {
            Refused(why) => {
                assert_eq!(
                    (migrated.status.code(), counts[1]),
                    (Some(1), 0),
                    "{}\n{received}",
                    said(&migrated)
                );
                let lines = said(&migrated);
                assert!(lines.lines().count() == 1 && lines.contains(why), "{lines}");
                self.program.ask(&self.hosts.source).unwrap();
            }
            _ => {
                assert_eq!(
                    (migrated.status.code(), counts[0]),
                    (Some(0), 0),
                    "{}\n{received}",
                    said(&migrated)
                );
                self.program.ask(&self.hosts.destination).unwrap();
            }
        }
    }
}

type Way = fn(&mut Life, Outcome);

/// A program lives through all ways, one after the other: it is dumped and moved also after it was restored.
fn lives(kind: Kind) {
    let row = row(kind);
    let mut life = Life::new(Criu::main().unwrap(), kind);
    let ways: [(Outcome, &str, Way); 3] = [
        (row.stored, "through a store", Life::through_a_store),
        (row.agent, "by the agent", Life::by_the_agent),
        (row.moved, "to another host", Life::move_away),
    ];
    for (outcome, name, way) in ways {
        match outcome {
            In(test) => eprintln!("{kind:?} {name}: {test}"),
            _ => way(&mut life, outcome),
        }
    }
}

/// A test of one kind.
macro_rules! programs {
    ($($name:ident: $kind:expr;)*) => {$(
        #[test]
        fn $name() {
            need!(Criu::main());
            need!(Program::installed($kind));
            lives($kind);
        }
    )*};
}

programs! {
    names_that_are_not_utf_8: Kind::Target("odd-names");
    a_user_namespace: Kind::Users;
    three_hundred_threads: Kind::Target("threads");
    thirty_thousand_mappings: Kind::Target("mappings");
    a_sparse_terabyte: Kind::Target("terabyte");
    huge_pages: Kind::Target("huge-pages");
    a_stopped_program: Kind::Stopped;
    a_program_with_strict_seccomp: Kind::Target("strict");
    a_reservation_beyond_the_memory: Kind::Target("reserved");
    a_postgresql: Kind::PostgreSql;
    a_java_program: Kind::Java;
    a_shell_in_tmux: Kind::Tmux;
}

#[test]
fn a_terminal_whose_number_is_taken_elsewhere_is_refused() {
    let criu = need!(Criu::main());
    need!(Program::installed(Kind::Tmux));
    let mut life = Life::new(criu, Kind::Tmux);
    let other = life.path("other");
    fs::create_dir(&other).unwrap();
    let mut taken = Program::start(Kind::Tmux, &other, &life.hosts.destination).unwrap();
    life.move_away(Refused("terminals of the program that are in use here: /dev/pts/0"));
    taken.ask(&life.hosts.destination).unwrap();
}
