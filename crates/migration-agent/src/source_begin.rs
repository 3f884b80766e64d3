// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a source begins: what an earlier agent has left, the tree's group, and the offer.

use anyhow::{Context as _, bail, ensure};
use rewake_migration::message::FromSource;
use rewake_migration::record::SourceRecord;
use rewake_process::proc;

use crate::cgroup::{self, TreeCgroup};
use crate::folder::{MigrationFolder, SourceEntry, WrittenRecord};
use crate::frame::{Frame, new_id};
use crate::host::HostOffer;
use crate::source::SourceOptions;

/// What an agent of the tree has left.
pub(crate) fn earlier(folder: &MigrationFolder) -> anyhow::Result<Option<SourceEntry>> {
    match folder.read()? {
        Some(WrittenRecord::Source(entry)) => Ok(Some(entry)),
        Some(WrittenRecord::Destination(_)) => {
            bail!("{}: the record of a destination", folder.path().display())
        }
        None => Ok(None),
    }
}

/// The start time of a process, which no other one of its number has.
pub(crate) fn start_of(pid: i32) -> anyhow::Result<String> {
    let start = proc::stat(pid).ok().and_then(|fields| fields.get(19).cloned());
    start.with_context(|| format!("-t {pid}: no such process"))
}

/// Gives the tree a group, writes that down, and describes the tree for the destination. An error leaves nothing.
pub(crate) fn begin(
    options: &SourceOptions,
    folder: &MigrationFolder,
) -> anyhow::Result<(SourceEntry, String)> {
    let cgroup = TreeCgroup::of_tree(options.tree)?;
    let begun = describe(options, &cgroup).and_then(|offer| {
        let (id, to) = (new_id()?, options.to.clone());
        let entry = SourceEntry { record: SourceRecord::Started, id, to, cgroup: cgroup.clone() };
        folder.write(&WrittenRecord::Source(entry.clone()))?;
        Ok((entry, offer))
    });
    if begun.is_err() {
        cgroup.release();
    }
    begun
}

/// Describes the tree for the destination.
fn describe(options: &SourceOptions, cgroup: &TreeCgroup) -> anyhow::Result<String> {
    // With zombies, which a group has not.
    let processes: Vec<i32> =
        cgroup::tree(options.tree)?.union(&cgroup.processes()?.into_iter().collect()).copied().collect();
    let mut offer = HostOffer::of(&processes, &options.criu)?;
    offer.give_up_after = options.lost_limit().as_secs();
    let refusals = offer.refused_here(options);
    ensure!(refusals.is_empty(), "{}", refusals.join("; "));
    let offer = serde_json::to_string(&offer)?;
    let frame = Frame::Source(FromSource::Offer(offer.clone()));
    frame.check().context("the description of the tree's files, sockets and pids")?;
    Ok(offer)
}
