// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signals to a process group: each kind of signal, in each phase of a restore, for each command. [`TABLE`]
//! is the specification.

use std::fs::File;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use rewake_tests::daemon::{Daemon, detached, processes_naming, timeline};
use rewake_tests::process::{until, wait_child};
use rewake_tests::restore_gate::{Gate, latecomer};
use rewake_tests::scene::{ACT, END};
use rewake_tests::sessions::parked;
use rewake_tests::{Criu, Scene, Verdict, need};

use Outcome::{Ends, ServesOn, ServesThenEnds};
use Phase::{BeforeItConnects, BeforeItReturns, MemoryMissing};

/// How far the restore is when the signals are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No restore has connected.
    BeforeItConnects,
    /// CRIU has made all tasks, and none has run.
    BeforeItReturns,
    /// The target runs, and some of its memory is missing.
    MemoryMissing,
}

/// What becomes of the target, and of the command that receives the signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The target is served to its end, byte for byte. The command runs as if no signal had been sent.
    ServesOn,
    /// The target is served to its end, byte for byte. Then the command ends.
    ServesThenEnds,
    /// The command ends. No target runs, and nothing of the restore is left.
    Ends,
}

/// Signals that are sent together.
type Signals = &'static [Signal];

/// Signals that terminals, scripts and service managers send, and that no process of a streamer uses.
const UNUSED: Signals = &[
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGPIPE,
    Signal::SIGPWR,
];
/// Twice: a service manager sends it to every process, and a person repeats it.
const STOP: Signals = &[Signal::SIGTERM, Signal::SIGTERM];
const INTERRUPT: Signals = &[Signal::SIGINT, Signal::SIGINT];

/// `rewake restore` serves nothing: its daemon does. It ends by any signal, and ends CRIU before the target
/// runs.
#[rustfmt::skip]
const TABLE: [(Signals, Phase, [Outcome; 3]); 9] = [
    // to the group of                 rewake lazy-pages  rewake serve    rewake restore
    (UNUSED,    BeforeItConnects, [ServesOn,       ServesOn,       Ends]),
    (STOP,      BeforeItConnects, [Ends,           Ends,           Ends]),
    (INTERRUPT, BeforeItConnects, [Ends,           Ends,           Ends]),
    (UNUSED,    BeforeItReturns,  [ServesOn,       ServesOn,       Ends]),
    (STOP,      BeforeItReturns,  [ServesThenEnds, ServesThenEnds, Ends]),
    (INTERRUPT, BeforeItReturns,  [ServesThenEnds, ServesThenEnds, Ends]),
    (UNUSED,    MemoryMissing,    [ServesOn,       ServesOn,       ServesThenEnds]),
    (STOP,      MemoryMissing,    [ServesThenEnds, ServesThenEnds, ServesThenEnds]),
    (INTERRUPT, MemoryMissing,    [ServesThenEnds, ServesThenEnds, ServesThenEnds]),
];

/// Memory of a target whose memory is to be missing, in MiB: loading it takes longer than sending some
/// signals.
const MIB: usize = 1024;
/// Memory of any other target, in MiB.
const SMALL_MIB: usize = 32;

/// Every row of the table, for one command. Most rows of the last phase must happen while memory is missing.
fn table(command: usize, play: fn(&Criu, &Scene, Signals, Phase, Outcome) -> bool) {
    let criu = need!(Criu::main());
    // In this order, because the kernel assigns pids upwards from the pids of restored tasks, and the small
    // target is restored first.
    let [mut large, mut small] = [MIB, SMALL_MIB].map(|mib| Scene::dumped(&criu, "random", mib).unwrap());
    let mut missing = 0;
    for (signals, phase, outcomes) in TABLE {
        let scene = if phase == MemoryMissing { &mut large } else { &mut small };
        // One pass over all of its memory.
        scene.go().unwrap();
        scene.stop().unwrap();
        eprintln!("{signals:?}, {phase:?}: {:?}", outcomes[command]);
        missing += usize::from(play(&criu, scene, signals, phase, outcomes[command]));
        scene.next_round().unwrap();
    }
    assert!(missing >= 2, "{missing} of 3 rows came while memory was missing: enlarge the image");
}

fn ends_well(scene: &Scene) {
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
}

fn gate(scene: &Scene) -> Gate {
    Gate::closed(scene.work().join("gate")).unwrap()
}

