// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake migrate` sends memory while the program runs: what has not changed is compared, and not sent
//! again.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use rewake_tests::migration::{Migration, RECEIVER};
use rewake_tests::process::{PATIENCE, until};
use rewake_tests::relay::SlowLink;
use rewake_tests::{Criu, need};

const MIB: usize = 64;
/// Of a slow link: 400 Mbit/s.
const RATE: u64 = 50_000_000;
/// Enough that most is not yet loaded when the program runs at the destination.
const LARGE: usize = 256;

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&text).into_owned()
}

fn path(criu: &Criu) -> &Path {
    Path::new(criu.as_ref())
}

/// The number before a word of the report.
fn number(text: &str, unit: &str) -> usize {
    let words: Vec<&str> = text.split_whitespace().collect();
    let at = words.windows(2).position(|pair| pair[1].starts_with(unit));
    at.and_then(|at| words[at].parse().ok()).unwrap_or_else(|| panic!("no {unit} in {text:?}"))
}

#[test]
fn an_idle_program_is_sent_once() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    let migrated = migration.migrate().unwrap().ended().unwrap();
    let text = said(&migrated);
    assert_eq!(migrated.status.code(), Some(0), "{text}\n{}", migration.received());
    assert!((MIB..MIB + MIB / 8).contains(&number(&text, "MiB")), "{text}");
    assert!(number(&text, "rounds") >= 2, "{text}");
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    migration.expect_right_bytes().unwrap();
}

/// It writes, drops, moves and forks at random, and knows what each page must hold.
#[test]
fn a_program_that_changes_its_memory_moves_with_every_byte() {
    let criu = need!(Criu::main());
    for options in [&[][..], &["--pre-copy-only"]] {
        let migration = Migration::started(&criu, "active", MIB).unwrap();
        let mut receive = migration.receive(path(&criu)).unwrap();
        migration.go().unwrap();
        let migrated = migration.migrate_with(RECEIVER, options).unwrap().ended().unwrap();
        let text = said(&migrated);
        assert_eq!(migrated.status.code(), Some(0), "{text}\n{}", migration.received());
        assert!(number(&text, "rounds") <= 8, "{text}");
        assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
        migration.expect_right_bytes().unwrap();
    }
}

#[test]
fn with_pre_copy_only_no_byte_is_missing_after_grant() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", LARGE).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    let mut migrate = migration.migrate_with(RECEIVER, &["--pre-copy-only"]).unwrap();
    until(PATIENCE, || migration.is_released().then_some(())).expect("RELEASE");
    migration.hosts.cut(true).unwrap();
    // A program that ends before that counts as lost.
    until(PATIENCE, || migration.is_resident().then_some(()))
        .expect("all memory is resident without the link");
    migration.expect_right_bytes().unwrap();
    migration.hosts.cut(false).unwrap();
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
}

#[test]
fn a_downtime_that_is_too_long_leaves_the_program() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    let migrated = migration.migrate_with(RECEIVER, &["--max-downtime", "20"]).unwrap().ended().unwrap();
    let text = said(&migrated);
    assert_eq!(migrated.status.code(), Some(1), "{text}");
    assert!(text.contains("runs here: the restore was not ready 20 ms after the freeze began"), "{text}");
    receive.ended().unwrap();
    assert_eq!((migration.processes(), migration.source_record()), ((1, 0), None));
    migration.expect_right_bytes().unwrap();
}

#[test]
fn a_restore_that_takes_too_long_leaves_the_program() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let mut receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let migrated = migration.migrate_with(RECEIVER, &["--max-downtime", "2000"]).unwrap().ended().unwrap();
    let text = said(&migrated);
    assert_eq!(migrated.status.code(), Some(1), "{text}");
    assert!(text.contains("runs here: the restore was not ready 2000 ms after the freeze began"), "{text}");
    receive.ended().unwrap();
    migration.expect_right_bytes().unwrap();
}

/// It would be frozen with the tree, and killed at the end. CRIU does not dump it.
#[test]
fn a_process_that_joins_the_cgroup_is_not_killed() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    let link = SlowLink::on(&migration.hosts.source, RECEIVER.parse().unwrap(), RATE).unwrap();
    let mut migrate = migration.migrate_to(&format!("127.0.0.1:{}", link.port())).unwrap();
    let cgroup = until(PATIENCE, || migration.tree_cgroup()).expect("a cgroup");
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    fs::write(cgroup.join("cgroup.procs"), other.id().to_string()).unwrap();
    let migrated = migrate.ended().unwrap();
    let text = said(&migrated);
    assert_eq!(migrated.status.code(), Some(1), "{text}");
    assert!(text.contains("runs here: process ") && text.contains(" is not in the tree of "), "{text}");
    assert_eq!(receive.ended().unwrap().status.code(), Some(1), "{}", migration.received());
    assert!(other.try_wait().unwrap().is_none(), "it was killed");
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(migration.processes(), (1, 0));
    migration.expect_right_bytes().unwrap();
}

/// Only CRIU would stop it: it would run at both hosts when CRIU dies.
#[test]
fn a_child_that_leaves_the_cgroup_ends_the_migration() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "tree", MIB).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    let link = SlowLink::on(&migration.hosts.source, RECEIVER.parse().unwrap(), RATE).unwrap();
    let mut migrate = migration.migrate_to(&format!("127.0.0.1:{}", link.port())).unwrap();
    let cgroup = until(PATIENCE, || migration.tree_cgroup()).expect("a cgroup");
    let child = migration.hosts.source.named("target").into_iter().max().expect("a child");
    let moved = || fs::write(cgroup.parent().unwrap().join("cgroup.procs"), child.to_string());
    until(PATIENCE, || moved().ok()).expect("it leaves");
    let migrated = migrate.ended().unwrap();
    let text = said(&migrated);
    assert_eq!(migrated.status.code(), Some(1), "{text}");
    assert!(text.contains("runs here: process ") && text.contains(" of the tree has left cgroup"), "{text}");
    assert_eq!(receive.ended().unwrap().status.code(), Some(1), "{}", migration.received());
    migration.expect_right_bytes().unwrap();
}
