// SPDX-License-Identifier: MIT OR Apache-2.0

use std::cell::RefCell;
use std::fs;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command};

use nix::sys::stat::fstat;
use rewake_plugin_protocol::{FileId, Phase, ProcessId, SessionNote, Store, own_pid_namespace};

use super::*;

/// A session that is not served, with a target that has its store.
struct Session {
    root: tempfile::TempDir,
    note: SessionNote,
    target: Child,
}

impl Session {
    fn new() -> Self {
        let (root, store) = (tempfile::tempdir().unwrap(), UnixDatagram::unbound().unwrap());
        let starter = ProcessId::of(std::process::id().cast_signed()).unwrap().unwrap();
        let inode = fstat(&store).unwrap().st_ino;
        let store_of_note = Store { number: store.as_raw_fd(), inode };
        let work = FileId { device: 1, inode: 2 };
        let note = SessionNote {
            folder: starter.to_string(),
            starter,
            pid_namespace: own_pid_namespace().unwrap(),
            work,
            phase: Phase::Running,
            stores: vec![(7, store_of_note)],
        };
        note.write(root.path()).unwrap();
        let copy = store.as_fd().try_clone_to_owned().unwrap();
        let target = Command::new("sleep").arg("1000").stdin(copy).spawn().unwrap();
        Self { root, note, target }
    }

    fn pid(&self) -> i32 {
        self.target.id().cast_signed()
    }

    /// Ends the session, as if all memory were resident: here by removing its note.
    fn end(&self) {
        self.note.remove(self.root.path()).unwrap();
    }

    /// Waits for a tree; returns the log lines.
    fn wait(&self, limit: Option<u64>, tree: impl Fn() -> Vec<i32>) -> (Result<(), DumpError>, Vec<String>) {
        let logged = RefCell::new(Vec::new());
        let log = |line: &str| logged.borrow_mut().push(line.to_owned());
        let waited = super::wait(self.root.path(), limit.map(Duration::from_secs), tree, log);
        (waited, logged.into_inner())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.target.kill();
        let _ = self.target.wait();
    }
}

#[test]
fn a_tree_without_missing_memory_does_not_wait() {
    let session = Session::new();
    let own = std::process::id().cast_signed();
    fs::write(session.root.path().join("no folder"), "").unwrap();
    let (waited, logged) = session.wait(Some(0), || vec![1_000_000_000, own + 1_000_000]);
    waited.unwrap();
    assert!(logged.len() == 1 && logged[0].contains("no folder/session-1: "), "{logged:?}");
}

#[test]
fn a_dump_waits_for_the_last_process_of_a_growing_tree() {
    let session = Session::new();
    let checks = RefCell::new(0);
    let tree = || {
        let check = checks.replace_with(|checks| *checks + 1);
        if check == 3 {
            session.end();
        }
        // The tree grows.
        vec![1_000_000_000; 3].into_iter().chain([session.pid()]).collect()
    };
    let (waited, logged) = session.wait(None, tree);
    waited.unwrap();
    assert_eq!(*checks.borrow(), 4);
    let [begin, end] = &logged[..] else { panic!("{logged:?}") };
    let names = format!("process {} (sleep) has memory that streamer ", session.pid());
    assert!(begin.starts_with(&names) && begin.contains("the dump waits until"), "{begin}");
    assert!(!begin.contains("recover"), "{begin}");
    assert!(end.starts_with("all memory of the tree is resident after 0."), "{end}");
}

#[test]
fn past_its_limit_a_dump_fails_and_names_what_is_missing() {
    let session = Session::new();
    for limit in [0, 1] {
        let start = Instant::now();
        let tree = || {
            assert!(start.elapsed() < Duration::from_secs(limit + 30), "the wait does not end");
            vec![session.pid()]
        };
        let (waited, logged) = session.wait(Some(limit), tree);
        let error = waited.unwrap_err().to_string();
        let names = format!("process {} (sleep) has memory that streamer ", session.pid());
        let ends = format!(
            "waited {limit} s, REWAKE_DUMP_WAIT allows no more: dump it later, or raise REWAKE_DUMP_WAIT"
        );
        assert!(error.starts_with(&names) && error.ends_with(&ends), "{error}");
        assert!(start.elapsed() >= Duration::from_secs(limit));
        assert_eq!(logged.len() as u64, limit, "{logged:?}");
    }
}

#[test]
fn an_unserved_session_is_named_with_the_remedy() {
    let mut session = Session::new();
    let root = session.root.path();
    session.note.remove(root).unwrap();
    session.note.starter.started += 1;
    session.note.folder = session.note.starter.to_string();
    session.note.write(root).unwrap();
    let error = session.wait(Some(0), || vec![session.pid()]).0.unwrap_err().to_string();
    assert!(error.contains("has not loaded yet and is not served: run `rewake recover`"), "{error}");
}

#[test]
fn the_second_check_refuses_a_process_restored_meanwhile() {
    let session = Session::new();
    let dumped = Dumped { sessions: session.root.path().to_owned() };
    let error = dumped.check(session.pid()).unwrap_err().to_string();
    assert!(error.contains("again: an image would have zeros in its place"), "{error}");
    session.end();
    dumped.check(session.pid()).unwrap();
}

#[test]
fn a_closed_gate_counts_as_missing_memory() {
    if let Err(error) = ProcessId::prepare() {
        assert!(env::var_os("CI").is_none(), "{}: {error}", rewake_plugin_protocol::DUMP_BLOCKS);
        return eprintln!("skipped: {}: {error}", rewake_plugin_protocol::DUMP_BLOCKS);
    }
    let session = Session::new();
    session.end();
    let gated = ProcessId::of(session.pid()).unwrap().unwrap();
    gated.block_dump().unwrap();
    let error = session.wait(Some(0), || vec![session.pid()]).0.unwrap_err().to_string();
    gated.allow_dump();
    assert!(error.contains("(sleep) has GPU queues that are stopped until memory"), "{error}");
    session.wait(Some(0), || vec![session.pid()]).0.unwrap();
}

#[test]
fn the_limit_is_a_number_of_seconds_or_none() {
    let of = |text: &str| limit(Ok(text.to_owned()));
    assert_eq!(limit(Err(VarError::NotPresent)).unwrap(), None);
    assert_eq!(of("0").unwrap(), Some(Duration::ZERO));
    assert_eq!(of("90").unwrap(), Some(Duration::from_secs(90)));
    for wrong in ["", "-1", "1.5", "soon"] {
        let error = of(wrong).unwrap_err().to_string();
        assert_eq!(error, format!("REWAKE_DUMP_WAIT={wrong:?}: expected a number of seconds"));
    }
}
