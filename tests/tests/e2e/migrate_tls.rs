// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake migrate --tls` and `rewake receive --tls`: which hosts a program moves between. Where one is
//! refused, the program was not touched.

use std::path::Path;
use std::process::Output;

use nix::sys::signal::Signal;
use rewake_testkit::authority::Authority;
use rewake_testkit::hosts::DESTINATION;
use rewake_tests::migration::{HostAgent, Migration, RECEIVER};
use rewake_tests::page_server::tls_options;
use rewake_tests::printed::{HOST_B, Terminals, recipe};
use rewake_tests::process::{PATIENCE, soon, until};
use rewake_tests::relay::SlowLink;
use rewake_tests::{Criu, need};

const SOURCE: &str = "host-a";
const MIB: usize = 64;
/// Enough that memory is missing when an agent is killed.
const LARGE: usize = 768;

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&text).into_owned()
}

/// The options of an agent with a certificate of this name.
fn named(authority: &Authority, name: &str) -> Vec<String> {
    tls_options(authority, &authority.issue(|request| request.address(name)))
}

/// The options of a destination with a certificate of this name, which takes the programs of `SOURCE`.
fn receiving(authority: &Authority, name: &str) -> Vec<String> {
    [named(authority, name), vec!["--allow".to_owned(), SOURCE.to_owned()]].concat()
}

/// Both agents have these options, and the migration is refused: each says its part in one line.
fn refused(migrate: Vec<String>, receive: Vec<String>, source_says: &str, destination_says: &str) {
    let criu = need!(Criu::main());
    let mut migration = Migration::started(&criu, "random", 1).unwrap();
    migration.secure_migrate(migrate);
    migration.secure_receive(receive);
    let receiver = migration.receive(Path::new(criu.as_ref())).unwrap();
    let cgroup = migration.source_cgroup().unwrap();
    let migrated = migration.migrate().unwrap().ended().unwrap();
    let text = said(&migrated);
    assert!(migrated.status.code() == Some(1) && text.contains(source_says), "{text}");
    assert!(text.lines().count() == 1 && text.contains("was not touched: connecting to "), "{text}");
    assert!(soon(|| migration.received().contains(destination_says)), "{}", migration.received());
    assert_eq!((migration.source_cgroup().unwrap(), migration.source_record()), (cgroup, None));
    assert_eq!(migration.processes(), (1, 0));
    migration.expect_right_bytes().unwrap();
    receiver.signal(Signal::SIGTERM).unwrap();
}

/// A source with another certificate than that of the migration's is refused, and its program stays frozen.
fn expect_refused(migration: &Migration, stranger: &mut HostAgent) {
    let migrated = stranger.ended().unwrap();
    let text = said(&migrated);
    let reason = "the source's certificate is not that of the connection before";
    assert!(migrated.status.code() == Some(4) && text.contains(reason), "{text}");
    assert!(soon(|| migration.received().contains(reason)), "{}", migration.received());
}

#[test]
fn a_host_that_is_not_allowed_moves_no_program() {
    let authority = Authority::new();
    refused(
        named(&authority, "host-c"),
        receiving(&authority, DESTINATION),
        "refused by the server: its --allow names none of this certificate: ",
        "not admitted: --allow names none of its certificate: ",
    );
}

#[test]
fn a_host_of_another_ca_moves_no_program() {
    let (authority, other) = (Authority::new(), Authority::named("Other CA"));
    let mut stranger = named(&other, SOURCE);
    stranger.splice(1..3, ["--tls-cacert".to_owned(), authority.ca().display().to_string()]);
    refused(
        stranger,
        receiving(&authority, DESTINATION),
        "the peer does not accept this side's certificate (UnknownCA)",
        "the peer's certificate is of no CA in --tls-cacert",
    );
}

#[test]
fn a_program_moves_to_no_other_host_than_the_named_one() {
    let authority = Authority::new();
    refused(
        named(&authority, SOURCE),
        receiving(&authority, "host-b"),
        "expected 10.77.0.2, the address that this side was given",
        "the peer does not accept this side's certificate",
    );
}

