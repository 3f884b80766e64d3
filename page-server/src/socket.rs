// SPDX-License-Identifier: MIT OR Apache-2.0
//! The socket that `criu restore --lazy-pages` connects to: `lazy-pages.socket` in the work directory.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::sys;

/// Fixed by CRIU (criu/uffd.c).
pub const NAME: &str = "lazy-pages.socket";

/// Binds and listens. A socket file that nobody serves is replaced, as CRIU's daemon does; one that a daemon
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
    let listener = UnixListener::bind(&path).with_context(|| format!("binding {}/{NAME}", work.display()))?;
    listener.set_nonblocking(true)?;
    sys::pass_credentials(listener.as_fd()).context("asking for the restore's pids")?;
    Ok(listener)
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

    #[test]
    fn a_stale_socket_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        // No socket was ever bound to it: a child of another test may have a copy of one that is dropped.
        mknod(&dir.path().join(NAME), SFlag::S_IFSOCK, Mode::S_IRUSR | Mode::S_IWUSR, 0).unwrap();
        listen(dir.path()).unwrap();
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
