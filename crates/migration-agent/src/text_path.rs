// SPDX-License-Identifier: MIT OR Apache-2.0
//! A path in JSON, whose texts are UTF-8: records on the disk, and what hosts compare.
//!
//! A path is its own text. A byte that is not UTF-8 is written as NUL, which no path has, and two hexadecimal
//! digits. An agent that does not know this looks for a file that cannot exist, and refuses the program by
//! its name.

use std::borrow::Borrow;
use std::ffi::OsString;
use std::ops::Deref;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use rewake_process::names;
use serde::{Deserialize, Serialize};

/// A path that is written as text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub(crate) struct TextPath(PathBuf);

impl TextPath {
    /// Returns it as text for people.
    pub(crate) fn printable(&self) -> String {
        names::printable(self.0.as_os_str().as_bytes())
    }
}

impl From<TextPath> for String {
    fn from(path: TextPath) -> Self {
        let mut text = Self::new();
        for chunk in path.0.as_os_str().as_bytes().utf8_chunks() {
            text.push_str(chunk.valid());
            chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\0{byte:02x}")));
        }
        text
    }
}

impl From<String> for TextPath {
    fn from(text: String) -> Self {
        let mut parts = text.split('\0');
        let mut path = parts.next().unwrap_or_default().as_bytes().to_vec();
        for part in parts {
            let byte = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
            // Without digits no agent has written it: it stays a path that does not exist.
            path.push(byte.unwrap_or(0));
            path.extend(&part.as_bytes()[if byte.is_some() { 2 } else { 0 }..]);
        }
        Self(OsString::from_vec(path).into())
    }
}

impl From<PathBuf> for TextPath {
    fn from(path: PathBuf) -> Self {
        Self(path)
    }
}

impl Deref for TextPath {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Borrow<Path> for TextPath {
    fn borrow(&self) -> &Path {
        &self.0
    }
}

impl AsRef<Path> for TextPath {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(bytes: &[u8]) -> TextPath {
        PathBuf::from(OsString::from_vec(bytes.to_vec())).into()
    }

    #[test]
    fn a_path_of_utf_8_is_its_own_text() {
        let text = serde_json::to_string(&path("/srv/données".as_bytes())).unwrap();
        assert_eq!(text, "\"/srv/données\"");
    }

    #[test]
    fn a_path_of_any_bytes_is_the_same_when_it_was_written_and_read() {
        let bytes: Vec<u8> = (1..=u8::MAX).chain(*b"ff \xff00 \xe9\xc3").collect();
        let text = serde_json::to_string(&path(&bytes)).unwrap();
        assert_eq!(serde_json::from_str::<TextPath>(&text).unwrap(), path(&bytes));
    }

    #[test]
    fn a_text_that_no_agent_writes_is_no_path_of_a_file() {
        for text in ["\0", "/a\0", "/a\0zz", "/a\0é"] {
            assert!(std::fs::metadata(TextPath::from(text.to_owned())).is_err(), "{text:?}");
        }
    }
}