/// Whether the signals were sent while memory was missing.
fn lazy_pages(_: &Criu, scene: &Scene, signals: Signals, phase: Phase, outcome: Outcome) -> bool {
    let mut server = scene.serve().unwrap();
    let group = server.pid();
    let send = || signals.iter().for_each(|signal| killpg(group, *signal).unwrap());
    let mut missing = false;
    match phase {
        BeforeItConnects => {
            send();
            if outcome != Ends {
                scene.restore().unwrap();
            }
        }
        BeforeItReturns => gate(scene).restore_and(scene, send).unwrap(),
        MemoryMissing => {
            scene.restore().unwrap();
            missing = parked(scene.pid(), || server.text().contains("all CPU memory is resident")).unwrap();
            if missing {
                send();
            }
        }
    }
    if outcome != Ends {
        ends_well(scene);
    }
    assert_eq!(server.ended(END).unwrap().code(), Some(0), "{}", server.text());
    assert!(outcome != Ends || !scene.socket().exists(), "the socket is left: {}", server.text());
    missing
}

#[test]
fn to_rewake_lazy_pages() {
    table(0, lazy_pages);
}

/// Waits until the one target of a daemon is parked; false when all its memory was resident before.
fn parked_of(daemon: &Daemon, scene: &Scene) -> bool {
    let served = || daemon.status().is_ok_and(|status| status["agent"]["sessions_served"] == 1);
    parked(scene.pid(), served).unwrap()
}

fn serve(criu: &Criu, scene: &Scene, signals: Signals, phase: Phase, outcome: Outcome) -> bool {
    let mut daemon = Daemon::start().unwrap();
    let group = daemon.pid();
    let send = || signals.iter().for_each(|signal| killpg(group, *signal).unwrap());
    let mut missing = false;
    if phase == BeforeItConnects {
        send();
    }
    if outcome != Ends {
        let gate = gate(scene);
        let mut command = detached(&daemon, criu, scene).unwrap();
        let restoring = command.arg("--action-script").arg(gate.script()).spawn().unwrap();
        if phase == BeforeItReturns {
            assert!(gate.is_reached_by(1, ACT), "{}", scene.logs());
            send();
        }
        gate.open().unwrap();
        if phase == MemoryMissing {
            missing = parked_of(&daemon, scene);
            send();
        }
        timeline(&restoring.wait_with_output().unwrap()).unwrap();
        ends_well(scene);
    }
    if outcome == ServesOn {
        assert_eq!(daemon.status().unwrap()["agent"]["pid"], group.as_raw(), "{}", daemon.logs());
    } else {
        assert_eq!(daemon.ended(END).unwrap().code(), Some(0));
        assert!(!daemon.socket().exists());
    }
    missing
}

#[test]
fn to_rewake_serve() {
    table(1, serve);
}

/// A `rewake restore` in a group of its own, CRIU included.
struct Restoring {
    child: Child,
    gate: Gate,
    /// A script in CRIU's place, and the file that it waits for.
    late: PathBuf,
    starter: PathBuf,
}

impl Restoring {
    fn start(daemon: &Daemon, criu: &Criu, scene: &Scene) -> Self {
        let (gate, starter) = (gate(scene), scene.work().join("begin"));
        let late = latecomer(criu, &scene.work(), &starter).unwrap();
        let mut command = detached(daemon, criu, scene).unwrap();
        command.arg("--action-script").arg(gate.script()).env("CRIU", &late).process_group(0);
        Self { child: command.spawn().unwrap(), gate, late, starter }
    }

    /// Lets it reach a phase. Returns whether memory is missing then.
    fn reach(&self, phase: Phase, daemon: &Daemon, scene: &Scene) -> bool {
        let late = format!("sh {}", self.late.display());
        until(ACT, || (!processes_naming(&late).is_empty()).then_some(())).expect("CRIU begins");
        if phase == BeforeItConnects {
            return false;
        }
        std::fs::write(&self.starter, "").unwrap();
        assert!(self.gate.is_reached_by(1, ACT), "{}", scene.logs());
        if phase == BeforeItReturns {
            return false;
        }
        self.gate.open().unwrap();
        parked_of(daemon, scene)
    }

    fn send(&self, signals: Signals) {
        let group = Pid::from_raw(self.child.id().cast_signed());
        for signal in signals {
            // The first may end it.
            let _ = killpg(group, *signal);
        }
    }

