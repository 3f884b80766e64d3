// SPDX-License-Identifier: MIT OR Apache-2.0
//! Everyday events that end a streamer's processes, or all processes of a restore: `cgroup.kill`, a service
//! manager's stop, a cgroup that runs out of memory, the end of a container's first process. [`TABLE`] is the
//! specification.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_tests::cgroup::Cgroup;
use rewake_tests::daemon::{Daemon, has_namespaces, in_namespaces, processes_naming, restore};
use rewake_tests::plugins::rewake_alone;
use rewake_tests::process::{children, has_ended, parent, run, session, until};
use rewake_tests::restore_gate::Gate;
use rewake_tests::scene::{ACT, END};
use rewake_tests::sessions::{
    folders, meets_a_missing_page, own_sessions, parked, recover, served_again, waits_in_a_page_fault,
};
use rewake_tests::{Criu, Scene, Server, Verdict, need, skip};

use Members::{All, Streamer};
use Outcome::{Killed, Recovered, Served};
use Phase::{BeforeItReturns, MemoryMissing};

/// How far the restore is when the event happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// CRIU has made all tasks, and none has run.
    BeforeItReturns,
    /// The target runs, and some of its memory is missing.
    MemoryMissing,
}

/// What becomes of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The streamer serves it to its end, byte for byte, and ends with 0.
    Served,
    /// No process of the streamer is left. The target waits, and `rewake recover` serves it to its end, byte
    /// for byte.
    Recovered,
    /// It is killed before it reads a byte that was not in its image, and `rewake recover` leaves nothing
    /// behind.
    Killed,
}

/// An event of a cgroup that has the server's processes.
type Event = fn(&Cgroup, &Server);

/// Which processes are in the cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Members {
    /// The streamer's.
    Streamer,
    /// The streamer's, the target, and CRIU as long as it restores.
    All,
}

/// The kernel's and `systemd.kill(5)`'s ways. "Timed out": the service manager's stop timeout has passed.
#[rustfmt::skip]
const TABLE: [(&str, Event, Members, [Outcome; 2]); 7] = [
    //                                                             BeforeItReturns, MemoryMissing
    ("cgroup.kill",                          cgroup_kill, Streamer, [Killed, Recovered]),
    ("cgroup.kill",                          cgroup_kill, All, [Killed, Killed]),
    ("systemctl stop, KillMode=control-group",   stop_all, Streamer, [Served, Served]),
    ("systemctl stop, KillMode=mixed",           stop_main, Streamer, [Served, Served]),
    ("the same, timed out, control-group",       stop_all_timed_out, Streamer, [Killed, Recovered]),
    ("the same, timed out, mixed",               stop_main_timed_out, Streamer, [Killed, Recovered]),
    ("systemctl kill -s KILL",                   kill_each, Streamer, [Killed, Recovered]),
];

fn cgroup_kill(group: &Cgroup, _: &Server) {
    group.kill().unwrap();
}

fn stop_all(group: &Cgroup, _: &Server) {
    group.signal(Signal::SIGTERM);
}

fn stop_main(_: &Cgroup, server: &Server) {
    kill(server.pid(), Signal::SIGTERM).unwrap();
}

fn stop_all_timed_out(group: &Cgroup, server: &Server) {
    stop_all(group, server);
    kill_each(group, server);
}

fn stop_main_timed_out(group: &Cgroup, server: &Server) {
    stop_main(group, server);
    kill_each(group, server);
}

/// SIGKILL to one process after the other, until none is left.
fn kill_each(group: &Cgroup, _: &Server) {
    until(END, || {
        group.signal(Signal::SIGKILL);
        group.processes().is_empty().then_some(())
    })
    .expect("the group's processes end");
}

/// Memory of the target, in MiB: loading it takes longer than killing its streamer.
const MIB: usize = 384;
/// Restores at most until an event happened while memory was missing.
const MOST: usize = 5;
/// How long the test watches a target that must not run.
const WATCHED: Duration = Duration::from_millis(200);

