// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections of a source with its destination. All of them are to the host that the user names.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rewake_criu_tls::{PeerCertificate, TlsClient};
use rewake_peer_stream::{PeerStream, connect};

use crate::frame::set_limits;
use crate::source_options::SourceOptions;

/// Time in which a connection must be accepted.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Names a certificate in a record: BLAKE3.
pub(crate) type CertificateDigest = [u8; 32];

/// The digest of a certificate.
pub(crate) fn certificate_digest(certificate: &PeerCertificate) -> CertificateDigest {
    *blake3::hash(certificate.as_der()).as_bytes()
}

/// The destination's agent, as the user names it.
#[derive(Debug)]
pub(crate) struct DestinationPeer {
    address: SocketAddr,
    tls: Option<TlsClient>,
    /// The certificate of the first connection. Later ones must have it, too.
    certificate: Option<PeerCertificate>,
}

impl DestinationPeer {
    /// Looks up the destination's address.
    ///
    /// # Errors
    /// It has none, or memory would travel unencrypted to another host.
    pub(crate) fn of(options: &SourceOptions) -> anyhow::Result<Self> {
        let mut found = options.to.to_socket_addrs().with_context(|| format!("--to {}", options.to))?;
        let address =
            found.next().with_context(|| format!("--to {}: no address of that name", options.to))?;
        ensure!(
            address.ip().is_loopback() || options.insecure || options.tls.is_some(),
            "--to {address}: memory would travel unencrypted to another host: add --tls, or --insecure if \
             the network is trusted"
        );
        Ok(Self { address, tls: options.tls.clone(), certificate: None })
    }

    /// Makes a connection. With TLS, both sides have accepted each other afterwards.
    ///
    /// # Errors
    /// The destination is not reached, or one side does not accept the other.
    pub(crate) fn dial(&mut self) -> anyhow::Result<PeerStream> {
        let dialed = self.try_dial();
        dialed.with_context(|| format!("connecting to {}", self.address))
    }

    fn try_dial(&mut self) -> anyhow::Result<PeerStream> {
        let socket = TcpStream::connect_timeout(&self.address, CONNECT_LIMIT)?;
        set_limits(&socket)?;
        let stream = connect(socket, self.tls.as_ref())?;
        if let Some(certificate) = stream.peer() {
            let first = self.certificate.get_or_insert_with(|| certificate.clone());
            ensure!(first == certificate, "its certificate is not that of the connection before");
        }
        Ok(stream)
    }
}
