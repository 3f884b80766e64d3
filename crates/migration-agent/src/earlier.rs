// SPDX-License-Identifier: MIT OR Apache-2.0
//! Migrations to this host whose agents were killed, or whose sources were not reached: their programs are
//! ended, and their sources get an answer.

use std::fs;
use std::time::Duration;

use anyhow::Context as _;
use rewake_migration::destination::{DestinationInput, DestinationOutput, MigrationDestination};
use rewake_migration::record::DestinationRecord;
use rewake_peer_stream::PeerStream;

use crate::folder::{self, DestinationEntry, MigrationFolder, WrittenRecord};
use crate::frame::{Frame, FrameWriter, MigrationId};
use crate::peer::CertificateDigest;
use crate::source;

/// Time after which no source is expected to ask for its program: twice as long as one waits for an answer.
const SOURCE_LIMIT: Duration = source::GIVE_UP_LIMIT.saturating_mul(2);

/// A migration whose source may still ask for its program.
#[derive(Debug)]
pub(crate) struct EarlierMigration {
    pub(crate) id: MigrationId,
    /// The certificate of its source, which has TLS.
    pub(crate) peer: Option<CertificateDigest>,
    record: DestinationRecord,
    folder: MigrationFolder,
}

impl EarlierMigration {
    /// Ends what agents that were killed have left. Programs that ran here lack memory that no process loads
    /// any more.
    pub(crate) fn end_all() -> Vec<Self> {
        folder::destinations().into_iter().filter_map(|name| Self::end(&name)).collect()
    }

    fn end(name: &str) -> Option<Self> {
        // Another agent uses it.
        let (folder, entry) = folder::left_destination(name)?;
        if entry.has_ended && folder.record_age() > SOURCE_LIMIT {
            folder.remove();
            return None;
        }
        entry.cgroup.kill();
        entry.cgroup.release();
        // What cannot be removed is found again.
        let _ = fs::remove_dir_all(folder::work(name));
        folder.remove_images();
        let Some(id) = entry.id else {
            folder.remove();
            return None;
        };
        match entry.record {
            _ if entry.has_ended => {
                tracing::warn!(
                    "an earlier program does not run here, and its source may not know: it is answered"
                );
            }
            DestinationRecord::Started => {
                tracing::warn!("an earlier agent was killed before RELEASE: its program never ran here");
            }
            DestinationRecord::Released => {
                tracing::error!(
                    "an earlier agent was killed after RELEASE: its program lacked memory, and was killed; \
                     `rewake migrate` at its source ends its frozen processes when it is run again"
                );
            }
        }
        let (peer, record) = (entry.peer, entry.record);
        if !entry.has_ended
            && let Err(error) =
                folder.write(&WrittenRecord::Destination(DestinationEntry { has_ended: true, ..entry }))
        {
            tracing::warn!("{error:#}");
        }
        Some(Self { id, peer, record, folder })
    }

    /// Answers the source on one connection, and returns when it has confirmed the answer.
    ///
    /// # Errors
    /// It may not have it, and is to be answered again.
    pub(crate) fn answer(&self, mut stream: PeerStream) -> anyhow::Result<()> {
        let writer = FrameWriter::new(stream.clone());
        let (mut machine, _) = MigrationDestination::restarted(self.record, false);
        while !machine.is_confirmed() {
            let frame = Frame::read(&mut stream)?.context("the source ended the connection")?;
            let Frame::Source(message) = frame else { continue };
            for output in machine.step(DestinationInput::Received(message)) {
                if let DestinationOutput::Send(message) = output {
                    writer.send(&Frame::Destination(message))?;
                }
            }
        }
        writer.close();
        Ok(())
    }

    /// Forgets the migration, whose source has its answer.
    pub(crate) fn forget(self) {
        self.folder.remove();
    }
}
