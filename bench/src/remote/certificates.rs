// SPDX-License-Identifier: MIT OR Apache-2.0
//! Certificates of both sides for rounds with TLS.

use std::sync::Arc;

use anyhow::Context as _;
use rewake_testkit::authority::{Authority, Issued};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

const HOST: &str = "127.0.0.1";

/// A CA, and a certificate for this host that both sides use.
#[derive(Debug)]
pub(super) struct Certificates {
    authority: Authority,
    issued: Issued,
}

/// The same certificates for a plain loop.
#[derive(Debug)]
pub(super) struct LoopConfigs {
    pub(super) server: Arc<ServerConfig>,
    pub(super) client: Arc<ClientConfig>,
    pub(super) name: ServerName<'static>,
}

impl Certificates {
    pub(super) fn made() -> Self {
        let authority = Authority::new();
        let issued = authority.issue(|request| request.address(HOST));
        Self { authority, issued }
    }

    /// The options of a page server and of its client.
    pub(super) fn options(&self) -> Vec<String> {
        let files = [
            ("--tls-cacert", self.authority.ca()),
            ("--tls-cert", self.issued.certificate.clone()),
            ("--tls-key", self.issued.key.clone()),
        ];
        let files = files.into_iter().flat_map(|(name, path)| [name.to_owned(), path.display().to_string()]);
        std::iter::once("--tls".to_owned()).chain(files).collect()
    }

    pub(super) fn configs(&self) -> anyhow::Result<LoopConfigs> {
        let provider = Arc::new(ring::default_provider());
        let chain = vec![CertificateDer::from_pem_file(&self.issued.certificate).context("the certificate")?];
        let key = PrivateKeyDer::from_pem_file(&self.issued.key).context("the key")?;
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.authority.ca()).context("the CA's certificate")?)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(LoopConfigs {
            server: Arc::new(server),
            client: Arc::new(client),
            name: ServerName::try_from(HOST)?,
        })
    }
}
