// SPDX-License-Identifier: MIT OR Apache-2.0
//! The socket at which the plugin and the server connect.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::socket::{self, AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, accept4, bind};
use nix::sys::stat::{Mode, fchmod};

use crate::SOCKET;
use crate::abi::accepted;
use crate::channel::Channel;
use crate::error::Error;

/// A server's socket that waits for a plugin. Only this user can connect.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// The file of the socket. When the listener is dropped, another one may have its name.
    file: File,
}

impl Listener {
    /// Listens in a work directory. A socket file without a listener is replaced.
    ///
    /// # Errors
    /// Another server listens there, or the kernel refuses.
    pub fn new(work: &Path) -> Result<Self, Error> {
        let path = work.join(SOCKET);
        // A socket's address has room for 107 bytes. The plugin runs in that folder and uses a relative name.
        let folder = open(work, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty());
        let folder = folder.map_err(Error::of("open the work directory"))?;
        let near = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(SOCKET);
        let address = UnixAddr::new(&near).map_err(Error::of("name the socket"))?;
        let socket = unconnected()?;
        if connect(&near)?.is_some() {
            return Err(Error::Refused(format!("{}: another server listens there", path.display())));
        }
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(Error::Socket { act: "remove an old socket", source });
            }
            _ => {}
        }
        // The file takes the socket's mode when it is bound (unix_bind_bsd of net/unix/af_unix.c), less the
        // umask. So other users cannot connect at any moment.
        fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR).map_err(Error::of("set the socket's mode"))?;
        bind(socket.as_raw_fd(), &address).map_err(Error::of("bind the socket"))?;
        let one = Backlog::new(1).map_err(Error::of("listen"))?;
        socket::listen(&socket, one).map_err(Error::of("listen"))?;
        let file = file(&path).map_err(|source| Error::Socket { act: "read the socket file", source })?;
        Ok(Self { socket, path, file })
    }

    /// Waits for a connection. Returns None when the listener is closed. A process that connects and closes
    /// is this user's or root's; the caller drops the channel and waits again.
    ///
    /// # Errors
    /// The peer is another user, or the kernel refuses.
    pub fn accept(&self) -> Result<Option<Channel>, Error> {
        loop {
            match accept4(self.socket.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
                Ok(number) => break Channel::new(accepted(number)).map(Some),
                Err(Errno::EINTR) => {}
                // The socket was shut down.
                Err(Errno::EINVAL) => break Ok(None),
                Err(errno) => break Err(Error::of("accept a connection")(errno)),
            }
        }
    }

    /// Refuses further connections, in all processes that have the socket.
    pub fn close(&self) {
        // An error does not matter: a late plugin is refused, or finds no socket.
        let _ = socket::shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        self.remove();
    }

    /// Removes the socket file, if it is still this listener's.
    fn remove(&self) {
        if file(&self.path).is_ok_and(|found| found == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A file: device, inode and change time. The inode number alone is soon reused.
type File = (u64, u64, i64, i64);

fn file(path: &Path) -> io::Result<File> {
    let status = fs::symlink_metadata(path)?;
    Ok((status.dev(), status.ino(), status.ctime(), status.ctime_nsec()))
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Connects to the server that listens at `path`; returns `None` if no server does.
///
/// # Errors
/// A server listens, but the connection fails.
pub fn connect(path: &Path) -> Result<Option<Channel>, Error> {
    let address = UnixAddr::new(path).map_err(Error::of("name the socket"))?;
    let socket = unconnected()?;
    match socket::connect(socket.as_raw_fd(), &address) {
        Ok(()) => Channel::new(socket).map(Some),
        Err(Errno::ENOENT | Errno::ECONNREFUSED) => Ok(None),
        Err(errno) => Err(Error::of("connect")(errno)),
    }
}

fn unconnected() -> Result<OwnedFd, Error> {
    let kind = (AddressFamily::Unix, SockType::SeqPacket);
    socket::socket(kind.0, kind.1, SockFlag::SOCK_CLOEXEC, None).map_err(Error::of("make a socket"))
}
