// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection between two Rewakes.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rewake_criu_tls::{PeerCertificate, REFUSAL_LIMIT, TlsLink, end_after_answer};

/// A TCP connection, in clear or encrypted. Its copies are the same connection: one thread reads, others
/// write.
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

    /// Returns the certificate of the other side, or `None` if the connection is in clear.
    #[must_use]
    pub fn peer(&self) -> Option<&PeerCertificate> {
        match &self.0 {
            Carrier::Clear(_) => None,
            Carrier::Encrypted(link) => Some(link.peer()),
        }
    }

    /// Ends the connection as [`end_after_answer`] does: the peer gets what was sent last.
    pub fn end_after_answer(self) {
        end_after_answer(self.socket(), REFUSAL_LIMIT);
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        far.set_read_timeout(Some(LIMIT)).unwrap();
        (listener.accept().unwrap().0, far)
    }

    #[test]
    fn a_peer_whose_bytes_are_not_read_gets_the_answer() {
        let (mut near, mut far) = pair();
        far.write_all(&[1; 1 << 16]).unwrap();
        near.write_all(b"busy").unwrap();
        let ends = std::thread::spawn(move || PeerStream::from(near).end_after_answer());
        // A message of the peer that crosses the answer.
        far.write_all(&[2; 1 << 16]).unwrap();
        let mut answer = String::new();
        far.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "busy");
        assert!(!ends.is_finished(), "it waits until the peer closes the connection");
        drop(far);
        ends.join().unwrap();
    }

    #[test]
    fn a_peer_that_sends_for_ever_is_left_at_the_limit() {
        let (near, mut far) = pair();
        std::thread::spawn(move || while far.write_all(&[0; 4096]).is_ok() {});
        end_after_answer(&near, Duration::from_millis(50));
    }
}
