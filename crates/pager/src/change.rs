// SPDX-License-Identifier: MIT OR Apache-2.0
//! Changes of a program's layout, as userfaultfd events report them.

use crate::PAGE_SIZE;

/// A change of the layout. Addresses and lengths are in bytes and cover whole pages of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The contents of `start..end` are dropped (`MADV_DONTNEED` and similar): the pages are zero from now
    /// on.
    Remove {
        /// First address.
        start: u64,
        /// Address after the last.
        end: u64,
    },
    /// `start..end` is unmapped.
    Unmap {
        /// First address.
        start: u64,
        /// Address after the last.
        end: u64,
    },
    /// The memory at `from..from + len` is moved to `to..to + len`.
    Remap {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Bytes.
        len: u64,
    },
}

/// Why a kernel cannot have reported a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// An address or length is not a multiple of the page size.
    #[error("changing a layout: {0:x?} is not in whole pages of 4096 bytes")]
    Unaligned(Change),
    /// The end is below the start, or beyond the last address.
    #[error("changing a layout: {0:x?} ends before it starts or beyond the last address")]
    BadRange(Change),
    /// Old and new range overlap, which `mremap` refuses.
    #[error("changing a layout: {0:x?} moves memory onto itself")]
    Overlap(Change),
}

impl Change {
    pub(crate) fn validate(&self) -> Result<(), ChangeError> {
        let aligned = |values: &[u64]| values.iter().all(|value| value.is_multiple_of(PAGE_SIZE));
        match *self {
            Self::Remove { start, end } | Self::Unmap { start, end } => {
                if !aligned(&[start, end]) {
                    return Err(ChangeError::Unaligned(*self));
                }
                if start > end { Err(ChangeError::BadRange(*self)) } else { Ok(()) }
            }
            Self::Remap { from, to, len } => {
                if !aligned(&[from, to, len]) {
                    return Err(ChangeError::Unaligned(*self));
                }
                if from.checked_add(len).is_none() || to.checked_add(len).is_none() {
                    return Err(ChangeError::BadRange(*self));
                }
                if from.abs_diff(to) < len { Err(ChangeError::Overlap(*self)) } else { Ok(()) }
            }
        }
    }
}
