// SPDX-License-Identifier: MIT OR Apache-2.0
//! Each wall alone: what a user, or Landlock, keeps a process from where a filter of system calls does not.

use std::ffi::{CStr, CString};
use std::fs::{self, Permissions};
use std::io::{self, Read as _};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, SockaddrLike, UnixAddr, socket};
use nix::unistd::{Gid, Uid, chown};
use rewake_skip::skip;
use rewake_testkit::confined::{CallEnd, end_of};

use super::*;

fn own_user() -> io::Result<()> {
    leave_user().map(drop)
}

fn nothing_by_name() -> io::Result<()> {
    allow_reading([]).map(drop)
}

/// Asserts that a call is refused with this wall, and made without it.
fn refused(what: &str, wall: fn() -> io::Result<()>, errno: Errno, call: impl Fn() -> i64) {
    assert_eq!(end_of(|| Ok(()), &call), CallEnd::Made, "{what}, without the wall");
    assert_eq!(end_of(wall, &call), CallEnd::Refused(errno), "{what}");
}

/// A connection of a new socket.
fn connects(family: AddressFamily, address: &dyn SockaddrLike) -> i64 {
    let stream = socket(family, SockType::Stream, SockFlag::empty(), None).unwrap();
    // SAFETY: the kernel reads an address of its own length.
    unsafe { libc::connect(stream.as_raw_fd(), address.as_ptr(), address.len()) }.into()
}

fn open(path: &CStr) -> i64 {
    // SAFETY: the kernel reads a string.
    unsafe { libc::open(path.as_ptr(), libc::O_RDONLY) }.into()
}

/// A listener whose path its user alone may connect to, and its address.
fn root_only(folder: &tempfile::TempDir) -> (UnixListener, UnixAddr) {
    let path = folder.path().join("control.sock");
    let listener = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    // The folder lets others through, so that the socket's own mode decides.
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    (listener, UnixAddr::new(&path).unwrap())
}

/// A file that its user alone may read.
fn private_file(folder: &tempfile::TempDir, user: u32) -> CString {
    let file = folder.path().join("private");
    fs::write(&file, "").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    chown(&file, Some(Uid::from_raw(user)), Some(Gid::from_raw(user))).unwrap();
    CString::new(file.into_os_string().into_encoded_bytes()).unwrap()
}

#[test]
fn a_user_of_its_own_owns_no_socket_no_file_and_no_process() {
    if !Uid::effective().is_root() {
        skip!("another user takes root");
    }
    let folder = tempfile::tempdir().unwrap();
    let (_listener, path) = root_only(&folder);
    refused("docker.sock", own_user, Errno::EACCES, || connects(AddressFamily::Unix, &path));
    let file = private_file(&folder, 0);
    refused("a file of root", own_user, Errno::EACCES, || open(&file));
    let parent = std::process::id().cast_signed();
    // SAFETY: no call has an effect on memory of this process; the tracer lets its process go when it ends.
    let calls: [(&str, &dyn Fn() -> i64); 4] = unsafe {
        [
            ("kill", &|| libc::kill(parent, 0).into()),
            ("ptrace", &|| libc::ptrace(libc::PTRACE_SEIZE, parent, 0, 0)),
            ("root again", &|| libc::setresuid(0, 0, 0).into()),
            ("a group of root", &|| libc::setgroups(1, &0).into()),
        ]
    };
    for (what, call) in calls {
        refused(what, own_user, Errno::EPERM, call);
    }
}

#[test]
fn two_processes_have_two_users() {
    if !Uid::effective().is_root() {
        skip!("another user takes root");
    }
    let (confined, ready) = UnixStream::pair().unwrap();
    // SAFETY: the child makes system calls and allocates, which glibc permits after a fork.
    let other = unsafe { libc::fork() };
    if other == 0 {
        let code = i32::from(own_user().is_err());
        drop((confined, ready));
        // SAFETY: it waits for a signal, and ends this process.
        unsafe {
            libc::pause();
            libc::_exit(code)
        }
    }
    drop(ready);
    assert_eq!((&confined).read(&mut [0]).unwrap(), 0, "the child has left its user");
    // SAFETY: signal 0 has no effect.
    let signal = || i64::from(unsafe { libc::kill(other, 0) });
    let ends = [end_of(|| Ok(()), signal), end_of(own_user, signal)];
    // SAFETY: it is this process's child, and no status is asked for.
    unsafe {
        libc::kill(other, libc::SIGKILL);
        libc::waitpid(other, std::ptr::null_mut(), 0);
    }
    assert_eq!(ends, [CallEnd::Made, CallEnd::Refused(Errno::EPERM)], "by root, and by another such user");
}

#[test]
fn a_process_that_cannot_leave_its_user_still_loses_its_capabilities() {
    if !Uid::effective().is_root() {
        skip!("it has no capabilities");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = private_file(&folder, 1);
    refused("a file of another user", without_other_users, Errno::EACCES, || open(&file));
}

/// [`leave_user`] in a container that does not let its root become another user.
fn without_other_users() -> io::Result<()> {
    const SETGID: u32 = 1 << 6;
    const SETUID: u32 = 1 << 7;
    let header: [u32; 2] = [0x2008_0522, 0];
    let mut sets = [0u32; 6];
    // SAFETY: capget writes, and capset reads, two sets of three words each.
    unsafe {
        libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr());
        sets[0] &= !(SETUID | SETGID);
        sets[1] &= !(SETUID | SETGID);
        libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr());
    }
    if leave_user()? { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
}

#[test]
fn landlock_permits_no_path_no_port_no_abstract_socket_and_no_signal() {
    if !thread::spawn(|| allow_reading([])).join().unwrap().unwrap() {
        skip!("this kernel has no Landlock");
    }
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = SockaddrIn::new(127, 0, 0, 1, port.local_addr().unwrap().port());
    let name = format!("rewake-sandbox-{}", std::process::id());
    let hidden = UnixAddr::new_abstract(name.as_bytes()).unwrap();
    let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
    nix::sys::socket::bind(listener.as_raw_fd(), &hidden).unwrap();
    nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::MAXCONN).unwrap();
    let outside = std::process::id().cast_signed();
    refused("a path", nothing_by_name, Errno::EACCES, || open(c"/etc/passwd"));
    refused("TCP", nothing_by_name, Errno::EACCES, || connects(AddressFamily::Inet, &address));
    if !has_scopes() {
        skip!("this kernel has no scopes of Landlock (Linux 6.12)");
    }
    refused("an abstract socket", nothing_by_name, Errno::EPERM, || connects(AddressFamily::Unix, &hidden));
    // SAFETY: signal 0 has no effect.
    refused("kill", nothing_by_name, Errno::EPERM, || unsafe { libc::kill(outside, 0) }.into());
}

/// Whether the kernel has ABI 6 of Landlock.
fn has_scopes() -> bool {
    const VERSION: libc::c_int = 1;
    // SAFETY: with this flag the call only returns a number.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, VERSION) >= 6 }
}
