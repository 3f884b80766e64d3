// SPDX-License-Identifier: MIT OR Apache-2.0

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use super::*;

fn own() -> ProcessId {
    ProcessId::of(std::process::id().cast_signed()).unwrap().unwrap()
}

/// A note of this process, whose store is `socket`.
fn note(socket: &UnixDatagram) -> SessionNote {
    SessionNote {
        folder: own().to_string(),
        starter: own(),
        pid_namespace: own_pid_namespace().unwrap(),
        work: FileId { device: 37, inode: 1234 },
        phase: Phase::Running,
        stores: vec![(7, Store { number: socket.as_raw_fd(), inode: fstat(socket).unwrap().st_ino })],
    }
}

fn of(starter: ProcessId, note: &SessionNote) -> SessionNote {
    SessionNote { folder: starter.to_string(), starter, ..note.clone() }
}

fn socket() -> UnixDatagram {
    UnixDatagram::unbound().unwrap()
}

/// A process that has a copy of the socket, as descriptor 0.
fn holder(socket: &UnixDatagram) -> Child {
    let copy = socket.as_fd().try_clone_to_owned().unwrap();
    Command::new("sleep").arg("1000").stdin(copy).spawn().unwrap()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_note_is_read_as_written_and_only_by_this_user() {
    let root = tempfile::tempdir().unwrap();
    let (root, socket) = (root.path().join("run/sessions"), socket());
    assert!(SessionNote::all(&root).unwrap().notes.is_empty(), "the folder does not exist yet");
    let first = note(&socket);
    first.write(&root).unwrap();
    let second = of(ProcessId { pid: 1, started: 2 }, &first);
    let same = SessionNote { folder: "1-2-1".into(), ..second.clone() };
    same.write(&root).unwrap();
    second.write(&root).unwrap();
    let changed = SessionNote { work: FileId { device: 1, inode: 2 }, ..first.clone() };
    changed.write(&root).unwrap();
    let mut all = SessionNote::all(&root).unwrap();
    all.notes.sort_by_key(|note| (note.starter != own(), note.folder.clone()));
    assert_eq!(all.notes, [changed.clone(), second.clone(), same.clone()]);
    same.remove(&root).unwrap();
    assert!(all.skipped.is_empty(), "{:?}", all.skipped);
    let folder = root.join(own().to_string());
    assert_eq!((mode(&folder), mode(&folder.join(NOTE))), (0o700, 0o600));
    changed.remove(&root).unwrap();
    changed.remove(&root).unwrap();
    assert!(!folder.exists(), "the folder is removed with the note");
    assert_eq!(SessionNote::all(&root).unwrap().notes, [second]);
}

#[test]
fn a_file_that_is_not_a_trusted_note_is_skipped_with_a_reason() {
    let root = tempfile::tempdir().unwrap();
    let (root, socket) = (root.path(), socket());
    let good = note(&socket);
    good.write(root).unwrap();
    let folder = root.join(own().to_string());
    let text = fs::read_to_string(folder.join(NOTE)).unwrap();
    // In the folders of other starters.
    let put = |starter: u64, text: &str| {
        let folder = root.join(format!("{starter}-1"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(NOTE), text).unwrap();
        folder.join(NOTE)
    };
    put(2, &text.replace("version 2", "version 3"));
    put(3, &text.replace("store 7 ", "store "));
    put(4, &text.replace("work 37 1234", "work 37"));
    put(5, &text.replace("work 37", "work x"));
    put(6, &text);
    put(7, "");
    put(12, &text.replace("pid-namespace ", "pid-namespace x"));
    put(13, &format!("{}pid-namespace 0\n", text.split_once("pid-namespace").unwrap().0));
    fs::set_permissions(put(8, &text), fs::Permissions::from_mode(0o622)).unwrap();
    fs::remove_file(put(9, "")).unwrap();
    symlink(folder.join(NOTE), root.join("9-1").join(NOTE)).unwrap();
    // Only root can give a file to another user.
    if chown(put(10, &text), Some(65534), None).is_err() {
        put(10, "");
    }
    fs::rename(put(11, "half"), root.join("11-1").join(format!("{NOTE}{UNFINISHED}"))).unwrap();
    let all = SessionNote::all(root).unwrap();
    assert_eq!(all.notes, [good]);
    let reason = |starter: u64| {
        let path = root.join(format!("{starter}-1")).join(NOTE);
        let skipped = all.skipped.iter().find(|skipped| skipped.path == path);
        skipped.unwrap_or_else(|| panic!("{starter}: {:?}", all.skipped)).reason.clone()
    };
    let expected = [
        (2, "version [3], expected 2"),
        (3, "line \"store\": expected three numbers, found 2"),
        (4, "expected two numbers, found 1"),
        (5, "line \"work\": invalid digit"),
        (6, "another starter's folder"),
        (7, "no line \"version\""),
        (8, "other users may write to it (mode 622)"),
        (9, "symbolic links"),
        (10, if geteuid().is_root() { "belongs to user 65534" } else { "no line" }),
        (12, "line \"pid-namespace\": invalid digit"),
        (13, "expected an inode, found [0]"),
    ];
    for (starter, text) in expected {
        assert!(reason(starter).contains(text), "{starter}: {}", reason(starter));
    }
    assert_eq!(all.skipped.len(), expected.len(), "{:?}", all.skipped);
}

#[test]
fn a_work_directory_s_session_is_the_newest_that_is_served() {
    let root = tempfile::tempdir().unwrap();
    let (root, socket) = (root.path(), socket());
    let work = FileId::of(root).unwrap();
    let of = |starter| SessionNote { work, ..of(starter, &note(&socket)) };
    assert_eq!(SessionNote::of_work_dir(root, work).unwrap(), None);
    let other = Command::new("sleep").arg("1000").spawn().unwrap();
    let other_id = ProcessId::of(other.id().cast_signed()).unwrap().unwrap();
    let notes = [of(own()), of(other_id), of(ProcessId { started: own().started + 1, ..own() })];
    for note in &notes {
        note.write(root).unwrap();
        // The file system's clock advances with the timer's tick.
        sleep(Duration::from_millis(30));
    }
    assert_eq!(SessionNote::of_work_dir(root, work).unwrap(), Some(notes[1].clone()));
    let elsewhere = FileId { inode: work.inode + 1, ..work };
    assert_eq!(SessionNote::of_work_dir(root, elsewhere).unwrap(), None);
    let moved = SessionNote { work: elsewhere, ..notes[0].clone() };
    moved.write(root).unwrap();
    assert_eq!(SessionNote::of_work_dir(root, elsewhere).unwrap(), Some(moved));
    // The starter of the newest has ended. While its worker has the ledger locked, the session is served.
    let ledger = File::create(notes[2].folder(root).join(LEDGER)).unwrap();
    ledger.lock().unwrap();
    assert_eq!(SessionNote::of_work_dir(root, work).unwrap(), Some(notes[2].clone()));
    drop(ledger);
    assert_eq!(SessionNote::of_work_dir(root, work).unwrap(), Some(notes[1].clone()));
    end(other);
}

#[test]
fn the_store_is_the_starter_s_socket_or_refused() {
    let socket = socket();
    let child = holder(&socket);
    let pid = child.id().cast_signed();
    let starter = ProcessId::of(pid).unwrap().unwrap();
    let inode = fstat(&socket).unwrap().st_ino;
    let store = Store { number: 0, inode };
    let note = SessionNote { starter, stores: vec![(7, store)], ..note(&socket) };
    assert_eq!((note.store_of(7), note.store_of(8)), (Some(store), None));
    assert_eq!(fstat(note.take(store).unwrap()).unwrap().st_ino, inode);
    let errno = |note: &SessionNote, store| note.take(store).unwrap_err().raw_os_error();
    // Standard error is not a socket; number 77 is not open.
    assert_eq!(errno(&note, Store { number: 2, ..store }), Some(libc::EINVAL));
    assert_eq!(errno(&note, Store { number: 77, ..store }), Some(libc::EBADF));
    assert_eq!(errno(&note, Store { inode: inode + 1, ..store }), Some(libc::EINVAL));
    let another = ProcessId { started: starter.started + 1, ..starter };
    let of_another = SessionNote { starter: another, ..note.clone() };
    assert_eq!(errno(&of_another, Store { number: 77, ..store }), Some(libc::ESRCH));
    // The starter has ended, and a worker has the store under the same number.
    let worker = holder(&socket);
    end(child);
    assert_eq!(fstat(note.take(store).unwrap()).unwrap().st_ino, inode);
    end(worker);
    assert_eq!(errno(&note, store), Some(libc::ESRCH));
}

#[test]
fn a_starter_in_another_pid_namespace_is_known() {
    let root = tempfile::tempdir().unwrap();
    let (root, socket) = (root.path(), socket());
    let own = note(&socket);
    assert!(!own.is_in_another_pid_namespace().unwrap());
    let other = SessionNote { pid_namespace: own.pid_namespace.checked_add(1).unwrap(), ..own };
    other.write(root).unwrap();
    let read = SessionNote::all(root).unwrap().notes;
    assert!(read == [other] && read[0].is_in_another_pid_namespace().unwrap());
}

#[test]
fn a_process_holds_the_store_while_it_has_a_descriptor_of_it() {
    let socket = socket();
    let note = note(&socket);
    let child = holder(&socket);
    let without = Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = |child: &Child| child.id().cast_signed();
    assert_eq!(note.held_by(pid(&child)).unwrap(), Some(0));
    assert_eq!(note.held_by(pid(&without)).unwrap(), None);
    let ended = pid(&child);
    end(child);
    end(without);
    assert_eq!(note.held_by(ended).unwrap(), None);
}
