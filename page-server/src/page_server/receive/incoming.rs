// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image that is received: its files are in a hidden folder until all of them are on the disk.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use rewake_criu_images::{Generation, MAX_TASKS, PagemapId, pages_name};
use rewake_process::file_lock::{DirectoryLock, Leftover};
use tempfile::TempDir;
use tracing::{info, warn};

use super::memory::ReceivedMemory;

/// Names of hidden folders begin like this.
const PREFIX: &str = ".rewake-incoming-";
/// The number of the first pages file. `criu page-server` has the same: the `criu dump` of an image counts
/// from 1.
const FIRST_PAGES_ID: u32 = 0x10001;
/// The most memories of an image, one for each task.
const MAX_MEMORIES: usize = MAX_TASKS;
/// Images of one task in the same directory.
const MAX_SAME_NAME: u32 = 10_000;

/// Where an image goes when it is complete.
#[derive(Debug)]
pub(super) enum Destination {
    /// Among the files of a directory. `previous` becomes its parent.
    Among {
        /// The directory.
        images: PathBuf,
        /// The parent, relative to it.
        previous: Option<PathBuf>,
    },
    /// A new folder in a directory, with the pid of the image's first task as its name.
    OwnFolder(PathBuf),
}

impl Destination {
    fn images(&self) -> &Path {
        match self {
            Self::Among { images, .. } | Self::OwnFolder(images) => images,
        }
    }
}

/// An image that is not complete. Dropping it removes all of it.
#[derive(Debug)]
pub(super) struct IncomingImage {
    destination: Destination,
    folder: TempDir,
    /// Held while this process uses the folder: see [`remove_leftovers`].
    lock: DirectoryLock,
    next_pages_id: u32,
    memories: Vec<(PagemapId, u32)>,
    seen: HashSet<PagemapId>,
}

