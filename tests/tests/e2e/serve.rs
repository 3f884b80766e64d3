// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve`, `rewake restore` and `rewake status`: many restores, at once, with failures among them.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_tests::daemon::{
    Daemon, detached, has_namespaces, in_namespaces, processes_naming, restore, timeline,
};
use rewake_tests::images::{self, Pagemap, pagemap_path, pages_path};
use rewake_tests::plugins::rewake_alone;
use rewake_tests::process::{children, signal_group, streamer_of, until};
use rewake_tests::restore_gate::{Gate, latecomer, script};
use rewake_tests::scene::{ACT, END};
use rewake_tests::sessions::{folders, own_sessions, parked};
use rewake_tests::{Criu, Scene, Verdict, need, skip};
use serde_json::Value;

/// The pages file of a scene's one process.
fn pages_file(scene: &Scene) -> PathBuf {
    let pagemap = Pagemap::read(&pagemap_path(&scene.images(), scene.pid())).unwrap();
    pages_path(&scene.images(), &pagemap)
}

fn session(status: &Value, state: &str) -> Option<Value> {
    let live = status["sessions"].as_array().unwrap().iter();
    let recent = status["recent"].as_array().unwrap().iter();
    live.chain(recent).find(|session| session["state"] == state).cloned()
}

/// A CRIU that cuts the pages file of the served copy in half, after the daemon has checked it. It restores
/// from the scene's own images: CRIU 4.2 reads a cut file in an endless loop.
fn saboteur(criu: &Criu, scene: &Scene, served: &Path) -> PathBuf {
    let pages = served.join(pages_file(scene).file_name().unwrap());
    let half = pages.metadata().unwrap().len() / 2;
    let cut = format!("truncate -s {half} {}", pages.display());
    let restore = format!("exec $criu $act $lazy -D {} \"$@\"", scene.images().display());
    script(criu, scene.work().join("criu"), &format!("{cut}\nact=$1 lazy=$2\nshift 4\n{restore}")).unwrap()
}

/// The work directories that restores have made beside the daemon's socket.
fn work_folders(daemon: &Daemon) -> Vec<String> {
    let entries = fs::read_dir(daemon.socket().parent().unwrap()).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("restore-")).collect()
}

/// A directory exists once a restore has connected, and until it ends.
fn under_way(daemon: &Daemon) -> Option<()> {
    let status = daemon.status().ok()?;
    let states = ["restoring", "running", "complete"];
    states.iter().any(|state| session(&status, state).is_some()).then_some(())
}

#[test]
fn one_daemon_serves_one_restore_after_another() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "plain", 32).unwrap();
    let daemon = Daemon::start().unwrap();
    for round in 1..=2 {
        scene.go().unwrap();
        let output = detached(&daemon, &criu, &scene).unwrap().output().unwrap();
        let result = timeline(&output).unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
        assert_eq!(result["session"], round);
        assert!(result["alive_ms"].is_f64() && result["all_resident_ms"].is_f64(), "{result}");
        assert!(result["copied_bytes"].as_u64() >= Some(32 << 20), "{result}");
        let status = daemon.status().unwrap();
        assert_eq!(status["agent"]["sessions_served"], round);
        assert_eq!(session(&status, "complete").unwrap()["images_dir"], scene.images().to_str().unwrap());
        scene.next_round().unwrap();
    }
}

#[test]
fn a_restore_that_waits_for_alive_returns_before_the_load_ends() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 1024).unwrap();
    let daemon = Daemon::start().unwrap();
    let mut command = daemon.restore(&criu, &scene.images()).unwrap();
    let result = timeline(&command.args(["--wait=alive", "--", "-d"]).output().unwrap()).unwrap();
    assert!(result["alive_ms"].is_f64() && result["all_resident_ms"].is_null(), "{result}");
    assert_eq!(work_folders(&daemon).len(), 1, "the agent and the streamer still use it");
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    let served = until(END, || session(&daemon.status().ok()?, "complete"));
    assert_eq!(served.expect("the load ends")["images_dir"], scene.images().to_str().unwrap());
    let removed = || work_folders(&daemon).is_empty().then_some(());
    until(END, removed).expect("the agent removes it: no command does");

    let mut command = daemon.restore(&criu, &scene.images()).unwrap();
    let refused = command.arg("--wait=alive").output().unwrap();
    let message = "rewake: --wait=alive: this command ends with the restored processes; add `-- -d` to \
                   restore them in the background\n";
    assert_eq!((refused.status.code(), &*String::from_utf8_lossy(&refused.stderr)), (Some(1), message));
}

