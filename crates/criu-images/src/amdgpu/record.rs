// SPDX-License-Identifier: MIT OR Apache-2.0
//! Messages of numbers, all of which are required.

use std::path::Path;

use prost::Message;

use super::contents::{HEADER, damaged};
use crate::error::{ImageError, Result};

/// A required field that a message does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MissingField(pub(crate) &'static str);

/// Defines a public struct and its conversions from and to the generated message: fields have the same names.
macro_rules! record {
    ($(#[$meta:meta])* $name:ident = $raw:path { $($(#[$doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl $name {
            pub(crate) fn from_raw(raw: &$raw) -> Result<Self, $crate::amdgpu::record::MissingField> {
                use $crate::amdgpu::record::MissingField;
                Ok(Self { $($field: raw.$field.ok_or(MissingField(stringify!($field)))?,)* })
            }

            #[allow(clippy::needless_update, reason = "not every message has more than its numbers")]
            pub(crate) fn to_raw(self) -> $raw {
                $raw { $($field: Some(self.$field),)* ..Default::default() }
            }
        }
    };
}
pub(crate) use record;

/// Makes errors about one file's contents.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Contents<'a>(pub(crate) &'a Path);

impl Contents<'_> {
    pub(crate) fn damaged(self, expected: impl Into<String>, found: impl Into<String>) -> ImageError {
        damaged(self.0, HEADER, expected, found)
    }

    /// Decodes one message.
    pub(crate) fn decode<M: Message + Default>(self, what: &str, bytes: &[u8]) -> Result<M> {
        M::decode(bytes).map_err(|error| self.damaged(what, error.to_string()))
    }

    /// Returns a message's value, or an error that names its missing field.
    pub(crate) fn whole<T>(self, what: &str, value: Result<T, MissingField>) -> Result<T> {
        value.map_err(|MissingField(field)| {
            self.damaged(format!("{what} with the field {field}"), "one without")
        })
    }

    /// Checks a count in the image against the length of its list, and the list against a limit.
    pub(crate) fn count(
        self,
        what: &'static str,
        claimed: Option<u64>,
        found: usize,
        limit: (&'static str, usize),
    ) -> Result<()> {
        if claimed != Some(found as u64) {
            let claimed = claimed.map_or_else(|| "no count of them".to_owned(), |count| count.to_string());
            return Err(
                self.damaged(format!("as many {what} as the image counts ({claimed})"), found.to_string())
            );
        }
        self.limit(what, found, limit)
    }

    /// Checks a count against a named limit.
    pub(crate) fn limit(self, what: &'static str, found: usize, limit: (&'static str, usize)) -> Result<()> {
        if found > limit.1 {
            return Err(ImageError::TooMany {
                file: self.0.to_path_buf(),
                offset: HEADER,
                what,
                found: found as u64,
                limit_name: limit.0,
                limit: limit.1 as u64,
            });
        }
        Ok(())
    }
}
