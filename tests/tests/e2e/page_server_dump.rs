// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake page-server` receives what `criu dump --page-server` sends: byte for byte the files that CRIU's
//! own server writes, from which the program is restored.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use rewake_tests::page_server::Peer::{New, Old};
use rewake_tests::page_server::{PageServer, Recorder, command, memory_files, task};
use rewake_tests::process::{run, until, wait_child, wait_pid};
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, need};

const MIB: usize = 24;

/// Dumps a target through a server, or a relay to one.
fn dump(scene: &Scene, images: &Path, options: &[String]) -> anyhow::Result<()> {
    let options: Vec<&OsStr> = options.iter().map(OsStr::new).collect();
    scene.dump_with(images, &options)
}

/// Ours receives a dump, and stock receives the same messages.
fn writes_what_stock_writes(scenario: &str) {
    for (criu, kind) in Criu::both().into_iter().zip([New, Old]) {
        let criu = need!(criu);
        let scene = Scene::started(&criu, scenario, MIB).unwrap();
        let [ours, stock] = ["ours", "stock"].map(|name| scene.files().join(name));
        [&ours, &stock].iter().for_each(|folder| fs::create_dir(folder).unwrap());
        let mut server = PageServer::ours(&ours, &[]).unwrap();
        let recorder = Recorder::before(&server).unwrap();
        dump(&scene, &scene.images(), &recorder.client_options()).unwrap();
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
        let mut server = PageServer::stock(&criu, &stock, &[]).unwrap();
        server.connect(kind).unwrap().replay(&recorder.sent().unwrap()).unwrap();
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
        let [ours, stock] = [ours, stock].map(|folder| memory_files(&folder).unwrap());
        let names = |files: &[(String, Vec<u8>)]| -> Vec<_> {
            files.iter().map(|(name, bytes)| (name.clone(), bytes.len())).collect()
        };
        assert_eq!(names(&ours), names(&stock));
        assert!(stock.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() > MIB << 20);
        for ((name, ours), (_, stock)) in ours.iter().zip(&stock) {
            assert!(
                ours == stock,
                "{name} differs at byte {:?}",
                ours.iter().zip(stock).position(|(a, b)| a != b)
            );
        }
    }
}

#[test]
fn one_process_is_received_byte_for_byte_as_by_stock() {
    writes_what_stock_writes("plain");
}

#[test]
fn a_tree_is_received_byte_for_byte_as_by_stock() {
    writes_what_stock_writes("tree");
}

#[test]
fn shared_memory_is_received_byte_for_byte_as_by_stock() {
    writes_what_stock_writes("mixed");
}

#[test]
fn a_received_dump_is_restored() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::started(&criu, "random", MIB).unwrap();
        let mut server = PageServer::ours(&scene.images(), &[]).unwrap();
        dump(&scene, &scene.images(), &server.client_options()).unwrap();
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
        assert!(!scene.images().join("pages-1.img").exists(), "the pages went to the server");
        scene.stop().unwrap();
        scene.play().unwrap();
    }
}

