// SPDX-License-Identifier: MIT OR Apache-2.0
//! A probe in the place of a fetcher that its peer has taken over: it tries to reach what is not the
//! fetcher's.

use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use libc::{c_int, c_long};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, SockaddrLike, UnixAddr, socket};
use nix::unistd::{Uid, getppid};
use rewake_skip::skip;
use rewake_testkit::confined::{CallEnd, end_of};

use super::*;

/// A system call: its name for messages, its number, and its arguments. All others are 0.
type Call<'a> = (&'a str, c_long, &'a [c_long]);

fn make((_, number, arguments): &Call<'_>) -> i64 {
    let [a, b, c, d, e, f] = std::array::from_fn(|index| arguments.get(index).copied().unwrap_or(0));
    // SAFETY: addresses among the arguments are of live objects that the kernel reads, or are 0; and the
    // process that makes the call ends after it.
    unsafe { libc::syscall(*number, a, b, c, d, e, f) }
}

/// The confinement of a fetcher, whose files have no byte.
fn confined() -> io::Result<()> {
    confine(0)
}

fn long(value: c_int) -> c_long {
    value.into()
}

fn at<T: ?Sized>(value: &T) -> c_long {
    (&raw const *value).cast::<u8>().addr().cast_signed() as c_long
}

fn connect<'a>(what: &'a str, socket: c_long, address: &impl SockaddrLike) -> (&'a str, c_long, Vec<c_long>) {
    let len = c_long::from(address.len());
    (what, libc::SYS_connect, vec![socket, address.as_ptr().addr().cast_signed() as c_long, len])
}

/// Asserts how each of these calls ends in a process that is confined in this way.
fn all_end<'a>(
    confine: fn() -> io::Result<()>,
    calls: impl IntoIterator<Item = Call<'a>>,
    expected: CallEnd,
) {
    let ends = calls.into_iter().map(|call| (call.0, end_of(confine, || make(&call))));
    assert_eq!(ends.filter(|(_, end)| *end != expected).collect::<Vec<_>>(), [], "not {expected:?}");
}

/// `F_SETSIG` of fcntl.h, which the crate lacks.
const F_SETSIG: c_long = 10;
const KILLED: CallEnd = CallEnd::Killed(Signal::SIGSYS);

/// A socket that its user alone may connect to, as docker, containerd and the node agent have.
fn root_only(folder: &tempfile::TempDir) -> (UnixListener, UnixAddr) {
    let path = folder.path().join("control.sock");
    let listener = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    // The folder lets others through, so that the socket's own mode decides.
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    (listener, UnixAddr::new(&path).unwrap())
}

#[test]
fn a_fetcher_reaches_no_other_socket_not_even_by_one_that_it_had() {
    let new = |family, kind| socket(family, kind, SockFlag::empty(), None).unwrap();
    let [unix, tcp] = [AddressFamily::Unix, AddressFamily::Inet].map(|of| new(of, SockType::Stream));
    let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (ours, _its) = UnixStream::pair().unwrap();
    let [unix, tcp, udp, ours] =
        [unix.as_raw_fd(), tcp.as_raw_fd(), udp.as_raw_fd(), ours.as_raw_fd()].map(long);
    let folder = tempfile::tempdir().unwrap();
    let (_listener, path) = root_only(&folder);
    let hidden = UnixAddr::new_abstract(b"rewake-fetcher-probe").unwrap();
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let other = SockaddrIn::new(127, 0, 0, 1, port.local_addr().unwrap().port());
    let (to, len) = (other.as_ptr().addr().cast_signed() as c_long, c_long::from(other.len()));
    let connects = [
        connect("docker.sock", unix, &path),
        connect("an abstract socket", unix, &hidden),
        connect("another TCP host", tcp, &other),
    ];
    all_end(confined, connects.iter().map(|(what, call, arguments)| (*what, *call, &arguments[..])), KILLED);
    let [signal, fast] = [libc::MSG_NOSIGNAL, libc::MSG_NOSIGNAL | libc::MSG_FASTOPEN].map(long);
    let kinds = [
        ("unix", libc::AF_UNIX, libc::SOCK_STREAM),
        ("TCP", libc::AF_INET, libc::SOCK_STREAM),
        ("TCP over IPv6", libc::AF_INET6, libc::SOCK_STREAM),
        ("UDP", libc::AF_INET, libc::SOCK_DGRAM),
        ("netlink", libc::AF_NETLINK, libc::SOCK_RAW),
        ("vsock", libc::AF_VSOCK, libc::SOCK_STREAM),
    ];
    let kinds = kinds.map(|(what, family, kind)| (what, [long(family), long(kind)]));
    all_end(confined, kinds.iter().map(|(what, kind)| (*what, libc::SYS_socket, &kind[..])), KILLED);
    let calls: &[Call<'_>] = &[
        ("UDP to an address", libc::SYS_sendto, &[udp, at("x"), 1, signal, to, len]),
        ("an address on a connected socket", libc::SYS_sendto, &[ours, at("x"), 1, signal, to, len]),
        ("a send that connects", libc::SYS_sendto, &[tcp, at("x"), 1, fast]),
        ("a message that connects", libc::SYS_sendmsg, &[tcp, 0, fast]),
        ("sendmmsg", libc::SYS_sendmmsg, &[udp, 0, 0, signal]),
        ("bind", libc::SYS_bind, &[tcp, to, len]),
        ("listen", libc::SYS_listen, &[tcp, 1]),
        ("accept", libc::SYS_accept4, &[tcp]),
        ("socketpair", libc::SYS_socketpair, &[long(libc::AF_UNIX), long(libc::SOCK_STREAM)]),
        (
            "the device of a socket",
            libc::SYS_setsockopt,
            &[tcp, long(libc::SOL_SOCKET), long(libc::SO_BINDTODEVICE)],
        ),
        ("a TCP option", libc::SYS_setsockopt, &[tcp, long(libc::IPPROTO_TCP), long(libc::TCP_NODELAY)]),
        (
            "a TCP option of a permitted number",
            libc::SYS_setsockopt,
            &[tcp, long(libc::IPPROTO_TCP), long(libc::SO_LINGER)],
        ),
        ("an ioctl", libc::SYS_ioctl, &[tcp, libc::FIONBIO.cast_signed() as c_long]),
    ];
    all_end(confined, calls.iter().copied(), KILLED);
}

