// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every process of a streamer is killed at one moment while memory is missing. The target waits, and `rewake
//! recover` serves it to its end, byte for byte.
//!
//! `REWAKE_RECOVERIES` is the number of total deaths of the random tests (default 2 each, half for some),
//! `REWAKE_SEED` repeats the moments of another run.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rewake_process::proc;
use rewake_tests::Random;
use rewake_tests::cgroup::Cgroup;
use rewake_tests::daemon::{Daemon, processes_naming, restore, timeline};
use rewake_tests::process::{kill_all, session, soon, until};
use rewake_tests::random::{count, is_share, moment, seed};
use rewake_tests::scene::{ACT, END};
use rewake_tests::server::rewake;
use rewake_tests::sessions::{
    are_parked, folders, meets_a_missing_page, own_sessions, parked, recover, restored_and_parked,
    served_again, waits_in_a_page_fault,
};
use rewake_tests::{Criu, Scene, Server, Verdict, images, need};

/// Memory of a target, in MiB: loading it takes longer than killing its streamer.
const MIB: usize = 256;

/// After the parking a streamer is killed within this time.
const LATEST: Duration = Duration::from_millis(40);

/// Total deaths at most until half of a few rounds came while memory was missing.
const MOST_DEATHS: usize = 12;

/// Restores at most until a streamer was killed while memory was missing.
const MOST: usize = 5;

fn rounds() -> usize {
    count("REWAKE_RECOVERIES", 2)
}

/// Kills every process of a streamer at once.
fn total_death(server: &mut Server) {
    server.signal_group(Signal::SIGKILL).unwrap();
    server.all_ended(END).unwrap();
}

/// Kills every process of a streamer: at once, or one after the other, the starter or the worker first.
fn deaths_in_some_order(server: &mut Server, random: &mut Random) {
    let mut processes = server.processes();
    match random.below(3) {
        0 => return total_death(server),
        1 => processes.reverse(),
        _ => {}
    }
    for process in processes {
        // A process that was replaced or has ended is no error, because the last line kills the rest.
        let _ = kill(process, Signal::SIGKILL);
    }
    let _ = server.signal_group(Signal::SIGKILL);
    server.all_ended(END).unwrap();
}

fn recovered() -> Output {
    let output = recover().unwrap().output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// What `rewake recover` says when the streamer died between the read of a fork event and the put of the
/// child's userfaultfd.
const FORK_LOST: &str = "the userfaultfd of a forked process of its session is lost";

/// Total deaths at random moments after a target was parked, until there were `rounds` and half of them came
/// while memory was missing; three times as many, or twelve, are enough for that. Of those that fork, one may
/// be killed for a death between the read of a fork's message and the next system call. The child of that
/// fork may have read zeros before.
fn campaign(scenario: &str, rounds: usize) {
    let criu = need!(Criu::main());
    own_sessions().unwrap();
    let seed = seed();
    let mut random = Random::new(seed);
    let mut scene = Scene::dumped(&criu, scenario, MIB).unwrap();
    let (mut served, mut killed, mut deaths) = (0, 0, 0);
    while deaths < rounds || served * 2 < rounds && deaths < MOST_DEATHS.max(3 * rounds) {
        deaths += 1;
        let mut lost = false;
        let mut server = scene.serve().unwrap();
        if restored_and_parked(&scene, &server) {
            moment(LATEST, &mut random);
            deaths_in_some_order(&mut server, &mut random);
            let log = scene.work().join("recover.log");
            let output = recover().unwrap().args(["-v4", "-o"]).arg(log).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            lost = said.contains(FORK_LOST);
            assert_eq!(output.status.success(), !lost, "{said}");
            served += served_again(&output);
        }
        killed += usize::from(lost);
        scene.stop().unwrap();
        let verdict = scene.verdict(ACT).unwrap();
        assert!(
            if lost { verdict != Verdict::Ok } else { verdict == Verdict::Ok },
            "{verdict:?}, lost {lost}, REWAKE_SEED={seed}\n{}\n{}",
            fs::read_to_string(scene.work().join("recover.log")).unwrap_or_default(),
            scene.logs()
        );
        scene.next_round().unwrap();
    }
    eprintln!(
        "{scenario}, REWAKE_SEED={seed}: {served} of {deaths} total deaths while memory was missing, \
         {killed} killed"
    );
    let forks = matches!(scenario, "fork" | "active");
    assert!(killed <= usize::from(forks), "{killed} of {deaths} were killed");
    assert!(served * 2 >= rounds, "{served} of {deaths} deaths came while memory was missing");
    assert_eq!(folders().len(), 0, "nothing is left below /run/rewake/sessions");
}

#[test]
fn a_target_outlives_every_process_of_its_streamer() {
    campaign("random", rounds());
}

#[test]
fn a_target_that_forks_drops_and_moves_memory_outlives_it() {
    campaign("active", rounds());
}

#[test]
fn the_processes_of_a_tree_outlive_their_streamer() {
    campaign("tree", rounds().div_ceil(2));
}

#[test]
fn threads_in_page_faults_outlive_their_streamer() {
    campaign("threads", rounds().div_ceil(2));
}

#[test]
fn children_forked_with_missing_memory_outlive_their_streamer() {
    campaign("fork", rounds().div_ceil(2));
}

/// A restored target whose streamer was killed, and which waits for missing memory.
fn orphaned(criu: &Criu, scenario: &str) -> Scene {
    own_sessions().unwrap();
    let mut scene = Scene::dumped(criu, scenario, 2 * MIB).unwrap();
    for _ in 0..MOST {
        let mut server = scene.serve().unwrap();
        if restored_and_parked(&scene, &server) {
            // A death in the moment of a fork is another test's.
            if scenario == "fork" {
                let have_forked = || server.text().matches("child forked").count() == 2;
                until(ACT, || have_forked().then_some(())).expect("child and grandchild");
            }
            total_death(&mut server);
            assert_eq!(folders().len(), 1, "its ledger is left");
            if meets_a_missing_page(scene.pid()) {
                return scene;
            }
            recovered();
        }
        ends_well(&scene);
        scene.next_round().unwrap();
    }
    panic!("in {MOST} restores all memory was resident before the streamer was killed: enlarge the image");
}

fn ends_well(scene: &Scene) {
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
    assert_eq!(folders().len(), 0);
}

#[test]
fn a_thread_waits_in_a_page_fault_until_it_is_recovered() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    sleep(Duration::from_millis(500));
    assert!(waits_in_a_page_fault(scene.pid()) && scene.written().is_empty(), "it reads no other byte");
    assert_eq!(served_again(&recovered()), 1);
    ends_well(&scene);
}

