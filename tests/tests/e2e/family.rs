// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads, trees of processes, processes that start or end while memory is missing.

use std::fs;

use rewake_tests::{Criu, Scene, need};

fn plays(scenario: &str, mib: usize) {
    let criu = need!(Criu::main());
    Scene::dumped(&criu, scenario, mib).unwrap().play().unwrap();
}

#[test]
fn threads_that_fault_at_the_same_time_see_right_bytes() {
    plays("threads", 16);
}

#[test]
fn each_process_of_a_tree_is_filled_from_its_own_pages_file() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "tree", 8).unwrap();
    let files = fs::read_dir(scene.images()).unwrap().flatten();
    let pages = files.filter(|file| file.file_name().to_string_lossy().starts_with("pages-")).count();
    assert!(pages >= 7, "{pages} pages files for seven processes");
    scene.play().unwrap();
}

#[test]
fn zombies_in_the_tree_do_not_hold_anything_up() {
    plays("zombies", 16);
}

#[test]
fn children_forked_with_missing_memory_see_the_fork_s_bytes() {
    plays("fork", 32);
}

#[test]
fn the_server_ends_well_when_a_target_exits_with_missing_memory() {
    plays("exit-early", 64);
}

#[test]
fn the_server_ends_well_when_a_target_execs_with_missing_memory() {
    plays("exec-early", 64);
}
