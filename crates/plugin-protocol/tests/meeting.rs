// SPDX-License-Identifier: MIT OR Apache-2.0
//! How plugin and server meet, and what either hears of the other.

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
fn what_is_said_is_heard_with_its_descriptors_in_their_order() {
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
    let (heard, came) = other.receive::<proto::ToServer>().unwrap();
    assert_eq!((heard, came.len()), (message, MAX_DESCRIPTORS));
    for (number, file) in came.into_iter().enumerate() {
        let mut text = String::new();
        File::from(file).read_to_string(&mut text).unwrap();
        assert_eq!(text, number.to_string());
    }
    let (heard, came) = other.receive::<proto::ToServer>().unwrap();
    assert_eq!((heard, came.len()), (hello(), 0));
}

#[test]
fn an_end_that_closes_is_told_and_so_is_nonsense() {
    let (one, other) = pair();
    let other = Channel::new(other).unwrap();
    send(one.as_raw_fd(), &[0xff; 40], MsgFlags::empty()).unwrap();
    assert!(matches!(other.receive::<proto::ToServer>(), Err(Error::Garbled { .. })));
    send(one.as_raw_fd(), &vec![0; 20_000], MsgFlags::empty()).unwrap();
    assert!(matches!(other.receive::<proto::ToServer>(), Err(Error::CutOff)));
    drop(one);
    assert!(matches!(other.receive::<proto::ToServer>(), Err(Error::Closed)));
    assert!(matches!(other.send(&hello(), &[]), Err(Error::Closed)));
}

#[test]
fn one_server_listens_in_a_folder_and_only_for_its_user() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(SOCKET);
    assert!(connect(&path).unwrap().is_none(), "nobody yet");
    // Of one that was killed.
    drop(UnixListener::bind(&path).unwrap());
    assert!(connect(&path).unwrap().is_none());
    let listener = Listener::new(folder.path()).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let second = Listener::new(folder.path()).unwrap_err().to_string();
    assert!(second.contains("somebody listens there"), "{second}");
    // The second one looked, and is gone.
    let looked = listener.accept().unwrap().unwrap();
    assert!(matches!(looked.receive::<proto::ToServer>(), Err(Error::Closed)));
    let plugin = thread::spawn({
        let path = path.clone();
        move || connect(&path).unwrap().unwrap().send(&hello(), &[]).unwrap()
    });
    let (heard, _) = listener.accept().unwrap().unwrap().receive::<proto::ToServer>().unwrap();
    plugin.join().unwrap();
    assert_eq!(heard, hello());
    listener.close();
    assert!(!path.exists() && connect(&path).unwrap().is_none(), "who comes too late finds nobody");
    // The name is another's from then on.
    thread::sleep(Duration::from_millis(20));
    let next = Listener::new(folder.path()).unwrap();
    drop(listener);
    assert!(path.exists(), "the next one's");
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
    assert!(matches!(Listener::new(&work), Err(Error::Refused(_))), "somebody listens there");
    // As the plugin does it, which is in that folder.
    let here = File::open(&work).unwrap();
    let near = format!("/proc/self/fd/{}/{SOCKET}", here.as_raw_fd());
    connect(near.as_ref()).unwrap().unwrap().send(&hello(), &[]).unwrap();
    // The second listener has looked, and gone.
    assert!(matches!(listener.accept().unwrap().unwrap().receive::<proto::ToServer>(), Err(Error::Closed)));
    assert_eq!(listener.accept().unwrap().unwrap().receive::<proto::ToServer>().unwrap().0, hello());
    drop(listener);
    assert!(!work.join(SOCKET).exists());
}

/// A user that is neither this one nor root.
const STRANGER: u32 = 65534;

/// Does something as a stranger, in a thread that ends then.
fn as_stranger<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let stranger = || {
        // The C library's would change all threads. Real and saved user stay.
        // SAFETY: numbers only.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, STRANGER, -1) };
        assert_eq!((changed, geteuid().as_raw()), (0, STRANGER));
        act()
    };
    thread::scope(|scope| scope.spawn(stranger).join().unwrap())
}

/// A folder in which anybody may do anything.
fn open_to_all() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    folder
}

#[test]
fn a_stranger_is_refused_as_plugin_and_as_server() {
    if !geteuid().is_root() {
        rewake_skip::skip!("only root can become another user");
    }
    let (own, their) = (open_to_all(), open_to_all());
    let path = own.path().join(SOCKET);
    let listener = Listener::new(own.path()).unwrap();
    let refused = as_stranger(|| connect(&path)).unwrap_err();
    assert!(matches!(refused, Error::Socket { act: "connect", .. }), "by the file's mode: {refused:?}");
    // As if that had been changed. To a stranger a server of root's is none.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let _there = as_stranger(|| connect(&path)).unwrap().unwrap();
    let error = listener.accept().unwrap_err();
    assert!(matches!(error, Error::Stranger { found: STRANGER, expected: 0 }), "{error:?}");
    assert_eq!(error.to_string(), "the other end belongs to user 65534, expected 0 or root");
    let _listener = as_stranger(|| Listener::new(their.path())).unwrap();
    let error = connect(&their.path().join(SOCKET)).unwrap_err();
    assert!(matches!(error, Error::Stranger { found: STRANGER, expected: 0 }), "{error:?}");
}

#[test]
fn an_end_that_neither_speaks_nor_hears_is_given_up() {
    let (one, _other) = pair();
    let patience = Duration::from_millis(50);
    let one = Channel::with_patience(one, patience).unwrap();
    let start = Instant::now();
    let error = one.receive::<proto::ToServer>().unwrap_err();
    assert!(matches!(error, Error::Silent(waited) if waited == patience), "{error:?}");
    assert!(start.elapsed() >= patience);
    assert_eq!(error.to_string(), "the other end has said nothing, and heard nothing, for 50ms");
    // As many as the socket takes.
    let error = (0..100_000).find_map(|_| one.send(&hello(), &[]).err()).unwrap();
    assert!(matches!(error, Error::Silent(_)), "{error:?}");
}

#[test]
fn an_end_of_another_version_is_told_from_one_of_this() {
    let check = |version| proto::Hello { version, holds: false }.check();
    check(VERSION).unwrap();
    for version in [0, VERSION - 1, VERSION + 1, u32::MAX] {
        let error = check(version).unwrap_err();
        assert!(matches!(error, Error::Version(found) if found == version), "{error:?}");
    }
}
