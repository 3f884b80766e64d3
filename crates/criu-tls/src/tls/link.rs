// SPDX-License-Identifier: MIT OR Apache-2.0
//! The encrypted stream between two Rewakes. One thread reads while others write.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, Connection};
use webpki::EndEntityCert;

use super::peer_name::PeerName;
use crate::ending::end_after_answer;
use crate::error::HandshakeError;
use crate::{HANDSHAKE_LIMIT, REFUSAL_LIMIT};

/// Encrypted bytes that are read from the socket at a time: two records.
const ARRIVED: usize = 33 << 10;

/// A peer's certificate, which a trusted CA has issued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerCertificate(CertificateDer<'static>);

impl PeerCertificate {
    /// Its bytes, DER.
    #[must_use]
    pub fn as_der(&self) -> &[u8] {
        &self.0
    }

    /// Checks whether it is for this name.
    ///
    /// # Errors
    /// It is for other names: [`HandshakeError::WrongName`] has them.
    pub fn is_for(&self, name: &PeerName) -> Result<(), HandshakeError> {
        let checked = EndEntityCert::try_from(&self.0)
            .map_err(|_| CertificateError::BadEncoding.into())
            .and_then(|certificate| name.check(&certificate));
        checked.map_err(|error| HandshakeError::from(io::Error::new(ErrorKind::InvalidData, error)))
    }
}

/// An encrypted stream over a blocking socket. Its copies are the same stream. Reads and writes do not wait
/// for each other: if both sides only wrote, neither would read.
#[derive(Debug, Clone)]
pub struct TlsLink(Arc<LinkState>);

#[derive(Debug)]
struct LinkState {
    socket: TcpStream,
    peer: PeerCertificate,
    /// The keys. Locked after one of the others, and never while the socket waits.
    connection: Mutex<Connection>,
    /// What the socket gave. Its lock makes one reader.
    arrived: Mutex<ArrivedBytes>,
    /// Records on their way to the socket, for which there is one buffer. Its lock keeps them in order.
    records: Mutex<Vec<u8>>,
}

/// Encrypted bytes of which the first `taken` were decrypted.
#[derive(Debug)]
struct ArrivedBytes {
    buffer: Box<[u8]>,
    taken: usize,
    len: usize,
}

impl TlsLink {
    /// Makes the handshake. A peer that is not accepted gets an alert.
    pub(crate) fn shake(mut connection: Connection, mut socket: TcpStream) -> Result<Self, HandshakeError> {
        let deadline = Instant::now() + HANDSHAKE_LIMIT;
        loop {
            while connection.wants_write() {
                connection.write_tls(&mut socket)?;
            }
            if !connection.is_handshaking() {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(HandshakeError::Timeout);
            }
            socket.set_read_timeout(Some(left))?;
            match connection.read_tls(&mut socket) {
                Ok(0) => return Err(HandshakeError::Closed),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            }
            if let Err(error) = connection.process_new_packets() {
                // The peer may have ended. A client may have sent requests already, which stay unread.
                let is_sent = connection.write_tls(&mut socket).is_ok();
                if is_sent && matches!(connection, Connection::Server(_)) {
                    end_after_answer(&socket, REFUSAL_LIMIT);
                }
                return Err(io::Error::new(ErrorKind::InvalidData, error).into());
            }
        }
        socket.set_read_timeout(None)?;
        let chain = connection.peer_certificates().and_then(<[_]>::first);
        let peer = PeerCertificate(chain.ok_or(HandshakeError::NoCertificate)?.clone().into_owned());
        let buffer = vec![0; ARRIVED].into_boxed_slice();
        Ok(Self(Arc::new(LinkState {
            socket,
            peer,
            connection: Mutex::new(connection),
            arrived: Mutex::new(ArrivedBytes { buffer, taken: 0, len: 0 }),
            records: Mutex::default(),
        })))
    }

    /// Returns the socket, for its settings and its end.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        &self.0.socket
    }

    /// Returns the certificate of the other side.
    #[must_use]
    pub fn peer(&self) -> &PeerCertificate {
        &self.0.peer
    }
}

impl Read for TlsLink {
    /// Reads up to the bytes of one record. A connection that ends without an announcement has ended, too:
    /// the messages in it say whether they are whole.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let state = &*self.0;
        let mut arrived = lock(&state.arrived);
        let arrived = &mut *arrived;
        loop {
            let mut connection = lock(&state.connection);
            match connection.reader().read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                read => return read,
            }
            let mut rest = &arrived.buffer[arrived.taken..arrived.len];
            if rest.is_empty() {
                drop(connection);
                (arrived.taken, arrived.len) = (0, (&state.socket).read(&mut arrived.buffer)?);
                connection = lock(&state.connection);
                rest = &arrived.buffer[..arrived.len];
            }
            // Without bytes, it takes the end.
            arrived.taken += connection.read_tls(&mut rest)?;
            connection
                .process_new_packets()
                .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        }
    }
}

impl Write for TlsLink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    /// Sends at most 64 KiB. After an error a part of it may have been sent: the stream is useless.
    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let state = &*self.0;
        let mut records = lock(&state.records);
        records.clear();
        let written = {
            let mut connection = lock(&state.connection);
            let written = connection.writer().write_vectored(parts)?;
            while connection.wants_write() {
                connection.write_tls(&mut *records)?;
            }
            written
        };
        (&state.socket).write_all(&records)?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
