// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection between two Rewakes.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rewake_criu_tls::{PeerCertificate, TlsLink};

/// A TCP connection, in clear or encrypted. Its copies are the same connection: one thread reads, others write.
#[derive(Debug, Clone)]
pub struct PeerStream(Carrier);

#[derive(Debug, Clone)]
enum Carrier {
    Clear(Arc<TcpStream>),
    Encrypted(TlsLink),
}

impl PeerStream {
    /// Returns the socket, for its limits and its end.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        match &self.0 {
            Carrier::Clear(socket) => socket,
            Carrier::Encrypted(link) => link.socket(),
        }
    }

    /// Returns the certificate of the other side; none if the connection is in clear.
    #[must_use]
    pub fn peer(&self) -> Option<&PeerCertificate> {
        match &self.0 {
            Carrier::Clear(_) => None,
            Carrier::Encrypted(link) => Some(link.peer()),
        }
    }
}

impl From<TcpStream> for PeerStream {
    fn from(socket: TcpStream) -> Self {
        Self(Carrier::Clear(Arc::new(socket)))
    }
}

impl From<TlsLink> for PeerStream {
    fn from(link: TlsLink) -> Self {
        Self(Carrier::Encrypted(link))
    }
}

impl Read for PeerStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.0 {
            Carrier::Clear(socket) => (&**socket).read(into),
            Carrier::Encrypted(link) => link.read(into),
        }
    }
}

impl Write for PeerStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Carrier::Clear(socket) => (&**socket).write(bytes),
            Carrier::Encrypted(link) => link.write(bytes),
        }
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.0 {
            Carrier::Clear(socket) => (&**socket).write_vectored(parts),
            Carrier::Encrypted(link) => link.write_vectored(parts),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
