// SPDX-License-Identifier: MIT OR Apache-2.0
//! One process, ordinary images: every byte is restored.

use rewake_tests::scene::{ACT, END};
use rewake_tests::{Criu, Scene, Verdict, images, need};

#[test]
fn memory_read_in_order_is_restored() {
    let criu = need!(Criu::main());
    Scene::dumped(&criu, "plain", 64).unwrap().play().unwrap();
}

#[test]
fn memory_read_in_random_order_while_it_loads_is_restored() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 64).unwrap();
    scene.stop().unwrap();
    scene.play().unwrap();
}

#[test]
fn pages_written_while_memory_loads_keep_their_new_bytes() {
    let criu = need!(Criu::main());
    Scene::dumped(&criu, "rewrite", 32).unwrap().play().unwrap();
}

#[test]
fn a_target_without_page_faults_is_loaded_in_the_background() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 32).unwrap();
    let mut server = scene.serve().unwrap();
    scene.restore().unwrap();
    let status = server.ended(END).unwrap();
    assert_eq!(status.code(), Some(0));
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn memory_in_transparent_huge_pages_is_restored() {
    let criu = need!(Criu::main());
    Scene::dumped(&criu, "thp", 32).unwrap().play().unwrap();
}

#[test]
fn memory_never_written_reads_zero() {
    let criu = need!(Criu::main());
    Scene::dumped(&criu, "sparse", 32).unwrap().play().unwrap();
}

#[test]
fn memory_that_is_not_lazy_is_restored_beside_lazy_memory() {
    let criu = need!(Criu::main());
    Scene::dumped(&criu, "mixed", 16).unwrap().play().unwrap();
}

#[test]
fn holes_in_the_pages_file_read_as_the_zeros_they_are() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "zeros", 16).unwrap();
    let pagemap = images::Pagemap::read(&images::pagemap_path(&scene.images(), scene.pid())).unwrap();
    let pages = images::pages_path(&scene.images(), &pagemap);
    assert!(images::punch_zero_pages(&pages).unwrap() > 1000);
    scene.play().unwrap();
}

#[test]
fn images_and_restore_of_another_criu_version_work_as_well() {
    let criu = need!(Criu::main());
    let other = need!(Criu::alternative());
    criu.ensure_differs(&other).unwrap();
    Scene::dumped(&other, "plain", 64).unwrap().play().unwrap();
}

#[test]
fn images_of_an_older_criu_are_restored_by_a_newer_one() {
    let criu = need!(Criu::main());
    let other = need!(Criu::alternative());
    let scene = Scene::dumped(&other, "random", 32).unwrap();
    let mut server = scene.serve().unwrap();
    scene.go().unwrap();
    scene.stop().unwrap();
    scene.restore_from(&criu, &scene.images()).unwrap();
    scene.expect_good_end(&mut server).unwrap();
}