#[test]
fn a_process_whose_first_thread_has_ended_is_recovered() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "first-thread-ends");
    assert_eq!(served_again(&recovered()), 1);
    ends_well(&scene);
}

#[test]
fn of_two_concurrent_recovers_one_serves() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    let both = [recover().unwrap().spawn().unwrap(), recover().unwrap().spawn().unwrap()];
    let outputs = both.map(|one| one.wait_with_output().unwrap());
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    assert_eq!(outputs.iter().map(served_again).sum::<usize>(), 1, "{outputs:?}");
    ends_well(&scene);
}

#[test]
fn a_daemon_that_starts_recovers_orphaned_sessions() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    let daemon = Daemon::start().unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", daemon.logs());
}

#[test]
fn nothing_is_left_of_a_target_that_has_ended() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    kill_all(&session(scene.pid()));
    assert_eq!(served_again(&recovered()), 0, "no process has its fd store");
    assert_eq!(folders().len(), 0);
}

#[test]
fn a_target_killed_while_recover_serves_it_ends_the_session() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    let output = recover().unwrap().arg("-d").output().unwrap();
    assert!(output.status.success() && served_again(&output) == 1, "{output:?}");
    kill_all(&session(scene.pid()));
    until(END, || folders().is_empty().then_some(())).expect("the session ends with its target");
}

/// Runs `rewake recover` for a session whose image is not there any more: it kills the target, and says why.
fn is_killed_for_its_image(scene: &Scene, reason: &str) {
    let output = recover().unwrap().output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && served_again(&output) == 0, "{text}");
    let killed = format!("killed process {}: its session's image", scene.pid());
    assert!(text.contains(reason) && text.contains(&killed), "{text}");
    assert!(scene.verdict(END).unwrap().killed());
    assert!(folders().is_empty());
}

#[test]
fn after_a_total_death_another_image_at_the_path_is_not_served() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    images::replace_with_other_bytes(&scene.images()).unwrap();
    is_killed_for_its_image(&scene, "pages-1.img");
}

#[test]
fn after_a_total_death_a_program_without_image_is_killed() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    fs::remove_dir_all(scene.images()).unwrap();
    is_killed_for_its_image(&scene, "the image must stay until all its memory is resident");
}

