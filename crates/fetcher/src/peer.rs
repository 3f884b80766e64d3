// SPDX-License-Identifier: MIT OR Apache-2.0
//! The socket that is connected with the peer.
//!
//! A CRIU that dumped its program waits for the last message, and takes a plain end of the connection for it:
//! it then kills the program. So a TCP connection is set to be reset when its last descriptor is closed,
//! which CRIU takes for a failure, unless [`PeerSocket::end`] was called. The streamer has a duplicate, and
//! closes it when the restored processes have ended.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::libc::linger;
use nix::sys::socket::{AddressFamily, SockaddrLike as _, SockaddrStorage, getsockname, setsockopt, sockopt};
use rewake_peer_stream::{PATIENT, watch_peer};

use crate::plan::PagePeer;

/// Time for one attempt to connect. It is long enough for three lost SYN packets, which the kernel repeats
/// after 1, 3 and 7 s.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Time in which a peer that was connected before must listen again, so that a restart of the server does not
/// end the fetcher.
const RECONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect again.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);
/// Time for one write. Requests are short and few are in flight, so only a peer that reads nothing needs
/// longer.
const SEND_LIMIT: Duration = Duration::from_secs(30);

/// What carries the bytes.
#[derive(Debug)]
pub(crate) enum PeerSocket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl PeerSocket {
    /// Connects to the peer. If it was connected before (`again`), it gets time to listen again.
    pub(crate) fn connect(peer: &PagePeer, connected: Option<OwnedFd>, again: bool) -> anyhow::Result<Self> {
        let connect = || match peer {
            PagePeer::Tcp(addresses) => connect_tcp(addresses).map(Self::Tcp),
            PagePeer::Unix(path) => UnixStream::connect(path).map(Self::Unix),
            PagePeer::Connected | PagePeer::Agent(_) => Err(io::ErrorKind::NotConnected.into()),
        };
        if let Some(socket) = connected {
            return Self::given(socket);
        }
        let deadline = Instant::now() + RECONNECT_LIMIT;
        loop {
            match connect() {
                Ok(stream) => {
                    stream.prepare().context("setting up the connection")?;
                    return Ok(stream);
                }
                Err(_) if again && *peer != PagePeer::Connected && Instant::now() < deadline => {
                    sleep(RECONNECT_INTERVAL);
                }
                Err(error) if again => bail!(
                    "connecting again: {error}: pages can be fetched on only if the server serves several \
                     connections (`rewake export`, `rewake page-server --lazy-pages --keep-listening`)"
                ),
                Err(error) => return Err(error).context("connecting: does the server listen there?"),
            }
        }
    }

    fn given(socket: OwnedFd) -> anyhow::Result<Self> {
        let name: SockaddrStorage =
            getsockname(socket.as_raw_fd()).context("--ps-socket: expected a socket")?;
        let stream = match name.family() {
            Some(AddressFamily::Inet | AddressFamily::Inet6) => Self::Tcp(socket.into()),
            Some(AddressFamily::Unix) => Self::Unix(socket.into()),
            family => bail!("--ps-socket: expected a TCP or unix socket, found {family:?}"),
        };
        match &stream {
            Self::Tcp(stream) => stream.set_nonblocking(false),
            Self::Unix(stream) => stream.set_nonblocking(false),
        }
        .context("--ps-socket")?;
        stream.prepare().context("--ps-socket")?;
        Ok(stream)
    }

    /// Returns the address that it is connected to; none for a unix socket.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(stream) => stream.peer_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    fn prepare(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                watch_peer(stream, PATIENT)?;
                stream.set_write_timeout(Some(SEND_LIMIT))?;
                setsockopt(stream, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 })?;
            }
            Self::Unix(stream) => stream.set_write_timeout(Some(SEND_LIMIT))?,
        }
        Ok(())
    }

    /// Ends the connection well.
    pub(crate) fn end(self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                setsockopt(&stream, sockopt::Linger, &linger { l_onoff: 0, l_linger: 0 })?;
                stream.shutdown(Shutdown::Write)
            }
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

fn connect_tcp(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpStream::connect_timeout(address, CONNECT_LIMIT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Read for PeerSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for PeerSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}
