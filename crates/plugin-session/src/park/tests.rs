// SPDX-License-Identifier: MIT OR Apache-2.0

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command};

use nix::sys::stat::fstat;
use rewake_plugin_protocol::{ANY_TASK, ProcessId, Store, own_pid_namespace};

use super::*;

/// A session that serves a restore, whose starter has its pid in another pid namespace. A child of this
/// process plays the starter.
struct Session {
    root: tempfile::TempDir,
    note: SessionNote,
    starter: Child,
    parking: Parking,
}

impl Session {
    fn new() -> Self {
        let (root, store) = (tempfile::tempdir().unwrap(), UnixDatagram::unbound().unwrap());
        let store_inode = fstat(&store).unwrap().st_ino;
        let copy = store.as_fd().try_clone_to_owned().unwrap();
        let child = Command::new("sleep").arg("1000").stdin(copy).spawn().unwrap();
        let starter = ProcessId::of(child.id().cast_signed()).unwrap().unwrap();
        let note = SessionNote {
            folder: starter.to_string(),
            starter,
            pid_namespace: own_pid_namespace().unwrap().checked_add(1).unwrap(),
            work: FileId::of(root.path()).unwrap(),
            phase: Phase::Running,
            stores: vec![(ANY_TASK, Store { number: 0, inode: store_inode })],
        };
        note.write(root.path()).unwrap();
        let parking = Parking::of(root.path().to_owned(), root.path());
        Self { root, note, starter: child, parking }
    }

    /// The starter ends, or is one of another namespace, which is not visible.
    fn starter_is_gone(&mut self) {
        self.starter.kill().unwrap();
        self.starter.wait().unwrap();
    }

    fn plan(&self) -> Treatment {
        self.parking.plan(|line| panic!("{line}")).unwrap()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.starter.kill();
        let _ = self.starter.wait();
    }
}

#[test]
fn a_store_of_another_pid_namespace_that_is_visible_is_parked() {
    let session = Session::new();
    let planned = session.plan();
    let Treatment::Park(note) = planned else { panic!("{planned:?}") };
    assert_eq!(note, session.note);
    let store = any_store(&note).unwrap();
    assert_eq!(fstat(&store).unwrap().st_ino, session.note.stores[0].1.inode);
}

#[test]
fn tasks_run_whose_store_only_another_pid_namespace_has() {
    let mut session = Session::new();
    // A process that is not visible serves the session.
    let ledger = File::create(session.root.path().join(&session.note.folder).join("ledger")).unwrap();
    ledger.lock().unwrap();
    session.starter_is_gone();
    let planned = session.plan();
    assert!(matches!(planned, Treatment::Later(pid) if pid == session.note.starter.pid), "{planned:?}");
}

#[test]
fn tasks_without_a_streamer_in_any_pid_namespace_are_killed() {
    for has_ledger in [true, false] {
        let mut session = Session::new();
        if has_ledger {
            fs::write(session.root.path().join(&session.note.folder).join("ledger"), "").unwrap();
        }
        session.starter_is_gone();
        let planned = session.plan();
        assert!(matches!(planned, Treatment::Kill(pid) if pid == session.note.starter.pid), "{planned:?}");
    }
}
