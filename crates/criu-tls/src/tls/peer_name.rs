// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whose certificate a peer must have: the check of names that GnuTLS makes for CRIU.
//!
//! An IP address must be among the certificate's alternative names. A host name must be there, too, or in the
//! subject if the certificate has no alternative names at all: CRIU's certificates may have a common name
//! only.

use std::net::IpAddr;

use anyhow::Context as _;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, Error};
use webpki::EndEntityCert;

/// The name that a peer's certificate must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerName(ServerName<'static>);

impl PeerName {
    /// Reads an address or a host name.
    ///
    /// # Errors
    /// It is neither.
    pub fn of_address(address: &str) -> anyhow::Result<Self> {
        // A link-local address ends with the name of its link, which no certificate has.
        let plain = address.split_once('%').map_or(address, |(address, _)| address);
        let name = ServerName::try_from(plain)
            .with_context(|| format!("{address:?}: expected an address or a host name"))?;
        Ok(Self(name.to_owned()))
    }

    /// Returns whether it is an address that stands for all addresses of a host, which no certificate has.
    pub(crate) fn is_any_address(&self) -> bool {
        match &self.0 {
            ServerName::IpAddress(address) => IpAddr::from(*address).is_unspecified(),
            _ => false,
        }
    }

    /// Checks a certificate, whose chain was verified.
    pub(crate) fn check(&self, certificate: &EndEntityCert<'_>) -> Result<(), Error> {
        let found = match certificate.verify_is_valid_for_subject_name(&self.0) {
            Err(webpki::Error::CertNotValidForName(found)) => found,
            checked => return checked.map_err(|_| CertificateError::BadEncoding.into()),
        };
        let mut presented = found.presented;
        if presented.is_empty() {
            let common = common_name(certificate.subject());
            if let (ServerName::DnsName(expected), Some(common)) = (&self.0, common)
                && common.eq_ignore_ascii_case(expected.as_ref())
            {
                return Ok(());
            }
            presented.extend(common.map(|name| format!("CN={name}")));
        }
        Err(CertificateError::NotValidForNameContext { expected: self.0.clone(), presented }.into())
    }
}

pub(super) const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
pub(super) const OBJECT: u8 = 0x06;
const UTF8: u8 = 0x0c;
const PRINTABLE: u8 = 0x13;
const IA5: u8 = 0x16;
/// 2.5.4.3, the attribute of common names.
const COMMON_NAME: [u8; 3] = [0x55, 4, 3];

/// Returns the common name of a subject (RFC 5280, `Name`, without its outer tag), or `None` if it has
/// several.
fn common_name(subject: &[u8]) -> Option<&str> {
    let mut found = None;
    let mut sets = subject;
    while !sets.is_empty() {
        let mut attributes;
        (attributes, sets) = value(sets, SET)?;
        while !attributes.is_empty() {
            let attribute;
            (attribute, attributes) = value(attributes, SEQUENCE)?;
            let (kind, text) = value(attribute, OBJECT)?;
            if kind != COMMON_NAME {
                continue;
            }
            let tag = [UTF8, PRINTABLE, IA5].into_iter().find(|tag| text.first() == Some(tag))?;
            let (text, end) = value(text, tag)?;
            if found.is_some() || !end.is_empty() {
                return None;
            }
            found = Some(str::from_utf8(text).ok()?);
        }
    }
    found
}

/// Splits DER that begins with an element of this tag into the element's value and the rest.
pub(super) fn value(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (head, rest) = der.split_first_chunk::<2>()?;
    if head[0] != tag {
        return None;
    }
    // A name has less than 64 KiB. Other forms of a length are longer than they need to be.
    let (len, rest) = match head[1] {
        len @ ..=0x7f => (usize::from(len), rest),
        0x81 => rest.split_first().map(|(len, rest)| (usize::from(*len), rest))?,
        0x82 => rest.split_first_chunk().map(|(len, rest)| (usize::from(u16::from_be_bytes(*len)), rest))?,
        _ => return None,
    };
    rest.split_at_checked(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(tag: u8, value: &[u8]) -> Vec<u8> {
        let len = u8::try_from(value.len()).unwrap();
        let head = if len < 0x80 { vec![tag, len] } else { vec![tag, 0x81, len] };
        [&head[..], value].concat()
    }

    fn attribute(object: &[u8], tag: u8, text: &[u8]) -> Vec<u8> {
        element(SEQUENCE, &[element(OBJECT, object), element(tag, text)].concat())
    }

    fn common(tag: u8, text: &[u8]) -> Vec<u8> {
        element(SET, &attribute(&COMMON_NAME, tag, text))
    }

    #[test]
    fn a_common_name_is_found_beside_other_attributes() {
        let country = element(SET, &attribute(&[0x55, 4, 6], PRINTABLE, b"DE"));
        for tag in [UTF8, PRINTABLE, IA5] {
            let subject = [country.clone(), common(tag, b"host-a"), country.clone()].concat();
            assert_eq!(common_name(&subject), Some("host-a"));
        }
        let long = [b'x'; 200];
        assert_eq!(common_name(&common(UTF8, &long)).map(str::len), Some(200));
    }

    #[test]
    fn two_common_names_are_none() {
        let two = [common(UTF8, b"host-a"), common(UTF8, b"host-b")].concat();
        assert_eq!(common_name(&two), None);
        let in_one_set = [attribute(&COMMON_NAME, UTF8, b"a"), attribute(&COMMON_NAME, UTF8, b"b")].concat();
        assert_eq!(common_name(&element(SET, &in_one_set)), None);
    }

    #[test]
    fn damaged_subjects_have_no_common_name() {
        assert_eq!(common_name(&[]), None);
        assert_eq!(common_name(&common(0x1e, b"\0a")), None, "a tag that is not read");
        assert_eq!(common_name(&common(UTF8, &[0xff])), None);
        let whole = common(UTF8, b"host-a");
        for len in 0..whole.len() {
            assert_eq!(common_name(&whole[..len]), None, "{len}");
        }
    }

    #[test]
    fn any_address_is_no_name() {
        let is_any = |address| PeerName::of_address(address).unwrap().is_any_address();
        assert_eq!(
            ["0.0.0.0", "::", "127.0.0.1", "fe80::1%eth0", "host"].map(is_any),
            [true, true, false, false, false]
        );
        assert!(PeerName::of_address("no name").is_err());
    }
}
