// SPDX-License-Identifier: MIT OR Apache-2.0
//! The side that connects.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::Context as _;
use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};

use super::encrypted::EncryptedStream;
use super::link::TlsLink;
use super::peer_name::PeerName;
use super::provider;
use super::verifier::PeerVerifier;
use crate::error::HandshakeError;
use crate::options::TlsOptions;

/// A client's certificate, and which server it accepts.
#[derive(Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
}

impl std::fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsClient").finish_non_exhaustive()
    }
}

impl TlsClient {
    /// Reads the files of a client. The server's certificate must have the name `address`, which the user
    /// gave.
    ///
    /// # Errors
    /// A file is missing or damaged, or the address is no name.
    pub fn new(options: &TlsOptions, address: Option<&str>) -> anyhow::Result<Self> {
        let name = address.filter(|_| !options.any_name).map(PeerName::of_address).transpose()?;
        let provider = provider();
        let verifier = PeerVerifier { trust: options.trust()?, name, provider: Arc::clone(&provider) };
        let identity = options.identity()?;
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("the versions of TLS")?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(identity.chain, identity.key)
            .with_context(|| options.identity_files())?;
        // CRIU names no server, and each connection shows its certificate.
        config.enable_sni = false;
        config.resumption = Resumption::disabled();
        Ok(Self { config: Arc::new(config) })
    }

    /// Makes the handshake with a server, over a blocking socket. In TLS 1.3 it ends before the server has
    /// seen this side's certificate: a refusal is the error of the first read, and [`HandshakeError::of`]
    /// explains it.
    ///
    /// # Errors
    /// The server is not accepted, speaks no TLS, or takes longer than [`HANDSHAKE_LIMIT`]. It is not
    /// informed: its connection stays as it is until the caller closes it.
    ///
    /// [`HANDSHAKE_LIMIT`]: crate::HANDSHAKE_LIMIT
    pub fn connect<S: AsFd + Write>(&self, socket: S) -> Result<EncryptedStream<S>, HandshakeError> {
        EncryptedStream::shake(self.connection()?, socket)
    }

    /// Makes the handshake with a Rewake, over a blocking socket. A refusal of this side's certificate is the
    /// error of the first read, as with [`TlsClient::connect`].
    ///
    /// # Errors
    /// The server is not accepted, which it learns, speaks no TLS, or takes longer than [`HANDSHAKE_LIMIT`].
    ///
    /// [`HANDSHAKE_LIMIT`]: crate::HANDSHAKE_LIMIT
    pub fn link(&self, socket: TcpStream) -> Result<TlsLink, HandshakeError> {
        TlsLink::shake(self.connection()?.into(), socket)
    }

    fn connection(&self) -> Result<ClientConnection, HandshakeError> {
        // The verifier has the name to check. This one is not used, nor sent.
        let unused = ServerName::from(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        ClientConnection::new(Arc::clone(&self.config), unused)
            .map_err(|error| HandshakeError::Other(error.to_string()))
    }
}