/// Restores a scene with its streamer in a cgroup, and lets the event happen in a phase. None when all memory
/// was resident before the event.
fn happens(
    scene: &Scene,
    group: &Cgroup,
    event: Event,
    members: Members,
    phase: Phase,
    outcome: Outcome,
) -> Option<Server> {
    let mut server = scene.serve().unwrap();
    let streamer = server.processes();
    streamer.iter().for_each(|pid| group.take(*pid).unwrap());
    scene.go().unwrap();
    let now = |server: &Server| {
        if members == All {
            let criu = parent(scene.pid()).filter(|_| phase == BeforeItReturns);
            session(scene.pid()).into_iter().chain(criu).for_each(|pid| group.take(pid).unwrap());
        }
        event(group, server);
        // A signal takes time to end a process. CRIU must not connect to a streamer that is about to end.
        if outcome != Served {
            let ended = || streamer.iter().all(|pid| has_ended(*pid)).then_some(());
            until(END, ended).expect("the event ends the streamer");
        }
    };
    if phase == MemoryMissing {
        scene.restore().unwrap();
        if !parked(scene.pid(), || server.text().contains("all CPU memory is resident")).unwrap() {
            return None;
        }
        now(&server);
        return Some(server);
    }
    let gate = Gate::closed(scene.work().join("gate")).unwrap();
    // It fails if the streamer or the tasks have ended.
    drop(gate.restore_and(scene, || now(&server)));
    Some(server)
}

/// `rewake recover`: how many sessions it has served.
fn recovered() -> usize {
    let output = recover().unwrap().output().unwrap();
    served_again(&output)
}

/// Whether the event happened while memory was missing, as [`Recovered`] requires.
fn has_outcome(scene: &Scene, server: &mut Server, outcome: Outcome) -> bool {
    let mut came = true;
    match outcome {
        Served => {}
        Recovered => {
            server.all_ended(END).unwrap();
            came = meets_a_missing_page(scene.pid());
            thread::sleep(WATCHED);
            assert!(!came || waits_in_a_page_fault(scene.pid()), "it still runs: {}", scene.written());
            assert!(recovered() == 1 || !came, "it waits, and is not recovered");
        }
        Killed => {
            server.all_ended(END).unwrap();
            assert_eq!(recovered(), 0);
            // No child of this process any more, or a killed one.
            assert!(scene.verdict(ACT).map_or(true, |verdict| verdict.killed()), "{}", scene.logs());
            assert_eq!((scene.written().as_str(), folders().len()), ("", 0));
            return came;
        }
    }
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
    if outcome == Served {
        assert_eq!(server.ended(END).unwrap().code(), Some(0), "{}", server.text());
    }
    assert_eq!(folders().len(), 0);
    came
}

fn plays(scene: &mut Scene, group: &Cgroup, event: Event, members: Members, phase: Phase, outcome: Outcome) {
    for _ in 0..MOST {
        let server = happens(scene, group, event, members, phase, outcome);
        let came = server.is_some_and(|mut server| has_outcome(scene, &mut server, outcome));
        scene.next_round().unwrap();
        if came {
            return;
        }
    }
    panic!("in {MOST} restores all memory was resident before the event: enlarge the image");
}

fn table(phase: Phase) {
    let criu = need!(Criu::main());
    own_sessions().unwrap();
    let mut scene = Scene::dumped(&criu, "random", MIB).unwrap();
    for (name, event, members, outcomes) in TABLE {
        let group = need!(Cgroup::new());
        let outcome = outcomes[usize::from(phase == MemoryMissing)];
        eprintln!("{name}, {members:?}, {phase:?}: {outcome:?}");
        plays(&mut scene, &group, event, members, phase, outcome);
    }
}

#[test]
fn every_event_to_a_cgroup_before_the_restore_returns() {
    table(BeforeItReturns);
}

#[test]
fn every_event_to_a_cgroup_while_memory_is_missing() {
    table(MemoryMissing);
}

/// `rewake park` is in the cgroup, too, and is a tracer of the target: the kernel kills a target whose tracer
/// ends.
#[test]
fn a_service_manager_s_stop_leaves_a_parked_target_unharmed() {
    let criu = need!(Criu::main());
    let group = need!(Cgroup::new());
    let mut scene = Scene::dumped(&criu, "random", 16).unwrap();
    for _ in 0..MOST {
        let mut server = scene.serve().unwrap();
        server.processes().into_iter().for_each(|pid| group.take(pid).unwrap());
        scene.go().unwrap();
        scene.stop().unwrap();
        // Not earlier: without a restore in flight the streamer ends.
        let gate = Gate::closed(scene.work().join("gate")).unwrap();
        thread::scope(|scope| {
            let restored = gate.restore_and(&scene, || {
                scope.spawn(|| {
                    while !group.processes().is_empty() {
                        group.signal(Signal::SIGTERM);
                    }
                });
            });
            restored.unwrap();
        });
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
        assert_eq!(server.ended(END).unwrap().code(), Some(0), "{}", server.text());
        scene.next_round().unwrap();
    }
}

