// SPDX-License-Identifier: MIT OR Apache-2.0
//! Binds the socket that `criu restore --lazy-pages` connects to: `lazy-pages.socket` in the work directory.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;
use tracing::warn;

use crate::sys;
use rewake_process::private_socket::{listener, may_speak};

/// The name of the socket, which CRIU sets (criu/uffd.c).
pub const NAME: &str = "lazy-pages.socket";

/// Binds the socket for this user only, and listens. Like CRIU's daemon, it replaces a stale socket file, but
/// not one that another process listens on.
///
/// # Errors
/// Fails when the directory is missing or not writable, or another process listens there.
pub fn listen(work: &Path) -> anyhow::Result<UnixListener> {
    let directory = File::open(work).with_context(|| format!("opening work directory {}", work.display()))?;
    // Through the descriptor, because the directory's path may be longer than a socket address.
    let path = PathBuf::from(format!("/proc/self/fd/{}/{NAME}", directory.as_raw_fd()));
    if is_served(&work.join(NAME)) {
        bail!("{}/{NAME}: another daemon listens here: end it, or give another -W directory", work.display());
    }
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("replacing {}/{NAME}", work.display()));
        }
        _ => {}
    }
    let listener = listener(&path).with_context(|| format!("binding {}/{NAME}", work.display()))?;
    sys::pass_credentials(listener.as_fd()).context("asking for the restore's pids")?;
    Ok(listener)
}

/// Accepts the next connection of this user or root. Returns none when none waits.
///
/// It closes connections of other users: such a process could send a userfaultfd of its own and get the
/// image's memory.
///
/// # Errors
/// Fails when the socket fails.
pub fn accept(listener: &UnixListener) -> io::Result<Option<UnixStream>> {
    loop {
        let connection = match listener.accept() {
            Ok((connection, _)) => connection,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => return Err(error),
        };
        let peer = getsockopt(&connection, PeerCredentials)?;
        if may_speak(peer.uid(), geteuid().as_raw()) {
            return Ok(Some(connection));
        }
        warn!(pid = peer.pid(), uid = peer.uid(), "another user's process connected to {NAME}: closed");
    }
}

/// Removes the socket file if it exists.
///
/// # Errors
/// Fails with the errors of `unlink`.
pub fn remove(work: &Path) -> io::Result<()> {
    match std::fs::remove_file(work.join(NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Returns whether a process listens on the socket file. It connects with a datagram socket: the kernel
/// answers "wrong type" for a bound stream socket and "refused" for a stale file. A stream would use up the
/// daemon's only accept.
fn is_served(path: &Path) -> bool {
    let Ok(probe) = std::os::unix::net::UnixDatagram::unbound() else { return false };
    probe.connect(path).is_err_and(|error| error.raw_os_error() == Some(libc::EPROTOTYPE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::{Mode, SFlag, mknod};
    use rewake_skip::skip;

    #[test]
    fn a_stale_socket_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        // Made without a socket: a forked child of another test could keep a copy of a dropped one.
        mknod(&dir.path().join(NAME), SFlag::S_IFSOCK, Mode::S_IRUSR | Mode::S_IWUSR, 0).unwrap();
        listen(dir.path()).unwrap();
    }

    #[test]
    fn the_socket_is_for_its_user_whatever_the_umask_is() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let _listener = listen(dir.path()).unwrap();
        let mode = dir.path().join(NAME).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o177, 0, "{mode:o}: no other user may connect");
    }

    #[test]
    fn another_user_s_connection_is_closed_and_the_next_one_accepted() {
        use std::os::unix::fs::PermissionsExt as _;
        if !geteuid().is_root() {
            skip!("only root can be another user");
        }
        let dir = tempfile::tempdir().unwrap();
        let listener = listen(dir.path()).unwrap();
        // As if the file's mode did not keep others out.
        for path in [dir.path().to_owned(), dir.path().join(NAME)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        let path = dir.path().join(NAME);
        let stranger = std::thread::spawn(move || {
            // SAFETY: integers only; the call, not libc's wrapper, changes this thread alone.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) }, 0);
            UnixStream::connect(path).unwrap()
        });
        let mut stranger = stranger.join().unwrap();
        stranger.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let ours = UnixStream::connect(dir.path().join(NAME)).unwrap();
        let accepted = accept(&listener).unwrap().expect("ours waits");
        assert_eq!(std::io::Read::read(&mut stranger, &mut [0]).unwrap(), 0, "closed");
        std::io::Write::write_all(&mut &ours, b"x").unwrap();
        let mut byte = [0];
        std::io::Read::read_exact(&mut &accepted, &mut byte).unwrap();
        assert_eq!(byte, *b"x");
        assert!(accept(&listener).unwrap().is_none());
    }

    #[test]
    fn a_served_socket_is_refused_and_not_disturbed() {
        let dir = tempfile::tempdir().unwrap();
        let first = listen(dir.path()).unwrap();
        let error = listen(dir.path()).unwrap_err().to_string();
        assert!(error.contains("another daemon listens here"), "{error}");
        assert_eq!(first.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_directory_too_deep_for_a_socket_address_works() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(100)).join("e".repeat(100));
        std::fs::create_dir_all(&deep).unwrap();
        listen(&deep).unwrap();
        assert!(deep.join(NAME).exists());
    }
}