impl IncomingImage {
    /// Makes its folder.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub(super) fn new(destination: Destination) -> anyhow::Result<Self> {
        let images = destination.images();
        let made = || -> io::Result<_> {
            // As directories are made: it may become the image's, which a task in a user namespace searches
            // itself.
            let mode = Permissions::from_mode(0o777);
            let folder = tempfile::Builder::new().prefix(PREFIX).permissions(mode).tempdir_in(images)?;
            let lock = DirectoryLock::take(folder.path())?.ok_or(io::ErrorKind::WouldBlock)?;
            Ok((folder, lock))
        };
        let (folder, lock) = made().with_context(|| format!("making a folder in {}", images.display()))?;
        let (next_pages_id, memories, seen) = (FIRST_PAGES_ID, Vec::new(), HashSet::new());
        Ok(Self { destination, folder, lock, next_pages_id, memories, seen })
    }

    /// Makes the files of a memory.
    pub(super) fn create(&mut self, id: PagemapId, generation: Generation) -> anyhow::Result<ReceivedMemory> {
        ensure!(self.seen.insert(id), "the client opens {id} twice: expected each memory once");
        ensure!(self.memories.len() < MAX_MEMORIES, "more than MAX_MEMORIES = {MAX_MEMORIES} memories");
        let pages_id = self.free_pages_id()?;
        self.memories.push((id, pages_id));
        ReceivedMemory::create(self.folder.path(), id, pages_id, generation)
    }

    /// Returns the next number of a pages file that the directory does not have. The pagemaps of an earlier
    /// dump keep their pages.
    fn free_pages_id(&mut self) -> anyhow::Result<u32> {
        loop {
            let id = self.next_pages_id;
            self.next_pages_id = id.checked_add(1).context("no number is left for a pages file")?;
            let is_taken = match &self.destination {
                Destination::Among { images, .. } => images.join(pages_name(id)).symlink_metadata().is_ok(),
                Destination::OwnFolder(_) => false,
            };
            if !is_taken {
                return Ok(id);
            }
        }
    }

    /// Returns the memories that were received.
    pub(super) fn memories(&self) -> impl Iterator<Item = PagemapId> {
        self.memories.iter().map(|(id, _)| *id)
    }

    /// Makes the image visible. All its files are on the disk. Returns its folder. An image without memory,
    /// of a dump that failed early, leaves nothing.
    pub(super) fn publish(self) -> anyhow::Result<PathBuf> {
        if self.memories.is_empty() {
            return Ok(self.destination.images().to_owned());
        }
        self.lock
            .directory()
            .sync_all()
            .with_context(|| format!("syncing {}", self.folder.path().display()))?;
        match &self.destination {
            Destination::Among { images, previous } => {
                self.move_files(images, previous.as_deref())?;
                sync(images)?;
                Ok(images.clone())
            }
            Destination::OwnFolder(images) => {
                let folder = self.move_folder(images)?;
                sync(images)?;
                Ok(folder)
            }
        }
    }

    /// Moves the pages, then the link to the parent, then the pagemaps: what a pagemap names exists by then.
    fn move_files(&self, images: &Path, previous: Option<&Path>) -> anyhow::Result<()> {
        for (_, pages_id) in &self.memories {
            let name = pages_name(*pages_id);
            rename(&self.folder.path().join(&name), &images.join(&name), RenameFlags::RENAME_NOREPLACE)?;
        }
        if let Some(previous) = previous {
            link(images, previous)?;
        }
        for (id, _) in &self.memories {
            let (from, to) = (self.folder.path().join(id.file_name()), images.join(id.file_name()));
            if to.exists() {
                warn!("{}: replaced; the pages file of the earlier dump stays", to.display());
            }
            rename(&from, &to, RenameFlags::empty())?;
        }
        Ok(())
    }

    /// Gives the folder the name of the first task's pid, or of the first memory if no task was dumped.
    fn move_folder(&self, images: &Path) -> anyhow::Result<PathBuf> {
        let task =
            self.memories().find_map(|id| if let PagemapId::Task(pid) = id { Some(pid) } else { None });
        let name = task.map_or_else(|| "no-task".to_owned(), |pid| pid.to_string());
        for number in 1..=MAX_SAME_NAME {
            let to = images.join(if number == 1 { name.clone() } else { format!("{name}.{number}") });
            match renameat2(AT_FDCWD, self.folder.path(), AT_FDCWD, &to, RenameFlags::RENAME_NOREPLACE) {
                Ok(()) => return Ok(to),
                Err(Errno::EEXIST | Errno::ENOTEMPTY) => {}
                Err(errno) => return Err(errno).with_context(|| format!("making {}", to.display())),
            }
        }
        bail!("{}: {MAX_SAME_NAME} images of task {name}: remove old ones", images.display())
    }
}

/// Removes the folders that servers left which were killed while they received an image.
pub(super) fn remove_leftovers(images: &Path) -> anyhow::Result<()> {
    let is_one = |name: &OsStr| name.as_bytes().starts_with(PREFIX.as_bytes());
    let found = Leftover::all(images, is_one).with_context(|| format!("listing {}", images.display()))?;
    for leftover in found {
        let path = leftover.path.display().to_string();
        info!("{path}: removing an image that was not complete");
        if let Err(error) = leftover.remove() {
            warn!(%error, "removing {path}");
        }
    }
    Ok(())
}

/// Links the parent as `criu dump --prev-images-dir` does, if it is not linked already.
fn link(images: &Path, previous: &Path) -> anyhow::Result<()> {
    let link = images.join(super::parent::LINK);
    match symlink(previous, &link) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("linking {}", link.display()))
        }
        _ => Ok(()),
    }
}

fn rename(from: &Path, to: &Path, flags: RenameFlags) -> anyhow::Result<()> {
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, flags) {
        Err(Errno::EEXIST) => bail!(
            "{}: another server has made it since: give each server that runs at the same time its own \
             directory",
            to.display()
        ),
        renamed => renamed.with_context(|| format!("moving {} to {}", from.display(), to.display())),
    }
}

fn sync(folder: &Path) -> anyhow::Result<()> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.with_context(|| format!("syncing {}", folder.display()))
}
