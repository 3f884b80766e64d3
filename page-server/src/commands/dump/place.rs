// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a dump writes: an old image stays whole until the new one takes its place.
//!
//! * A directory without an image is filled as it is. The manifest is written last, and a directory without
//!   one is no complete image.
//! * A directory with an image stays as it is. CRIU writes into a directory beside it, which then changes
//!   places with it in one step (`renameat2(2)`, `RENAME_EXCHANGE`).
//!
//! The directory that is written is locked for as long as this process or CRIU lives. The next dump removes
//! such directories that have no lock and no reader, because killed dumps have left them.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail, ensure};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use rewake_criu_images::ImageLease;
use rewake_manifest::{MANIFEST_NAME, PARENT};
use rewake_process::file_lock::{DirectoryLock, Leftover};
use rewake_process::names::{lines, unescaped};

use super::super::print;
use super::overlay;

/// Directories that were removed by another dump before they were locked: each dump removes them once.
const MAX_TRIES: u32 = 5;
/// Random letters at the end of the name of a directory next to the target.
const SUFFIX: usize = 6;
/// What CRIU writes in its work directory when the tree has ended.
const STATISTICS: &str = "stats-dump";

/// The directory of a dump.
#[derive(Debug)]
pub(super) struct DumpPlace {
    /// The user's directory.
    target: PathBuf,
    /// Where CRIU writes: the target, or a directory next to it.
    images: PathBuf,
    /// Device and inode of `images`.
    identity: (u64, u64),
    /// The locks of `images` and of the target, which CRIU shares; fewer where the file system has none.
    _locks: Vec<DirectoryLock>,
    /// The lease of the old image, or `None` if that image is incomplete.
    old: Option<ImageLease>,
}

impl DumpPlace {
    /// Prepares the directory `target`, a full path. `log` is the name of CRIU's log.
    ///
    /// # Errors
    /// Another dump or a restore uses the directory, or it cannot be replaced.
    pub(super) fn prepare(target: &Path, log: &Path) -> anyhow::Result<Self> {
        remove_leftovers(target)?;
        if !has_image(target)? {
            return Self::inside(target);
        }
        match Self::beside(target, log, false)? {
            Some(place) => Ok(place),
            // The directory is another one now.
            None => Self::beside(target, log, true)?.context("the directory was copied, and cannot be moved"),
        }
    }

    fn inside(target: &Path) -> anyhow::Result<Self> {
        let lock = match DirectoryLock::take(target) {
            Ok(None) => {
                bail!("-D {}: another dump writes into it, or a copy or a restore does", target.display())
            }
            // Remote file systems may have no locks of directories: there is no image to protect.
            lock => lock.ok().flatten(),
        };
        Self::new(target, target.to_owned(), lock.into_iter().collect(), None)
    }

    /// Makes a directory next to the target. Returns `None` if the target could not have changed places with
    /// that directory, and was copied into one that can. The caller then calls this again, with `is_copied`.
    fn beside(target: &Path, log: &Path, is_copied: bool) -> anyhow::Result<Option<Self>> {
        let being_removed = || format!("-D {}: another dump is removing it", target.display());
        let of_target = match DirectoryLock::take(target) {
            Ok(None) => {
                bail!(
                    "-D {}: another dump writes into it, or a copy or a restore does: wait until it has \
                     ended",
                    target.display()
                )
            }
            lock => lock.ok().flatten(),
        };
        let old = match ImageLease::shared(target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            old => Some(old.context("leasing the old image")?.with_context(being_removed)?),
        };
        check_replaceable(target)?;
        let (images, lock) = make_beside(target)?;
        if !overlay::can_move(target, &images)? {
            let moved = match is_copied {
                true => Err(anyhow!(
                    "-D {}: this file system cannot move it: use another directory",
                    target.display()
                )),
                false => overlay::copy_up(target, &images, old.as_ref()),
            };
            return moved.map(|()| None);
        }
        let locks = [Some(lock), of_target].into_iter().flatten().collect();
        let place = Self::new(target, images, locks, old)?;
        let prepared = place.check_exchange().and_then(|()| place.keep_other_files(log));
        if prepared.is_err() {
            place.abandon(log);
        }
        prepared.map(|()| Some(place))
    }