/// Bytes that an agent's streamers have read from the disk. All have ended: the kernel adds the bytes of
/// awaited children to their parent's (proc(5)).
fn read_bytes(daemon: &Daemon) -> u64 {
    let io = fs::read_to_string(format!("/proc/{}/io", daemon.pid())).unwrap();
    io.lines().find_map(|line| line.strip_prefix("read_bytes: ")).unwrap().parse().unwrap()
}

/// The bytes that three cold restores at once of an image of `mib` MiB have read, and the image's.
fn restore_three_times(criu: &Criu, mib: usize) -> (u64, u64) {
    let scene = Scene::dumped(criu, "plain", mib).unwrap();
    let daemon = Daemon::start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let pages = File::open(pages_file(&scene)).unwrap();
    pages.sync_all().unwrap();
    posix_fadvise(&pages, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();

    let gate = Gate::closed(dir.path().join("gate")).unwrap();
    let folders: Vec<PathBuf> = (0..3).map(|number| dir.path().join(number.to_string())).collect();
    let start = |folder: &PathBuf| {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("go"), "").unwrap();
        let mut inner = daemon.restore(criu, &scene.images()).unwrap();
        inner.args(["--", "-v4", "--action-script"]).arg(gate.script());
        in_namespaces(&inner, &scene.files(), folder).spawn().unwrap()
    };
    let restores: Vec<Child> = folders.iter().map(start).collect();
    assert!(gate.is_reached_by(3, ACT), "three restores");
    gate.open().unwrap();
    for (restore, folder) in restores.into_iter().zip(&folders) {
        timeline(&restore.wait_with_output().unwrap()).unwrap();
        assert_eq!(fs::read_to_string(folder.join("verdict")).unwrap(), "OK\n");
    }
    let status = daemon.status().unwrap();
    assert_eq!(status["agent"]["sessions_served"], 3, "{status}");
    until(END, || children(daemon.pid()).is_empty().then_some(())).expect("the streamers end");
    let (read, image) = (read_bytes(&daemon), pages.metadata().unwrap().len());
    eprintln!("{read} of {image} bytes read from the disk for three restores");
    (read, image)
}

#[test]
fn three_restores_at_once_of_an_image_read_most_of_it_once() {
    let criu = need!(Criu::main());
    if !has_namespaces() {
        skip!("no new pid namespaces here (unshare --pid)");
    }
    for mib in [24, 256] {
        // Alone each reads all of it: 3 images. A streamer that starts later may find that another has read
        // past the page cache before.
        let mut rounds: Vec<(u64, u64)> = Vec::new();
        for _ in 0..3 {
            let (read, image) = restore_three_times(&criu, mib);
            if read < image / 2 {
                skip!("the page cache kept the image (posix_fadvise DONTNEED)");
            }
            rounds.push((read, image));
        }
        rounds.sort_unstable();
        let (read, image) = rounds[1];
        assert!(
            read < image + image / 2,
            "{rounds:?} (bytes read, of the image): most was read more than once"
        );
    }
}

/// A command that runs `inner` as [`in_namespaces`] does, in namespaces that last for 100 s, or until their
/// first process is killed.
fn in_lasting_namespaces(inner: &Command, place: &Path, files: &Path) -> Command {
    let mut first = Command::new("sh");
    first.args(["-c", "\"$@\" > \"$0\" && exec sleep 100"]).arg(files.join("timeline"));
    first.arg(inner.get_program()).args(inner.get_args());
    first.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    in_namespaces(&first, place, files)
}

