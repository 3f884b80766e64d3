// SPDX-License-Identifier: MIT OR Apache-2.0
//! Containers: `runc checkpoint`, then `runc restore --lazy-pages` with this page server.

use std::fs;
use std::path::Path;

use rewake_tests::container::{Network, runc_works};
use rewake_tests::images;
use rewake_tests::scene::{ACT, END};
use rewake_tests::{Container, Criu, Verdict, need};

/// The CRIU to work with, or the test is skipped.
macro_rules! need_runc {
    ($criu:expr) => {{
        let criu = need!($criu);
        need!(runc_works(&criu));
        criu
    }};
}

/// Enough that most is missing when the restore has finished.
const MIB: usize = 512;

/// Restores at most until a kill was not too late.
const MOST: usize = 5;

/// There and back.
fn comes_back(criu: &Criu, network: Network, scenario: &str) {
    let container = Container::dumped(criu, network, scenario, 64).unwrap();
    let mut server = container.setup().unwrap().listening().unwrap();
    container.go().unwrap();
    container.restore().unwrap();
    container.expect_good_end(&mut server).unwrap();
}

#[test]
fn memory_of_a_container_comes_back() {
    comes_back(&need_runc!(Criu::main()), Network::Own, "plain");
}

#[test]
fn with_another_criu_and_the_host_s_network_it_does_as_well() {
    comes_back(&need_runc!(Criu::alternative()), Network::Hosts, "plain");
}

#[test]
fn every_process_of_a_container_comes_back() {
    comes_back(&need_runc!(Criu::main()), Network::Own, "tree");
}

#[test]
fn a_container_that_forks_while_memory_is_missing_sees_right_bytes() {
    comes_back(&need_runc!(Criu::main()), Network::Own, "fork");
}

#[test]
fn without_a_work_path_the_socket_is_looked_for_beside_the_images() {
    let criu = need_runc!(Criu::main());
    let container = Container::dumped(&criu, Network::Own, "plain", 16).unwrap();
    let mut server = container.setup().unwrap().without_work_dir().listening().unwrap();
    container.go().unwrap();
    container.restore_without_work_path().unwrap();
    container.expect_good_end(&mut server).unwrap();
}

#[test]
fn without_a_page_server_nothing_runs_and_it_can_be_tried_again() {
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
fn a_worker_that_is_killed_is_replaced_and_the_container_sees_right_bytes() {
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

/// Leaves half of what the pages files hold.
fn cut(images: &Path) {
    for file in fs::read_dir(images).unwrap() {
        let path = file.unwrap().path();
        if path.file_name().unwrap().to_string_lossy().starts_with("pages-") {
            images::truncate(&path, fs::metadata(&path).unwrap().len() / 2).unwrap();
        }
    }
}

#[test]
fn when_bytes_cannot_be_had_every_process_of_the_container_is_killed() {
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
            // Everything had been read before the cut.
            assert_eq!(verdict, Verdict::Ok);
            continue;
        }
        assert!(verdict.killed() && status.code() == Some(1), "{verdict:?}, the server: {status}");
        return;
    }
    panic!("the images were cut too late {MOST} times");
}
