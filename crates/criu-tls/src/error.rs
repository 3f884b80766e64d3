// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a connection was not made.

use std::io;

use rustls::{AlertDescription, CertificateError, Error, OtherError};

use crate::HANDSHAKE_LIMIT;

/// Why a handshake failed, and what to do.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The peer sent bytes that are no TLS.
    #[error("the peer does not use TLS: start it with --tls, too")]
    NotTls,
    /// The peer closed the connection.
    #[error("the peer closed the connection during the TLS handshake: its log may say why")]
    Closed,
    /// [`HANDSHAKE_LIMIT`] is over.
    #[error("the peer has not finished the TLS handshake within {} s", HANDSHAKE_LIMIT.as_secs())]
    Timeout,
    /// The client showed no certificate.
    #[error(
        "the peer showed no certificate: expected one of the CA of --tls-cacert; give the peer \
         --tls-cert and --tls-key"
    )]
    NoCertificate,
    /// No trusted CA has issued the certificate.
    #[error(
        "the peer's certificate is of no CA in --tls-cacert: issue one by that CA, or add the \
         peer's CA to the file"
    )]
    UnknownCa,
    /// The certificate is too old.
    #[error("the peer's certificate has expired: issue a new one, or correct the clock of this host")]
    Expired,
    /// The certificate is too new.
    #[error("the peer's certificate is not valid yet: correct the clock of this host or of the CA")]
    NotValidYet,
    /// The certificate is on a list.
    #[error("the peer's certificate is revoked by --tls-cacrl: issue a new one")]
    Revoked,
    /// No list is of its CA.
    #[error(
        "--tls-cacrl has no list of the CA that issued the peer's certificate: expected one of \
         each CA of its chain"
    )]
    NoRevocationList,
    /// The list of its CA is too old.
    #[error("--tls-cacrl has a list that is past its next update: get the CA's current one")]
    OldRevocationList,
    /// The certificate has another name.
    #[error(
        "the peer's certificate is for {found}: expected {expected}, the address that this side was given; \
         --tls-no-cn-verify accepts every certificate of the CA"
    )]
    WrongName {
        /// The name that it must have.
        expected: String,
        /// Those that it has.
        found: String,
    },
    /// The certificate is for another use.
    #[error(
        "the peer's certificate has an extended key usage without this use: expected serverAuth for \
         servers and clientAuth for clients, or no such extension"
    )]
    WrongPurpose,
    /// The certificate is the CA's own.
    #[error(
        "the peer's certificate is a CA's (CA:TRUE): issue one with basicConstraints CA:FALSE by that CA"
    )]
    IsCa,
    /// The certificate has no extensions.
    #[error(
        "the peer's certificate has X.509 version 1: issue one of version 3, with basicConstraints CA:FALSE"
    )]
    OldVersion,
    /// The peer does not accept this side's certificate.
    #[error("the peer does not accept this side's certificate ({0}): its log may say more")]
    Refused(String),
    /// Something else.
    #[error("TLS: {0}")]
    Other(String),
}

impl HandshakeError {
    /// Explains an error of a stream, if TLS made it.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<Self> {
        let error = error.get_ref()?.downcast_ref::<Error>()?;
        Some(match error {
            Error::InvalidMessage(_) => Self::NotTls,
            Error::NoCertificatesPresented => Self::NoCertificate,
            Error::InvalidCertificate(reason) => Self::of_certificate(reason),
            Error::AlertReceived(alert) => Self::of_alert(*alert),
            other => Self::Other(other.to_string()),
        })
    }

    fn of_certificate(reason: &CertificateError) -> Self {
        match reason {
            CertificateError::UnknownIssuer => Self::UnknownCa,
            CertificateError::Expired => Self::Expired,
            CertificateError::NotValidYet => Self::NotValidYet,
            CertificateError::Revoked => Self::Revoked,
            CertificateError::UnknownRevocationStatus => Self::NoRevocationList,
            CertificateError::ExpiredRevocationList => Self::OldRevocationList,
            CertificateError::InvalidPurpose => Self::WrongPurpose,
            CertificateError::NotValidForNameContext { expected, presented } => Self::WrongName {
                expected: expected.to_str().into_owned(),
                found: if presented.is_empty() { "no name".to_owned() } else { presented.join(", ") },
            },
            CertificateError::Other(OtherError(reason)) => match reason.downcast_ref::<webpki::Error>() {
                Some(webpki::Error::CaUsedAsEndEntity) => Self::IsCa,
                Some(webpki::Error::UnsupportedCertVersion) => Self::OldVersion,
                _ => Self::Other(format!("the peer's certificate is not accepted: {reason}")),
            },
            other => Self::Other(format!("the peer's certificate is not accepted: {other}")),
        }
    }

    fn of_alert(alert: AlertDescription) -> Self {
        match alert {
            AlertDescription::HandshakeFailure | AlertDescription::ProtocolVersion => {
                Self::Other(format!("the peer and this side have no algorithms in common ({alert:?})"))
            }
            other => Self::Refused(format!("{other:?}")),
        }
    }
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Self::Closed
            }
            // The time for one write is over.
            io::ErrorKind::WouldBlock => Self::Timeout,
            _ => Self::of(&error).unwrap_or_else(|| Self::Other(error.to_string())),
        }
    }
}
