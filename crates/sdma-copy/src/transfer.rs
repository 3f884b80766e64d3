// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an engine is asked to do.

use crate::staging::Place;
use crate::table::Bo;

/// Bytes to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// From staging into a BO.
    Load {
        /// The BO.
        bo: Bo,
        /// First byte of the BO.
        at: u64,
        /// First byte of the staging memory.
        from: Place,
        /// How many, at least one.
        bytes: u64,
    },
    /// From a BO into staging.
    Save {
        /// The BO.
        bo: Bo,
        /// First byte of the BO.
        at: u64,
        /// First byte of the staging memory.
        to: Place,
        /// How many, at least one.
        bytes: u64,
    },
    /// A word, again and again, into a BO.
    Fill {
        /// The BO.
        bo: Bo,
        /// First byte of the BO, a multiple of 4.
        at: u64,
        /// How many, a multiple of 4 and at least 4.
        bytes: u64,
        /// The word.
        word: u32,
    },
}

impl Transfer {
    /// Which BO.
    #[must_use]
    pub fn bo(&self) -> Bo {
        match *self {
            Self::Load { bo, .. } | Self::Save { bo, .. } | Self::Fill { bo, .. } => bo,
        }
    }

    /// First byte of the BO.
    #[must_use]
    pub fn at(&self) -> u64 {
        match *self {
            Self::Load { at, .. } | Self::Save { at, .. } | Self::Fill { at, .. } => at,
        }
    }

    /// How many bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match *self {
            Self::Load { bytes, .. } | Self::Save { bytes, .. } | Self::Fill { bytes, .. } => bytes,
        }
    }

    /// Where in the staging memory, if there.
    #[must_use]
    pub fn place(&self) -> Option<Place> {
        match *self {
            Self::Load { from: place, .. } | Self::Save { to: place, .. } => Some(place),
            Self::Fill { .. } => None,
        }
    }
}
