// SPDX-License-Identifier: MIT OR Apache-2.0
//! Containers: `runc checkpoint`, then `runc restore --lazy-pages` with this page server.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rewake_tests::container::{Network, runc_works};
use rewake_tests::page_server::PageServer;
use rewake_tests::plugins::rewake_alone;
use rewake_tests::process::{output, until};
use rewake_tests::scene::{ACT, END};
use rewake_tests::server::rewake;
use rewake_tests::{Container, Criu, Verdict, images, need, sessions};

/// The CRIU for this test; without one the test is skipped.
macro_rules! need_runc {
    ($criu:expr) => {{
        let criu = need!($criu);
        need!(runc_works(&criu));
        criu
    }};
}

/// Enough that most is missing when the restore has finished.
const MIB: usize = 512;

/// Restores at most until a kill came early enough.
const MOST: usize = 5;

/// Dumps and restores a container.
fn restores(criu: &Criu, network: Network, scenario: &str) {
    let container = Container::dumped(criu, network, scenario, 64).unwrap();
    let mut server = container.setup().unwrap().listening().unwrap();
    container.go().unwrap();
    container.restore().unwrap();
    container.expect_good_end(&mut server).unwrap();
}

#[test]
fn memory_of_a_container_is_restored() {
    restores(&need_runc!(Criu::main()), Network::Own, "plain");
}

#[test]
fn a_container_in_the_host_network_is_restored_by_another_criu() {
    restores(&need_runc!(Criu::alternative()), Network::Hosts, "plain");
}

/// Its tasks open files of the image themselves, as the namespace's root. Stock loads all memory of such a
/// container first, too, because the kernel gives tasks of a user namespace no userfaultfd.
#[test]
fn a_container_with_users_is_restored_from_received_memory() {
    let criu = need_runc!(Criu::main());
    let container = Container::in_user_namespace(&criu, "plain", 64).unwrap();
    let mut receiver = PageServer::ours(&container.images(), &[]).unwrap();
    container.dump_through(&receiver).unwrap();
    assert_eq!(receiver.ended().unwrap().code(), Some(0), "{}", receiver.text());
    let inspect = ["inspect", "--json"];
    let report = output(Command::new(rewake().unwrap()).args(inspect).arg(container.images())).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let gives_none = fs::read("/proc/sys/vm/unprivileged_userfaultfd").unwrap() == b"0\n";
    assert_eq!(report["lazy"]["verdict"] == "not-here", gives_none, "{}", report["lazy"]);
    container.go().unwrap();
    container.restore_eagerly().unwrap();
    assert_eq!(container.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn every_process_of_a_container_is_restored() {
    restores(&need_runc!(Criu::main()), Network::Own, "tree");
}

#[test]
fn a_container_forks_with_missing_memory_and_sees_right_bytes() {
    restores(&need_runc!(Criu::main()), Network::Own, "fork");
}

#[test]
fn without_a_work_path_the_socket_is_in_the_images_directory() {
    let criu = need_runc!(Criu::main());
    let container = Container::dumped(&criu, Network::Own, "plain", 16).unwrap();
    let mut server = container.setup().unwrap().without_work_dir().listening().unwrap();
    container.go().unwrap();
    container.restore_without_work_path().unwrap();
    container.expect_good_end(&mut server).unwrap();
}

#[test]
fn a_restore_without_a_page_server_fails_and_can_be_repeated() {
    let criu = need_runc!(Criu::main());
    let container = Container::dumped(&criu, Network::Own, "plain", 16).unwrap();
    container.go().unwrap();
    let error = container.restore().unwrap_err().to_string();
    assert!(error.contains("lazy-pages.socket"), "{error}");
    assert_eq!(container.written(), "");
    let mut server = container.setup().unwrap().listening().unwrap();
    container.restore().unwrap();
    container.expect_good_end(&mut server).unwrap();
}

#[test]
fn a_successor_of_a_killed_worker_serves_the_container() {
    let criu = need_runc!(Criu::main());
    for _ in 0..MOST {
        let container = Container::dumped(&criu, Network::Own, "random", MIB).unwrap();
        let mut server = container.setup().unwrap().listening().unwrap();
        container.go().unwrap();
        container.restore().unwrap();
        server.kill_worker();
        container.stop().unwrap();
        container.expect_good_end(&mut server).unwrap();
        if server.text().contains("starting a successor") {
            return;
        }
    }
    panic!("the worker was killed too late {MOST} times");
}

/// Cuts the pages files to half of their length.
fn cut(images: &Path) {
    for file in fs::read_dir(images).unwrap() {
        let path = file.unwrap().path();
        if path.file_name().unwrap().to_string_lossy().starts_with("pages-") {
            images::truncate(&path, fs::metadata(&path).unwrap().len() / 2).unwrap();
        }
    }
}

#[test]
fn unreadable_bytes_kill_every_process_of_the_container() {
    let criu = need_runc!(Criu::main());
    for _ in 0..MOST {
        let container = Container::dumped(&criu, Network::Own, "tree", MIB / 4).unwrap();
        let mut server = container.setup().unwrap().listening().unwrap();
        container.restore().unwrap();
        cut(&container.images());
        container.go().unwrap();
        let verdict = container.verdict(ACT).unwrap();
        let status = server.ended(END).unwrap();
        if status.success() {
            // The server had read everything before the cut.
            assert_eq!(verdict, Verdict::Ok);
            continue;
        }
        assert!(verdict.killed() && status.code() == Some(1), "{verdict:?}, the server: {status}");
        return;
    }
    panic!("the images were cut too late {MOST} times");
}

#[test]
fn a_dump_of_a_container_with_missing_memory_is_complete() {
    let criu = need_runc!(Criu::main());
    for _ in 0..MOST {
        let container = Container::dumped(&criu, Network::Own, "plain", MIB).unwrap();
        container.load_plugins(&rewake_alone(&container.work()).unwrap()).unwrap();
        let mut server = container.setup().unwrap().listening().unwrap();
        container.restore().unwrap();
        container.put_images_aside("first").unwrap();
        container.dump().unwrap();
        assert!(server.ended(END).unwrap().success(), "{}", server.text());
        let log = fs::read_to_string(container.work().join("dump.log")).unwrap();
        // The first image's bytes came through open files; the second image has all of them.
        let mut second = container.setup().unwrap().listening().unwrap();
        container.go().unwrap();
        container.restore().unwrap();
        container.expect_good_end(&mut second).unwrap();
        if log.contains("the dump waits until all memory of its tree is resident") {
            return;
        }
    }
    panic!("all memory was resident before the dump {MOST} times");
}

#[test]
fn without_the_plugin_a_dump_with_missing_memory_is_refused() {
    let criu = need_runc!(Criu::main());
    for _ in 0..MOST {
        let container = Container::dumped(&criu, Network::Own, "plain", MIB).unwrap();
        let mut server = container.setup().unwrap().listening().unwrap();
        container.restore().unwrap();
        let parked = || sessions::are_parked(container.pid().unwrap()).then_some(());
        let was_parked = until(Duration::from_millis(300), parked).is_some();
        container.put_images_aside("first").unwrap();
        if container.dump().is_ok() {
            assert!(!was_parked || server.ended(END).unwrap().success(), "{}", server.text());
            continue;
        }
        container.go().unwrap();
        container.expect_good_end(&mut server).unwrap();
        return;
    }
    panic!("the dump was refused in none of {MOST} rounds");
}
