// SPDX-License-Identifier: MIT OR Apache-2.0
//! Migrations over a slow link that is cut in each phase, and to hosts without room.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getsid};
use rewake_tests::limit::MemoryLimit;
use rewake_tests::migration::{HostAgent, Migration, RECEIVER};
use rewake_tests::process::{PATIENCE, output, until};
use rewake_tests::relay::SlowLink;
use rewake_tests::server::rewake;
use rewake_tests::{Criu, need};

const MIB: usize = 32;
/// 100 Mbit/s.
const RATE: u64 = 12_500_000;
const CUT: Duration = Duration::from_secs(5);

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&text).into_owned()
}

fn path(criu: &Criu) -> &Path {
    Path::new(criu.as_ref())
}

fn cut(link: &SlowLink) {
    link.part();
    sleep(CUT);
    link.join();
}

/// The bytes of candidates that the destination has stored. Its folder on the disk has the name of its
/// record.
fn candidates(migration: &Migration) -> u64 {
    let records = fs::read_dir(migration.hosts.destination.path("/run/rewake/migrations"));
    let names = records.into_iter().flatten().flatten().map(|record| record.file_name());
    let files = names.map(|name| format!("/var/tmp/rewake-{}/candidates", name.to_string_lossy()));
    files.filter_map(|file| fs::metadata(file).ok()).map(|file| file.len()).sum()
}

/// Waits until a part of the memory has arrived, before the freeze.
fn expect_candidates(migration: &Migration, migrate: &mut HostAgent) {
    let arrive = || (candidates(migration) > 4 << 20).then_some(true);
    let arrived = until(PATIENCE, || arrive().or_else(|| migrate.has_ended().then_some(false)));
    assert!(arrived == Some(true), "{arrived:?}: {:?}", migrate.ended().map(|migrated| said(&migrated)));
}

#[test]
fn a_slow_link_that_is_cut_in_each_phase_pauses_only() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "active", MIB).unwrap();
    let mut receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let link = SlowLink::on(&migration.hosts.source, RECEIVER.parse().unwrap(), RATE).unwrap();
    migration.go().unwrap();
    let to = format!("127.0.0.1:{}", link.port());
    let mut migrate = migration.migrate_with(&to, &["--give-up-after", "20"]).unwrap();
    expect_candidates(&migration, &mut migrate);
    cut(&link);
    migration.restoring().unwrap();
    cut(&link);
    migration.proceed().unwrap();
    until(PATIENCE, || migration.is_released().then_some(())).expect("RELEASE");
    cut(&link);
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    migration.expect_right_bytes().unwrap();
}

#[test]
fn a_link_that_stays_cut_before_grant_leaves_the_program() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "active", MIB).unwrap();
    let _receive = migration.receive(path(&criu)).unwrap();
    let link = SlowLink::on(&migration.hosts.source, RECEIVER.parse().unwrap(), RATE).unwrap();
    migration.go().unwrap();
    let to = format!("127.0.0.1:{}", link.port());
    let mut migrate = migration.migrate_with(&to, &["--give-up-after", "2"]).unwrap();
    expect_candidates(&migration, &mut migrate);
    link.part();
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(1));
    assert!(said(&migrated).contains("runs here: no connection to 127.0.0.1:"), "{}", said(&migrated));
    assert!(said(&migrated).contains("for 2 s"), "{}", said(&migrated));
    migration.expect_right_bytes().unwrap();
}

/// A program of its own on the source, whose migration is refused: one line says why.
#[test]
fn a_destination_that_has_another_program_refuses_one_by_name() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "active", 1).unwrap();
    let mut receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let mut migrate = migration.migrate().unwrap();
    migration.restoring().unwrap();

    let source = &migration.hosts.source;
    let mut sleep = Command::new("sleep");
    let mut other = source.apart(sleep.arg("1000")).spawn().unwrap();
    let sleeper = until(PATIENCE, || source.named("sleep").into_iter().find(|pid| is_leader(*pid))).unwrap();
    let pid = source.own_number(sleeper).unwrap().to_string();
    let mut refused = source.command(rewake().unwrap());
    refused.args(["migrate", "--insecure", "--to", RECEIVER, "-t", &pid, "--criu"]).arg(path(&criu));
    let refused = refused.output().unwrap();
    let reason =
        "the destination refuses the connection: this agent has another migration: it takes one program";
    assert_eq!(said(&refused), format!("rewake: {pid} runs here: {reason}\n"));
    assert_eq!(refused.status.code(), Some(1));
    assert!(other.try_wait().unwrap().is_none(), "the refused program runs on");
    kill(sleeper, Signal::SIGKILL).unwrap();
    other.wait().unwrap();

    migration.proceed().unwrap();
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(0), "{}\n{}", said(&migrated), migration.received());
    assert_eq!(receive.ended().unwrap().status.code(), Some(0), "{}", migration.received());
    migration.expect_right_bytes().unwrap();
}

