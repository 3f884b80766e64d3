// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a user says about TLS.

use std::path::PathBuf;

/// What the options `--tls-*` say. Paths are relative to the process's working directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// Certificates of the CAs that issued the peers' certificates [default: `/etc/pki/CA/cacert.pem`].
    pub ca: Option<PathBuf>,
    /// Revocation lists of these CAs [default: `/etc/pki/CA/cacrl.pem`, if it exists].
    pub crl: Option<PathBuf>,
    /// This side's certificate, and after it the certificates of CAs between it and the peer's CA [default:
    /// `/etc/pki/criu/cert.pem`].
    pub certificate: Option<PathBuf>,
    /// Its key [default: `/etc/pki/criu/private/key.pem`].
    pub key: Option<PathBuf>,
    /// Any certificate of the CA is accepted, whatever its name.
    pub any_name: bool,
}
