// SPDX-License-Identifier: MIT OR Apache-2.0
//! How plugin and server connect, and what each end receives.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socketpair};
use nix::unistd::geteuid;
use rewake_plugin_protocol::proto::{self, to_server};
use rewake_plugin_protocol::{Channel, Error, Listener, MAX_DESCRIPTORS, SOCKET, VERSION, connect};

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap()
}

fn hello() -> proto::ToServer {
    proto::ToServer { what: Some(to_server::What::Hello(proto::Hello { version: VERSION, holds: false })) }
}

#[test]
fn messages_are_received_with_their_descriptors_in_order() {
    let (one, other) = pair();
    let (one, other) = (Channel::new(one).unwrap(), Channel::new(other).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<File> = (0..MAX_DESCRIPTORS)
        .map(|number| {
            let path = folder.path().join(number.to_string());
            fs::write(&path, number.to_string()).unwrap();
            File::open(path).unwrap()
        })
        .collect();
    let descriptors: Vec<_> = files.iter().map(File::as_fd).collect();
    let numbers: Vec<u32> = (0..).take(MAX_DESCRIPTORS).collect();
    let what = to_server::What::Buffers(proto::Buffers { numbers });
    let message = proto::ToServer { what: Some(what) };
    one.send(&message, &descriptors).unwrap();
    one.send(&hello(), &[]).unwrap();
    let (received, descriptors) = other.receive::<proto::ToServer>().unwrap();
    assert_eq!((received, descriptors.len()), (message, MAX_DESCRIPTORS));
    for (number, file) in descriptors.into_iter().enumerate() {
        let mut text = String::new();
        File::from(file).read_to_string(&mut text).unwrap();
        assert_eq!(text, number.to_string());
    }
    let (received, descriptors) = other.receive::<proto::ToServer>().unwrap();
    assert_eq!((received, descriptors.len()), (hello(), 0));
}

#[test]
fn closed_ends_and_malformed_messages_are_errors() {
    let (one, other) = pair();
    let other = Channel::new(other).unwrap();
    send(one.as_raw_fd(), &[0xff; 40], MsgFlags::empty()).unwrap();
    assert!(matches!(other.receive::<proto::ToServer>(), Err(Error::Malformed { .. })));
    send(one.as_raw_fd(), &vec![0; 20_000], MsgFlags::empty()).unwrap();
    assert!(matches!(other.receive::<proto::ToServer>(), Err(Error::Truncated)));
    drop(one);
    assert!(matches!(other.receive::<proto::ToServer>(), Err(Error::Closed)));
    assert!(matches!(other.send(&hello(), &[]), Err(Error::Closed)));
}

#[test]
fn one_server_listens_in_a_folder_and_only_for_its_user() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(SOCKET);
    assert!(connect(&path).unwrap().is_none(), "no server yet");
    // The socket of a server that was killed.
    drop(UnixListener::bind(&path).unwrap());
    assert!(connect(&path).unwrap().is_none());
    let listener = Listener::new(folder.path()).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let second = Listener::new(folder.path()).unwrap_err().to_string();
    assert!(second.contains("another server listens there"), "{second}");
    // The second server connected and closed.
    let closed = listener.accept().unwrap().unwrap();
    assert!(matches!(closed.receive::<proto::ToServer>(), Err(Error::Closed)));
    let plugin = thread::spawn({
        let path = path.clone();
        move || connect(&path).unwrap().unwrap().send(&hello(), &[]).unwrap()
    });
    let (received, _) = listener.accept().unwrap().unwrap().receive::<proto::ToServer>().unwrap();
    plugin.join().unwrap();
    assert_eq!(received, hello());
    listener.close();
    assert!(!path.exists() && connect(&path).unwrap().is_none(), "a late plugin finds no server");
    // The name may be another server's from now on.
    thread::sleep(Duration::from_millis(20));
    let next = Listener::new(folder.path()).unwrap();
    drop(listener);
    assert!(path.exists(), "the next server's");
    drop(next);
    assert!(!path.exists());
}

