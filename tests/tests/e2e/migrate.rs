// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake migrate` and `rewake receive`: a program moves between two hosts. It runs on one of them at most,
//! and it sees right bytes only.

use std::fs;
use std::path::Path;
use std::process::Output;
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::Signal;
use rewake_tests::migration::{Migration, RECEIVER};
use rewake_tests::process::{PATIENCE, soon, until};
use rewake_tests::{Criu, need};

const MIB: usize = 64;
/// Enough that most is missing when the program runs at the destination.
const LARGE: usize = 768;

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&text).into_owned()
}

fn path(criu: &Criu) -> &Path {
    Path::new(criu.as_ref())
}

/// Moves a target, which then checks its memory.
fn migrates(criu: &Criu, scenario: &str) {
    let migration = Migration::started(criu, scenario, MIB).unwrap();
    let (processes, _) = migration.processes();
    let mut receive = migration.receive(path(criu)).unwrap();
    let migrated = migration.migrate().unwrap().ended().unwrap();
    assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
    assert!(said(&migrated).contains("downtime "), "{}", said(&migrated));
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    assert_eq!(migration.processes(), (0, processes));
    assert_eq!(migration.source_record(), None);
    assert_eq!(migration.parked(), 0);
    migration.expect_right_bytes().unwrap();
}

#[test]
fn a_program_moves_with_every_byte() {
    for criu in Criu::both() {
        migrates(&need!(criu), "random");
    }
}

#[test]
fn a_tree_moves_with_every_byte() {
    migrates(&need!(Criu::main()), "tree");
}

#[test]
fn a_program_moves_whose_names_are_not_utf_8() {
    migrates(&need!(Criu::main()), "odd-names");
}

#[test]
fn a_dry_run_compares_and_changes_nothing() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", 1).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    let compared = |options: &[&str]| {
        let options = [&["--dry-run"], options].concat();
        let output = migration.migrate_with(RECEIVER, &options).unwrap().ended().unwrap();
        (output.status.code(), said(&output))
    };
    let cgroup = migration.source_cgroup().unwrap();
    let (code, text) = compared(&[]);
    assert_eq!((code, text.contains(" can move to 10.77.0.2:7700")), (Some(0), true), "{text}");
    assert_eq!((migration.source_cgroup().unwrap(), migration.source_record()), (cgroup.clone(), None));
    migration.take_pid_at_destination().unwrap();
    let (code, text) = compared(&[]);
    let reason = "refused: 10.77.0.2:7700: pids of the program that are in use here: ";
    assert_eq!((code, text.starts_with(reason)), (Some(1), true), "{text}");
    // The same in a migration, which leaves the program as it was.
    let refused = migration.migrate().unwrap().ended().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        said(&refused).contains("runs here: pids of the program that are in use here"),
        "{}",
        said(&refused)
    );
    receive.ended().unwrap();
    assert_eq!((migration.processes(), migration.source_record()), ((1, 0), None));
    assert_eq!(migration.source_cgroup().unwrap(), cgroup);
    migration.expect_right_bytes().unwrap();
}

/// Pages of it that the program has not written do not travel.
#[test]
fn another_version_of_the_program_is_refused_by_name() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", 1).unwrap();
    let _receive = migration.receive(path(&criu)).unwrap();
    let pid = migration.hosts.source.named("target").into_iter().min().unwrap();
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let mut bytes = fs::read(&program).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other");
    fs::write(&other, bytes).unwrap();
    let mut mount = migration.hosts.destination.command("mount");
    assert!(mount.arg("--bind").args([&other, &program]).status().unwrap().success());
    let compared = migration.migrate_with(RECEIVER, &["--dry-run"]).unwrap().ended().unwrap();
    let reason =
        "refused: 10.77.0.2:7700: files that the program has mapped, and that are other files here: ";
    let expected = format!("{reason}{}\n", program.display());
    assert_eq!((compared.status.code(), said(&compared)), (Some(1), expected));
}

