// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which kinds of keys `ring` knows. What it does not know would otherwise be a signature that is wrong, or a
//! handshake without a reason.

use super::peer_name::{OBJECT, SEQUENCE, value};

/// rsaEncryption, 1.2.840.113549.1.1.1.
const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1];
/// id-RSASSA-PSS, 1.2.840.113549.1.1.10.
const RSA_PSS: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 10];
/// id-dsa, 1.2.840.10040.4.1.
const DSA: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x38, 4, 1];
/// id-ecPublicKey, 1.2.840.10045.2.1, and curves.
const EC: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1];
const P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7];
const P384: &[u8] = &[0x2b, 0x81, 4, 0, 34];
const P521: &[u8] = &[0x2b, 0x81, 4, 0, 35];
/// id-Ed25519 and id-Ed448.
const ED25519: &[u8] = &[0x2b, 0x65, 112];
const ED448: &[u8] = &[0x2b, 0x65, 113];

/// Returns the kind of a key that is not known here; `None` for one that is. `info`: RFC 5280's
/// `SubjectPublicKeyInfo`, without its outer tag.
pub(crate) fn unknown_kind(info: &[u8]) -> Option<&'static str> {
    let parts = || {
        let (algorithm, _) = value(info, SEQUENCE)?;
        let (kind, parameters) = value(algorithm, OBJECT)?;
        Some((kind, value(parameters, OBJECT).map(|(curve, _)| curve)))
    };
    match parts() {
        Some((RSA | ED25519, _)) | Some((EC, Some(P256 | P384))) => None,
        Some((EC, Some(P521))) => Some("ECDSA P-521"),
        Some((EC, _)) => Some("ECDSA of a rare curve"),
        Some((RSA_PSS, _)) => Some("RSA-PSS"),
        Some((ED448, _)) => Some("Ed448"),
        Some((DSA, _)) => Some("DSA"),
        _ => Some("unknown"),
    }
}

/// The same for a whole `SubjectPublicKeyInfo`.
pub(crate) fn unknown_kind_in(info: &[u8]) -> Option<&'static str> {
    unknown_kind(value(info, SEQUENCE).map_or(&[], |(info, _)| info))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An element of less than 128 bytes.
    fn element(tag: u8, value: &[u8]) -> Vec<u8> {
        [&[tag, u8::try_from(value.len()).unwrap()], value].concat()
    }

    fn key(kind: &[u8], parameters: &[u8]) -> Vec<u8> {
        let algorithm = [element(OBJECT, kind), parameters.to_vec()].concat();
        element(SEQUENCE, &[element(SEQUENCE, &algorithm), element(3, &[0, 1, 2])].concat())
    }

    #[test]
    fn keys_that_are_not_known_are_named() {
        let curve = |curve: &[u8]| key(EC, &element(OBJECT, curve));
        for known in [key(RSA, &[5, 0]), key(ED25519, &[]), curve(P256), curve(P384)] {
            assert_eq!(unknown_kind_in(&known), None, "{known:x?}");
        }
        for (key, kind) in [
            (curve(P521), "ECDSA P-521"),
            (curve(&[0x2b, 0x81, 4, 0, 10]), "ECDSA of a rare curve"),
            (key(EC, &[5, 0]), "ECDSA of a rare curve"),
            (key(RSA_PSS, &[]), "RSA-PSS"),
            (key(ED448, &[]), "Ed448"),
            (key(DSA, &[5, 0]), "DSA"),
            (key(&[1, 2, 3], &[]), "unknown"),
        ] {
            assert_eq!(unknown_kind_in(&key), Some(kind));
        }
    }

    #[test]
    fn a_damaged_key_is_of_an_unknown_kind() {
        let whole = key(EC, &element(OBJECT, P256));
        for len in 0..whole.len() {
            assert_eq!(unknown_kind_in(&whole[..len]), Some("unknown"), "{len}");
        }
    }
}
