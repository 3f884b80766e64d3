// SPDX-License-Identifier: MIT OR Apache-2.0
//! What each side writes down before it acts.
//!
//! A record must survive the death of the process that wrote it. It need not survive the host: the tree that
//! it is about does not, either. When a write fails, the record must be as it was before.

use serde::{Deserialize, Serialize};

/// What a source has decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceRecord {
    /// A migration has begun. The tree may be frozen, and is thawed when the agent ends.
    Started,
    /// The tree never runs here again.
    Granted,
}

/// What a destination has decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DestinationRecord {
    /// A migration has begun. A restore that waits is ended when the agent ends.
    Started,
    /// The tree may run here.
    Released,
}
