// SPDX-License-Identifier: MIT OR Apache-2.0
//! The service manager that has started this process, if one has: systemd (`sd_listen_fds(3)`,
//! `sd_notify(3)`).

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::sys::socket::{SockType, UnixAddr, getsockname, getsockopt, sockopt};
use sd_notify::NotifyState;

/// Why the socket that the service manager gives cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GivenSocketError {
    /// It gives several.
    #[error("the service manager gives {0} sockets: expected one: {expected}", expected = .1.display())]
    Several(usize, PathBuf),
    /// It gives another one.
    #[error(
        "the service manager gives a socket that is not {}: write this path into ListenStream= of \
         rewake.socket, or give --socket the path of that one", .0.display()
    )]
    Other(PathBuf),
    /// The kernel refuses to say what it is.
    #[error("the service manager's socket: {0}")]
    Unusable(#[from] io::Error),
}

/// Takes the socket at `path` that the service manager listens on for this process, or returns `None` if
/// there is none. To be called once, before this process starts others: they must not inherit the socket.
///
/// # Errors
/// It gives other sockets than this one.
pub fn take_listener(path: &Path) -> Result<Option<UnixListener>, GivenSocketError> {
    // This also marks them to be closed on exec.
    let mut given = sd_notify::listen_fds()?;
    let number = match (given.len(), given.next()) {
        (1, Some(number)) => number,
        (0, _) => return Ok(None),
        (several, _) => return Err(GivenSocketError::Several(several, path.to_owned())),
    };
    // SAFETY: the service manager has opened it for this process before the process began, as an environment
    // shows that names this process. No other code asks for it, and it is taken once.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    if !is_listener_at(&socket, path) {
        return Err(GivenSocketError::Other(path.to_owned()));
    }
    let listener = UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    Ok(Some(listener))
}

/// Returns whether a socket listens for streams at a path.
fn is_listener_at(socket: &OwnedFd, path: &Path) -> bool {
    let address = getsockname::<UnixAddr>(socket.as_raw_fd());
    address.is_ok_and(|address| address.path() == Some(path))
        && getsockopt(socket, sockopt::SockType) == Ok(SockType::Stream)
        && getsockopt(socket, sockopt::AcceptConn) == Ok(true)
}

/// Reports that this process is ready. It does nothing unless a service manager waits for that.
///
/// # Errors
/// The service manager cannot be reached.
pub fn report_ready() -> io::Result<()> {
    sd_notify::notify(&[NotifyState::Ready])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_at_another_path_or_one_that_does_not_listen_is_no_listener() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = OwnedFd::from(UnixListener::bind(&path).unwrap());
        let connected = OwnedFd::from(std::os::unix::net::UnixStream::connect(&path).unwrap());
        assert!(is_listener_at(&listener, &path));
        assert!(!is_listener_at(&listener, &folder.path().join("another")));
        assert!(!is_listener_at(&connected, &path));
        assert!(!is_listener_at(&std::fs::File::open("/dev/null").unwrap().into(), &path));
    }

    #[test]
    fn a_process_that_no_service_manager_has_started_is_given_nothing() {
        assert!(take_listener(Path::new("/run/rewake/rewake.sock")).unwrap().is_none());
        report_ready().unwrap();
    }
}