/// The cgroup runs out of memory, and the kernel kills all of it.
fn out_of_memory(group: &Cgroup, _: &Server) {
    group.run_out_of_memory().unwrap();
    until(END, || group.processes().is_empty().then_some(())).expect("the kernel kills the group");
    // Twice where another process of it ran out of memory first.
    assert!((1..=2).contains(&group.group_kills()));
}

#[test]
fn a_cgroup_out_of_memory_costs_the_processes_in_it_and_no_byte() {
    let criu = need!(Criu::main());
    drop(need!(Cgroup::with_memory()));
    own_sessions().unwrap();
    let mut scene = Scene::dumped(&criu, "random", MIB).unwrap();
    for (members, phase, outcome) in [
        (Streamer, BeforeItReturns, Killed),
        (Streamer, MemoryMissing, Recovered),
        (All, BeforeItReturns, Killed),
        (All, MemoryMissing, Killed),
    ] {
        eprintln!("{members:?}, {phase:?}: {outcome:?}");
        let group = Cgroup::with_memory().unwrap();
        plays(&mut scene, &group, out_of_memory, members, phase, outcome);
    }
}

/// The first process of the namespaces that a command has made, from outside.
fn first_process(unshare: u32) -> Pid {
    let unshare = Pid::from_raw(unshare.cast_signed());
    until(ACT, || children(unshare).first().copied()).expect("unshare has a child")
}

/// A restored target in namespaces, by its pid outside.
fn target_of(scene: &Scene) -> Pid {
    let line = format!("target random --dir {}", scene.files().display());
    until(ACT, || processes_naming(&line).first().copied()).expect("the target is restored")
}

/// A container with `rewake restore` as its first process ends in a phase. `daemon`: the agent outside that
/// serves it; without it the streamer is inside. True when the event happened in that phase.
fn container_ends(criu: &Criu, scene: &Scene, daemon: Option<&Daemon>, phase: Phase) -> bool {
    let gate = Gate::closed(scene.work().join("gate")).unwrap();
    let files = scene.work().join("files");
    fs::create_dir(&files).unwrap();
    fs::write(files.join("go"), "").unwrap();
    let mut inner = match daemon {
        Some(daemon) => daemon.restore(criu, &scene.images()).unwrap(),
        None => restore(criu, &scene.images()).unwrap(),
    };
    inner.arg("-W").arg(scene.work()).args(["--", "-v4", "--action-script"]).arg(gate.script());
    let mut container = in_namespaces(&inner, &scene.files(), &files).spawn().unwrap();
    assert!(gate.is_reached_by(1, ACT), "{}", scene.logs());
    let came = phase == BeforeItReturns || {
        gate.open().unwrap();
        let target = target_of(scene);
        let over = || daemon.is_some_and(|daemon| daemon.status().unwrap()["agent"]["sessions_served"] != 0);
        parked(target, over).unwrap()
    };
    let first = first_process(container.id());
    kill(first, Signal::SIGKILL).unwrap();
    until(END, || container.try_wait().unwrap()).expect("unshare ends with its child");
    let line = scene.files();
    let line = String::from_utf8_lossy(line.as_os_str().as_bytes());
    let left = until(END, || processes_naming(&line).is_empty().then_some(())).is_none();
    assert!(!left, "processes are left: {:?}", processes_naming(&line));
    let written = fs::read_to_string(files.join("verdict")).unwrap_or_default();
    assert_eq!(written, "", "it read missing memory before it was killed");
    came
}

/// Ends a container in each phase; most of the second kind must happen while memory is missing.
fn containers_end(daemon: Option<&Daemon>, mut after: impl FnMut(Phase)) {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "random", MIB).unwrap();
    for phase in [BeforeItReturns, MemoryMissing] {
        let came = (0..MOST).any(|_| {
            let came = container_ends(&criu, &scene, daemon, phase);
            after(phase);
            scene.next_round().unwrap();
            came
        });
        assert!(came, "{phase:?}: all memory was resident before the event: enlarge the image");
    }
}