#[test]
fn a_received_dump_is_restored_by_criu_alone() {
    let criu = need!(Criu::main());
    let scene = Scene::started(&criu, "plain", MIB).unwrap();
    let server = PageServer::ours(&scene.images(), &[]).unwrap();
    dump(&scene, &scene.images(), &server.client_options()).unwrap();
    scene.go().unwrap();
    let mut restore = criu.command("restore");
    restore.arg("-d").arg("-D").arg(scene.images()).arg("-W").arg(scene.work()).args([
        "-v4",
        "-o",
        "restore.log",
    ]);
    let status = run(restore.stdout(Stdio::null()).stderr(Stdio::null()), ACT).unwrap();
    assert!(status.success());
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn two_dumps_at_once_get_a_folder_each() {
    let (criu, other) = (need!(Criu::main()), need!(Criu::alternative()));
    let scenes = [&criu, &other].map(|criu| Scene::started(criu, "random", MIB).unwrap());
    let inbox = tempfile::tempdir().unwrap();
    let mut server = PageServer::ours(inbox.path(), &["--keep-listening"]).unwrap();
    std::thread::scope(|scope| {
        for scene in &scenes {
            scope.spawn(|| dump(scene, &scene.images(), &server.client_options()).unwrap());
        }
    });
    for scene in &scenes {
        let folder = inbox.path().join(scene.pid().to_string());
        for (name, bytes) in memory_files(&folder).unwrap() {
            fs::write(scene.images().join(name), bytes).unwrap();
        }
        scene.stop().unwrap();
        scene.play().unwrap();
    }
    assert_eq!(fs::read_dir(inbox.path()).unwrap().count(), 2);
    server.signal(Signal::SIGTERM).unwrap();
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
}

#[test]
fn a_later_dump_of_the_same_pid_replaces_no_image() {
    need!(Criu::main());
    let inbox = tempfile::tempdir().unwrap();
    let server = PageServer::ours(inbox.path(), &["--keep-listening"]).unwrap();
    for (number, folder) in [(1u8, "7"), (2, "7.2"), (3, "7.3")] {
        let mut client = server.connect(New).unwrap();
        client.open(task(7)).unwrap();
        client.send(command::LAZY, 1, 0x10000, task(7), &[number; 4096]).unwrap();
        assert_eq!(client.close().unwrap(), 0);
        let pages = fs::read(inbox.path().join(folder).join("pages-65537.img")).unwrap();
        assert_eq!(pages, [number; 4096]);
    }
}

#[test]
fn the_socket_of_another_process_is_used() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::started(&criu, "random", MIB).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let kept = ours.try_clone().unwrap();
        let images = scene.images();
        let mut server = Command::new("/bin/sh");
        server
            .args(["-c", "exec \"$@\" 8<&0 0</dev/null", "sh"])
            .arg(rewake_tests::server::rewake().unwrap());
        server.args(["page-server", "--ps-socket", "8", "-D"]).arg(&images).stdin(OwnedFd::from(ours));
        let mut server = server.spawn().unwrap();
        let mut dump = Command::new("/bin/sh");
        dump.args(["-c", "exec \"$@\" 8<&0 0</dev/null", "sh"]).arg(&criu).args(["dump", "-t"]);
        dump.arg(scene.pid().to_string()).arg("-D").arg(&images).args(["-v4", "-o", "dump.log"]);
        dump.args(["--page-server", "--ps-socket", "8"]).stdin(OwnedFd::from(theirs));
        assert!(run(&mut dump, ACT).unwrap().success());
        let ended = wait_child(&mut server, ACT).expect("it ends with its client");
        assert_eq!(ended.code(), Some(0));
        wait_pid(scene.pid(), ACT).unwrap();
        let flags = OFlag::from_bits_retain(fcntl(&kept, FcntlArg::F_GETFL).unwrap());
        assert!(!flags.contains(OFlag::O_NONBLOCK), "the next round of a migration waits for its bytes");
        scene.stop().unwrap();
        scene.play().unwrap();
    }
}

#[test]
fn a_detached_server_writes_its_pidfile_and_receives() {
    let criu = need!(Criu::main());
    let scene = Scene::started(&criu, "random", MIB).unwrap();
    let mut server = PageServer::ours(&scene.images(), &["-d", "--pidfile", "pid"]).unwrap();
    assert_eq!(server.ended().unwrap().code(), Some(0), "the starter has ended");
    let pid = fs::read_to_string(server.work().join("pid")).unwrap().parse().unwrap();
    dump(&scene, &scene.images(), &server.client_options()).unwrap();
    // It has become a child of this process.
    let ended = wait_pid(Pid::from_raw(pid), ACT).unwrap();
    assert_eq!(ended, Some(WaitStatus::Exited(Pid::from_raw(pid), 0)));
    scene.stop().unwrap();
    scene.play().unwrap();
}

#[test]
fn a_cut_client_leaves_nothing_visible() {
    need!(Criu::main());
    for kind in [Old, New] {
        let images = tempfile::tempdir().unwrap();
        let mut server = PageServer::ours(images.path(), &[]).unwrap();
        let mut client = server.connect(kind).unwrap();
        assert!(!client.open(task(7)).unwrap());
        client.send(command::LAZY, 4, 0x10000, task(7), &[1; 4096]).unwrap();
        drop(client);
        assert_eq!(server.ended().unwrap().code(), Some(1));
        assert_eq!(fs::read_dir(images.path()).unwrap().count(), 0);
        let text = server.text();
        let line = "closed its connection in the middle of a message";
        assert_eq!(
            text.lines().filter(|text| text.starts_with("rewake: ") && text.contains(line)).count(),
            1,
            "{text}"
        );
    }
}

#[test]
fn a_client_that_ends_between_messages_leaves_nothing() {
    need!(Criu::main());
    let images = tempfile::tempdir().unwrap();
    let mut server = PageServer::ours(images.path(), &[]).unwrap();
    let mut client = server.connect(New).unwrap();
    client.open(task(7)).unwrap();
    client.send(command::LAZY, 1, 0x10000, task(7), &[1; 4096]).unwrap();
    drop(client);
    assert_eq!(server.ended().unwrap().code(), Some(1));
    assert_eq!(fs::read_dir(images.path()).unwrap().count(), 0);
    assert!(server.text().contains("its image is not complete"), "{}", server.text());
}

