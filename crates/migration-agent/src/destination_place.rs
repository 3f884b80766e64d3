// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a destination has before its source connects: new, or left by an agent that was killed.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use nix::fcntl::Flock;
use rewake_migration::destination::DestinationInput;
use rewake_migration::record::DestinationRecord;

use crate::candidates::CandidateStore;
use crate::cgroup::TreeCgroup;
use crate::folder::{self, DestinationEntry, MigrationFolder, WrittenRecord};
use crate::frame::new_name;
use crate::page_client::PageClient;

/// The place of one migration.
pub(crate) struct DestinationPlace {
    pub(crate) folder: MigrationFolder,
    /// CRIU's work directory.
    pub(crate) work: PathBuf,
    pub(crate) entry: DestinationEntry,
    pub(crate) cgroup_lock: Flock<File>,
    pub(crate) store: CandidateStore,
    pub(crate) scripts: UnixListener,
}

impl DestinationPlace {
    /// Makes a new one.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let name = new_name(folder::DESTINATION)?;
        let folder = MigrationFolder::open(&name)?;
        let work = folder::work(&name);
        match Self::begin(&folder, &work) {
            Ok((entry, cgroup_lock, store, scripts)) => {
                Ok(Self { folder, work, entry, cgroup_lock, store, scripts })
            }
            Err(error) => {
                // It may not exist.
                let _ = fs::remove_dir_all(&work);
                folder.remove();
                Err(error)
            }
        }
    }

    /// Makes what a restore needs. The caller removes both folders if that fails.
    fn begin(
        folder: &MigrationFolder,
        work: &Path,
    ) -> anyhow::Result<(DestinationEntry, Flock<File>, CandidateStore, UnixListener)> {
        let made = DirBuilder::new().mode(0o700).create(work);
        made.with_context(|| format!("making {}", work.display()))?;
        let store = CandidateStore::make(work)?;
        let scripts = folder.listen()?;
        let (cgroup, lock) = TreeCgroup::for_restore()?;
        let entry = DestinationEntry {
            record: DestinationRecord::Started,
            id: None,
            peer: None,
            client: None,
            restore: None,
            has_ended: false,
            cgroup,
        };
        if let Err(error) = folder.write(&WrittenRecord::Destination(entry.clone())) {
            entry.cgroup.release();
            return Err(error);
        }
        Ok((entry, lock, store, scripts))
    }

    /// Takes the place of an agent that was killed after RELEASE, whose program still runs, and is served or
    /// has all its memory, or `None` if none exists. All memory that is missing is at the source: its
    /// candidates are forgotten.
    pub(crate) fn left() -> anyhow::Result<Option<Self>> {
        for name in folder::destinations() {
            // Another agent uses it.
            let Some((folder, entry)) = folder::left_destination(&name) else { continue };
            let work = folder::work(&name);
            let client = entry.client.clone().map(PageClient::Left);
            let end = client.map(|mut client| client.end(&entry.cgroup, &work));
            let is_right = matches!(end, Some(None | Some(DestinationInput::Resident)));
            if entry.record == DestinationRecord::Released && is_right && entry.cgroup.has_processes() {
                let (cgroup_lock, store) = (entry.cgroup.lock()?, CandidateStore::make(&work)?);
                let scripts = folder.listen()?;
                return Ok(Some(Self { folder, work, entry, cgroup_lock, store, scripts }));
            }
        }
        Ok(None)
    }
}
