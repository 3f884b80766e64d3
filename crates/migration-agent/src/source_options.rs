// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a user wants of a migration.

use std::time::Duration;

use rewake_criu_tls::TlsClient;

use crate::criu::CriuChoice;
use crate::pre_copy::PreCopyGoal;

/// Time without a connection before GRANT, after which the program runs on here.
pub(crate) const LOST_LIMIT: Duration = Duration::from_secs(5);

/// A migration that a user wants.
#[derive(Debug)]
pub struct SourceOptions {
    /// The root of the tree.
    pub tree: i32,
    /// The destination's agent, `ADDRESS:PORT`.
    pub to: String,
    /// Whether memory may travel unencrypted to another host.
    pub insecure: bool,
    /// This host's certificate, and which destination it accepts; none: in clear.
    pub tls: Option<TlsClient>,
    /// For `criu dump`.
    pub criu: CriuChoice,
    /// What is sent before the freeze, and how long the program may be frozen.
    pub goal: PreCopyGoal,
    /// Time without a connection before GRANT, after which the program runs on here; 5 s without it.
    pub give_up_after: Option<Duration>,
}

impl SourceOptions {
    /// Time without a connection before GRANT, after which the program runs on here.
    pub(crate) fn lost_limit(&self) -> Duration {
        self.give_up_after.unwrap_or(LOST_LIMIT)
    }
}
