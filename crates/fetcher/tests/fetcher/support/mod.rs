// SPDX-License-Identifier: MIT OR Apache-2.0
//! A fetcher in a process of its own.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, dup2_stdin, fork};
use rewake_fetcher::channel::{self, FetchReport};
use rewake_fetcher::process;
use rewake_process::wake_socket::WakeSocket;

/// Time that a fetcher or a peer has for a step.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// A fetcher, and the socket of its owner.
pub(crate) struct FetcherProcess {
    pub(crate) pid: Pid,
    pub(crate) socket: OwnedFd,
}

impl FetcherProcess {
    /// Starts one, which waits for its first order.
    pub(crate) fn start() -> Self {
        let (socket, its) = socket_pair();
        // SAFETY: the child makes system calls and allocates, which glibc permits after a fork.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                // A thread's arena of malloc is open here, and glibc opens a file when it first gives memory
                // of one back. A fetcher that was executed uses the main arena, which needs none.
                // SAFETY: a parameter of malloc, in a process with one thread.
                unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX) };
                dup2_stdin(its).unwrap();
                let code = process::run().map_or(9, i32::from);
                // SAFETY: it ends this process.
                unsafe { libc::_exit(code) }
            }
            ForkResult::Parent { child } => Self { pid: child, socket },
        }
    }

    /// Its next report.
    pub(crate) fn report(&self) -> FetchReport {
        readable(&self.socket);
        channel::receive_report(self.socket.as_fd()).unwrap().unwrap()
    }

    /// Waits for its end.
    pub(crate) fn code(&self) -> i32 {
        match waitpid(self.pid, None).unwrap() {
            WaitStatus::Exited(_, code) => code,
            other => panic!("{other:?}"),
        }
    }
}

/// A socket for a fetcher, and its end.
pub(crate) fn socket_pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap()
}

/// A reader that a fetcher wakes.
pub(crate) fn reader() -> WakeSocket {
    WakeSocket::new().unwrap()
}

/// Waits until a reader is woken.
pub(crate) fn woken(reader: &WakeSocket) {
    readable(reader);
    reader.drain();
}

/// Waits for something to read.
pub(crate) fn readable(descriptor: &impl AsFd) {
    let limit = PollTimeout::try_from(LIMIT).unwrap();
    let ready = poll(&mut [PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)], limit).unwrap();
    assert_eq!(ready, 1, "nothing for {LIMIT:?}");
}