/// Whether a process leads its session.
fn is_leader(pid: Pid) -> bool {
    getsid(Some(pid)) == Ok(pid)
}

/// The same command reports the end to the destination, which would wait for its source.
#[test]
fn a_source_killed_before_grant_leaves_no_busy_destination() {
    let criu = need!(Criu::main());
    let migration = Migration::started(&criu, "random", MIB).unwrap();
    let mut receive = migration.receive(&migration.criu_that_waits().unwrap()).unwrap();
    let mut migrate = migration.migrate().unwrap();
    migration.restoring().unwrap();
    migrate.signal(Signal::SIGKILL).unwrap();
    migrate.ended().unwrap();
    let migrated = migration.migrate().unwrap().ended().unwrap();
    assert_eq!(migrated.status.code(), Some(1), "{}\n{}", said(&migrated), migration.received());
    let reason = "the source's agent ended before GRANT";
    assert!(said(&migrated).contains(&format!("runs here: {reason}")), "{}", said(&migrated));
    assert_eq!(receive.ended().unwrap().status.code(), Some(1));
    assert!(migration.received().contains(reason), "{}", migration.received());
    assert_eq!((migration.processes(), migration.source_record()), ((1, 0), None));
    migration.expect_right_bytes().unwrap();
}

/// A migration over a link: the program was released, and lacks memory.
struct Released {
    migration: Migration,
    receive: HostAgent,
    link: SlowLink,
    migrate: HostAgent,
}

impl Released {
    fn of(criu: &Criu) -> Self {
        let migration = Migration::started(criu, "random", 4 * MIB).unwrap();
        let receive = migration.receive(path(criu)).unwrap();
        let link = SlowLink::on(&migration.hosts.source, RECEIVER.parse().unwrap(), 2 * RATE).unwrap();
        let migrate = migration.migrate_to(&format!("127.0.0.1:{}", link.port())).unwrap();
        until(PATIENCE, || migration.is_released().then_some(())).expect("RELEASE");
        Self { migration, receive, link, migrate }
    }
}

/// Both agents end, and say that the program is lost.
fn expect_lost(migration: &Migration, migrate: &mut HostAgent, receive: &mut HostAgent) {
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(3), "{}\n{}", said(&migrated), migration.received());
    assert_eq!(receive.ended().unwrap().status.code(), Some(1), "{}", migration.received());
    assert_eq!(migration.processes(), (0, 0));
}

/// Before that the destination's agent waits: no other process knows what became of the program.
#[test]
fn a_program_lost_during_a_cut_is_reported_afterwards() {
    let criu = need!(Criu::main());
    let Released { migration, mut receive, link, mut migrate } = Released::of(&criu);
    link.part();
    let waits = || migration.received().contains("the source has no connection").then_some(());
    let server = serves_page_faults(&migration).expect("lazy-pages");
    kill(server, Signal::SIGKILL).unwrap();
    until(PATIENCE, waits).expect("the agent waits for its source");
    assert!(!receive.has_ended());
    link.join();
    expect_lost(&migration, &mut migrate, &mut receive);
}

/// The end of a connection does not say that the source has read what was sent on it.
#[test]
fn a_loss_whose_report_is_cut_is_reported_afterwards() {
    let criu = need!(Criu::main());
    let Released { migration, mut receive, link, mut migrate } = Released::of(&criu);
    link.slow_to(1);
    let before = link.passed();
    until(PATIENCE, || (link.passed() > before).then_some(())).expect("bytes that keep all others back");
    kill(serves_page_faults(&migration).expect("lazy-pages"), Signal::SIGKILL).unwrap();
    until(PATIENCE, || migration.is_lost().then_some(())).expect("the loss");
    link.part();
    sleep(Duration::from_secs(1));
    assert!(!receive.has_ended(), "{}", migration.received());
    link.slow_to(RATE);
    link.join();
    expect_lost(&migration, &mut migrate, &mut receive);
}

/// A user may end the wait for the source: its answer is in the record, for the next agent.
#[test]
fn a_later_agent_reports_a_loss_that_one_has_recorded() {
    let criu = need!(Criu::main());
    let Released { migration, mut receive, link, mut migrate } = Released::of(&criu);
    link.part();
    kill(serves_page_faults(&migration).expect("lazy-pages"), Signal::SIGKILL).unwrap();
    until(PATIENCE, || migration.is_lost().then_some(())).expect("the loss");
    receive.signal(Signal::SIGINT).unwrap();
    assert_eq!(receive.ended().unwrap().status.code(), Some(1), "{}", migration.received());
    assert_eq!(left_at(&migration), ["agent.sock", "lock", "record"]);
    let _later = migration.receive(path(&criu)).unwrap();
    link.join();
    let migrated = migrate.ended().unwrap();
    assert_eq!(migrated.status.code(), Some(3), "{}\n{}", said(&migrated), migration.received());
    let log = migration.received();
    assert!(log.contains("its source may not know") && !log.contains("was killed"), "{log}");
    assert!(until(PATIENCE, || left_at(&migration).is_empty().then_some(())).is_some());
}

