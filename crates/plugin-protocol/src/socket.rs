// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the ends meet.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::socket::{self, AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, accept4, bind};
use nix::sys::stat::{Mode, fchmod};

use crate::abi::accepted;
use crate::channel::Channel;
use crate::error::Error;

/// The socket's name in CRIU's work directory, which is where CRIU is while it restores.
pub const SOCKET: &str = "rewake-gpu.socket";

/// A server's end that waits for a plugin. The socket is only for this user.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// At its end another may have the name.
    file: File,
}

impl Listener {
    /// Listens in a work directory. A file that nobody listens on is replaced.
    ///
    /// # Errors
    /// Somebody listens there, or the kernel refuses.
    pub fn new(work: &Path) -> Result<Self, Error> {
        let path = work.join(SOCKET);
        // A socket's address has room for 107 bytes; the plugin, which is in that folder, names it without one.
        let folder = open(work, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty());
        let folder = folder.map_err(Error::of("open the work directory"))?;
        let near = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(SOCKET);
        let address = UnixAddr::new(&near).map_err(Error::of("name the socket"))?;
        let socket = unconnected()?;
        if connect(&near)?.is_some() {
            return Err(Error::Refused(format!("{}: somebody listens there", path.display())));
        }
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(Error::Socket { act: "remove an old socket", source });
            }
            _ => {}
        }
        // The file takes the socket's mode when it is bound (unix_bind_bsd of net/unix/af_unix.c), less the umask:
        // there is no moment at which others could connect.
        fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR).map_err(Error::of("set the socket's mode"))?;
        bind(socket.as_raw_fd(), &address).map_err(Error::of("bind the socket"))?;
        let one = Backlog::new(1).map_err(Error::of("listen"))?;
        socket::listen(&socket, one).map_err(Error::of("listen"))?;
        let file = file(&path).map_err(|source| Error::Socket { act: "look at the socket", source })?;
        Ok(Self { socket, path, file })
    }

    /// Takes whoever has come; waits for it, or until it is closed: none then. How often that was somebody who only looked does not matter: it is this user or root,
    /// nothing is kept of it, and waiting goes on as before.
    ///
    /// # Errors
    /// It is a stranger's, or the kernel refuses.
    pub fn accept(&self) -> Result<Option<Channel>, Error> {
        loop {
            match accept4(self.socket.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
                Ok(number) => break Channel::new(accepted(number)).map(Some),
                Err(Errno::EINTR) => {}
                // It was shut down.
                Err(Errno::EINVAL) => break Ok(None),
                Err(errno) => break Err(Error::of("accept a connection")(errno)),
            }
        }
    }

    /// Nobody can come any more, in any process that has it.
    pub fn close(&self) {
        // Neither can fail in a way that matters: whoever came too late is turned away, or finds nothing.
        let _ = socket::shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        self.remove();
    }

    /// Whoever has removed it has done no harm.
    fn remove(&self) {
        if file(&self.path).is_ok_and(|there| there == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A file: device, inode, and when that became this one, as its number is another's soon.
type File = (u64, u64, i64, i64);

fn file(path: &Path) -> io::Result<File> {
    let there = fs::symlink_metadata(path)?;
    Ok((there.dev(), there.ino(), there.ctime(), there.ctime_nsec()))
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The server that listens at `path`; none if there is none.
///
/// # Errors
/// There is one, and it cannot be had.
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
