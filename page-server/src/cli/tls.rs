// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of encrypted connections.

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use clap::Args;
use rewake_criu_tls::{TlsClient, TlsOptions, TlsServer};
use rewake_peer_stream::{Admission, AllowedPeer};

/// Options of TLS, with CRIU's names, files and checks. Paths are relative to the work directory.
#[derive(Debug, Args)]
pub struct TlsArgs {
    /// Encrypt the connection: both sides show a certificate of the same CA
    #[arg(long)]
    pub tls: bool,
    /// The CAs that issue the peers' certificates [default: /etc/pki/CA/cacert.pem]
    #[arg(long, value_name = "FILE", requires = "tls")]
    pub tls_cacert: Option<PathBuf>,
    /// Certificates that these CAs have revoked [default: /etc/pki/CA/cacrl.pem, if it exists]
    #[arg(long, value_name = "FILE", requires = "tls")]
    pub tls_cacrl: Option<PathBuf>,
    /// This side's certificate [default: /etc/pki/criu/cert.pem]
    #[arg(long, value_name = "FILE", requires = "tls")]
    pub tls_cert: Option<PathBuf>,
    /// The key of that certificate [default: /etc/pki/criu/private/key.pem]
    #[arg(long, value_name = "FILE", requires = "tls")]
    pub tls_key: Option<PathBuf>,
    /// Accept every certificate of the CA. Otherwise the peer's must have the name of the address that this
    /// side was given
    #[arg(long, requires = "tls")]
    pub tls_no_cn_verify: bool,
}

impl TlsArgs {
    /// What they say; none without `--tls`.
    pub(crate) fn options(&self) -> Option<TlsOptions> {
        self.tls.then(|| TlsOptions {
            ca: self.tls_cacert.clone(),
            crl: self.tls_cacrl.clone(),
            certificate: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            any_name: self.tls_no_cn_verify,
        })
    }

    /// Reads the files of a client, whose server must be `host`; none without `--tls`.
    ///
    /// # Errors
    /// A file is missing or damaged, or the host is no name.
    pub(crate) fn client(&self, host: &str) -> anyhow::Result<Option<TlsClient>> {
        self.options().map(|options| TlsClient::new(&options, Some(host))).transpose()
    }
}

/// Options of the servers to which other Rewakes connect.
#[derive(Debug, Args)]
pub struct PeerTlsArgs {
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Permit an address that other hosts reach, without TLS. Memory then travels unencrypted, and any host
    /// can connect
    #[arg(long, conflicts_with = "tls")]
    pub insecure: bool,
}

impl PeerTlsArgs {
    /// Whether an address that other hosts reach is permitted.
    pub(crate) fn for_other_hosts(&self) -> bool {
        self.insecure || self.tls.tls
    }

    /// Reads the server's files, and says which clients it admits.
    ///
    /// # Errors
    /// A file is missing or damaged.
    pub(crate) fn admission(&self, allowed: &[AllowedPeer]) -> anyhow::Result<Admission> {
        let Some(options) = self.tls.options() else { return Ok(Admission::in_clear()) };
        ensure!(
            !options.any_name,
            "--tls-no-cn-verify: this server does not compare its clients' names with its address; leave the \
             option out, and name the clients with --allow"
        );
        Ok(Admission::encrypted(TlsServer::new(&options, None).context("--tls")?, allowed.to_vec()))
    }
}
