// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two classes of transfers.

/// Why a transfer is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A thread waits for it.
    Demand,
    /// No thread waits for it: the I/O budget limits reads of this class.
    Background,
}