/// The plugin sees no process of the streamer there, so the session itself gives the program its store. A
/// plugin that looked for one waited for 60 s, or until all memory was loaded.
#[test]
fn a_restore_in_another_pid_namespace_is_parked_at_once() {
    let criu = need!(Criu::main());
    if !has_namespaces() {
        skip!("no new pid namespaces here (unshare --pid)");
    }
    own_sessions().unwrap();
    let scene = Scene::dumped(&criu, "plain", 64).unwrap();
    let (daemon, files) = (Daemon::start().unwrap(), tempfile::tempdir().unwrap());
    let mut inner = daemon.restore(&criu, &scene.images()).unwrap();
    inner.args(["--on-demand-only=3600", "--wait=alive", "-W"]).arg(scene.work());
    inner.args(["--", "-d", "-v4", "-L"]).arg(rewake_alone(files.path()).unwrap());
    let mut container = in_lasting_namespaces(&inner, &scene.files(), files.path()).spawn().unwrap();
    let result = || serde_json::from_slice(&fs::read(files.path().join("timeline")).ok()?).ok();
    let result: Value = until(ACT + ACT, result).expect("it is restored");
    assert!(result["alive_ms"].as_f64().unwrap() < 30_000.0, "{result}");
    let log = fs::read_to_string(scene.work().join("restore.log")).unwrap();
    assert!(log.contains("runs in another pid namespace: its session parks the store"), "{log}");
    assert!(!log.contains("Warn  (rewake_plugin)"), "{log}");

    // Its command line cannot be read while that page is missing.
    let first = children(Pid::from_raw(container.id().cast_signed()))[0];
    let waits = || fs::read_to_string(format!("/proc/{first}/comm")).ok().filter(|name| name == "sleep\n");
    until(END, waits).expect("its restore has ended: only the program is a child");
    let target = children(first)[0];
    assert!(parked(target, || false).unwrap());
    let (supervisor, _) = streamer_of(daemon.pid());
    signal_group(supervisor, &[Signal::SIGKILL]);
    fs::write(files.path().join("go"), "").unwrap();
    let verdict = files.path().join("verdict");
    let written = until(ACT, || fs::read_to_string(&verdict).ok().filter(|text| !text.is_empty()));
    assert_eq!(written.as_deref(), Some("OK\n"));
    kill(first, Signal::SIGKILL).unwrap();
    container.wait().unwrap();
}

#[test]
fn an_agent_has_its_session_served_again_without_being_asked() {
    let criu = need!(Criu::main());
    own_sessions().unwrap();
    let scene = Scene::dumped(&criu, "random", 512).unwrap();
    let daemon = Daemon::start().unwrap();
    let mut restoring = daemon.restore(&criu, &scene.images()).unwrap();
    restoring.arg("-W").arg(scene.work()).args(["--on-demand-only=3600", "--wait=resident", "--", "-d"]);
    let restoring = restoring.spawn().unwrap();
    until(ACT, || session(&daemon.status().ok()?, "running")).expect("its processes run");
    assert!(parked(scene.pid(), || false).unwrap());
    let (supervisor, _) = streamer_of(daemon.pid());
    signal_group(supervisor, &[Signal::SIGKILL]);
    timeline(&restoring.wait_with_output().unwrap()).unwrap();
    scene.go().unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", daemon.logs());
    let is_counted = || (daemon.status().ok()?["agent"]["sessions_served"] == 1).then_some(());
    until(END, is_counted).expect("the session is the agent's still");
    assert_eq!(folders().len(), 0);
}

#[test]
fn a_failing_session_harms_no_other() {
    let criu = need!(Criu::main());
    let good = Scene::dumped(&criu, "random", 64).unwrap();
    let bad = Scene::dumped(&criu, "plain", 64).unwrap();
    let daemon = Daemon::start().unwrap();
    good.go().unwrap();
    let restoring = detached(&daemon, &criu, &good).unwrap().spawn().unwrap();

    bad.go().unwrap();
    let served = bad.images().join("served");
    images::copy(&bad.images(), &served).unwrap();
    let broken = saboteur(&criu, &bad, &served);
    let mut command = daemon.restore(&criu, &served).unwrap();
    command.arg("-W").arg(bad.work()).arg("--criu").arg(broken).args(["--", "-d"]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("pages-1.img: the file ends"), "{said}");
    assert!(!bad.written().contains("BAD") && !bad.written().contains("OK"), "{}", bad.written());

    timeline(&restoring.wait_with_output().unwrap()).unwrap();
    good.stop().unwrap();
    assert_eq!(good.verdict(ACT).unwrap(), Verdict::Ok);
    let status = daemon.status().unwrap();
    assert_eq!(
        (&status["agent"]["sessions_served"], &status["agent"]["sessions_failed"]),
        (&1.into(), &1.into())
    );
}

/// Waits until this agent serves a restore of a scene; returns the restore.
fn restoring(daemon: &Daemon, criu: &Criu, scene: &Scene) -> Child {
    let restoring = detached(daemon, criu, scene).unwrap().spawn().unwrap();
    until(ACT, || under_way(daemon)).expect("a running restore");
    restoring
}

#[test]
fn sessions_and_clients_outlive_a_killed_agent() {
    let criu = need!(Criu::main());
    // It is loaded for longer than an agent takes to start.
    let scene = Scene::dumped(&criu, "random", 1024).unwrap();
    let mut daemon = Daemon::start().unwrap();
    let restoring = restoring(&daemon, &criu, &scene);
    daemon.replace().unwrap();
    scene.go().unwrap();
    timeline(&restoring.wait_with_output().unwrap()).unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    let ended =
        until(END, || session(&daemon.status().ok()?, "complete")).expect("the next agent has followed it");
    assert_eq!(
        (&ended["session"], &ended["images_dir"]),
        (&1.into(), &scene.images().to_str().unwrap().into())
    );
}