#[test]
fn the_end_of_a_container_ends_the_session_of_its_streamer() {
    if !has_namespaces() {
        skip!("no new pid namespaces here (unshare --pid)");
    }
    own_sessions().unwrap();
    let daemon = Daemon::start().unwrap();
    containers_end(Some(&daemon), |phase| {
        let ended = || daemon.status().unwrap()["sessions"].as_array().unwrap().is_empty().then_some(());
        until(END, ended).unwrap_or_else(|| panic!("{phase:?}: {}", daemon.status().unwrap()));
    });
    let status = daemon.status().unwrap();
    let count = |name: &str| status["agent"][name].as_u64().unwrap();
    assert!(
        count("sessions_failed") >= 1 && count("sessions_failed") + count("sessions_served") >= 2,
        "{status}"
    );
    assert_eq!(recovered(), 0);
}

#[test]
fn a_streamer_inside_a_container_ends_with_it() {
    if !has_namespaces() {
        skip!("no new pid namespaces here (unshare --pid)");
    }
    own_sessions().unwrap();
    containers_end(None, |phase| {
        assert_eq!(recovered(), 0, "{phase:?}");
        assert_eq!(folders().len(), 0, "{phase:?}");
    });
}

/// The plugin's late hook waits for the streamer 60 s at most, and then lets the tasks run.
#[test]
fn targets_of_a_stopped_streamer_wait_until_it_continues() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "random", MIB).unwrap();
    for plugin in [false, true] {
        let mut server = scene.serve().unwrap();
        scene.go().unwrap();
        let plugins = rewake_alone(&scene.work()).unwrap();
        let gate = Gate::closed(scene.work().join("gate")).unwrap();
        let script = gate.script();
        let options = ["--action-script".as_ref(), script.as_os_str(), "-L".as_ref(), plugins.as_os_str()];
        let options = if plugin { &options[..] } else { &options[..2] };
        thread::scope(|scope| {
            let restore = scope.spawn(|| scene.restore_with(options));
            assert!(gate.is_reached_by(1, ACT), "{}", scene.logs());
            server.processes().into_iter().for_each(|pid| kill(pid, Signal::SIGSTOP).unwrap());
            gate.open().unwrap();
            if !plugin {
                until(ACT, || restore.is_finished().then_some(())).expect("CRIU waits for no streamer");
            }
            thread::sleep(WATCHED);
            // With the plugin CRIU waits, and the target has not run. Without it the target waits.
            assert_eq!((restore.is_finished(), scene.written().as_str()), (!plugin, ""));
            assert!(plugin || waits_in_a_page_fault(scene.pid()), "{}", scene.logs());
            server.continues().unwrap();
            restore.join().unwrap().unwrap();
        });
        scene.stop().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
        assert_eq!(server.ended(END).unwrap().code(), Some(0), "{}", server.text());
        scene.next_round().unwrap();
    }
}

/// `criu dump` of a scene's target; whether it succeeded.
fn is_dumped(criu: &Criu, scene: &Scene, plugins: Option<&Path>) -> bool {
    let images = scene.work().join(if plugins.is_some() { "with-plugin" } else { "without" });
    fs::create_dir(&images).unwrap();
    let mut command = criu.command("dump");
    command.args(["-t", &scene.pid().to_string(), "-o", "dump.log", "-D"]).arg(&images);
    command.env("REWAKE_DUMP_WAIT", "1");
    command.args(plugins.iter().flat_map(|folder| ["-L".as_ref(), folder.as_os_str()]));
    run(&mut command, ACT).unwrap().success()
}

/// Without the plugin CRIU refuses parked targets alone: see the threat model.
#[test]
fn targets_of_a_stopped_streamer_are_not_dumped() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "random", MIB).unwrap();
    for is_parked in [true, false] {
        let mut server = scene.serve().unwrap();
        scene.go().unwrap();
        if is_parked {
            scene.restore().unwrap();
            let came = parked(scene.pid(), || server.text().contains("all CPU memory is resident")).unwrap();
            assert!(came, "all memory was resident before the streamer was stopped: enlarge the image");
            server.processes().into_iter().for_each(|pid| kill(pid, Signal::SIGSTOP).unwrap());
            assert!(!is_dumped(&criu, &scene, None));
        } else {
            scene.restore_and_stop(&mut server).unwrap();
        }
        let plugins = rewake_alone(&scene.work()).unwrap();
        assert!(!is_dumped(&criu, &scene, Some(&plugins)));
        server.continues().unwrap();
        scene.stop().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
        assert_eq!(server.ended(END).unwrap().code(), Some(0), "{}", server.text());
        scene.next_round().unwrap();
    }
}