    fn new(
        target: &Path,
        images: PathBuf,
        locks: Vec<DirectoryLock>,
        old: Option<ImageLease>,
    ) -> anyhow::Result<Self> {
        locks
            .iter()
            .try_for_each(DirectoryLock::inherit)
            .context("sharing the lock of the image directory")?;
        let of = fs::metadata(&images).with_context(|| images.display().to_string())?;
        Ok(Self { target: target.to_owned(), images, identity: (of.dev(), of.ino()), _locks: locks, old })
    }

    /// Where CRIU writes.
    pub(super) fn images(&self) -> &Path {
        &self.images
    }

    fn is_beside(&self) -> bool {
        self.images != self.target
    }

    /// Whether the user's directory has the new image.
    pub(super) fn is_committed(&self) -> anyhow::Result<bool> {
        Ok(self.is_in_place()? && self.target.join(MANIFEST_NAME).symlink_metadata().is_ok())
    }

    /// Whether the new image has changed places with an old one.
    pub(super) fn is_exchanged(&self) -> anyhow::Result<bool> {
        Ok(self.is_beside() && self.is_in_place()?)
    }

    fn is_in_place(&self) -> anyhow::Result<bool> {
        let now =
            fs::metadata(&self.target).with_context(|| format!("looking at {}", self.target.display()))?;
        Ok((now.dev(), now.ino()) == self.identity)
    }

    /// Ends a failed dump: the old image stays, and gets the log.
    pub(super) fn abandon(&self, log: &Path) {
        if !self.is_beside() {
            return;
        }
        // The dump's error is the one to report; the next dump removes what is left.
        let _ = fs::rename(self.images.join(log), self.target.join(log));
        let _ = fs::remove_dir_all(&self.images);
    }

    /// Removes the old image after the exchange; returns false if a restore uses it. The next dump removes it
    /// then.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(super) fn remove_old(&self) -> anyhow::Result<bool> {
        if !self.is_beside() {
            return Ok(true);
        }
        if let Some(old) = &self.old
            && !old.make_exclusive()?
        {
            return Ok(false);
        }
        fs::remove_dir_all(&self.images).with_context(|| format!("removing {}", self.images.display()))?;
        Ok(true)
    }

    /// Checks that this file system exchanges directories in one step.
    fn check_exchange(&self) -> anyhow::Result<()> {
        let [one, two] = ["1", "2"].map(|name| self.images.join(name));
        fs::create_dir(&one).and_then(|()| fs::create_dir(&two)).context("making a directory")?;
        let exchanged = exchange(&one, &two);
        fs::remove_dir(&one).and_then(|()| fs::remove_dir(&two)).context("removing a directory")?;
        exchanged.with_context(|| {
            let target = self.target.display();
            format!(
                "-D {target}: it has an image, and this file system cannot replace it in one step: use \
                an empty one"
            )
        })
    }

    /// Gives the new directory the old one's files that are not part of its image, because a dump leaves them
    /// alone.
    fn keep_other_files(&self, log: &Path) -> anyhow::Result<()> {
        for name in overlay::names(&self.target)? {
            let is_written = name == log.as_os_str() || name == STATISTICS;
            if is_of_image(&name) || is_written {
                continue;
            }
            let (from, to) = (self.target.join(&name), self.images.join(&name));
            fs::hard_link(&from, to).with_context(|| format!("-D: keeping {}", from.display()))?;
        }
        Ok(())
    }
}

/// Puts a complete image in the place of the old one. Both directories are on the disk.
///
/// # Errors
/// The kernel refuses: the old image stays.
pub(super) fn commit(images: &Path, target: &Path) -> anyhow::Result<()> {
    if images == target {
        return Ok(());
    }
    exchange(images, target)
        .with_context(|| format!("putting the image in the place of {}", target.display()))?;
    let parent = target.parent().unwrap_or(target);
    fs::File::open(parent).and_then(|parent| parent.sync_all()).with_context(|| parent.display().to_string())
}

fn exchange(one: &Path, two: &Path) -> io::Result<()> {
    renameat2(AT_FDCWD, one, AT_FDCWD, two, RenameFlags::RENAME_EXCHANGE).map_err(io::Error::from)
}

/// Whether a directory has files of an image, complete or not. CRIU writes through symbolic links, so links
/// to files count: what they lead to may be another image's. A link `parent` alone is no image: an
/// incremental dump begins so.
fn has_image(target: &Path) -> anyhow::Result<bool> {
    let is_one = |name: &OsString| {
        let found = target.join(name).symlink_metadata();
        found.is_ok_and(|of| of.is_file() || of.is_symlink() && name != PARENT)
    };
    Ok(overlay::names(target)?.iter().any(|name| is_of_image(name) && is_one(name)))
}

