// SPDX-License-Identifier: MIT OR Apache-2.0
//! Both sides of the beginning of a connection: the handshake of TLS, and the server's answer about the
//! client.
//!
//! ```text
//! answer, by the server, with TLS only:   length u16   reason
//! ```
//! The length is little-endian; 0 admits the client. In TLS 1.3 a client's handshake ends before the server
//! has seen its certificate. The answer says how that ended.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use rewake_criu_tls::{
    HANDSHAKE_LIMIT, HandshakeError, PeerCertificate, REFUSAL_LIMIT, TlsClient, TlsLink, TlsServer,
    end_after_answer,
};

use crate::{AllowedPeer, PeerRights, PeerStream};

/// The longest reason in bytes. A certificate may have many names.
const MAX_REASON: usize = 4096;

/// Which clients a server admits.
#[derive(Debug, Clone)]
pub struct Admission {
    tls: Option<TlsServer>,
    allowed: Vec<AllowedPeer>,
}

impl Admission {
    /// Admits all clients, in clear.
    #[must_use]
    pub fn in_clear() -> Self {
        Self { tls: None, allowed: Vec::new() }
    }

    /// Admits the allowed clients; without any, all whose certificate TLS accepts.
    #[must_use]
    pub fn encrypted(tls: TlsServer, allowed: Vec<AllowedPeer>) -> Self {
        Self { tls: Some(tls), allowed }
    }

    /// Begins a connection, and returns it and what the client may do. Its write limit must have been set;
    /// afterwards it has no read limit.
    ///
    /// # Errors
    /// The client is not admitted, which it learns, or is lost.
    pub fn admit(&self, socket: TcpStream) -> anyhow::Result<(PeerStream, PeerRights)> {
        let Some(tls) = &self.tls else { return Ok((socket.into(), PeerRights::All)) };
        let mut link = tls.link(socket)?;
        match rights(&self.allowed, link.peer()) {
            Ok(rights) => {
                answer(&mut link, "").context("admitting a client")?;
                Ok((link.into(), rights))
            }
            Err(names) => {
                // It may be gone.
                let _ = answer(&mut link, &format!("its --allow names none of this certificate: {names}"));
                // A fetcher sends its first requests before it has the answer.
                end_after_answer(link.socket(), REFUSAL_LIMIT);
                bail!("not admitted: --allow names none of its certificate: {names}")
            }
        }
    }
}

/// What a client may do; its names if nothing.
fn rights(allowed: &[AllowedPeer], peer: &PeerCertificate) -> Result<PeerRights, String> {
    if allowed.is_empty() {
        return Ok(PeerRights::All);
    }
    let (mut folders, mut names) = (Vec::<PathBuf>::new(), String::new());
    for one in allowed {
        match (peer.is_for(&one.name), &one.folder) {
            (Ok(()), None) => return Ok(PeerRights::All),
            (Ok(()), Some(folder)) => folders.push(folder.clone()),
            (Err(HandshakeError::WrongName { found, .. }), _) => names = found,
            (Err(other), _) => names = other.to_string(),
        }
    }
    if folders.is_empty() { Err(names) } else { Ok(PeerRights::Folders(folders)) }
}

fn answer(link: &mut TlsLink, reason: &str) -> io::Result<()> {
    let reason = &reason.as_bytes()[..reason.len().min(MAX_REASON)];
    let len = u16::try_from(reason.len()).unwrap_or(u16::MAX);
    link.write_all(&[&len.to_le_bytes(), reason].concat())
}

/// Begins a connection with a server. Without `tls` that is done. Afterwards it has no read limit.
///
/// # Errors
/// The server is not accepted, or does not admit this side, or is lost.
pub fn connect(socket: TcpStream, tls: Option<&TlsClient>) -> io::Result<PeerStream> {
    let Some(tls) = tls else { return Ok(socket.into()) };
    let mut link = tls.link(socket).map_err(io::Error::other)?;
    link.socket().set_read_timeout(Some(HANDSHAKE_LIMIT))?;
    if let Some(reason) = answered(&mut link).map_err(HandshakeError::from).map_err(io::Error::other)? {
        return Err(io::Error::new(ErrorKind::PermissionDenied, format!("refused by the server: {reason}")));
    }
    link.socket().set_read_timeout(None)?;
    Ok(link.into())
}

/// Receives the server's answer: why this side is not admitted, or `None` if it is.
fn answered(link: &mut TlsLink) -> io::Result<Option<String>> {
    let mut len = [0; 2];
    link.read_exact(&mut len)?;
    let len = usize::from(u16::from_le_bytes(len));
    if len > MAX_REASON {
        return Err(io::Error::new(ErrorKind::InvalidData, "not an answer of rewake: is that a Rewake?"));
    }
    let mut reason = vec![0; len];
    link.read_exact(&mut reason)?;
    // It is shown on terminals, and the server may be any program.
    let printable = |char: char| if char.is_control() { ' ' } else { char };
    Ok((len > 0).then(|| String::from_utf8_lossy(&reason).chars().map(printable).collect()))
}
