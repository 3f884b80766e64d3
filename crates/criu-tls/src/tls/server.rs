// SPDX-License-Identifier: MIT OR Apache-2.0
//! The side that waits for connections.

use std::net::TcpStream;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rustls::server::NoServerSessionStorage;
use rustls::{ServerConfig, ServerConnection};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::link::TlsLink;
use super::peer_name::PeerName;
use super::provider;
use super::verifier::PeerVerifier;
use crate::HANDSHAKE_LIMIT;
use crate::error::HandshakeError;
use crate::options::TlsOptions;

/// A server's certificate, and whom it accepts.
#[derive(Clone)]
pub struct TlsServer {
    acceptor: TlsAcceptor,
}

impl std::fmt::Debug for TlsServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsServer").finish_non_exhaustive()
    }
}

impl TlsServer {
    /// Reads the files of a server. Its clients' certificates must have the name `address`, which the server
    /// listens on, as CRIU's server requires it; without an address any certificate of the CA is accepted.
    ///
    /// # Errors
    /// A file is missing or damaged. Or the address stands for all addresses, which no certificate has.
    pub fn new(options: &TlsOptions, address: Option<&str>) -> anyhow::Result<Self> {
        let name = address.filter(|_| !options.any_name).map(PeerName::of_address).transpose()?;
        ensure!(
            !name.as_ref().is_some_and(PeerName::is_any_address),
            "--tls: clients would need a certificate for --address {}, which no host has: name one address, \
             or add --tls-no-cn-verify to accept every certificate of the CA",
            address.unwrap_or_default()
        );
        let provider = provider();
        let verifier = PeerVerifier { trust: options.trust()?, name, provider: Arc::clone(&provider) };
        let identity = options.identity()?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("the versions of TLS")?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_single_cert(identity.chain, identity.key)
            .with_context(|| options.identity_files())?;
        // `criu dump` fails when it gets a ticket. Each connection shows its certificate.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)) })
    }

    /// Makes the handshake with a client.
    ///
    /// # Errors
    /// The client is not accepted, does not accept this server, speaks no TLS, or takes longer than
    /// [`HANDSHAKE_LIMIT`].
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> Result<TlsStream<S>, HandshakeError> {
        match timeout(HANDSHAKE_LIMIT, self.acceptor.accept(stream)).await {
            Ok(accepted) => accepted.map_err(HandshakeError::from),
            Err(_) => Err(HandshakeError::Timeout),
        }
    }

    /// Makes the handshake with a Rewake, over a blocking socket.
    ///
    /// # Errors
    /// As [`TlsServer::accept`]. A client that is not accepted gets an alert with the reason.
    pub fn link(&self, socket: TcpStream) -> Result<TlsLink, HandshakeError> {
        let connection = ServerConnection::new(Arc::clone(self.acceptor.config()))
            .map_err(|error| HandshakeError::Other(error.to_string()))?;
        TlsLink::shake(connection.into(), socket)
    }
}
