// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake_plugin.so` makes a restore lazy that has no option for it, where the policy wants that and a node
//! agent serves it. In all other cases CRIU restores as it would have done.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use prost::Message as _;
use rewake_plugin_protocol::control::{self, proto};
use rewake_tests::container::{Network, runc_works};
use rewake_tests::daemon::{Daemon, has_namespaces};
use rewake_tests::node_etc::NodeEtc;
use rewake_tests::plugins::rewake_alone;
use rewake_tests::process::{run, streamer_of, until};
use rewake_tests::scene::{ACT, END};
use rewake_tests::{Container, Criu, Scene, Verdict, need, skip};

/// Enough that most is missing when the restore has finished.
const MIB: usize = 256;

/// Restores without an option for laziness. Returns whether CRIU succeeded, and its log.
fn restore(criu: &Criu, scene: &Scene, agent: &Path, lazy: &str) -> (bool, String) {
    let plugins = rewake_alone(&scene.work()).unwrap();
    let mut command = criu.command("restore");
    command.arg("-d").arg("-D").arg(scene.images()).arg("-W").arg(scene.work());
    command.args(["-v4", "-o", "restore.log", "-L"]).arg(plugins);
    command.env("REWAKE_LAZY", lazy).env("REWAKE_SOCKET", agent);
    let succeeded = run(&mut command, END).unwrap().success();
    (succeeded, fs::read_to_string(scene.work().join("restore.log")).unwrap())
}

fn sessions_served(daemon: &Daemon) -> u64 {
    daemon.status().unwrap()["agent"]["sessions_served"].as_u64().unwrap()
}

#[test]
fn a_restore_becomes_lazy_without_an_option() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::dumped(&criu, "random", MIB).unwrap();
        let daemon = Daemon::start().unwrap();
        let (succeeded, log) = restore(&criu, &scene, &daemon.socket(), "1");
        assert!(succeeded && log.contains("the restore is lazy"), "{log}");
        scene.go().unwrap();
        scene.stop().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", daemon.logs());
        until(END, || (sessions_served(&daemon) == 1).then_some(())).expect("one session was served");
        let status = daemon.status().unwrap();
        let resident = status["recent"][0]["processes"][0]["memory"][0]["resident"].as_u64();
        assert!(resident >= Some((MIB as u64) << 20), "{status}");
    }
}

/// Engines remove the images as soon as the restore returns.
#[test]
fn removed_images_are_served_by_a_successor_too() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 2 * MIB).unwrap();
    let daemon = Daemon::start().unwrap();
    let (succeeded, log) = restore(&criu, &scene, &daemon.socket(), "1");
    assert!(succeeded, "{log}");
    fs::remove_dir_all(scene.images()).unwrap();
    let (_, workers) = streamer_of(daemon.pid());
    for worker in workers {
        nix::sys::signal::kill(worker, nix::sys::signal::Signal::SIGKILL).unwrap();
    }
    scene.go().unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", daemon.logs());
    let log = fs::read_to_string(scene.work().join("rewake-streamer.log")).unwrap();
    assert!(log.contains("starting a successor"), "{log}");
}

/// Restores on a node with this policy, without `REWAKE_LAZY`. Returns whether CRIU succeeded, and its log.
fn restore_on(policy: &str, criu: &Criu, scene: &Scene, agent: &Path) -> (bool, String) {
    let node = NodeEtc::with(&[("rewake.toml", policy)]).unwrap();
    let plugins = rewake_alone(&scene.work()).unwrap();
    let mut command = criu.command("restore");
    command.arg("-d").arg("-D").arg(scene.images()).arg("-W").arg(scene.work());
    command.args(["-v4", "-o", "restore.log", "-L"]).arg(plugins).env("REWAKE_SOCKET", agent);
    let succeeded = run(&mut node.around(&command), END).unwrap().success();
    (succeeded, fs::read_to_string(scene.work().join("restore.log")).unwrap())
}

