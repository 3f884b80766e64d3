// SPDX-License-Identifier: MIT OR Apache-2.0
//! The end of a migration that another process of the user wants.

use std::io::ErrorKind;

use anyhow::Context as _;
use rewake_migration::record::SourceRecord;

use crate::folder::{self, WrittenRecord};
use crate::script;
use crate::start_time::start_of;

/// Asks the agent that migrates a tree to end the migration. Returns whether the program runs here; false if
/// it was given away.
///
/// # Errors
/// No agent migrates it.
pub fn abort(tree: i32) -> anyhow::Result<bool> {
    let folder = folder::path(&folder::source_name(tree, &start_of(tree)?));
    let waits = || tracing::warn!("-t {tree}: waiting for criu dump, which releases it");
    let answer = match script::ask_to_abort(&folder, waits) {
        Ok(answer) => answer,
        // No agent listens.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => None,
        Err(error) => return Err(error).with_context(|| format!("-t {tree}: asking its `rewake migrate`")),
    };
    answer.with_context(|| match folder::read_record(&folder) {
        Ok(Some(WrittenRecord::Source(entry))) if entry.record == SourceRecord::Granted => {
            format!(
                "-t {tree}: it was given to {}, and its agent has ended: migrate it again with that --to",
                entry.to
            )
        }
        _ => format!("-t {tree}: no `rewake migrate` of it runs, or it has just ended"),
    })
}