#[test]
fn a_tree_with_a_zombie_is_compared() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "zombies", 1).unwrap();
    let _receive = migration.receive(path(&criu)).unwrap();
    let compared = migration.migrate_with(RECEIVER, &["--dry-run"]).unwrap().ended().unwrap();
    assert_eq!(compared.status.code(), Some(0), "{}", said(&compared));
}

#[test]
fn an_abort_before_grant_leaves_the_program_at_the_source() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let mut receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let mut migrate = migration.migrate().unwrap();
    migration.restoring().unwrap();
    assert!(migration.is_frozen() && !migration.is_granted());
    migrate.signal(Signal::SIGINT).unwrap();
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(1));
    assert!(
        said(&migrated).contains("runs here: the source's user ended the migration"),
        "{}",
        said(&migrated)
    );
    assert_eq!(receive.ended().unwrap().status.code(), Some(1));
    assert!(migration.received().contains("the program does not run here"), "{}", migration.received());
    assert_eq!(migration.processes(), (1, 0));
    migration.expect_right_bytes().unwrap();
}

#[test]
fn another_terminal_ends_a_migration_before_grant_only() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", LARGE).unwrap();
    let none = migration.abort().unwrap();
    assert_eq!(none.status.code(), Some(1));
    assert!(said(&none).contains("no `rewake migrate` of it runs"), "{}", said(&none));
    let mut receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let mut migrate = migration.migrate().unwrap();
    migration.restoring().unwrap();
    let aborted = migration.abort().unwrap();
    assert_eq!(
        (aborted.status.code(), said(&aborted).contains("runs here")),
        (Some(0), true),
        "{}",
        said(&aborted)
    );
    assert_eq!(migrate.ended().unwrap().status.code(), Some(1));
    assert_eq!(receive.ended().unwrap().status.code(), Some(1));
    assert_eq!(migration.processes(), (1, 0));
    let mut receive = migration.receive(path(&criu)).unwrap();
    let mut migrate = migration.migrate().unwrap();
    until(PATIENCE, || migration.is_granted().then_some(())).expect("GRANT");
    let refused = migration.abort().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("was given to the destination"), "{}", said(&refused));
    assert_eq!(migrate.ended().unwrap().status.code(), Some(0));
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    migration.expect_right_bytes().unwrap();
}

#[test]
fn a_destination_killed_before_grant_leaves_the_program() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let mut migrate = migration.migrate().unwrap();
    migration.restoring().unwrap();
    receive.signal(Signal::SIGKILL).unwrap();
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(1));
    assert!(said(&migrated).contains("runs here: no connection to"), "{}", said(&migrated));
    assert_eq!(migration.processes(), (1, 0));
    migration.expect_right_bytes().unwrap();
}

#[test]
fn a_source_agent_killed_before_grant_leaves_the_program() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let _receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let migrate = migration.migrate().unwrap();
    migration.restoring().unwrap();
    assert!(migration.is_frozen());
    migrate.signal(Signal::SIGKILL).unwrap();
    // CRIU's action script thaws the tree.
    migration.expect_right_bytes().unwrap();
}

#[test]
fn without_its_agent_the_program_reads_no_zeros() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", LARGE).unwrap();
    let receive = migration.receive(path(&criu)).unwrap();
    let migrate = migration.migrate().unwrap();
    until(PATIENCE, || migration.is_released().then_some(())).expect("RELEASE");
    receive.signal(Signal::SIGKILL).unwrap();
    migration.act().unwrap();
    // Its threads wait for missing memory while another connection is tried, for 5 s.
    sleep(Duration::from_secs(1));
    assert_eq!(migration.processes().1, 1, "{:?}", migration.written());
    let ended = until(PATIENCE, || (migration.processes().1 == 0).then_some(()));
    assert!(ended.is_some(), "the program runs on: {:?}", migration.written());
    assert!(!migration.written().contains("BAD"), "{:?}", migration.written());
    migrate.signal(Signal::SIGKILL).unwrap();
}

