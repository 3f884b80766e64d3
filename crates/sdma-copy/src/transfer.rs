// SPDX-License-Identifier: MIT OR Apache-2.0
//! The transfers of an engine.

use crate::staging::StagingOffset;
use crate::table::Bo;

/// Bytes to copy or fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Copies from staging memory into a BO.
    Load {
        /// The BO.
        bo: Bo,
        /// The first byte of the BO.
        at: u64,
        /// The first byte of the staging memory.
        from: StagingOffset,
        /// The number of bytes, at least one.
        bytes: u64,
    },
    /// Copies from a BO into staging memory.
    Save {
        /// The BO.
        bo: Bo,
        /// The first byte of the BO.
        at: u64,
        /// The first byte of the staging memory.
        to: StagingOffset,
        /// The number of bytes, at least one.
        bytes: u64,
    },
    /// Fills a BO with a repeated word.
    Fill {
        /// The BO.
        bo: Bo,
        /// The first byte of the BO, a multiple of 4.
        at: u64,
        /// The number of bytes, a multiple of 4 and at least 4.
        bytes: u64,
        /// The word.
        word: u32,
    },
}

impl Transfer {
    /// Returns the BO.
    #[must_use]
    pub fn bo(&self) -> Bo {
        match *self {
            Self::Load { bo, .. } | Self::Save { bo, .. } | Self::Fill { bo, .. } => bo,
        }
    }

    /// Returns the first byte of the BO.
    #[must_use]
    pub fn at(&self) -> u64 {
        match *self {
            Self::Load { at, .. } | Self::Save { at, .. } | Self::Fill { at, .. } => at,
        }
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match *self {
            Self::Load { bytes, .. } | Self::Save { bytes, .. } | Self::Fill { bytes, .. } => bytes,
        }
    }

    /// Returns the place in staging memory, unless it is a fill.
    #[must_use]
    pub fn place(&self) -> Option<StagingOffset> {
        match *self {
            Self::Load { from: place, .. } | Self::Save { to: place, .. } => Some(place),
            Self::Fill { .. } => None,
        }
    }
}
