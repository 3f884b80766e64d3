// SPDX-License-Identifier: MIT OR Apache-2.0
//! Images whose older pages lie in a parent directory.

use rewake_tests::images::{LAZY, PARENT, split};
use rewake_tests::{Criu, Scene, need};

fn plays(flags: u32, punch: bool) {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 32).unwrap();
    split(&scene.images(), "before", scene.pid(), flags, punch).unwrap();
    scene.stop().unwrap();
    scene.play().unwrap();
}

#[test]
fn lazy_pages_of_the_parent_are_read_from_the_parent() {
    plays(PARENT | LAZY, false);
}

#[test]
fn pages_of_the_parent_that_criu_restores_itself_are_left_alone() {
    plays(PARENT, false);
}

#[test]
fn holes_that_deduplication_left_in_the_parent_are_never_read() {
    plays(PARENT | LAZY, true);
}
