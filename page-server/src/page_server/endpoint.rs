// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where clients connect: a TCP port, a unix socket, or a connection that the caller has made.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{
    AddressFamily, SockType, SockaddrLike as _, SockaddrStorage, getsockname, getsockopt, sockopt,
};
use rewake_peer_stream::{PATIENT, watch_peer};
use rewake_process::private_socket;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// Where clients connect.
#[derive(Debug)]
pub enum Endpoint {
    /// A TCP port.
    Tcp {
        /// An address or a name of this host; the loopback address without one.
        address: Option<String>,
        /// The port; the kernel chooses one without it.
        port: Option<u16>,
        /// Whether an address that other hosts reach is permitted: with TLS, or where the user permits it.
        for_other_hosts: bool,
    },
    /// A unix socket with this path, for this user only.
    Unix(PathBuf),
    /// The only client, connected already (`--ps-socket`).
    Connected(OwnedFd),
}

/// An open [`Endpoint`].
#[derive(Debug)]
pub enum Entrance {
    /// A TCP port.
    Tcp(TcpListener),
    /// A unix socket, and its path.
    Unix(UnixListener, PathBuf),
    /// The only client.
    Connected(OwnedFd),
}

impl Endpoint {
    /// Binds the socket and listens.
    ///
    /// # Errors
    /// The address cannot be bound, or other hosts reach it and are not permitted; a descriptor is no
    /// connected stream socket.
    pub fn open(self) -> anyhow::Result<Entrance> {
        match self {
            Self::Tcp { address, port, for_other_hosts } => {
                let address = resolve(address.as_deref(), port.unwrap_or(0))?;
                ensure!(
                    address.ip().is_loopback() || for_other_hosts,
                    "--address {}: other hosts reach this address, and memory would travel unencrypted, to \
                     and from any host: add --insecure if the network is trusted, or --tls",
                    address.ip()
                );
                let listener =
                    TcpListener::bind(address).with_context(|| format!("listening on {address}"))?;
                Ok(Entrance::Tcp(listener))
            }
            Self::Unix(path) => Ok(Entrance::Unix(private_socket::bind(&path)?, path)),
            Self::Connected(socket) => {
                let kind =
                    getsockopt(&socket, sockopt::SockType).context("--ps-socket: expected a socket")?;
                ensure!(kind == SockType::Stream, "--ps-socket: expected a stream socket, found {kind:?}");
                Ok(Entrance::Connected(socket))
            }
        }
    }
}

fn resolve(address: Option<&str>, port: u16) -> anyhow::Result<SocketAddr> {
    let Some(address) = address else {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    };
    let mut found = (address, port).to_socket_addrs().with_context(|| format!("--address {address}"))?;
    found.next().with_context(|| format!("--address {address}: no address of that name"))
}

/// The address, for logs.
impl fmt::Display for Entrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(listener) => match listener.local_addr() {
                Ok(address) => write!(f, "{address}"),
                Err(error) => write!(f, "a port that the kernel does not name ({error})"),
            },
            Self::Unix(_, path) => write!(f, "{}", path.display()),
            Self::Connected(_) => write!(f, "--ps-socket"),
        }
    }
}

/// What carries the bytes of a client.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> ByteStream for T {}

/// A connected client.
pub(crate) struct ConnectedClient {
    pub(crate) stream: Box<dyn ByteStream>,
    /// Its name, for logs.
    pub(crate) peer: String,
    /// For a socket that others use afterwards.
    pub(crate) blocking: Option<Blocking>,
}

/// An entrance whose clients the runtime waits for.
pub(crate) enum Door {
    Tcp(tokio::net::TcpListener),
    Unix(tokio::net::UnixListener, PathBuf),
    Connected(Option<OwnedFd>),
}

impl Door {
    pub(crate) fn of(entrance: Entrance) -> io::Result<Self> {
        match entrance {
            Entrance::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                tokio::net::TcpListener::from_std(listener).map(Self::Tcp)
            }
            Entrance::Unix(listener, path) => {
                listener.set_nonblocking(true)?;
                Ok(Self::Unix(tokio::net::UnixListener::from_std(listener)?, path))
            }
            Entrance::Connected(socket) => Ok(Self::Connected(Some(socket))),
        }
    }

    /// Waits for the next client. A client that is connected already arrives once.
    pub(crate) async fn next(&mut self) -> anyhow::Result<ConnectedClient> {
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await.context("accepting a client")?;
                // It may be silent for hours: a lazy restore whose processes access no missing memory.
                watch_peer(&stream, PATIENT).with_context(|| format!("client {peer}"))?;
                Ok(ConnectedClient { stream: Box::new(stream), peer: peer.to_string(), blocking: None })
            }
            Self::Unix(listener, path) => {
                let (stream, _) = listener.accept().await.context("accepting a client")?;
                Ok(ConnectedClient {
                    stream: Box::new(stream),
                    peer: format!("of {}", path.display()),
                    blocking: None,
                })
            }
            Self::Connected(socket) => {
                let socket = socket.take().context("the client of --ps-socket has been served")?;
                let blocking = Some(Blocking(socket.try_clone().context("--ps-socket")?));
                Ok(ConnectedClient {
                    stream: connected(socket)?,
                    peer: "of --ps-socket".to_owned(),
                    blocking,
                })
            }
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // It may have been removed.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Makes a stream of a connected socket. Its calls do not block afterwards, in no process that has it: see
/// [`Blocking`].
fn connected(socket: OwnedFd) -> anyhow::Result<Box<dyn ByteStream>> {
    let name: SockaddrStorage = getsockname(socket.as_raw_fd()).context("--ps-socket: expected a socket")?;
    match name.family() {
        Some(AddressFamily::Inet | AddressFamily::Inet6) => {
            let stream = std::net::TcpStream::from(socket);
            stream.set_nonblocking(true)?;
            let stream = TcpStream::from_std(stream)?;
            watch_peer(&stream, PATIENT).context("--ps-socket")?;
            Ok(Box::new(stream))
        }
        Some(AddressFamily::Unix) => {
            let stream = std::os::unix::net::UnixStream::from(socket);
            stream.set_nonblocking(true)?;
            Ok(Box::new(UnixStream::from_std(stream)?))
        }
        family => bail!("--ps-socket: expected a TCP or unix socket, found {family:?}"),
    }
}

/// Makes the calls of a socket block again when it is dropped: other processes use the socket of
/// `--ps-socket` after this one, as CRIU does for the next round of a migration.
pub(crate) struct Blocking(OwnedFd);

impl Drop for Blocking {
    fn drop(&mut self) {
        let Ok(flags) = fcntl(self.0.as_fd(), FcntlArg::F_GETFL) else { return };
        let flags = OFlag::from_bits_retain(flags) - OFlag::O_NONBLOCK;
        // If the kernel refuses, the next user of the socket gets that error.
        let _ = fcntl(self.0.as_fd(), FcntlArg::F_SETFL(flags));
    }
}
