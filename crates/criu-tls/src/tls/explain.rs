// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an error of TLS means to a user.

use std::io;

use rustls::{AlertDescription, CertificateError, Error, OtherError};

use super::verifier::UnknownKey;
use crate::error::{HandshakeError, KNOWN_KINDS};

/// Explains an error of a stream, if TLS made it.
pub(crate) fn explained(error: &io::Error) -> Option<HandshakeError> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    Some(match error {
        Error::InvalidMessage(_) => HandshakeError::NotTls,
        Error::NoCertificatesPresented => HandshakeError::NoCertificate,
        Error::InvalidCertificate(reason) => of_certificate(reason),
        Error::AlertReceived(alert) => of_alert(*alert),
        other => HandshakeError::Other(other.to_string()),
    })
}

fn of_certificate(reason: &CertificateError) -> HandshakeError {
    match reason {
        CertificateError::UnknownIssuer => HandshakeError::UnknownCa,
        CertificateError::Expired => HandshakeError::Expired,
        CertificateError::NotValidYet => HandshakeError::NotValidYet,
        CertificateError::Revoked => HandshakeError::Revoked,
        CertificateError::UnknownRevocationStatus => HandshakeError::NoRevocationList,
        CertificateError::ExpiredRevocationList => HandshakeError::OldRevocationList,
        CertificateError::InvalidPurpose => HandshakeError::WrongPurpose,
        CertificateError::NotValidForNameContext { expected, presented } => HandshakeError::WrongName {
            expected: expected.to_str().into_owned(),
            found: if presented.is_empty() { "no name".to_owned() } else { presented.join(", ") },
        },
        CertificateError::Other(OtherError(reason)) => {
            if let Some(UnknownKey(kind)) = reason.downcast_ref() {
                return HandshakeError::UnknownKey(kind);
            }
            match reason.downcast_ref::<webpki::Error>() {
                Some(webpki::Error::CaUsedAsEndEntity) => HandshakeError::IsCa,
                Some(webpki::Error::UnsupportedCertVersion) => HandshakeError::OldVersion,
                Some(
                    webpki::Error::UnsupportedSignatureAlgorithmContext(_)
                    | webpki::Error::UnsupportedSignatureAlgorithmForPublicKeyContext(_),
                ) => HandshakeError::UnknownSignature,
                _ => HandshakeError::Other(format!("the peer's certificate is not accepted: {reason}")),
            }
        }
        other => HandshakeError::Other(format!("the peer's certificate is not accepted: {other}")),
    }
}

fn of_alert(alert: AlertDescription) -> HandshakeError {
    match alert {
        AlertDescription::HandshakeFailure | AlertDescription::ProtocolVersion => {
            HandshakeError::Other(format!(
                "the peer and this side have no algorithms in common ({alert:?}): both certificates need \
                 keys of a kind that both sides know: {KNOWN_KINDS}"
            ))
        }
        other => HandshakeError::Refused(format!("{other:?}")),
    }
}
