// SPDX-License-Identifier: MIT OR Apache-2.0
//! The socket that `criu restore --lazy-pages` connects to: `lazy-pages.socket` in the work directory.

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

use crate::session::address::{listener, may_speak};
use crate::sys;

/// Fixed by CRIU (criu/uffd.c).
pub const NAME: &str = "lazy-pages.socket";

/// Binds and listens, for this user only. A socket file that nobody serves is replaced, as CRIU's daemon does; one that a daemon
/// of ours serves is not.
///
/// # Errors
/// The directory is missing or not writable, or another `rewake` listens there.
pub fn listen(work: &Path) -> anyhow::Result<UnixListener> {
    let directory = File::open(work).with_context(|| format!("opening work directory {}", work.display()))?;
    // Through the descriptor: the directory's own path may be longer than a socket address.
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

/// The next connection of this user or root; one of another user is closed: it could pass a userfaultfd of its own and be
/// given the image's memory. None where none waits.
///
/// # Errors
/// The socket failed.
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

/// Removes a socket file that is not needed any more.
///
/// # Errors
/// As `unlink`.
pub fn remove(work: &Path) -> io::Result<()> {
    match std::fs::remove_file(work.join(NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Whether some process has the socket file bound. A datagram socket is asked, not a stream: the kernel
/// answers "wrong type" for a bound one and "refused" for a stale file, and the daemon's one accept is not
/// used up by a connection that is no restore.
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
        // No socket was ever bound to it: a child of another test may have a copy of one that is dropped.
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