/// The new streamer's store takes the place of the former one. It dies while targets have both, only the new
/// one, or only the former one.
#[test]
fn a_recovered_session_outlives_another_total_death() {
    let criu = need!(Criu::main());
    let mut again = 0;
    for round in 0..2 * MOST {
        let scene = orphaned(&criu, "fork");
        let stores = || {
            let sockets = rewake_plugin_protocol::sockets_of(scene.pid().as_raw()).unwrap_or_default();
            sockets.into_iter().map(|(_, inode)| inode).collect::<Vec<_>>()
        };
        let former = stores();
        let mut recovering = recover().unwrap().spawn().unwrap();
        let is_reached = |now: &[u64]| match round % 3 {
            0 => now.len() > former.len(),
            1 => now.iter().any(|inode| !former.contains(inode)) && now.len() == former.len(),
            _ => true,
        };
        let reached = until(ACT, || (is_reached(&stores()) || stores().is_empty()).then_some(()));
        let streamers = proc::tree(recovering.id().cast_signed(), 100).into_iter().skip(1);
        kill_all(&streamers.map(Pid::from_raw).collect::<Vec<_>>());
        recovering.kill().unwrap();
        recovering.wait().unwrap();
        assert!(reached.is_some(), "no target is given another store");
        let output = recover().unwrap().output().unwrap();
        again += served_again(&output);
        scene.stop().unwrap();
        let verdict = scene.verdict(ACT).unwrap();
        assert!(verdict == Verdict::Ok || verdict.killed(), "{verdict:?}\n{}", scene.logs());
        assert_eq!(folders().len(), 0);
        if again > 2 {
            return;
        }
    }
    panic!("after {again} of {} second deaths memory was still missing: enlarge the image", 2 * MOST);
}

#[test]
fn with_the_plugin_a_total_death_at_any_moment_costs_no_byte() {
    for criu in Criu::both() {
        deaths_at_any_moment(&need!(criu));
    }
}

/// Kills all processes at random moments of a restore with the plugin. At least a quarter of the targets must
/// end well.
fn deaths_at_any_moment(criu: &Criu) {
    own_sessions().unwrap();
    let seed = seed();
    let mut random = Random::new(seed);
    let mut scene = Scene::dumped(criu, "random", MIB).unwrap();
    // How long a restore takes here and now: three quarters of the moments are after its end.
    let server = scene.serve().unwrap();
    scene.go().unwrap();
    let start = Instant::now();
    scene.restore().unwrap();
    let latest = start.elapsed() * 4;
    ends_well(&scene);
    drop(server);
    scene.next_round().unwrap();
    let (mut served, mut refused) = (0, 0);
    for _ in 0..rounds() {
        let mut server = scene.serve().unwrap();
        scene.go().unwrap();
        let plugins = rewake_tests::plugins::rewake_alone(&scene.work()).unwrap();
        let restored = std::thread::scope(|scope| {
            let options = [std::ffi::OsStr::new("-L"), plugins.as_os_str()];
            let (images, work) = (scene.images(), scene.work());
            let restore = scope.spawn(move || criu.restore_with(&images, &work, &options));
            moment(latest, &mut random);
            deaths_in_some_order(&mut server, &mut random);
            restore.join().unwrap()
        });
        let found = served_again(&recovered());
        scene.stop().unwrap();
        // CRIU ignores the hook's result: the hook may have killed the tasks.
        let killed = fs::read_to_string(scene.work().join("restore.log")).unwrap_or_default();
        let killed = killed.contains("the tasks are killed");
        if restored.is_err() || killed {
            refused += 1;
            assert_eq!(found, 0);
            assert!(!scene.written().contains("BAD"), "{}", scene.written());
        } else {
            served += 1;
            assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
        }
        scene.next_round().unwrap();
    }
    eprintln!("{}, REWAKE_SEED={seed}: {served} ended well, {refused} were refused", criu.version().unwrap());
    assert!(is_share(served, 4, rounds()), "{served} ended well, {refused} were refused");
}

/// A restore is over while its target has a tracer, so that no other process can stop the target and take the
/// descriptor of the session back.
fn ended_while_traced(criu: &Criu) -> Scene {
    own_sessions().unwrap();
    let scene = Scene::dumped(criu, "plain", 16).unwrap();
    let mut command = restore(criu, &scene.images()).unwrap();
    command.args(["--on-demand-only=2", "--wait=alive", "-W"]).arg(scene.work()).args(["--", "-d"]);
    timeline(&command.output().unwrap()).unwrap();
    assert!(parked(scene.pid(), || false).unwrap());
    ptrace::seize(scene.pid(), ptrace::Options::empty()).unwrap();
    let work = scene.work();
    until(ACT, || processes_naming(work.to_str().unwrap()).is_empty().then_some(()))
        .expect("the streamer ends");
    assert!(are_parked(scene.pid()));
    scene
}