#[test]
fn a_session_and_its_client_outlive_a_killed_worker() {
    let criu = need!(Criu::main());
    // It is loaded for longer than this test takes to find the worker.
    let scene = Scene::dumped(&criu, "random", 1024).unwrap();
    let daemon = Daemon::start().unwrap();
    let restoring = restoring(&daemon, &criu, &scene);
    let (_, workers) = streamer_of(daemon.pid());
    kill(workers[0], Signal::SIGKILL).unwrap();
    scene.go().unwrap();
    timeline(&restoring.wait_with_output().unwrap()).unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn a_restore_without_an_agent_starts_its_streamer() {
    let criu = need!(Criu::main());
    if UnixStream::connect("/run/rewake/rewake.sock").is_ok() {
        skip!("a daemon listens on /run/rewake/rewake.sock");
    }
    let scene = Scene::dumped(&criu, "plain", 32).unwrap();
    scene.go().unwrap();
    let temp = tempfile::tempdir().unwrap();
    let mut command = restore(&criu, &scene.images()).unwrap();
    let output = command.args(["--", "-d"]).env("TMPDIR", temp.path()).output().unwrap();
    let result = timeline(&output).unwrap();
    assert_eq!(result["session"], Value::Null);
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    let ours = temp.path().to_str().unwrap();
    until(END, || processes_naming(ours).is_empty().then_some(())).expect("its streamer ends");
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn without_d_the_restore_lasts_as_long_as_the_tree() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 32).unwrap();
    let daemon = Daemon::start().unwrap();
    let said = scene.work().join("restore.err");
    let mut command = daemon.restore(&criu, &scene.images()).unwrap();
    let mut restoring = command.stderr(File::create(&said).unwrap()).spawn().unwrap();
    until(ACT, || session(&daemon.status().ok()?, "complete")).expect("all CPU memory is resident");
    // The tree, and CRIU with it, may end only after the client knows of that.
    let knows = || fs::read_to_string(&said).unwrap().contains("all memory is resident").then_some(());
    until(ACT, knows).expect("it prints when all CPU memory is resident");
    assert!(restoring.try_wait().unwrap().is_none(), "the tree still runs");
    scene.go().unwrap();
    let result = timeline(&restoring.wait_with_output().unwrap()).unwrap();
    assert_eq!(result["criu_exit_code"], 0);
    assert!(result["criu_ended_ms"].as_f64() >= result["all_resident_ms"].as_f64(), "{result}");
    assert_eq!(scene.written(), "OK\n");
}

#[test]
fn a_program_killed_while_memory_is_missing_is_no_success() {
    let criu = need!(Criu::main());
    let (scene, daemon) = (Scene::dumped(&criu, "plain", 32).unwrap(), Daemon::start().unwrap());
    let mut command = daemon.restore(&criu, &scene.images()).unwrap();
    let restoring = command.args(["--on-demand-only=3600", "--", "-d"]).spawn().unwrap();
    until(ACT, || session(&daemon.status().ok()?, "running")).expect("the program runs");
    kill(scene.pid(), Signal::SIGKILL).unwrap();
    let output = restoring.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    let line = "rewake: the program ended (killed by SIGKILL) before all its memory was resident: ";
    assert!(said.lines().any(|of| of.starts_with(line)) && !said.contains("all memory"), "{said}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let early = &result["ended_early"][0];
    assert_eq!((&result["ok"], &early["pid"]), (&false.into(), &scene.pid().as_raw().into()), "{result}");
    assert!(early["missing_bytes"].as_u64() >= Some(30 << 20), "{result}");
    assert!(
        result["lazy_bytes"].as_u64() >= Some(32 << 20) && result["all_resident_ms"].is_null(),
        "{result}"
    );
    let status = daemon.status().unwrap();
    assert_eq!(session(&status, "ended").unwrap()["images_dir"], scene.images().to_str().unwrap());
    assert_eq!(
        (&status["agent"]["sessions_served"], &status["agent"]["sessions_failed"]),
        (&0.into(), &1.into())
    );
    assert_eq!(work_folders(&daemon), [""; 0]);
}

#[test]
fn a_program_that_finishes_its_work_early_is_restored_well() {
    let criu = need!(Criu::main());
    let (scene, daemon) = (Scene::dumped(&criu, "plain", 8).unwrap(), Daemon::start().unwrap());
    scene.go().unwrap();
    let mut command = daemon.restore(&criu, &scene.images()).unwrap();
    let output = command.args(["--on-demand-only=3600", "--", "-d"]).output().unwrap();
    let result = timeline(&output).unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    assert_eq!((&result["ok"], &result["reason"]), (&true.into(), &Value::Null), "{result}");
    assert_eq!(result["ended_early"][0]["pid"], scene.pid().as_raw(), "{result}");
    assert!(result["all_resident_ms"].is_null(), "{result}");
    assert_eq!(daemon.status().unwrap()["agent"]["sessions_served"], 1);
}

#[test]
fn a_failed_criu_is_reported_and_leaves_nothing() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 8).unwrap();
    let daemon = Daemon::start().unwrap();
    fs::write(scene.images().join("core-1.img"), "").unwrap(); // harmless: not of this tree
    fs::remove_file(scene.images().join(format!("fs-{}.img", scene.pid()))).unwrap();
    let mut command = daemon.restore(&criu, &scene.images()).unwrap();
    let output = command.args(["--", "-d"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("criu: ") && said.contains("Error ("), "{said}");
    assert!(said.contains("nothing was restored"), "{said}");
    let status = daemon.status().unwrap();
    assert_eq!(
        (status["sessions"].as_array().unwrap().len(), &status["agent"]["sessions_failed"]),
        (0, &1.into())
    );
    assert_eq!(work_folders(&daemon), [""; 0]);
}

