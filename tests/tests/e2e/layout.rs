// SPDX-License-Identifier: MIT OR Apache-2.0
//! The target changes its address space while memory is missing.

use std::fs;

use rewake_tests::scene::{ACT, END};
use rewake_tests::{Criu, Scene, Verdict, need, skip};

fn plays(scenario: &str, mib: usize) {
    let criu = need!(Criu::main());
    Scene::dumped(&criu, scenario, mib).unwrap().play().unwrap();
}

/// The server must finish while the target lives.
fn server_ends_first(scenario: &str, mib: usize) {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, scenario, mib).unwrap();
    let mut server = scene.serve().unwrap();
    scene.go().unwrap();
    scene.restore().unwrap();
    let status = server.ended(END).unwrap();
    assert_eq!(status.code(), Some(0));
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn missing_memory_can_be_moved_grown_and_shrunk() {
    plays("mremap", 32);
}

#[test]
fn unmapped_memory_stays_unmapped_and_the_rest_is_restored() {
    plays("munmap", 32);
}

#[test]
fn memory_after_madv_dontneed_reads_zero_for_ever() {
    plays("dontneed", 32);
}

#[test]
fn memory_after_madv_free_reads_old_bytes_or_zero() {
    plays("free", 32);
}

#[test]
fn random_reads_writes_drops_moves_and_forks_see_right_bytes() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "active", 32).unwrap();
    scene.stop().unwrap();
    scene.play().unwrap();
}

#[test]
fn over_two_gib_of_missing_memory_can_be_unmapped_at_once() {
    server_ends_first("sparse-unmap", 3072);
}

#[test]
fn over_two_gib_of_missing_memory_can_be_dropped_at_once() {
    server_ends_first("sparse-dontneed", 3072);
}

#[test]
fn over_two_gib_of_written_memory_can_be_unmapped_at_once() {
    const MIB: usize = 2560;
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("MemAvailable:")).unwrap();
    let available = line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() >> 10;
    if available < 3 * MIB {
        skip!("MemAvailable in /proc/meminfo is {available} MiB, {} are needed", 3 * MIB);
    }
    server_ends_first("dense-unmap", MIB);
}