/// Whether a dump or Rewake makes files of this name in an image directory.
fn is_of_image(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name.ends_with(b".img") || name.starts_with(b"rewake-") || name == PARENT.as_bytes()
}

/// Checks that a directory with an image can be replaced as a whole.
fn check_replaceable(target: &Path) -> anyhow::Result<()> {
    let shown = target.display();
    if let Some(child) = child_beside(target)? {
        bail!(
            "-D {shown}: the image in {} is incremental and needs its pages: dump into another directory, or \
             remove that image first",
            child.display()
        );
    }
    ensure!(
        !is_mount_point(target)?,
        "-D {shown}: it has an image and is a mount point, so no new image can take its place in one step: \
         use a directory below it, or empty it"
    );
    for name in overlay::names(target)? {
        if target.join(&name).symlink_metadata().is_ok_and(|of| of.is_dir()) {
            bail!(
                "-D {shown}: it has an image and the directory {}; the new image replaces all of it: use a \
                 directory for each image",
                name.display()
            );
        }
    }
    Ok(())
}

/// Returns an image beside this one that has it as its parent.
fn child_beside(target: &Path) -> anyhow::Result<Option<PathBuf>> {
    let Some(folder) = target.parent() else { return Ok(None) };
    let is_child = |path: &PathBuf| path.join("parent").canonicalize().is_ok_and(|parent| parent == target);
    Ok(overlay::names(folder)?.into_iter().map(|name| folder.join(name)).find(is_child))
}

fn is_mount_point(directory: &Path) -> anyhow::Result<bool> {
    let mounts = fs::read("/proc/self/mountinfo").context("reading /proc/self/mountinfo")?;
    let place = |line: &[u8]| line.split(|byte| *byte == b' ').nth(4).map(unescaped);
    Ok(lines(&mounts).any(|line| place(line).as_deref() == Some(directory.as_os_str().as_bytes())))
}

/// What the names of directories beside this one begin with.
fn prefix(target: &Path) -> anyhow::Result<OsString> {
    let name = target
        .file_name()
        .with_context(|| format!("-D {}: no new image can take its place", target.display()))?;
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".rewake-");
    Ok(prefix)
}

/// Makes and locks a directory beside the target, with its owner and mode.
fn make_beside(target: &Path) -> anyhow::Result<(PathBuf, DirectoryLock)> {
    let parent = target.parent().unwrap_or(target);
    let of = fs::metadata(target)?;
    for _ in 0..MAX_TRIES {
        let made = tempfile::Builder::new().prefix(&prefix(target)?).rand_bytes(SUFFIX).tempdir_in(parent);
        let made = made.with_context(|| format!("making a directory in {}", parent.display()))?.keep();
        // Another dump may take it for a leftover, until it is locked.
        let Some(lock) = DirectoryLock::take(&made).with_context(|| format!("locking {}", made.display()))?
        else {
            continue;
        };
        if !lock.is_of(&made) {
            continue;
        }
        // By its descriptor: another user may have put a link in its place.
        lock.give_to(&of).context("giving the new directory its owner and mode")?;
        return Ok((made, lock));
    }
    bail!("making a directory beside {}: other dumps have removed {MAX_TRIES} of them", target.display());
}

/// Removes directories beside the target that killed dumps have left, or restores that have ended since.
fn remove_leftovers(target: &Path) -> anyhow::Result<()> {
    let (Some(parent), Ok(prefix)) = (target.parent(), prefix(target)) else { return Ok(()) };
    let is_one =
        |name: &OsStr| name.as_bytes().starts_with(prefix.as_bytes()) && name.len() == prefix.len() + SUFFIX;
    let found = Leftover::all(parent, is_one).with_context(|| format!("listing {}", parent.display()))?;
    for leftover in found {
        if overlay::is_only_copy(&leftover.path, target) {
            print::say(format!(
                "{} has a complete image that a killed dump could not put in the place of {}: move it there, \
                 or remove it",
                leftover.path.display(),
                target.display()
            ));
            continue;
        }
        let has_reader = match ImageLease::shared(&leftover.path) {
            Ok(lease) => !lease.is_some_and(|lease| lease.make_exclusive().unwrap_or(false)),
            Err(_) => false,
        };
        if !has_reader {
            let path = leftover.path.display().to_string();
            leftover.remove().with_context(|| format!("removing {path}"))?;
        }
    }
    Ok(())
}