#[test]
fn a_work_directory_may_have_a_longer_name_than_a_socket() {
    let folder = tempfile::tempdir().unwrap();
    let work = folder.path().join("a".repeat(120)).join("b".repeat(120));
    fs::create_dir_all(&work).unwrap();
    let listener = Listener::new(&work).unwrap();
    assert!(work.join(SOCKET).exists());
    assert!(matches!(Listener::new(&work), Err(Error::Refused(_))), "another server listens there");
    // As the plugin does, which runs in that folder.
    let here = File::open(&work).unwrap();
    let near = format!("/proc/self/fd/{}/{SOCKET}", here.as_raw_fd());
    connect(near.as_ref()).unwrap().unwrap().send(&hello(), &[]).unwrap();
    // The second listener connected and closed.
    assert!(matches!(listener.accept().unwrap().unwrap().receive::<proto::ToServer>(), Err(Error::Closed)));
    assert_eq!(listener.accept().unwrap().unwrap().receive::<proto::ToServer>().unwrap().0, hello());
    drop(listener);
    assert!(!work.join(SOCKET).exists());
}

/// A user that is neither this one nor root.
const OTHER_USER: u32 = 65534;

/// Runs `act` as another user, in a thread of its own.
fn as_other_user<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let run = || {
        // The C library's function would change all threads. The real and the saved user stay.
        // SAFETY: the call takes numbers only.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, OTHER_USER, -1) };
        assert_eq!((changed, geteuid().as_raw()), (0, OTHER_USER));
        act()
    };
    thread::scope(|scope| scope.spawn(run).join().unwrap())
}

/// A folder in which all users may write.
fn world_writable() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    folder
}

#[test]
fn another_user_is_refused_as_plugin_and_as_server() {
    if !geteuid().is_root() {
        rewake_skip::skip!("only root can become another user");
    }
    let (own, their) = (world_writable(), world_writable());
    let path = own.path().join(SOCKET);
    let listener = Listener::new(own.path()).unwrap();
    let refused = as_other_user(|| connect(&path)).unwrap_err();
    assert!(matches!(refused, Error::Socket { act: "connect", .. }), "the file's mode refuses: {refused:?}");
    // As if another process had changed the mode. For another user a server of root is acceptable.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let _connection = as_other_user(|| connect(&path)).unwrap().unwrap();
    let error = listener.accept().unwrap_err();
    assert!(matches!(error, Error::ForeignUser { found: OTHER_USER, expected: 0 }), "{error:?}");
    assert_eq!(error.to_string(), "the peer belongs to user 65534, expected 0 or root");
    let _listener = as_other_user(|| Listener::new(their.path())).unwrap();
    let error = connect(&their.path().join(SOCKET)).unwrap_err();
    assert!(matches!(error, Error::ForeignUser { found: OTHER_USER, expected: 0 }), "{error:?}");
}

#[test]
fn an_end_that_neither_sends_nor_receives_times_out() {
    let (one, _other) = pair();
    let timeout = Duration::from_millis(50);
    let one = Channel::with_timeout(one, timeout).unwrap();
    let start = Instant::now();
    let error = one.receive::<proto::ToServer>().unwrap_err();
    assert!(matches!(error, Error::TimedOut(waited) if waited == timeout), "{error:?}");
    assert!(start.elapsed() >= timeout);
    assert_eq!(error.to_string(), "the peer has neither sent nor received for 50ms");
    // As many messages as the socket takes.
    let error = (0..100_000).find_map(|_| one.send(&hello(), &[]).err()).unwrap();
    assert!(matches!(error, Error::TimedOut(_)), "{error:?}");
}

#[test]
fn another_version_is_refused() {
    let check = |version| proto::Hello { version, holds: false }.check();
    check(VERSION).unwrap();
    for version in [0, VERSION - 1, VERSION + 1, u32::MAX] {
        let error = check(version).unwrap_err();
        assert!(matches!(error, Error::Version(found) if found == version), "{error:?}");
    }
}
