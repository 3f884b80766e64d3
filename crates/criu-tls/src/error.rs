// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a connection was not made.

use std::io;

use crate::HANDSHAKE_LIMIT;

/// What a key of a certificate has to be.
pub(crate) const KNOWN_KINDS: &str = "ECDSA P-256 or P-384, Ed25519, or RSA of 2048 to 4096 bits";

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
         --tls-cert and --tls-key, with a key of a kind that this side knows: {KNOWN_KINDS}"
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
    /// The certificate has a key of a kind that this side cannot use.
    #[error(
        "the peer's certificate has a key of the kind {0}: expected {KNOWN_KINDS}; issue a certificate for \
         such a key"
    )]
    UnknownKey(&'static str),
    /// The certificate, or one of its CAs, was signed in a way that this side cannot verify.
    #[error(
        "the peer's certificate, or that of a CA between, has a signature of a kind that this side does not \
         know: expected CAs with keys of {KNOWN_KINDS}, which sign with SHA-256 or SHA-384"
    )]
    UnknownSignature,
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
        crate::explained(error)
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
