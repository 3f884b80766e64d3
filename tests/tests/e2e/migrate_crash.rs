// SPDX-License-Identifier: MIT OR Apache-2.0
//! Migrations whose agent, CRIU or script is killed, or says nothing, at a bad moment.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use nix::sys::signal::Signal;
use rewake_tests::migration::Migration;
use rewake_tests::process::{PATIENCE, soon, until};
use rewake_tests::{Criu, need};

const MIB: usize = 16;
/// Enough that most is not yet loaded when the program runs at the destination.
const LARGE: usize = 256;

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn an_agent_killed_during_an_abort_leaves_the_program() {
    let criu = need!(Criu::main());
    let mut migration = Migration::started(&criu, "random", MIB).unwrap();
    // Its end is not seen: the agent waits for it.
    let slow =
        migration.criu_with("criu-slow", "$real \"$@\"\nif [ \"$1\" = dump ]; then sleep 1000; fi").unwrap();
    migration.dump_by(slow);
    let _receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let migrate = migration.migrate().unwrap();
    migration.restoring().unwrap();
    assert!(migration.is_frozen());
    migrate.signal(Signal::SIGTERM).unwrap();
    assert!(soon(|| !migration.is_frozen()), "it stays frozen");
    migrate.signal(Signal::SIGKILL).unwrap();
    migration.expect_right_bytes().unwrap();
}

/// CRIU's script does not reach the agent when the program runs.
#[test]
fn a_program_whose_start_is_not_reported_is_committed() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let silent = "for a; do shift\n  if [ \"$before\" = --action-script ]; then\n    \
                  printf '#!/bin/sh\\n[ $CRTOOLS_SCRIPT_ACTION = post-resume ] || exec %s\\n' \"$a\" \
                  > $files/action\n    chmod 700 $files/action\n    a=$files/action\n  fi\n  \
                  before=$a\n  set -- \"$@\" \"$a\"\ndone\nexec $real \"$@\"";
    let mut receive = migration.receive(&migration.criu_with("criu-silent", silent).unwrap()).unwrap();
    let migrated = migration.migrate().unwrap().ended().unwrap();
    assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    migration.expect_right_bytes().unwrap();
}

#[test]
fn a_criu_that_is_killed_before_grant_leaves_the_program() {
    let criu = need!(Criu::main());
    let mut migration = Migration::started(&criu, "random", MIB).unwrap();
    let mortal = "if [ \"$1\" = dump ]; then\n  ( ( until [ -e $files/kill ]; do sleep 0.01; done; \
                  kill -9 $$ ) & )\nfi\nexec $real \"$@\"";
    let mortal = migration.criu_with("criu-mortal", mortal).unwrap();
    let folder = mortal.parent().unwrap().to_owned();
    migration.dump_by(mortal);
    let mut receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let mut migrate = migration.migrate().unwrap();
    migration.restoring().unwrap();
    fs::write(folder.join("kill"), "").unwrap();
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(1), "{}", said(&migrated));
    assert!(said(&migrated).contains("runs here: dump failed (signal: 9"), "{}", said(&migrated));
    assert_eq!(receive.ended().unwrap().status.code(), Some(1), "{}", migration.received());
    assert_eq!(migration.processes(), (1, 0));
    migration.expect_right_bytes().unwrap();
}

/// It would be killed at the end, and CRIU has not dumped it.
#[test]
fn a_process_that_joins_the_frozen_cgroup_ends_the_migration() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let mut receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let mut migrate = migration.migrate().unwrap();
    migration.restoring().unwrap();
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    let entrance = migration.tree_cgroup().unwrap().join("cgroup.procs");
    fs::write(entrance, other.id().to_string()).unwrap();
    migration.proceed().unwrap();
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

/// No record says which processes may be spared: a wrong one would let the program run while its copy runs.
#[test]
fn after_grant_all_of_the_frozen_cgroup_is_killed() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", LARGE).unwrap();
    let mut receive = migration.receive(Path::new(criu.as_ref())).unwrap();
    let mut migrate = migration.migrate().unwrap();
    until(PATIENCE, || migration.is_granted().then_some(())).expect("GRANT");
    migrate.signal(Signal::SIGKILL).unwrap();
    migrate.ended().unwrap();
    let mut other = Command::new("sleep").arg("60").spawn().unwrap();
    let entrance = migration.tree_cgroup().unwrap().join("cgroup.procs");
    fs::write(entrance, other.id().to_string()).unwrap();
    let continued = migration.migrate().unwrap().ended().unwrap();
    assert_eq!(continued.status.code(), Some(0), "{}\n{}", said(&continued), migration.received());
    assert!(soon(|| other.try_wait().unwrap().is_some()), "it outlives the program");
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    assert!(soon(|| migration.processes() == (0, 1)), "{:?}", migration.processes());
    migration.expect_right_bytes().unwrap();
}