#[test]
fn an_image_that_cannot_be_served_is_refused_in_one_line() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 8).unwrap();
    let daemon = Daemon::start().unwrap();
    File::options().write(true).open(pages_file(&scene)).unwrap().set_len(4096).unwrap();
    for mut command in
        [daemon.restore(&criu, &scene.images()).unwrap(), restore(&criu, &scene.images()).unwrap()]
    {
        let output = command.arg("--").arg("-d").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert!(said.contains("pages-") && said.contains("nothing was started"), "{said}");
    }
    assert_eq!(daemon.status().unwrap()["agent"]["sessions_failed"], 0);
}

#[test]
fn an_agent_asked_to_end_leaves_its_sessions_running() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 256).unwrap();
    let mut daemon = Daemon::start().unwrap();
    let restoring = restoring(&daemon, &criu, &scene);
    daemon.terminate().unwrap();
    assert_eq!(daemon.ended(END).unwrap().code(), Some(0));
    assert!(!daemon.socket().exists());
    scene.go().unwrap();
    timeline(&restoring.wait_with_output().unwrap()).unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn an_idle_daemon_asked_to_end_ends_at_once() {
    need!(Criu::main());
    let mut daemon = Daemon::start().unwrap();
    daemon.terminate().unwrap();
    assert_eq!(daemon.ended(END).unwrap().code(), Some(0));
    assert!(!daemon.socket().exists());
}

#[test]
fn an_interrupted_restore_leaves_nothing() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 8).unwrap();
    let daemon = Daemon::start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let waiting = latecomer(&criu, dir.path(), &dir.path().join("never")).unwrap();
    let mut command = daemon.restore(&criu, &scene.images()).unwrap();
    let restoring = command.env("CRIU", &waiting).args(["--", "-d"]).spawn().unwrap();
    let running = || (!processes_naming(&format!("sh {}", waiting.display())).is_empty()).then_some(());
    until(ACT, running).expect("the script runs");
    kill(Pid::from_raw(restoring.id().cast_signed()), Signal::SIGINT).unwrap();
    let output = restoring.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(running().is_none());
    let none = || daemon.status().unwrap()["sessions"].as_array().unwrap().is_empty().then_some(());
    until(END, none).expect("the session ends");
    assert_eq!(work_folders(&daemon), [""; 0]);
}

#[test]
fn clients_with_invalid_messages_are_disconnected() {
    need!(Criu::main());
    let daemon = Daemon::start().unwrap();
    let silent = UnixStream::connect(daemon.socket()).unwrap();
    for nonsense in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4], &[4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], &[9]]
    {
        let mut client = UnixStream::connect(daemon.socket()).unwrap();
        client.write_all(nonsense).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        // Closed, or reset because not all was read.
        let _ = client.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{nonsense:?}: {answer:?}");
    }
    assert_eq!(daemon.status().unwrap()["agent"]["pid"], daemon.pid().as_raw());
    drop(silent);
}
