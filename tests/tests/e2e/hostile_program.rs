// SPDX-License-Identifier: MIT OR Apache-2.0
//! A restored program is hostile. While memory is missing it holds the session's fd store, and these tests do
//! with the store what the program could do: they take everything out, put something in, and look for files.

use std::collections::BTreeSet;
use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use nix::unistd::{Pid, close};
use rewake_process::pidfd::{pidfd_getfd, pidfd_open};
use rewake_tests::process::session;
use rewake_tests::scene::{ACT, END};
use rewake_tests::sessions::{folders, own_sessions, restored_and_parked};
use rewake_tests::{Criu, Scene, Server, Verdict, need};

/// Memory of a target, in MiB: loading it takes longer than these tests look at the store.
const MIB: usize = 512;
/// A user without rights.
const OTHER_USER: u32 = 65_534;
/// Descriptors that a message can carry.
const MOST_RECEIVED: usize = 253;

/// A restored program whose memory is not resident yet.
fn with_missing_memory(criu: &Criu, scenario: &str) -> (Scene, Server) {
    own_sessions().unwrap();
    let mut scene = Scene::dumped(criu, scenario, MIB).unwrap();
    for _ in 0..5 {
        let server = scene.serve().unwrap();
        if restored_and_parked(&scene, &server) {
            return (scene, server);
        }
        scene.stop().unwrap();
        scene.next_round().unwrap();
    }
    panic!("all memory was resident before the store was seen: enlarge the image");
}

/// A process's own descriptor of the store.
fn store_of(process: Pid) -> OwnedFd {
    let pid = process.as_raw();
    let sockets = sockets(process);
    let [(number, _)] = sockets[..] else { panic!("one socket expected, found {sockets:?}") };
    pidfd_getfd(pidfd_open(pid).unwrap().as_fd(), number).unwrap()
}

fn sockets(process: Pid) -> Vec<(RawFd, u64)> {
    rewake_plugin_protocol::sockets_of(process.as_raw()).unwrap()
}

/// Takes everything out of the store, and returns what it was.
fn taken_out(store: &OwnedFd) -> Vec<String> {
    let mut found = Vec::new();
    loop {
        let mut bytes = [0; 64];
        let mut space = cmsg_space!([RawFd; MOST_RECEIVED]);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg::<()>(store.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_DONTWAIT);
        let received = match received {
            Err(Errno::EAGAIN) => return found,
            received => received.unwrap(),
        };
        for control in received.cmsgs().unwrap() {
            let ControlMessageOwned::ScmRights(numbers) = control else { continue };
            for number in numbers {
                let link = fs::read_link(format!("/proc/self/fd/{number}")).unwrap();
                found.push(link.to_string_lossy().into_owned());
                close(number).unwrap();
            }
        }
    }
}

fn ends_well(scene: &Scene, server: &mut Server) {
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
    server.all_ended(END).unwrap();
}

/// A successor serves the session to its end.
fn continues(scene: &Scene, server: &mut Server) {
    assert!(server.kill_worker());
    server.continues().unwrap();
    ends_well(scene, server);
}

#[test]
fn it_holds_userfaultfds_and_nothing_else() {
    let criu = need!(Criu::main());
    let (scene, mut server) = with_missing_memory(&criu, "random");
    let found = taken_out(&store_of(scene.pid()));
    assert!(!found.is_empty() && found.iter().all(|link| link == "anon_inode:[userfaultfd]"), "{found:?}");
    // The session continues without what the program took, and so does a successor.
    continues(&scene, &mut server);
}

/// A process with the userfaultfd of another one can write to the other one's missing memory, and may have
/// given up the other one's rights.
#[test]
fn each_task_holds_its_own_userfaultfd_and_no_other_s() {
    let criu = need!(Criu::main());
    let (scene, mut server) = with_missing_memory(&criu, "tree");
    let tasks = session(scene.pid());
    assert!(tasks.len() > 2, "{tasks:?}");
    let stores: BTreeSet<u64> =
        tasks.iter().flat_map(|task| sockets(*task)).map(|(_, inode)| inode).collect();
    assert_eq!(stores.len(), tasks.len());
    for task in &tasks {
        let found = taken_out(&store_of(*task));
        assert_eq!(found, ["anon_inode:[userfaultfd]"], "task {task}");
    }
    continues(&scene, &mut server);
}

#[test]
fn it_puts_nothing_into_the_store_for_a_successor() {
    let criu = need!(Criu::main());
    let (scene, mut server) = with_missing_memory(&criu, "random");
    let store = store_of(scene.pid());
    let sent = sendmsg::<()>(
        store.as_raw_fd(),
        &[IoSlice::new(&[2; 16])],
        &[],
        MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL,
        None,
    );
    assert_eq!(sent, Err(Errno::EPIPE));
    // The streamer takes it from every process that has it, and this one would not expect that.
    drop(store);
    continues(&scene, &mut server);
}

#[test]
fn as_another_user_it_reads_nothing_of_the_session_s_folder() {
    let criu = need!(Criu::main());
    let (scene, mut server) = with_missing_memory(&criu, "random");
    let folder = folders().pop().unwrap();
    for name in ["ledger", "plan", "paths", "journal-0"] {
        assert!(folder.join(name).is_file(), "{name}");
        let mut read = Command::new("cat");
        read.arg(folder.join(name)).uid(OTHER_USER).gid(OTHER_USER).stdin(Stdio::null());
        let read = read.output().unwrap();
        assert!(!read.status.success() && read.stdout.is_empty(), "{name}");
    }
    ends_well(&scene, &mut server);
}
