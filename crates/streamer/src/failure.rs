// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why a restore has failed: words for people, and the cause for programs, because an agent counts failures
//! by their cause, and compares its copy of an image with the store when that copy is the cause.

use rewake_bo_contents::Error as ContentsError;
use rewake_criu_images::ImageError;
use rewake_image_io::TransferError;
use serde::{Deserialize, Serialize};

use crate::limits;

/// The cause of a failure, as far as a program decides by it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCause {
    /// Any other.
    #[default]
    Other,
    /// A file of the image is not what its format says.
    DamagedImage,
    /// A block of the image is not the block that was sealed.
    WrongBlock,
}

impl FailureCause {
    /// The first cause that an error names.
    #[must_use]
    pub fn of(error: &anyhow::Error) -> Self {
        error.chain().map(Self::of_one).find(|cause| *cause != Self::Other).unwrap_or_default()
    }

    fn of_one(error: &(dyn std::error::Error + 'static)) -> Self {
        let is_damage = || error.downcast_ref::<ImageError>().is_some_and(ImageError::is_damage);
        if let Some(failure) = error.downcast_ref::<Failure>() {
            failure.cause
        } else if let Some(transfer) = error.downcast_ref::<TransferError>() {
            transfer.into()
        } else if let Some(ContentsError::Transfer(transfer)) = error.downcast_ref() {
            // This error is transparent, so that its source is not in the chain.
            transfer.into()
        } else if is_damage() {
            Self::DamagedImage
        } else {
            Self::Other
        }
    }
}

impl From<&TransferError> for FailureCause {
    fn from(error: &TransferError) -> Self {
        match error {
            TransferError::Damaged { .. } => Self::WrongBlock,
            _ => Self::Other,
        }
    }
}

/// A failure that has been put into words.
#[derive(Debug, Clone, Default, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Failure {
    /// What programs decide by.
    pub cause: FailureCause,
    /// What people read.
    pub reason: String,
}

impl From<&str> for Failure {
    fn from(reason: &str) -> Self {
        reason.to_owned().into()
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self { cause: FailureCause::Other, reason }
    }
}

impl From<&anyhow::Error> for Failure {
    /// The error, with the limit of this process that it is about.
    fn from(error: &anyhow::Error) -> Self {
        Self { cause: FailureCause::of(error), reason: limits::explained(error) }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn a_cause_is_found_below_what_was_done() {
        let cause = |error: anyhow::Error| FailureCause::of(&error.context("restoring"));
        let file = || PathBuf::from("/images/pagemap-1.img");
        let (expected, found) = ("a pagemap".to_owned(), "zeros".to_owned());
        let damaged = ImageError::Damaged { file: file(), offset: 0, expected, found };
        assert_eq!(cause(damaged.into()), FailureCause::DamagedImage);
        let missing = ImageError::Missing { file: file(), expected: "a pagemap" };
        assert_eq!(cause(missing.into()), FailureCause::DamagedImage);
        let block = TransferError::Damaged { file: file(), offset: 0, length: 4096 };
        assert_eq!(cause(block.into()), FailureCause::WrongBlock);
        let block = TransferError::Damaged { file: file(), offset: 0, length: 4096 };
        assert_eq!(cause(ContentsError::from(block).into()), FailureCause::WrongBlock);
        let failure = Failure { cause: FailureCause::WrongBlock, reason: "memory of process 7".to_owned() };
        assert_eq!(cause(failure.into()), FailureCause::WrongBlock);
        // Files that cannot be opened now show nothing.
        let source = std::io::Error::from_raw_os_error(24);
        assert_eq!(cause(ImageError::Io { act: "open", file: file(), source }.into()), FailureCause::Other);
        assert_eq!(cause(ImageError::BeingReplaced { file: file() }.into()), FailureCause::Other);
        let (expected, found) = ("version 2".to_owned(), "version 1".to_owned());
        let unsupported = ImageError::Unsupported { file: file(), expected, found };
        assert_eq!(cause(unsupported.into()), FailureCause::Other);
        assert_eq!(cause(anyhow::anyhow!("no such process")), FailureCause::Other);
    }
}