#[test]
fn the_policy_of_the_node_decides() {
    let criu = need!(Criu::main());
    if !has_namespaces() {
        skip!("this machine makes no namespaces");
    }
    let mut scene = Scene::dumped(&criu, "random", 16).unwrap();
    let daemon = Daemon::start().unwrap();
    let table = |keys: &str| format!("[restore]\n{keys}\n");

    let fails = table("lazy = \"always\"\non_refusal = \"fail\"");
    let nowhere = scene.work().join("agent");
    let (succeeded, log) = restore_on(&fails, &criu, &scene, &nowhere);
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("cannot be lazy")).collect();
    let refusal = "this restore cannot be lazy, and /etc/rewake/rewake.toml has on_refusal = \"fail\": ";
    assert!(!succeeded && errors.len() == 1 && errors[0].contains(refusal), "{errors:?}\n{log}");
    assert!(!Path::new(&format!("/proc/{}", scene.pid())).exists(), "nothing is restored by half");

    scene.next_round().unwrap();
    let unknown = table("lazy = \"always\"\nlazyness = 1");
    let (succeeded, log) = restore_on(&unknown, &criu, &scene, &daemon.socket());
    assert!(!succeeded && log.contains("/etc/rewake/rewake.toml: line 3: unknown field"), "{log}");

    for (keys, is_lazy) in [
        ("lazy = \"never\"", false),
        ("lazy = \"sealed\"", false),
        ("lazy = \"always\"\nmin_size_mib = 1024", false),
        ("lazy = \"always\"\nmin_size_mib = 1", true),
    ] {
        scene.next_round().unwrap();
        let (succeeded, log) = restore_on(&table(keys), &criu, &scene, &daemon.socket());
        assert!(succeeded && log.contains("the restore is lazy") == is_lazy, "{keys}\n{log}");
        scene.go().unwrap();
        scene.stop().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{keys}");
    }
}

#[test]
fn a_container_becomes_lazy_without_an_option() {
    let criu = need!(Criu::main());
    need!(runc_works(&criu));
    let container = Container::dumped(&criu, Network::Own, "plain", 64).unwrap();
    container.load_plugins(&rewake_alone(&container.work()).unwrap()).unwrap();
    let daemon = Daemon::start().unwrap();
    container.go().unwrap();
    container.restore_by_policy(&daemon.socket()).unwrap();
    assert_eq!(container.verdict(ACT).unwrap(), Verdict::Ok, "{}", container.logs());
    until(END, || (sessions_served(&daemon) == 1).then_some(())).expect("one session was served");
}

/// Restores eagerly, as this line of CRIU's log says, and the program reads its own bytes.
fn is_eager(criu: &Criu, scene: &Scene, agent: &Path, lazy: &str, line: &str) {
    let (succeeded, log) = restore(criu, scene, agent, lazy);
    assert!(succeeded && log.contains(line) && !log.contains("the restore is lazy"), "{log}");
    scene.go().unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn without_an_agent_the_restore_is_eager() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "random", 16).unwrap();
    let agent = scene.work().join("agent");
    is_eager(&criu, &scene, &agent, "1", "restored eagerly");
    scene.next_round().unwrap();
    // One that listens and never answers.
    let agent = scene.work().join("agent");
    let _listener = UnixListener::bind(&agent).unwrap();
    is_eager(&criu, &scene, &agent, "1", "has not started a streamer within 10s");
}

/// An agent that answers from another mount namespace has its streamer listen elsewhere.
#[test]
fn a_streamer_that_listens_elsewhere_leaves_the_restore_eager() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 16).unwrap();
    let agent = scene.work().join("agent");
    let listener = UnixListener::bind(&agent).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let opened = proto::Opened { session: 1, lazy_pages: true, reason: String::new() };
        let reply = proto::Reply { kind: Some(proto::reply::Kind::Opened(opened)) };
        for message in [control::hello().encode_to_vec(), reply.encode_to_vec()] {
            stream.write_all(&u32::try_from(message.len()).unwrap().to_le_bytes()).unwrap();
            stream.write_all(&message).unwrap();
        }
        // To the end: the plugin closes first.
        let _ = io::copy(&mut stream, &mut io::sink());
    });
    is_eager(&criu, &scene, &agent, "1", "does not listen in CRIU's work directory");
}

#[test]
fn the_policy_may_be_never_and_is_read_before_anything_else() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "random", 16).unwrap();
    let daemon = Daemon::start().unwrap();
    let (succeeded, log) = restore(&criu, &scene, &daemon.socket(), "maybe");
    assert!(!succeeded && log.contains("REWAKE_LAZY: expected 0 or 1, found \"maybe\""), "{log}");
    is_eager(&criu, &scene, &daemon.socket(), "0", "Restore finished successfully");
    scene.next_round().unwrap();
    is_eager(&criu, &scene, &daemon.socket(), "", "Restore finished successfully");
    assert_eq!(daemon.status().unwrap()["sessions"].as_array().unwrap().len(), 0);
}

#[test]
fn a_restore_that_has_a_streamer_is_left_alone() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 16).unwrap();
    let daemon = Daemon::start().unwrap();
    let server = scene.serve().unwrap();
    let (succeeded, log) = restore(&criu, &scene, &daemon.socket(), "1");
    assert!(succeeded && log.contains("a lazy-pages.socket lies in CRIU's work directory"), "{log}");
    scene.go().unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    assert_eq!(daemon.status().unwrap()["sessions"].as_array().unwrap().len(), 0);
    drop(server);
}
