// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds out when a TCP peer is lost: its host has died, or the network between.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{setsockopt, sockopt};

/// When a peer is asked whether it still exists, and when it is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerWatch {
    /// Seconds without a byte before the first question.
    idle: u32,
    /// Seconds between two questions.
    interval: u32,
    /// Unanswered questions after which the connection is lost.
    count: u32,
    /// Milliseconds after which bytes must be acknowledged, if there is such a limit. A peer that reads
    /// nothing acknowledges none.
    acknowledgement: Option<u32>,
}

/// For peers that may be silent for hours, or read nothing for long: lost after a minute.
pub const PATIENT: PeerWatch = PeerWatch { idle: 30, interval: 10, count: 3, acknowledgement: None };
/// For peers that a program waits for: lost after 20 s.
pub const PROMPT: PeerWatch = PeerWatch { idle: 5, interval: 5, count: 3, acknowledgement: Some(20_000) };

/// Has the kernel watch the peer of a TCP socket, and send small messages at once.
///
/// # Errors
/// The kernel refuses.
pub fn watch_peer(socket: &impl AsFd, watch: PeerWatch) -> io::Result<()> {
    setsockopt(socket, sockopt::TcpNoDelay, &true)?;
    setsockopt(socket, sockopt::KeepAlive, &true)?;
    setsockopt(socket, sockopt::TcpKeepIdle, &watch.idle)?;
    setsockopt(socket, sockopt::TcpKeepInterval, &watch.interval)?;
    setsockopt(socket, sockopt::TcpKeepCount, &watch.count)?;
    if let Some(limit) = &watch.acknowledgement {
        setsockopt(socket, sockopt::TcpUserTimeout, limit)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use nix::sys::socket::getsockopt;

    use super::*;

    #[test]
    fn a_silent_peer_is_lost_within_the_watch_s_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for (watch, lost_after, acknowledgement) in [(PATIENT, 60, 0), (PROMPT, 20, 20_000)] {
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            watch_peer(&socket, watch).unwrap();
            let idle = getsockopt(&socket, sockopt::TcpKeepIdle).unwrap();
            let interval = getsockopt(&socket, sockopt::TcpKeepInterval).unwrap();
            let count = getsockopt(&socket, sockopt::TcpKeepCount).unwrap();
            assert_eq!(idle + interval * count, lost_after);
            assert_eq!(getsockopt(&socket, sockopt::TcpUserTimeout).unwrap(), acknowledgement);
            assert!(getsockopt(&socket, sockopt::KeepAlive).unwrap() && socket.nodelay().unwrap());
        }
    }
}