#[test]
fn what_a_traced_target_keeps_is_shown_and_taken_back_later() {
    let criu = need!(Criu::main());
    let scene = ended_while_traced(&criu);
    let status = Command::new(rewake().unwrap()).arg("status").output().unwrap();
    let shown = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(shown.contains(&format!(
        "keep an empty descriptor of it, with which CRIU cannot dump them: {}",
        scene.pid()
    )));
    let output = recover().unwrap().output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("a process keeps an empty descriptor"), "{said}");
    assert!(folders().is_empty(), "no ledger is kept");

    interrupt_and_detach(&scene);
    let output = recover().unwrap().output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!are_parked(scene.pid()) && folders().is_empty());
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn an_agent_takes_back_what_a_traced_target_kept() {
    let criu = need!(Criu::main());
    let scene = ended_while_traced(&criu);
    interrupt_and_detach(&scene);
    let _daemon = Daemon::start().unwrap();
    until(END, || (!are_parked(scene.pid()) && folders().is_empty()).then_some(()))
        .expect("it is taken back");
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

/// `rewake dump` of a scene's target; whether it succeeded, and what it said.
fn dumped(scene: &Scene, criu: &Criu, images: &str) -> (bool, String) {
    let images = scene.work().join(images);
    fs::create_dir(&images).unwrap();
    let mut dump = Command::new(rewake().unwrap());
    dump.args(["dump", "-t", &scene.pid().to_string(), "-D"]).arg(&images).env("CRIU", criu);
    let output = dump.output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_dump_takes_back_what_its_tree_keeps() {
    let criu = need!(Criu::main());
    let scene = ended_while_traced(&criu);
    let (is_dumped, said) = dumped(&scene, &criu, "refused");
    assert!(!is_dumped && said.lines().count() == 1, "{said}");
    assert!(
        said.contains("keeps an empty descriptor of the restore of") && said.contains("rewake recover"),
        "{said}"
    );
    assert!(are_parked(scene.pid()), "nothing was touched");
    interrupt_and_detach(&scene);
    let (is_dumped, said) = dumped(&scene, &criu, "images");
    assert!(is_dumped, "{said}");
    assert_eq!(folders().len(), 0);
    waitpid(scene.pid(), None).unwrap();
    let mut command = restore(&criu, &scene.work().join("images")).unwrap();
    command.arg("-W").arg(scene.work()).args(["--", "-d"]);
    timeline(&command.output().unwrap()).unwrap();
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

/// More than `rewake park` can wait for, one second each.
const FROZEN: usize = 24;

#[test]
fn frozen_processes_do_not_keep_others_waiting() {
    let group = need!(Cgroup::new());
    let (one, other) = UnixStream::pair().unwrap();
    let holder = |command: &mut Command| {
        command.stdin(OwnedFd::from(one.try_clone().unwrap())).stdout(Stdio::null()).spawn().unwrap()
    };
    let mut sleep = Command::new("sleep");
    sleep.arg("1000");
    let mut frozen: Vec<_> = (0..FROZEN).map(|_| holder(&mut group.entered_by(&sleep))).collect();
    assert!(soon(|| group.processes().len() == FROZEN && frozen.iter().all(|it| is_named(it.id(), "sleep"))));
    need!(group.freeze());
    let mut last = holder(&mut sleep);
    assert!(soon(|| is_named(last.id(), "sleep")));
    let inode = fs::read_link(format!("/proc/{}/fd/0", last.id())).unwrap();
    let inode = inode.to_str().unwrap().trim_start_matches("socket:[").trim_end_matches(']');
    // The command has a copy of its own.
    drop((sleep, one, other));
    let mut unpark = Command::new(rewake().unwrap());
    let output = unpark.args(["park", "--unpark", inode]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), FROZEN), "{said}");
    assert!(said.lines().all(|line| line.starts_with(&format!("{inode} "))), "{said}");
    assert!(!Path::new(&format!("/proc/{}/fd/0", last.id())).exists(), "it was taken back");
    drop(group);
    last.kill().unwrap();
    frozen.iter_mut().chain([&mut last]).for_each(|it| drop(it.wait()));
}

fn is_named(pid: u32, name: &str) -> bool {
    proc::name(pid.cast_signed()) == name.as_bytes()
}

/// Ends the tracing: only a stopped task can be left.
fn interrupt_and_detach(scene: &Scene) {
    ptrace::interrupt(scene.pid()).unwrap();
    waitpid(scene.pid(), Some(WaitPidFlag::__WALL)).unwrap();
    ptrace::detach(scene.pid(), None).unwrap();
}
