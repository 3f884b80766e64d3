// SPDX-License-Identifier: MIT OR Apache-2.0
//! Migrations to this host whose agents were killed: their programs are ended, and their sources get an answer.

use std::fs;

use anyhow::Context as _;
use rewake_migration::destination::{DestinationInput, DestinationOutput, MigrationDestination};
use rewake_migration::record::DestinationRecord;
use rewake_peer_stream::PeerStream;

use crate::folder::{self, MigrationFolder};
use crate::frame::{Frame, FrameWriter, MigrationId};
use crate::peer::CertificateDigest;

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
    /// Ends what agents that were killed have left. Programs that ran here lack memory that no process loads any more.
    pub(crate) fn end_all() -> Vec<Self> {
        folder::destinations().into_iter().filter_map(|name| Self::end(&name)).collect()
    }

    fn end(name: &str) -> Option<Self> {
        // Another agent uses it.
        let (folder, entry) = folder::left_destination(name)?;
        entry.cgroup.kill();
        entry.cgroup.release();
        // What cannot be removed is found again.
        let _ = fs::remove_dir_all(folder::work(name));
        let _ = fs::remove_dir_all(folder.images());
        let Some(id) = entry.id else {
            folder.remove();
            return None;
        };
        match entry.record {
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
        Some(Self { id, peer: entry.peer, record: entry.record, folder })
    }

    /// Answers the source on one connection, and returns when it has read the answer.
    ///
    /// # Errors
    /// It may not have read it, and is to be answered again.
    pub(crate) fn answer(&self, mut stream: PeerStream) -> anyhow::Result<()> {
        let writer = FrameWriter::new(stream.clone());
        let (mut machine, _) = MigrationDestination::restarted(self.record, false);
        let first = Frame::read(&mut stream)?.context("the source ended the connection")?;
        if let Frame::Source(message) = first {
            for output in machine.step(DestinationInput::Received(message)) {
                if let DestinationOutput::Send(message) = output {
                    writer.send(&Frame::Destination(message))?;
                }
            }
        }
        // Until the source has read the answer, and has ended the connection.
        while Frame::read(&mut stream)?.is_some() {}
        Ok(())
    }

    /// Forgets the migration, whose source has its answer.
    pub(crate) fn forget(self) {
        self.folder.remove();
    }
}
