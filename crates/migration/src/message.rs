// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the sides send each other. Memory and files travel between these messages, on the same connection and
//! in the same order.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The version of the protocol. A side that gets another one ends the migration.
pub const VERSION: u32 = 8;

/// A message of the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromSource {
    /// The first message on each connection.
    Hello {
        /// The version that the source speaks.
        version: u32,
    },
    /// What the destination must have or be.
    Offer(
        /// Text of the drivers.
        String,
    ),
    /// All files of the image have been sent on this connection.
    Metadata {
        /// The destination asks for GRANT when it has all memory, not before.
        all_first: bool,
    },
    /// The program runs at the destination from now on, and never at the source.
    Grant,
    /// The source has killed its tree, after `Commit`, or after the destination has said that the program is
    /// lost.
    Discarded,
    /// The migration has ended, and the program runs at the source.
    Abort(
        /// Why.
        String,
    ),
}

/// A message of the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromDestination {
    /// The agent refuses the connection, and closes it. It sends this instead of all other messages, and
    /// before it reads the source's `Hello`.
    Refused(LinkRefusal),
    /// The answer to the source's `Hello`.
    Hello {
        /// The version that the destination speaks.
        version: u32,
        /// How far it is.
        progress: DestinationProgress,
        /// GPU memory may arrive there while the program runs.
        gpu_on_demand: bool,
    },
    /// The destination takes the program.
    Accept,
    /// The restore waits at its last step, and asks for `Grant`. If all memory was to be first, none is
    /// missing.
    Ready,
    /// The destination's user ends the migration, after `Ready`: GRANT may be in flight, so the source
    /// decides.
    Withdraw,
    /// The program runs. The source measures the downtime with it.
    Running,
    /// The program runs, and all of its memory is resident.
    Commit,
    /// The migration has ended, and the program does not run at the destination.
    Abort(
        /// Why.
        String,
    ),
}

/// Why an agent refuses a connection. What it says is about the agent, and never about the program of the
/// migration that the connection belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkRefusal {
    /// The agent has another migration.
    Busy,
    /// The agent has this migration, whose source has shown another certificate.
    OtherCertificate,
}

impl fmt::Display for LinkRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "this agent has another migration: it takes one program",
            Self::OtherCertificate => "the source's certificate is not that of the connection before",
        })
    }
}

/// How far a destination is. The order is that of time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DestinationProgress {
    /// It has no offer.
    New,
    /// It has accepted the offer, and lacks metadata.
    Accepted,
    /// It has all metadata, and restores.
    Restoring,
    /// Its restore waits for `Grant`.
    Ready,
    /// The program was released, and lacks memory.
    Released,
    /// All memory is resident, and the program runs.
    Resident,
    /// The program does not run there, and never will.
    Gone(
        /// Why.
        String,
    ),
}