#[test]
fn a_failed_dump_leaves_the_earlier_image_whole() {
    let criu = need!(Criu::main());
    let scene = Scene::started(&criu, "random", MIB).unwrap();
    let images = scene.images();
    let server = PageServer::ours(&images, &[]).unwrap();
    dump(&scene, &images, &server.client_options()).unwrap();
    let before = memory_files(&images).unwrap();
    let mut server = PageServer::ours(&images, &[]).unwrap();
    let mut client = server.connect(New).unwrap();
    let id = task(u64::try_from(scene.pid().as_raw()).unwrap());
    client.open(id).unwrap();
    client.send(command::LAZY, 1, 0x10000, id, &[1; 4096]).unwrap();
    drop(client);
    server.ended().unwrap();
    assert!(memory_files(&images).unwrap() == before);
    scene.stop().unwrap();
    scene.play().unwrap();
}

#[test]
fn what_a_killed_server_left_is_removed_by_the_next() {
    need!(Criu::main());
    let images = tempfile::tempdir().unwrap();
    let hidden = || fs::read_dir(images.path()).unwrap().count();
    let server = PageServer::ours(images.path(), &["--keep-listening"]).unwrap();
    let mut client = server.connect(New).unwrap();
    client.open(task(7)).unwrap();
    assert_eq!(hidden(), 1);
    let other = PageServer::ours(images.path(), &["--keep-listening"]).unwrap();
    assert_eq!(hidden(), 1, "the first server is still using it");
    drop((server, other));
    assert_eq!(hidden(), 1);
    let _next = PageServer::ours(images.path(), &[]).unwrap();
    assert!(until(ACT, || (hidden() == 0).then_some(())).is_some());
}

/// A server that receives into `images` must not start; its line says `reason`.
fn does_not_start(images: &Path, options: &[&str], reason: &str) {
    let refused = PageServer::try_ours(images, options).unwrap().unwrap_err();
    assert_eq!(refused.code, Some(1));
    let said = refused.text.lines().filter(|line| line.starts_with("rewake: -D ") && line.contains(reason));
    assert_eq!(said.count(), 1, "{}", refused.text);
}

#[test]
fn a_directory_that_is_written_into_is_refused() {
    need!(Criu::main());
    let images = tempfile::tempdir().unwrap();
    let server = PageServer::ours(images.path(), &[]).unwrap();
    does_not_start(images.path(), &[], "a dump or another page server writes into it");
    let mut dump = Command::new(rewake_tests::server::rewake().unwrap());
    dump.args(["dump", "-t", &std::process::id().to_string(), "-D"]).arg(images.path());
    let dumped = dump.output().unwrap();
    let text = String::from_utf8_lossy(&dumped.stderr).into_owned();
    assert!(!dumped.status.success() && text.contains("another dump writes into it"), "{text}");
    drop(server);
    PageServer::ours(images.path(), &[]).unwrap();
}

#[test]
fn a_directory_with_a_complete_image_is_refused() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 1).unwrap();
    let seal =
        || Command::new(rewake_tests::server::rewake().unwrap()).arg("seal").arg(scene.images()).output();
    assert!(seal().unwrap().status.success());
    for options in [[].as_slice(), &["--keep-listening"]] {
        does_not_start(&scene.images(), options, "it has a complete image (rewake-manifest)");
    }
    // It is served.
    PageServer::ours(&scene.images(), &["--lazy-pages"]).unwrap();
}

#[test]
fn a_client_that_was_cut_ends_no_other_client() {
    need!(Criu::main());
    let inbox = tempfile::tempdir().unwrap();
    let server = PageServer::ours(inbox.path(), &["--keep-listening"]).unwrap();
    let mut good = server.connect(Old).unwrap();
    good.open(task(7)).unwrap();
    let mut cut = server.connect(New).unwrap();
    cut.open(task(8)).unwrap();
    cut.send(command::LAZY, 9, 0x10000, task(8), &[2; 4096]).unwrap();
    drop(cut);
    assert!(until(ACT, || server.text().contains("in the middle of a message").then_some(())).is_some());
    good.send(command::PRESENT, 1, 0x10000, task(7), &[1; 4096]).unwrap();
    assert_eq!(good.close().unwrap(), 0);
    assert!(inbox.path().join("7/pagemap-7.img").exists() && !inbox.path().join("8").exists());
}