/// The source's agent is killed after GRANT. Only a host with its certificate can continue.
#[test]
fn all_connections_of_a_migration_have_one_certificate() {
    let criu = need!(Criu::main());
    let authority = Authority::new();
    let mut migration = Migration::started(&criu, "random", LARGE).unwrap();
    let (own, other) = (named(&authority, SOURCE), named(&authority, SOURCE));
    migration.secure_receive(receiving(&authority, DESTINATION));
    migration.secure_migrate(own.clone());
    let mut receive = migration.receive(Path::new(criu.as_ref())).unwrap();
    let mut migrate = migration.migrate().unwrap();
    until(PATIENCE, || migration.is_released().then_some(())).expect("RELEASE");
    migrate.signal(Signal::SIGKILL).unwrap();
    migrate.ended().unwrap();

    migration.secure_migrate(other);
    let mut stranger = migration.migrate().unwrap();
    expect_refused(&migration, &mut stranger);

    migration.secure_migrate(own);
    let migrated = migration.migrate().unwrap().ended().unwrap();
    assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    migration.expect_right_bytes().unwrap();
}

/// Both agents are killed after GRANT, and the program ends without them.
#[test]
fn a_later_agent_answers_its_own_source_only() {
    let criu = need!(Criu::main());
    let authority = Authority::new();
    let mut migration = Migration::started(&criu, "random", LARGE).unwrap();
    let (own, other) = (named(&authority, SOURCE), named(&authority, SOURCE));
    migration.secure_receive(receiving(&authority, DESTINATION));
    migration.secure_migrate(own.clone());
    let mut receive = migration.receive(Path::new(criu.as_ref())).unwrap();
    let mut migrate = migration.migrate().unwrap();
    until(PATIENCE, || migration.is_released().then_some(())).expect("RELEASE");
    receive.signal(Signal::SIGKILL).unwrap();
    receive.ended().unwrap();
    migrate.signal(Signal::SIGKILL).unwrap();
    migrate.ended().unwrap();
    until(PATIENCE, || (migration.processes().1 == 0).then_some(())).expect("the program's end");

    let mut later = migration.receive(Path::new(criu.as_ref())).unwrap();
    migration.secure_migrate(other);
    let mut stranger = migration.migrate().unwrap();
    expect_refused(&migration, &mut stranger);
    assert!(migration.is_frozen() && migration.is_granted());

    migration.secure_migrate(own);
    let migrated = migration.migrate().unwrap().ended().unwrap();
    assert_eq!(migrated.status.code(), Some(3), "{}\n{}", said(&migrated), migration.received());
    later.signal(Signal::SIGTERM).unwrap();
    later.ended().unwrap();
}

#[test]
fn a_program_moves_encrypted_with_every_byte() {
    let criu = need!(Criu::main());
    let authority = Authority::new();
    for is_secure in [false, true] {
        let mut migration = Migration::started(&criu, "random", MIB).unwrap();
        let link = SlowLink::on(&migration.hosts.source, RECEIVER.parse().unwrap(), u64::MAX).unwrap();
        if is_secure {
            migration.secure_receive(receiving(&authority, "127.0.0.1"));
            migration.secure_migrate(named(&authority, SOURCE));
        }
        let mut receive = migration.receive(Path::new(criu.as_ref())).unwrap();
        let to = format!("127.0.0.1:{}", link.port());
        let migrated = migration.migrate_to(&to).unwrap().ended().unwrap();
        assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
        assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
        assert_eq!(migration.processes(), (0, 1));
        migration.expect_right_bytes().unwrap();
        assert_eq!(link.has_shown_clear_text(), !is_secure);
    }
}

#[test]
fn the_printed_commands_move_a_program() {
    let criu = need!(Criu::main());
    let mut terminals = Terminals::open(&criu, 8).unwrap();
    terminals.make_certificates().unwrap();
    let pid = terminals.migration.pid().to_string();
    let commands = recipe("migrate", &[("HOST-B", HOST_B), ("PID", &pid)]).commands();
    let [receive, migrate] = &commands[..] else { panic!("{commands:?}") };
    let mut receive = terminals.type_in(receive).unwrap();
    terminals.listens(&mut receive, "hostB", 9000).unwrap();
    let line = terminals.run(migrate).unwrap();
    assert!(line.starts_with(&format!("{pid} runs at {HOST_B}:9000, downtime ")), "{line}");
    assert_eq!(receive.ended().unwrap().code(), Some(0), "{}", receive.text());
    terminals.migration.expect_right_bytes().unwrap();
}
