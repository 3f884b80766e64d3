// SPDX-License-Identifier: MIT OR Apache-2.0
//! A fetcher in a process of its own.

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, dup2_stdin, fork};
use rewake_fetcher::channel::{self, FetchReport};
use rewake_fetcher::process;

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
pub(crate) fn reader() -> OwnedFd {
    OwnedFd::from(EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap())
}

/// Waits until a reader is woken.
pub(crate) fn woken(reader: &OwnedFd) {
    readable(reader);
    nix::unistd::read(reader, &mut [0; 4096]).unwrap();
}

/// Waits for something to read.
pub(crate) fn readable(descriptor: &OwnedFd) {
    let limit = PollTimeout::try_from(LIMIT).unwrap();
    let ready = poll(&mut [PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)], limit).unwrap();
    assert_eq!(ready, 1, "nothing for {LIMIT:?}");
}
