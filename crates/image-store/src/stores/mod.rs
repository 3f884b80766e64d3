// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stores: what is left out without the feature `stores`.

pub(crate) mod answer;
pub(crate) mod blocks;
pub(crate) mod connect;
pub(crate) mod format;
pub(crate) mod garbage;
pub(crate) mod generated;
pub(crate) mod manifest_bytes;
pub(crate) mod names;
pub(crate) mod pack;
pub(crate) mod pack_run;
pub(crate) mod pinned;
pub(crate) mod profile;
pub(crate) mod push;
pub(crate) mod read_ahead;
pub(crate) mod reader;
pub(crate) mod registry;
pub(crate) mod served;
pub(crate) mod shared_reads;
pub(crate) mod source;
pub(crate) mod store;
pub(crate) mod stored_chunk;
pub(crate) mod stored_range;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod verify;
#[cfg(test)]
pub(crate) mod walk;
pub(crate) mod working_set;

/// Returns whether this program can use stores.
///
/// # Errors
/// None: it can.
pub fn need_stores(_what: &str) -> crate::Result<()> {
    Ok(())
}
