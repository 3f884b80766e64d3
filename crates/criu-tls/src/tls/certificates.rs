// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files of `--tls`: the CA, its revocation lists, this side's certificate and key.

use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, TrustAnchor};
use webpki::{CertRevocationList, EndEntityCert, OwnedCertRevocationList};

use super::key_kind::{unknown_kind, unknown_kind_in};
use crate::error::KNOWN_KINDS;
use crate::options::TlsOptions;

/// CRIU's files, which are used where an option names none.
const CA: &str = "/etc/pki/CA/cacert.pem";
const CRL: &str = "/etc/pki/CA/cacrl.pem";
const CERTIFICATE: &str = "/etc/pki/criu/cert.pem";
const KEY: &str = "/etc/pki/criu/private/key.pem";
/// Certificates, or revocation lists, in one file.
const MAX_IN_FILE: usize = 1024;

/// Whom this side trusts.
#[derive(Debug)]
pub(crate) struct Trust {
    pub(crate) anchors: Vec<TrustAnchor<'static>>,
    /// Empty: nothing is looked up.
    pub(crate) revocations: Vec<CertRevocationList<'static>>,
}

/// What this side shows.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl TlsOptions {
    /// Reads the CA and the revocation lists. CRIU trusts the system's CAs, too, if no file is named: any of
    /// them could then admit a peer. Here they are not trusted.
    ///
    /// # Errors
    /// A file is missing or damaged, or has none of what it is for.
    pub(crate) fn trust(&self) -> anyhow::Result<Trust> {
        let path = path(self.ca.as_deref(), CA);
        let authorities: Vec<CertificateDer<'static>> =
            read(path).with_context(|| format!("--tls-cacert {}", path.display()))?;
        let mut anchors = Vec::new();
        for certificate in &authorities {
            let anchor = webpki::anchor_from_trusted_cert(certificate);
            let anchor = anchor.with_context(|| format!("--tls-cacert {}: a certificate", path.display()))?;
            anchors.push(anchor.to_owned());
        }
        let unknown: Vec<_> =
            anchors.iter().filter_map(|anchor| unknown_kind(&anchor.subject_public_key_info)).collect();
        if let Some(kind) = unknown.first().filter(|_| unknown.len() == anchors.len()) {
            bail!(
                "--tls-cacert {}: the CA's key is of the kind {kind}: expected {KNOWN_KINDS}; make a CA with \
                 such a key",
                path.display()
            );
        }
        Ok(Trust { anchors, revocations: self.revocations()? })
    }

    fn revocations(&self) -> anyhow::Result<Vec<CertRevocationList<'static>>> {
        let path = path(self.crl.as_deref(), CRL);
        let option = || format!("--tls-cacrl {}", path.display());
        // A list that cannot be examined may revoke the peer.
        if self.crl.is_none() && !path.try_exists().with_context(option)? {
            return Ok(Vec::new());
        }
        let lists: Vec<CertificateRevocationListDer<'static>> = read(path).with_context(option)?;
        let parsed = lists.iter().map(|list| Ok(OwnedCertRevocationList::from_der(list)?.into()));
        parsed.collect::<Result<_, webpki::Error>>().with_context(|| {
            format!("{}: expected revocation lists of version 2, with a number and a next update", option())
        })
    }

    /// Reads this side's certificate and key.
    ///
    /// # Errors
    /// A file is missing or damaged, or has none of what it is for.
    pub(crate) fn identity(&self) -> anyhow::Result<Identity> {
        let certificate = path(self.certificate.as_deref(), CERTIFICATE);
        let chain: Vec<CertificateDer<'static>> =
            read(certificate).with_context(|| format!("--tls-cert {}", certificate.display()))?;
        // What cannot be parsed is refused where it is used.
        let own = chain.first().and_then(|own| EndEntityCert::try_from(own).ok());
        if let Some(kind) = own.and_then(|own| unknown_kind_in(&own.subject_public_key_info())) {
            bail!(
                "--tls-cert {}: its key is of the kind {kind}: expected {KNOWN_KINDS}; make a certificate \
                 with such a key",
                certificate.display()
            );
        }
        let key = path(self.key.as_deref(), KEY);
        let read = PrivateKeyDer::from_pem_file(key).map_err(plain);
        let key = read.with_context(|| {
            format!("--tls-key {}: expected a private key in PEM, without a password", key.display())
        })?;
        Ok(Identity { chain, key })
    }

    /// Says which files an identity came from, for errors.
    pub(crate) fn identity_files(&self) -> String {
        let certificate = path(self.certificate.as_deref(), CERTIFICATE);
        format!(
            "--tls-cert {}, --tls-key {} (expected {KNOWN_KINDS})",
            certificate.display(),
            path(self.key.as_deref(), KEY).display()
        )
    }
}

fn path<'a>(given: Option<&'a Path>, default: &'static str) -> &'a Path {
    given.unwrap_or_else(|| Path::new(default))
}

/// Reads all objects of a kind from a file, of which it must have one.
fn read<T: PemObject>(path: &Path) -> anyhow::Result<Vec<T>> {
    let mut objects = Vec::new();
    for object in T::pem_file_iter(path).map_err(plain)? {
        ensure!(objects.len() < MAX_IN_FILE, "more than MAX_IN_FILE = {MAX_IN_FILE} objects");
        objects.push(object.map_err(plain)?);
    }
    if objects.is_empty() {
        bail!("expected PEM with at least one of its kind, found none");
    }
    Ok(objects)
}

/// Keeps the system's reason alone.
fn plain(error: PemError) -> anyhow::Error {
    match error {
        PemError::Io(error) => error.into(),
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_an_unknown_kind_is_one_line_with_its_name() {
        for (file, kind) in [("p521.pem", "ECDSA P-521"), ("rsa-pss.pem", "RSA-PSS")] {
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates").join(file);
            let options = TlsOptions {
                ca: Some(file.clone()),
                certificate: Some(file.clone()),
                ..TlsOptions::default()
            };
            let refused = [options.trust().map(drop), options.identity().map(drop)];
            let refused = refused.map(|refused| format!("{:#}", refused.unwrap_err()));
            let (ca, own) = (format!("--tls-cacert {}: the CA's key", file.display()), file.display());
            let expected = format!("is of the kind {kind}: expected {KNOWN_KINDS}; make a ");
            assert!(refused[0].starts_with(&format!("{ca} {expected}")), "{}", refused[0]);
            assert!(
                refused[1].starts_with(&format!("--tls-cert {own}: its key {expected}")),
                "{}",
                refused[1]
            );
            assert!(refused.iter().all(|line| line.lines().count() == 1), "{refused:?}");
        }
    }
}
