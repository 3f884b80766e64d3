// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a source begins: what an earlier agent has left, the tree's group, who calls it, and the offer.

use std::sync::mpsc::{Receiver, SyncSender};
use std::thread;

use anyhow::{Context as _, bail, ensure};
use rewake_migration::message::FromSource;
use rewake_migration::record::SourceRecord;

use crate::cgroup::{self, TreeCgroup};
use crate::folder::{MigrationFolder, SourceEntry, WrittenRecord};
use crate::frame::{Frame, new_id};
use crate::host::HostOffer;
use crate::script::{self, AgentCall};
use crate::source_link::SourceEvent;
use crate::source_options::SourceOptions;

const ABORTED: &str = "the source's user ended the migration";

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

/// Gives the tree a group, writes that down, and describes the tree for the destination. An error leaves
/// nothing.
pub(crate) fn begin(
    options: &SourceOptions,
    folder: &MigrationFolder,
    sender: &SyncSender<SourceEvent>,
    events: &Receiver<SourceEvent>,
) -> anyhow::Result<(SourceEntry, String)> {
    let cgroup = TreeCgroup::of_tree(options.tree)?;
    let begun = describe(options, &cgroup, sender, events).and_then(|offer| {
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
fn describe(
    options: &SourceOptions,
    cgroup: &TreeCgroup,
    sender: &SyncSender<SourceEvent>,
    events: &Receiver<SourceEvent>,
) -> anyhow::Result<String> {
    // With zombies, which a group has not.
    let processes: Vec<i32> =
        cgroup::tree(options.tree)?.union(&cgroup.processes()?.into_iter().collect()).copied().collect();
    let (criu, sender) = (options.criu.clone(), sender.clone());
    thread::spawn(move || {
        let described = HostOffer::in_time(processes, &criu);
        // The agent may have ended.
        let _ = sender.send(SourceEvent::Described(Box::new(described)));
    });
    let mut offer = described(events)?;
    offer.give_up_after = options.lost_limit().as_secs();
    let refusals = offer.refused_here(options);
    ensure!(refusals.is_empty(), "{}", refusals.join("; "));
    let offer = serde_json::to_string(&offer)?;
    let frame = Frame::Source(FromSource::Offer(offer.clone()));
    frame.check().context("the description of the tree's files, sockets and pids")?;
    Ok(offer)
}

/// Waits until the tree is described. A user may end the migration meanwhile.
fn described(events: &Receiver<SourceEvent>) -> anyhow::Result<HostOffer> {
    loop {
        match events.recv()? {
            SourceEvent::Described(offer) => return *offer,
            SourceEvent::Abort => bail!(ABORTED),
            SourceEvent::Called(AgentCall::Abort, caller) => {
                // The caller may have ended.
                let _ = caller.decide(true);
                bail!(ABORTED);
            }
            // Nothing else is begun.
            _ => {}
        }
    }
}

/// Listens for CRIU's action scripts, and for `rewake migrate --abort`.
pub(crate) fn listen_to_scripts(
    folder: &MigrationFolder,
    sender: SyncSender<SourceEvent>,
) -> anyhow::Result<()> {
    let listener = folder.listen()?;
    thread::spawn(move || {
        script::receive(&listener, |call, script| sender.send(SourceEvent::Called(call, script)).is_ok());
    });
    Ok(())
}

/// Passes on the user's wishes to end the migration.
pub(crate) fn forward_aborts(aborts: Receiver<()>, sender: SyncSender<SourceEvent>) {
    thread::spawn(move || while aborts.recv().is_ok() && sender.send(SourceEvent::Abort).is_ok() {});
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    /// A file system that does not answer delays no abort.
    #[test]
    fn a_user_ends_a_migration_while_files_are_looked_at() {
        let (sender, events) = sync_channel(1);
        sender.send(SourceEvent::Abort).unwrap();
        assert_eq!(described(&events).unwrap_err().to_string(), ABORTED);
        let looked_at = Err(anyhow::anyhow!("it does not answer"));
        sender.send(SourceEvent::Described(Box::new(looked_at))).unwrap();
        assert_eq!(described(&events).unwrap_err().to_string(), "it does not answer");
    }
}
