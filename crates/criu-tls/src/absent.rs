// SPDX-License-Identifier: MIT OR Apache-2.0
//! This crate in a program without TLS: `--tls` is refused before any connection is made. There is no value
//! of the types that TLS needs, so nothing can be done with one.

use std::convert::Infallible;
use std::io::{self, IoSlice, Read, Write};
use std::marker::PhantomData;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::bail;

use crate::error::HandshakeError;
use crate::options::TlsOptions;

/// Why `--tls` is refused, and what to do.
const NOT_BUILT: &str = "this rewake was built without TLS, which --tls needs: `cargo build --release -p \
     rewake` builds one that has it";

/// No error is one of TLS.
pub(crate) fn explained(_error: &io::Error) -> Option<HandshakeError> {
    None
}

/// A client's certificate: none can be read.
#[derive(Debug, Clone)]
pub struct TlsClient(Infallible);

impl TlsClient {
    /// Refuses TLS.
    ///
    /// # Errors
    /// Always.
    pub fn new(_options: &TlsOptions, _address: Option<&str>) -> anyhow::Result<Self> {
        bail!("{NOT_BUILT}")
    }

    /// Cannot be called: there is no client.
    ///
    /// # Errors
    /// None.
    pub fn connect<S: AsFd + Write>(&self, _socket: S) -> Result<EncryptedStream<S>, HandshakeError> {
        match self.0 {}
    }

    /// Cannot be called: there is no client.
    ///
    /// # Errors
    /// None.
    pub fn link(&self, _socket: TcpStream) -> Result<TlsLink, HandshakeError> {
        match self.0 {}
    }
}

/// A server's certificate: none can be read.
#[derive(Debug, Clone)]
pub struct TlsServer(Infallible);

impl TlsServer {
    /// Refuses TLS.
    ///
    /// # Errors
    /// Always.
    pub fn new(_options: &TlsOptions, _address: Option<&str>) -> anyhow::Result<Self> {
        bail!("{NOT_BUILT}")
    }

    /// Cannot be called: there is no server.
    ///
    /// # Errors
    /// None.
    pub async fn accept<S>(&self, _stream: S) -> Result<S, HandshakeError> {
        match self.0 {}
    }

    /// Cannot be called: there is no server.
    ///
    /// # Errors
    /// None.
    pub fn link(&self, _socket: TcpStream) -> Result<TlsLink, HandshakeError> {
        match self.0 {}
    }
}

/// The name that a peer's certificate must have: none can be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerName(Infallible);

impl PeerName {
    /// Refuses TLS.
    ///
    /// # Errors
    /// Always.
    pub fn of_address(_address: &str) -> anyhow::Result<Self> {
        bail!("{NOT_BUILT}")
    }
}

/// A peer's certificate: there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerCertificate(Infallible);

impl PeerCertificate {
    /// Cannot be called: there is no certificate.
    #[must_use]
    pub fn as_der(&self) -> &[u8] {
        match self.0 {}
    }

    /// Cannot be called: there is no certificate.
    ///
    /// # Errors
    /// None.
    pub fn is_for(&self, _name: &PeerName) -> Result<(), HandshakeError> {
        match self.0 {}
    }
}

/// An encrypted stream between two Rewakes: there is none.
#[derive(Debug, Clone)]
pub struct TlsLink(Infallible);

impl TlsLink {
    /// Cannot be called: there is no stream.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        match self.0 {}
    }

    /// Cannot be called: there is no stream.
    #[must_use]
    pub fn peer(&self) -> &PeerCertificate {
        match self.0 {}
    }
}

impl Read for TlsLink {
    fn read(&mut self, _into: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }
}

impl Write for TlsLink {
    fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
        match self.0 {}
    }

    fn write_vectored(&mut self, _parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.0 {}
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0 {}
    }
}

/// A client's encrypted stream: there is none.
#[derive(Debug)]
pub struct EncryptedStream<S>(Infallible, PhantomData<S>);

impl<S> EncryptedStream<S> {
    /// Cannot be called: there is no stream.
    pub fn socket(&self) -> &S {
        match self.0 {}
    }

    /// Cannot be called: there is no stream.
    pub fn is_ready(&mut self) -> bool {
        match self.0 {}
    }

    /// Cannot be called: there is no stream.
    ///
    /// # Errors
    /// None.
    pub fn end(self, _limit: Duration) -> io::Result<S> {
        match self.0 {}
    }
}

impl<S> Read for EncryptedStream<S> {
    fn read(&mut self, _buffer: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }
}

impl<S> Write for EncryptedStream<S> {
    fn write(&mut self, _bytes: &[u8]) -> io::Result<usize> {
        match self.0 {}
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0 {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_is_refused_with_what_to_build() {
        let options = TlsOptions::default();
        let refusals = [
            TlsClient::new(&options, Some("host")).unwrap_err(),
            TlsServer::new(&options, Some("host")).unwrap_err(),
        ];
        for refusal in refusals {
            assert_eq!(
                refusal.to_string(),
                "this rewake was built without TLS, which --tls needs: `cargo build --release -p rewake` \
                 builds one that has it"
            );
        }
    }
}
