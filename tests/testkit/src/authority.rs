// SPDX-License-Identifier: MIT OR Apache-2.0
//! A CA of a test: it issues certificates of every kind, and revokes them.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SerialNumber, date_time_ymd,
};
use tempfile::TempDir;

/// A CA, with a directory for the files that it makes.
#[derive(Debug)]
pub struct Authority {
    folder: TempDir,
    issuer: Issuer<'static, KeyPair>,
    issued: Cell<u64>,
}

/// A certificate that was issued, and its key.
#[derive(Debug)]
pub struct Issued {
    /// The certificate's file.
    pub certificate: PathBuf,
    /// The key's file.
    pub key: PathBuf,
    serial: u64,
    params: CertificateParams,
}

/// What a certificate shall be.
#[derive(Debug)]
pub struct CertificateRequest(CertificateParams);

impl CertificateRequest {
    /// Adds an alternative name: an IP address or a host name.
    ///
    /// # Panics
    /// It is no name.
    #[must_use]
    pub fn address(mut self, name: &str) -> Self {
        let names = CertificateParams::new([name.to_owned()]).expect("a name").subject_alt_names;
        self.0.subject_alt_names.extend(names);
        self
    }

    /// Gives it a common name.
    #[must_use]
    pub fn common_name(mut self, name: &str) -> Self {
        self.0.distinguished_name = named(name);
        self
    }

    /// Has it end with this year.
    #[must_use]
    pub fn until(mut self, year: i32) -> Self {
        self.0.not_after = date_time_ymd(year, 12, 31);
        self
    }

    /// Makes it one for servers, not for clients.
    #[must_use]
    pub fn for_servers_only(mut self) -> Self {
        self.0.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        self
    }

    /// Makes it a CA's.
    #[must_use]
    pub fn ca(mut self) -> Self {
        self.0.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        self
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

#[expect(clippy::new_without_default, reason = "it makes a directory and a key")]
#[expect(clippy::missing_panics_doc, reason = "a test ends where a file or a certificate cannot be made")]
impl Authority {
    /// Makes a CA. All that this makes have one name.
    #[must_use]
    pub fn new() -> Self {
        Self::named("Test CA")
    }

    /// Makes a CA with this name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("rewake-ca-").tempdir().expect("a directory");
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.distinguished_name = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).expect("a CA");
        fs::write(folder.path().join("ca.pem"), certificate.pem()).expect("the CA's file");
        Self { folder, issuer: Issuer::new(params, key), issued: Cell::new(0) }
    }

    /// The file of the CA's certificate.
    #[must_use]
    pub fn ca(&self) -> PathBuf {
        self.path("ca.pem")
    }

    /// A path in the CA's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file into the CA's directory.
    #[must_use]
    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        fs::write(self.path(name), text).expect("a file");
        self.path(name)
    }

    /// Issues a certificate.
    #[must_use]
    pub fn issue(&self, wanted: impl FnOnce(CertificateRequest) -> CertificateRequest) -> Issued {
        self.sign(&self.issuer, "", wanted)
    }

    /// Has the owner of a certificate issue another one.
    #[must_use]
    pub fn issue_by(
        &self,
        by: &Issued,
        wanted: impl FnOnce(CertificateRequest) -> CertificateRequest,
    ) -> Issued {
        let key = KeyPair::from_pem(&read(&by.key)).expect("a key");
        self.sign(&Issuer::new(by.params.clone(), key), &read(&by.certificate), wanted)
    }

    fn sign(
        &self,
        issuer: &Issuer<'_, KeyPair>,
        chain: &str,
        wanted: impl FnOnce(CertificateRequest) -> CertificateRequest,
    ) -> Issued {
        let serial = self.issued.get() + 1;
        self.issued.set(serial);
        let mut params = CertificateParams::default();
        params.distinguished_name = named(&format!("peer {serial}"));
        params.serial_number = Some(SerialNumber::from(serial));
        params.is_ca = IsCa::ExplicitNoCa;
        let CertificateRequest(params) = wanted(CertificateRequest(params));
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, issuer).expect("a certificate");
        Issued {
            certificate: self.file(&format!("cert-{serial}.pem"), &(certificate.pem() + chain)),
            key: self.file(&format!("key-{serial}.pem"), &key.serialize_pem()),
            serial,
            params,
        }
    }

    /// Writes a list that revokes a certificate; its next update is at the end of this year. Returns its
    /// file.
    #[must_use]
    pub fn revoke(&self, certificate: &Issued, next_update: i32) -> PathBuf {
        let since = date_time_ymd(2019, 1, 1);
        let revoked = RevokedCertParams {
            serial_number: SerialNumber::from(certificate.serial),
            revocation_time: since,
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: since,
            next_update: date_time_ymd(next_update, 12, 31),
            crl_number: SerialNumber::from(1u64),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).and_then(|list| list.pem()).expect("a list");
        self.file(&format!("revoked-{}.pem", certificate.serial), &list)
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).expect("a file of the CA")
}
