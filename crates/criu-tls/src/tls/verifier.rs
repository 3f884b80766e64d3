// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which certificates are accepted: `webpki` verifies the chain up to a CA, dates, purpose and revocation.
//! Only the check of names is ours ([`PeerName`]).

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme,
};
use webpki::{
    EndEntityCert, ExpirationPolicy, KeyUsage, RevocationCheckDepth, RevocationOptionsBuilder,
    UnknownStatusPolicy,
};

use super::certificates::Trust;
use super::key_kind::unknown_kind_in;
use super::peer_name::PeerName;

/// A key is of a kind that is not known here.
#[derive(Debug, thiserror::Error)]
#[error("a key of the kind {0}")]
pub(super) struct UnknownKey(pub(super) &'static str);

/// Verifies the certificates of peers, for a server and for a client.
#[derive(Debug)]
pub(crate) struct PeerVerifier {
    pub(crate) trust: Trust,
    /// None: any certificate of the CA is accepted.
    pub(crate) name: Option<PeerName>,
    pub(crate) provider: Arc<CryptoProvider>,
}

impl PeerVerifier {
    fn verify(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        purpose: KeyUsage,
        now: UnixTime,
    ) -> Result<(), Error> {
        let parsed = EndEntityCert::try_from(certificate).map_err(|error| refused(&error))?;
        if let Some(kind) = unknown_kind_in(&parsed.subject_public_key_info()) {
            return Err(CertificateError::Other(OtherError(Arc::new(UnknownKey(kind)))).into());
        }
        let lists: Vec<_> = self.trust.revocations.iter().collect();
        // Lists fail closed: each CA of the chain needs one that is not past its next update.
        let revocation = RevocationOptionsBuilder::new(&lists).ok().map(|options| {
            options
                .with_depth(RevocationCheckDepth::Chain)
                .with_status_policy(UnknownStatusPolicy::Deny)
                .with_expiration_policy(ExpirationPolicy::Enforce)
                .build()
        });
        let algorithms = self.provider.signature_verification_algorithms.all;
        let chain = parsed.verify_for_usage(
            algorithms,
            &self.trust.anchors,
            intermediates,
            now,
            purpose,
            revocation,
            None,
        );
        chain.map_err(|error| refused(&error))?;
        self.name.as_ref().map_or(Ok(()), |name| name.check(&parsed))
    }

    fn signature12(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn signature13(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Names the reason so that the peer gets the alert for it.
fn refused(error: &webpki::Error) -> Error {
    use webpki::Error as Reason;
    let reason = match error {
        Reason::CertExpired { .. } => CertificateError::Expired,
        Reason::CertNotValidYet { .. } => CertificateError::NotValidYet,
        Reason::CertRevoked => CertificateError::Revoked,
        Reason::CrlExpired { .. } => CertificateError::ExpiredRevocationList,
        Reason::UnknownIssuer | Reason::InvalidSignatureForPublicKey => CertificateError::UnknownIssuer,
        Reason::UnknownRevocationStatus => CertificateError::UnknownRevocationStatus,
        Reason::RequiredEkuNotFoundContext(_) => CertificateError::InvalidPurpose,
        other => CertificateError::Other(OtherError(Arc::new(other.clone()))),
    };
    reason.into()
}

impl ClientCertVerifier for PeerVerifier {
    /// No CA is named, as CRIU's server names none: a client whose certificate is of another CA shows it, and
    /// gets the reason.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify(certificate, intermediates, KeyUsage::client_auth(), now)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature12(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature13(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ServerCertVerifier for PeerVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verify(certificate, intermediates, KeyUsage::server_auth(), now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature12(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature13(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject as _;

    use super::*;
    use crate::error::HandshakeError;
    use crate::tls::explained;

    #[test]
    fn a_peer_s_key_of_an_unknown_kind_is_named() {
        let trust = Trust { anchors: Vec::new(), revocations: Vec::new() };
        let verifier = PeerVerifier { trust, name: None, provider: super::super::provider() };
        for (pem, kind) in [
            (include_str!("../../tests/certificates/p521.pem"), "ECDSA P-521"),
            (include_str!("../../tests/certificates/rsa-pss.pem"), "RSA-PSS"),
        ] {
            let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
            let refused = verifier.verify(&certificate, &[], KeyUsage::server_auth(), UnixTime::now());
            let refused = std::io::Error::other(refused.unwrap_err());
            assert_eq!(explained(&refused), Some(HandshakeError::UnknownKey(kind)));
        }
    }
}