#[test]
fn a_later_agent_continues_a_program_that_runs() {
    let criu = need!(Criu::main());
    for options in [&[][..], &["--pre-copy-only"]] {
        let migration = Migration::started(&criu, "random", LARGE).unwrap();
        let mut receive = migration.receive(path(&criu)).unwrap();
        let mut migrate = migration.migrate_with(RECEIVER, options).unwrap();
        until(PATIENCE, || migration.is_released().then_some(())).expect("RELEASE");
        receive.signal(Signal::SIGKILL).unwrap();
        receive.ended().unwrap();
        let mut later = migration.receive(path(&criu)).unwrap();
        let migrated = migrate.ended().unwrap();
        assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
        assert_eq!(later.ended().unwrap().status.code(), Some(0), "{}", migration.received());
        assert!(migration.received().contains("and this one continues"), "{}", migration.received());
        assert!(soon(|| migration.processes() == (0, 1)), "{:?}", migration.processes());
        migration.expect_right_bytes().unwrap();
    }
}

#[test]
fn a_later_agent_says_what_became_of_the_program() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", LARGE).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    let mut migrate = migration.migrate().unwrap();
    until(PATIENCE, || migration.is_released().then_some(())).expect("RELEASE");
    receive.signal(Signal::SIGKILL).unwrap();
    receive.ended().unwrap();
    // It gets no memory for 5 s, and is killed.
    let ended = until(PATIENCE, || (migration.processes().1 == 0).then_some(()));
    assert!(ended.is_some(), "the program runs on: {:?}", migration.written());
    let mut later = migration.receive(path(&criu)).unwrap();
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(3), "{}\n{}", said(&migrated), migration.received());
    let lost = "is lost: the destination had it, and has ended: the restored processes have ended";
    assert!(said(&migrated).contains(lost), "{}", said(&migrated));
    assert!(
        migration.received().contains("an earlier agent was killed after RELEASE"),
        "{}",
        migration.received()
    );
    assert!(soon(|| migration.processes() == (0, 0)), "{:?}", migration.processes());
    assert!(!migration.written().contains("BAD"), "{:?}", migration.written());
    // It can still take a program.
    later.signal(Signal::SIGTERM).unwrap();
    assert_eq!(later.ended().unwrap().status.code(), Some(1));
}

/// Longer than `rewake lazy-pages` waits for an answer.
#[test]
fn after_grant_a_cut_link_only_pauses_the_program() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", LARGE).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    let mut migrate = migration.migrate().unwrap();
    until(PATIENCE, || migration.is_released().then_some(())).expect("RELEASE");
    migration.hosts.cut(true).unwrap();
    sleep(Duration::from_secs(35));
    assert_eq!((migration.processes().1, migration.parked()), (1, 1), "{}", migration.received());
    migration.hosts.cut(false).unwrap();
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    migration.expect_right_bytes().unwrap();
}

#[test]
fn after_grant_the_source_never_runs() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", LARGE).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    let mut migrate = migration.migrate().unwrap();
    until(PATIENCE, || migration.is_granted().then_some(())).expect("GRANT");
    migrate.signal(Signal::SIGKILL).unwrap();
    migrate.ended().unwrap();
    for _ in 0..20 {
        assert!(migration.is_frozen() && migration.is_granted(), "{}", migration.received());
        sleep(Duration::from_millis(50));
    }
    let elsewhere = migration.migrate_to("10.77.0.2:7701").unwrap().ended().unwrap();
    assert_eq!(elsewhere.status.code(), Some(1));
    assert!(said(&elsewhere).contains("continue with --to 10.77.0.2:7700"), "{}", said(&elsewhere));
    assert!(migration.is_frozen() && migration.is_granted());
    let continued = migration.migrate().unwrap().ended().unwrap();
    assert_eq!(continued.status.code(), Some(0), "{}\n{}", said(&continued), migration.received());
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    assert!(soon(|| migration.processes() == (0, 1)), "{:?}", migration.processes());
    migration.expect_right_bytes().unwrap();
}
