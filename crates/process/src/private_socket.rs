// SPDX-License-Identifier: MIT OR Apache-2.0
//! Unix sockets that only their user and root may connect to, among them the control socket.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, listen, socket};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::geteuid;

/// The folder of root's socket.
const RUN: &str = "/run/rewake";
const NAME: &str = "rewake.sock";
/// The environment's socket, also for a CRIU plugin, which has no options.
const VARIABLE: &str = "REWAKE_SOCKET";

/// Another process listens on a socket.
#[derive(Debug, thiserror::Error)]
#[error("{}: a daemon listens here: use it, or give another --socket", .0.display())]
pub struct SocketInUse(PathBuf);

/// Returns the control socket of a daemon without `--socket`: that of `REWAKE_SOCKET`, else
/// `/run/rewake/rewake.sock` for root, and `$XDG_RUNTIME_DIR/rewake.sock` for others.
///
/// # Errors
/// Fails when the user is not root and the variable is not set.
pub fn default_socket() -> anyhow::Result<PathBuf> {
    if let Some(socket) = std::env::var_os(VARIABLE).filter(|socket| !socket.is_empty()) {
        return Ok(PathBuf::from(socket));
    }
    if geteuid().is_root() {
        return Ok(Path::new(RUN).join(NAME));
    }
    let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let folder = folder.context("XDG_RUNTIME_DIR is not set: say where the socket is with --socket")?;
    Ok(Path::new(&folder).join(NAME))
}

/// Binds the socket for this user only, and listens. It replaces a stale socket file, but not one that a
/// daemon listens on.
///
/// # Errors
/// Fails when the folder is missing or not writable, or the path is too long for a socket (107 bytes). Also
/// when the file is no socket, or a daemon listens on it.
pub fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    let folder =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    if folder == Path::new(RUN) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.with_context(|| format!("making {RUN}"))?;
    }
    // Two daemons that start at once must not both find the other's file stale.
    let lock = File::open(folder).with_context(|| format!("opening {}", folder.display()))?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive)
        .map_err(|(_, error)| error)
        .with_context(|| format!("locking {}", folder.display()))?;
    match state(path) {
        SocketState::Free => {}
        SocketState::Stale => {
            std::fs::remove_file(path).with_context(|| format!("replacing {}", path.display()))?;
        }
        SocketState::Served => return Err(SocketInUse(path.to_owned()).into()),
        SocketState::Other(error) => {
            return Err(error).with_context(|| format!("{}: not a socket", path.display()));
        }
    }
    listener(path).with_context(|| format!("binding {}", path.display()))
}

/// Binds a socket that only its user can connect to. The file gets the mode of its socket at the bind, less
/// the umask (net/unix/af_unix.c: `unix_bind_bsd`). So others can connect at no moment, whatever the umask
/// is.
/// # Errors
/// The path is taken, or too long for a socket.
pub fn listener(path: &Path) -> io::Result<UnixListener> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let made = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    fchmod(&made, Mode::S_IRUSR | Mode::S_IWUSR)?;
    nix::sys::socket::bind(made.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&made, Backlog::MAXCONN)?;
    Ok(UnixListener::from(made))
}

/// Returns the path of a file of an open directory: a socket address has 107 bytes, and the directory's own
/// path may be longer.
#[must_use]
pub fn within(directory: &File, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd()))
}

/// The state of a socket file.
enum SocketState {
    Free,
    Stale,
    Served,
    Other(io::Error),
}

/// Returns the state of a socket file. It connects with a datagram socket, which leaves the daemon's accept
/// queue alone: the kernel answers "wrong type" for a bound stream socket and "refused" for a stale file.
fn state(path: &Path) -> SocketState {
    let connected = UnixDatagram::unbound().and_then(|probe| probe.connect(path));
    let Err(error) = connected else { return SocketState::Served };
    let is_socket = || {
        use std::os::unix::fs::FileTypeExt as _;
        std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
    };
    match error.raw_os_error() {
        Some(libc::ENOENT) if std::fs::symlink_metadata(path).is_err() => SocketState::Free,
        Some(libc::EPROTOTYPE) => SocketState::Served,
        Some(libc::ECONNREFUSED) if is_socket() => SocketState::Stale,
        _ => SocketState::Other(error),
    }
}

/// Returns whether a daemon of user `ours` accepts a peer: only the same user and root.
#[must_use]
pub fn may_speak(peer: u32, ours: u32) -> bool {
    peer == ours || peer == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::{SFlag, mknod};
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn the_socket_is_for_its_user_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_stale_socket_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // Made without a socket: a forked child of another test could keep a copy of a dropped one.
        mknod(&path, SFlag::S_IFSOCK, Mode::S_IRUSR | Mode::S_IWUSR, 0).unwrap();
        bind(&path).unwrap();
    }

    #[test]
    fn a_served_socket_is_refused_and_not_disturbed() {
        let dir = tempfile::tempdir().unwrap();
        let first = bind(&dir.path().join("s")).unwrap();
        let error = bind(&dir.path().join("s")).unwrap_err().to_string();
        assert!(error.contains("a daemon listens here"), "{error}");
        assert_eq!(first.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, "bytes").unwrap();
        let error = format!("{:#}", bind(&path).unwrap_err());
        assert!(error.contains("not a socket"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"bytes");
    }

    #[test]
    fn only_the_same_user_and_root_may_speak() {
        assert!(may_speak(1000, 1000) && may_speak(0, 1000) && may_speak(0, 0));
        assert!(!may_speak(1001, 1000) && !may_speak(1000, 0));
    }
}