#[test]
fn a_loss_that_no_source_asks_for_is_dropped() {
    let criu = need!(Criu::main());
    let Released { migration, mut receive, link, migrate: _migrate } = Released::of(&criu);
    link.part();
    kill(serves_page_faults(&migration).expect("lazy-pages"), Signal::SIGKILL).unwrap();
    until(PATIENCE, || migration.is_lost().then_some(())).expect("the loss");
    receive.signal(Signal::SIGINT).unwrap();
    receive.ended().unwrap();
    let [folder] = &ended_at(&migration)[..] else { panic!("{:?}", ended_at(&migration)) };
    let long_ago = SystemTime::now() - Duration::from_secs(601);
    File::open(folder.join("record")).unwrap().set_modified(long_ago).unwrap();
    let _later = migration.receive(path(&criu)).unwrap();
    until(PATIENCE, || ended_at(&migration).is_empty().then_some(())).expect("no record");
}

/// The names of what the destination keeps of migrations that have ended.
fn left_at(migration: &Migration) -> Vec<String> {
    let files = ended_at(migration)
        .into_iter()
        .flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let mut names: Vec<_> = files.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The destination's folders of migrations that have ended.
fn ended_at(migration: &Migration) -> Vec<PathBuf> {
    let folders = fs::read_dir(migration.hosts.destination.path("/run/rewake/migrations"));
    let folders = folders.into_iter().flatten().flatten().map(|folder| folder.path());
    let ends = |folder: &PathBuf| {
        fs::read_to_string(folder.join("record")).is_ok_and(|record| record.contains("\"has_ended\":true"))
    };
    folders.filter(ends).collect()
}

/// The process that serves the restored program's page faults.
fn serves_page_faults(migration: &Migration) -> Option<Pid> {
    let rewakes = migration.hosts.destination.named("rewake");
    rewakes.into_iter().find(|pid| {
        fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains("lazy-pages"))
    })
}

#[test]
fn a_destination_without_room_leaves_the_program() {
    let criu = need!(Criu::main());
    // What is full, and why the program runs on: before it is touched, and after it was frozen.
    for (mount, reason) in [
        (
            &["-t", "tmpfs", "-o", "size=8m", "tmpfs", "/var/tmp"][..],
            "MiB of disk space are needed in /var/tmp",
        ),
        (&["-o", "remount,size=64k", "/run/rewake"], "No space left on device"),
    ] {
        let migration = Migration::started(&criu, "random", MIB).unwrap();
        let mut receive = migration.receive(path(&criu)).unwrap();
        output(migration.hosts.destination.command("mount").args(mount)).unwrap();
        let migrated = migration.migrate().unwrap().ended().unwrap();
        assert_eq!(migrated.status.code(), Some(1), "{}", said(&migrated));
        let text = said(&migrated);
        assert!(text.contains("runs here: ") && text.contains(reason), "{text}");
        assert_eq!(receive.ended().unwrap().status.code(), Some(1));
        assert_eq!((migration.processes(), migration.source_record()), ((1, 0), None));
        migration.expect_right_bytes().unwrap();
    }
}

/// The kernel kills a process of the destination: the restore, the program, or what loads its memory.
#[test]
fn a_destination_whose_memory_is_full_ends_in_one_place_at_most() {
    let criu = need!(Criu::main());
    let limit = need!(MemoryLimit::that_kills(48));
    let migration = Migration::started(&criu, "random", 4 * MIB).unwrap();
    let mut receive = migration.receive(path(&criu)).unwrap();
    limit.hold(receive.pid().unwrap()).unwrap();
    let mut migrate = migration.migrate().unwrap();
    receive.ended().unwrap();
    // If it was the agent, after GRANT, its source waits for one that says what became of the program.
    let _later = migration.receive(path(&criu)).unwrap();
    let migrated = migrate.ended().unwrap();
    let text = said(&migrated);
    match migrated.status.code() {
        Some(1) => {
            assert_eq!(migration.processes(), (1, 0), "{text}");
            migration.expect_right_bytes().unwrap();
        }
        Some(3) => assert_eq!(migration.processes(), (0, 0), "{text}"),
        // The later agent has continued the program, whose memory does not fit: the kernel may kill it.
        Some(0) => {
            assert_eq!(migration.processes().0, 0, "{text}");
            let ends = || (migration.processes().1 == 0).then_some(());
            assert!(migration.expect_right_bytes().is_ok() || ends().is_some(), "{}", migration.received());
        }
        other => panic!("{other:?}: {text}\n{}", migration.received()),
    }
    assert!(!migration.written().contains("BAD"), "{:?}", migration.written());
}