#[test]
fn a_fetcher_reaches_no_process_and_no_file() {
    let parent: c_long = getppid().as_raw().into();
    let readonly = long(libc::O_RDONLY);
    let [file, folder] = [libc::AT_FDCWD, libc::AT_FDCWD].map(long);
    let how = [0u64; 3];
    let calls: &[Call<'_>] = &[
        ("the owner of a socket", libc::SYS_fcntl, &[0, long(libc::F_SETOWN), parent]),
        ("the signal of a socket", libc::SYS_fcntl, &[0, F_SETSIG, long(libc::SIGKILL)]),
        ("signals of a socket", libc::SYS_fcntl, &[0, long(libc::F_SETFL), long(libc::O_ASYNC)]),
        ("appending", libc::SYS_fcntl, &[0, long(libc::F_SETFL), long(libc::O_APPEND)]),
        ("a lease", libc::SYS_fcntl, &[0, long(libc::F_SETLEASE), long(libc::F_RDLCK)]),
        ("a duplicate", libc::SYS_fcntl, &[0, long(libc::F_DUPFD_CLOEXEC), 0]),
        ("kill", libc::SYS_kill, &[parent]),
        ("kill of all", libc::SYS_kill, &[-1]),
        ("tgkill", libc::SYS_tgkill, &[parent, parent]),
        ("tkill", libc::SYS_tkill, &[parent]),
        ("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, &[parent]),
        ("pidfd_open", libc::SYS_pidfd_open, &[parent]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, &[0, 0]),
        ("pidfd_send_signal", libc::SYS_pidfd_send_signal, &[0, 0]),
        ("ptrace", libc::SYS_ptrace, &[long(libc::PTRACE_SEIZE.cast_signed()), parent]),
        ("process_vm_readv", libc::SYS_process_vm_readv, &[parent]),
        ("process_vm_writev", libc::SYS_process_vm_writev, &[parent]),
        ("prlimit", libc::SYS_prlimit64, &[parent]),
        ("kcmp", libc::SYS_kcmp, &[parent, parent]),
        ("fork", libc::SYS_clone, &[long(libc::SIGCHLD)]),
        ("clone3", libc::SYS_clone3, &[]),
        ("execve", libc::SYS_execve, &[at(c"/bin/true"), 0, 0]),
        ("unshare", libc::SYS_unshare, &[long(libc::CLONE_NEWUSER)]),
        ("/proc/self/maps", libc::SYS_openat, &[file, at(c"/proc/self/maps"), readonly]),
        ("/proc/self/fd", libc::SYS_openat, &[file, at(c"/proc/self/fd/0"), readonly]),
        ("openat2", libc::SYS_openat2, &[file, at(c"/etc/passwd"), at(&how), 24]),
        ("readlinkat", libc::SYS_readlinkat, &[folder, at(c"/proc/self/exe")]),
        ("statx", libc::SYS_statx, &[folder, at(c"/etc/passwd")]),
        ("name_to_handle_at", libc::SYS_name_to_handle_at, &[folder, at(c"/etc/passwd")]),
        ("io_uring_setup", libc::SYS_io_uring_setup, &[1]),
        ("memfd_create", libc::SYS_memfd_create, &[at(c"x")]),
        ("userfaultfd", libc::SYS_userfaultfd, &[]),
        ("bpf", libc::SYS_bpf, &[]),
        ("perf_event_open", libc::SYS_perf_event_open, &[]),
        ("keyctl", libc::SYS_keyctl, &[]),
        ("another user", libc::SYS_setresuid, &[0, 0, 0]),
        ("another group", libc::SYS_setresgid, &[0, 0, 0]),
        ("capset", libc::SYS_capset, &[]),
        ("prctl", libc::SYS_prctl, &[long(libc::PR_SET_DUMPABLE), 1]),
        ("seccomp", libc::SYS_seccomp, &[]),
        ("personality", libc::SYS_personality, &[]),
        (
            "code in new memory",
            libc::SYS_mmap,
            &[
                0,
                4096,
                long(libc::PROT_READ | libc::PROT_EXEC),
                long(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS),
                -1,
            ],
        ),
        ("code in old memory", libc::SYS_mprotect, &[0, 4096, long(libc::PROT_EXEC)]),
        ("code with a key", libc::SYS_pkey_mprotect, &[0, 4096, long(libc::PROT_EXEC), -1]),
        ("code in shared memory", libc::SYS_shmat, &[0, 0, long(libc::SHM_EXEC)]),
    ];
    all_end(confined, calls.iter().copied(), KILLED);
}

#[test]
fn what_a_fetcher_does_itself_is_permitted() {
    let (ours, _its) = UnixStream::pair().unwrap();
    let ours = long(ours.as_raw_fd());
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let time = libc::timeval { tv_sec: 1, tv_usec: 0 };
    let socket = long(libc::SOL_SOCKET);
    let calls: &[Call<'_>] = &[
        ("a send", libc::SYS_sendto, &[ours, at("x"), 1, long(libc::MSG_NOSIGNAL)]),
        ("a wake-up", libc::SYS_sendto, &[ours, at("x"), 1, long(libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)]),
        ("whether it is open", libc::SYS_fcntl, &[ours, long(libc::F_GETFD)]),
        (
            "how a connection ends",
            libc::SYS_setsockopt,
            &[ours, socket, long(libc::SO_LINGER), at(&linger), size_of_val(&linger) as c_long],
        ),
        (
            "the time for a handshake",
            libc::SYS_setsockopt,
            &[ours, socket, long(libc::SO_RCVTIMEO), at(&time), size_of_val(&time) as c_long],
        ),
    ];
    all_end(confined, calls.iter().copied(), CallEnd::Made);
    let itself = || {
        let own = std::process::id().cast_signed();
        make(&("tgkill", libc::SYS_tgkill, &[long(own), long(own), 0]))
    };
    assert_eq!(end_of(confined, itself), CallEnd::Made);
}

#[test]
fn without_the_filter_the_user_and_landlock_still_hold() {
    if !Uid::effective().is_root() {
        skip!("another user takes root");
    }
    if !thread::spawn(|| allow_reading([])).join().unwrap().unwrap() {
        skip!("this kernel has no Landlock");
    }
    let stream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (_listener, path) = root_only(&folder);
    let (what, number, arguments) = connect("docker.sock", long(stream.as_raw_fd()), &path);
    let open = [long(libc::AT_FDCWD), at(c"/etc/passwd"), long(libc::O_RDONLY)];
    let calls: &[Call<'_>] =
        &[(what, number, &arguments), ("what each user may read", libc::SYS_openat, &open)];
    all_end(second_wall, calls.iter().copied(), CallEnd::Refused(Errno::EACCES));
    all_end(|| Ok(()), calls.iter().copied(), CallEnd::Made);
    let dumpable: Call<'_> = ("core dumps", libc::SYS_prctl, &[long(libc::PR_GET_DUMPABLE)]);
    let has_core = || -i64::from(make(&dumpable) != 0);
    assert_eq!(end_of(second_wall, has_core), CallEnd::Made);
}