    fn ended(self) -> Output {
        self.child.wait_with_output().unwrap()
    }
}

/// Whether a process is a child of this one, ended or not.
fn is_child(pid: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.contains(&format!("\nPPid:\t{}\n", std::process::id()))
}

fn restore(criu: &Criu, scene: &Scene, signals: Signals, phase: Phase, outcome: Outcome) -> bool {
    let daemon = Daemon::start().unwrap();
    let restoring = Restoring::start(&daemon, criu, scene);
    let missing = restoring.reach(phase, &daemon, scene);
    restoring.send(signals);
    if outcome == Ends {
        restoring.gate.open().unwrap();
        let late = restoring.late.display().to_string();
        let output = restoring.ended();
        let status = output.status;
        let stopped = status.code() == Some(128 + signals[0] as i32);
        // CRIU, in the same group, may end first: that is a failed restore, which is reported.
        let record: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        let failed = record.is_some_and(|record| record["ok"] == false && record["reason"].is_string());
        let reported = status.code() == Some(1) && failed;
        assert!(stopped || reported || status.signal().is_some_and(|signal| signal != 0), "{output:?}");
        until(END, || processes_naming(&late).is_empty().then_some(())).expect("its CRIU ends");
        // No child of this process any more, or a killed one.
        assert!(scene.verdict(ACT).map_or(true, |verdict| verdict.killed()), "{}", scene.logs());
        assert_eq!(scene.written(), "");
    } else {
        restoring.ended();
        // Until CRIU ends it is the target's parent.
        until(END, || is_child(scene.pid()).then_some(())).expect("its CRIU ends");
        ends_well(scene);
    }
    assert_eq!(daemon.status().unwrap()["agent"]["pid"], daemon.pid().as_raw(), "{}", daemon.logs());
    missing
}

#[test]
fn to_rewake_restore() {
    table(2, restore);
}

/// The files of restores beside a daemon's socket, in the work directories that they have made.
fn of_restores(daemon: &Daemon, name: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(daemon.socket().parent().unwrap()).unwrap().flatten();
    let ours = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("restore-"));
    ours.map(|entry| entry.path().join(name)).filter(|path| path.exists()).collect()
}

fn sessions(daemon: &Daemon, state: &str) -> usize {
    let status = daemon.status().unwrap();
    let all = ["sessions", "recent"].map(|of| status[of].as_array().unwrap().clone()).concat();
    all.iter().filter(|session| session["state"] == state).count()
}

/// The program runs, and CRIU is its parent until it ends. The signal comes when all its memory is resident,
/// which is before the command has had a report, or on demand when some is missing.
fn in_the_foreground(criu: &Criu, signal: Signal, options: &[&str]) {
    let (scene, daemon) = (Scene::dumped(criu, "plain", 4).unwrap(), Daemon::start().unwrap());
    // CRIU has the command's standard error, too, for as long as the program runs: a pipe would not end.
    let said = scene.work().join("restore.out");
    let mut command = daemon.restore(criu, &scene.images()).unwrap();
    command.args(options).stdout(Stdio::null()).stderr(File::create(&said).unwrap());
    let mut restoring = command.spawn().unwrap();
    let state = if options.is_empty() { "complete" } else { "running" };
    let runs = || sessions(&daemon, state) == 1 && !of_restores(&daemon, "stats-restore").is_empty();
    until(ACT, || runs().then_some(())).expect("the program runs");
    kill(Pid::from_raw(restoring.id().cast_signed()), signal).unwrap();
    let status = wait_child(&mut restoring, ACT).expect("the command ends");
    let said = std::fs::read_to_string(said).unwrap();
    assert_eq!(status.code(), Some(128 + signal as i32), "{said}");
    assert!(said.ends_with(": the restored processes continue; so does their streamer\n"), "{said}");
    scene.go().unwrap();
    until(ACT, || (scene.written() == "OK\n").then_some(())).expect("it has all its memory");
    until(END, || of_restores(&daemon, "").is_empty().then_some(())).expect("nothing of the restore is left");
}

#[test]
fn to_a_rewake_restore_in_the_foreground() {
    let criu = need!(Criu::main());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        in_the_foreground(&criu, signal, &[]);
        in_the_foreground(&criu, signal, &["--on-demand-only=3600"]);
    }
}
