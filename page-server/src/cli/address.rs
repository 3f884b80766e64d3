// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments that are a path or something else. A path need not be UTF-8.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

/// The address of a page server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PageServerAddress {
    /// The address or name of a host.
    Host(String),
    /// The path of a unix socket: it has a slash in it.
    Socket(PathBuf),
}

impl PageServerAddress {
    /// Reads `--address`.
    pub(super) fn of(given: OsString) -> Result<Self, String> {
        if given.as_bytes().contains(&b'/') {
            return Ok(Self::Socket(given.into()));
        }
        let host = given.into_string();
        host.map(Self::Host).map_err(|_| "expected a host, or the path of a socket with a / in it".to_owned())
    }

    /// The host; none for a socket.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        match self {
            Self::Host(host) => Some(host),
            Self::Socket(_) => None,
        }
    }
}

/// An image of another host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteImage {
    /// Address or name of the host.
    pub host: String,
    /// The name of the image there, which is a path.
    pub image: PathBuf,
}

impl RemoteImage {
    /// Reads `HOST:IMAGE` or `[IPV6]:IMAGE`.
    pub(super) fn of(given: &OsStr) -> Result<Self, String> {
        let given = given.as_bytes();
        let (rest, border) = match given.strip_prefix(b"[") {
            Some(rest) => (rest, &b"]:"[..]),
            None => (given, &b":"[..]),
        };
        let at = rest.windows(border.len()).position(|part| part == border);
        let parts = at.map(|at| (str::from_utf8(&rest[..at]), &rest[at + border.len()..]));
        match parts {
            Some((Ok(host), image)) if !host.is_empty() && !image.is_empty() => {
                Ok(Self { host: host.to_owned(), image: OsStr::from_bytes(image).into() })
            }
            _ => Err("expected HOST:IMAGE".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(given: &[u8]) -> Option<(String, Vec<u8>)> {
        let RemoteImage { host, image } = RemoteImage::of(OsStr::from_bytes(given)).ok()?;
        Some((host, image.as_os_str().as_bytes().to_vec()))
    }

    #[test]
    fn an_image_of_a_host_may_have_any_name() {
        let both = |host: &str, image: &[u8]| Some((host.to_owned(), image.to_vec()));
        assert_eq!(remote(b"host-a:web/1:2"), both("host-a", b"web/1:2"));
        assert_eq!(remote(b"[::1]:caf\xe9"), both("::1", b"caf\xe9"));
        for wrong in [&b"host-a"[..], b":web", b"host-a:", b"[::1]web", b"caf\xe9:web", b""] {
            assert_eq!(remote(wrong), None, "{}", wrong.escape_ascii());
        }
    }

    #[test]
    fn an_address_with_a_slash_is_a_socket_s_path() {
        let of = |given: &[u8]| PageServerAddress::of(OsStr::from_bytes(given).to_owned()).ok();
        assert_eq!(of(b"::1"), Some(PageServerAddress::Host("::1".to_owned())));
        assert_eq!(of(b"./caf\xe9"), Some(PageServerAddress::Socket(OsStr::from_bytes(b"./caf\xe9").into())));
        assert_eq!(of(b"caf\xe9"), None);
    }
}
