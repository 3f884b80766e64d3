// SPDX-License-Identifier: MIT OR Apache-2.0
//! A socket by which another process wakes a thread, which that process need not trust.
//!
//! An eventfd does not do for that: a process with a copy can fill its counter and make it blocking, as
//! O_NONBLOCK is a flag of the open file, and then a wake-up waits for ever. A send with MSG_DONTWAIT never
//! waits, whatever the other end does.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::{
    AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, getsockopt, recv, send, shutdown, socketpair,
    sockopt,
};

/// Wakes one thread. Clones share the sockets. It stays readable from a [`wake`](WakeSocket::wake) until
/// [`drain`](WakeSocket::drain).
#[derive(Debug, Clone)]
pub struct WakeSocket(Arc<Ends>);

#[derive(Debug)]
struct Ends {
    woken: OwnedFd,
    sender: OwnedFd,
}

impl WakeSocket {
    /// Makes a pair of sockets without a pending wake-up.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub fn new() -> io::Result<Self> {
        let (woken, sender) =
            socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
        shutdown(sender.as_raw_fd(), Shutdown::Read)?;
        Ok(Self(Arc::new(Ends { woken, sender })))
    }

    /// Returns the end for the process that wakes.
    #[must_use]
    pub fn sender(&self) -> BorrowedFd<'_> {
        self.0.sender.as_fd()
    }

    /// Wakes the thread.
    pub fn wake(&self) {
        wake(self.sender());
    }

    /// Clears all wake-ups so far. Drain first, then look for work: the other order loses wake-ups.
    pub fn drain(&self) {
        let mut bytes = [0; 4096];
        while recv(self.0.woken.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) == Ok(bytes.len()) {}
    }
}

impl AsFd for WakeSocket {
    /// The end that is readable while a wake-up is not drained.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.woken.as_fd()
    }
}

/// Wakes by the [sender](WakeSocket::sender) of another process. It never waits.
pub fn wake(sender: BorrowedFd<'_>) {
    // One whose buffer is full is readable all the same, and one that is closed wakes no thread.
    let _ = send(sender.as_raw_fd(), &[0], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
}

/// Returns whether a descriptor that another process sent is such a sender: a unix stream socket. A send to
/// other sockets may wait for a lock, which a thread keeps that sends from memory it fills itself.
#[must_use]
pub fn is_sender(descriptor: BorrowedFd<'_>) -> bool {
    getsockopt(&descriptor, sockopt::SockType) == Ok(SockType::Stream)
        && domain(descriptor) == Ok(libc::AF_UNIX)
}

fn domain(socket: BorrowedFd<'_>) -> Result<libc::c_int, nix::Error> {
    let mut domain: libc::c_int = 0;
    #[expect(clippy::cast_possible_truncation, reason = "4")]
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    let value = (&raw mut domain).cast();
    // SAFETY: the value is a live int of the length given.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_DOMAIN, value, &raw mut len)
    };
    nix::Error::result(result)?;
    Ok(domain)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use nix::poll::{PollFd, PollFlags, poll};
    use nix::sys::eventfd::EventFd;

    use super::*;

    fn is_awake(socket: &WakeSocket) -> bool {
        poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], 0u8).unwrap() == 1
    }

    #[test]
    fn it_is_readable_from_a_wake_up_until_it_is_drained() {
        let socket = WakeSocket::new().unwrap();
        assert!(!is_awake(&socket));
        socket.drain();
        (0..5000).for_each(|_| socket.wake());
        assert!(is_awake(&socket));
        socket.drain();
        assert!(!is_awake(&socket));
    }

    /// The other process has copies of both ends.
    #[test]
    fn a_wake_up_never_waits_whatever_the_other_process_does() {
        let socket = WakeSocket::new().unwrap();
        for end in [socket.sender(), socket.as_fd()] {
            fcntl(end, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        }
        while send(socket.sender().as_raw_fd(), &[0; 4096], MsgFlags::MSG_DONTWAIT).is_ok() {}
        wake(socket.sender());
        assert!(is_awake(&socket));
        shutdown(socket.as_fd().as_raw_fd(), Shutdown::Both).unwrap();
        wake(socket.sender());
    }

    #[test]
    fn only_unix_stream_sockets_are_senders() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_reader, pipe) = nix::unistd::pipe().unwrap();
        let eventfd = EventFd::new().unwrap();
        assert!(is_sender(WakeSocket::new().unwrap().sender()));
        for other in [tcp.as_fd(), pipe.as_fd(), eventfd.as_fd()] {
            assert!(!is_sender(other));
        }
    }
}
