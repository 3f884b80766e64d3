// SPDX-License-Identifier: MIT OR Apache-2.0
//! Directories that cannot change places, because they are in a lower layer of overlayfs, as in a container's
//! image. Their files can be replaced, but the kernel renames no such directory (EXDEV), unless the mount has
//! `redirect_dir`.
//!
//! Before a dump writes anything, such a directory is copied into a new one, which takes its place: by hard
//! links, for which overlayfs copies each file into the upper layer. This is not one step. The copy is
//! complete before the first file is removed, and a dump that is killed in between leaves it: no later dump
//! removes it then ([`is_only_copy`]).

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use rewake_criu_images::{INVENTORY_NAME, ImageLease};

/// Whether the kernel would move a directory. `beside` is an empty directory in the same folder.
///
/// It is asked to put the directory in the place of one that is not empty, which it always refuses: with
/// EXDEV if it does not move the directory at all.
pub(super) fn can_move(target: &Path, beside: &Path) -> anyhow::Result<bool> {
    let (full, inner) = (beside.join("full"), beside.join("full/inner"));
    fs::create_dir_all(&inner).context("making a directory")?;
    let moved = renameat2(AT_FDCWD, target, AT_FDCWD, &full, RenameFlags::empty());
    fs::remove_dir(&inner).and_then(|()| fs::remove_dir(&full)).context("removing a directory")?;
    Ok(moved != Err(Errno::EXDEV))
}

/// Puts a copy of a directory in its place. `copy` is an empty directory of this process, with its owner and
/// mode, and `old` the lease of the image.
///
/// # Errors
/// A restore reads the image, or the kernel refuses. Once files were removed, the error says where the copy
/// is.
pub(super) fn copy_up(target: &Path, copy: &Path, old: Option<&ImageLease>) -> anyhow::Result<()> {
    let shown = target.display();
    let copied = || -> anyhow::Result<_> {
        ensure!(
            old.map_or(Ok(true), ImageLease::make_exclusive)?,
            "-D {shown}: it is in a lower layer of overlayfs, and a restore reads its image: use another \
             directory"
        );
        let mut all = names(target)?;
        for name in &all {
            fs::hard_link(target.join(name), copy.join(name))
                .with_context(|| format!("copying {}", target.join(name).display()))?;
        }
        fs::File::open(copy).and_then(|copy| copy.sync_all()).context("writing the copy to the disk")?;
        // Without it a directory has no complete image, so that a later dump knows the copy as the only one.
        all.sort_by_key(|name| name != INVENTORY_NAME);
        Ok(all)
    };
    let all = copied().inspect_err(|_| {
        // The first error is the one to report; the next dump removes what is left.
        let _ = fs::remove_dir_all(copy);
    })?;
    let replaced = all.iter().try_for_each(|name| fs::remove_file(target.join(name)));
    replaced.and_then(|()| fs::rename(copy, target)).with_context(|| {
        format!("putting {} in the place of {shown}, of which it is a complete copy", copy.display())
    })
}

/// Whether a directory has a complete image, and the target, whose place it was to take, has none.
pub(super) fn is_only_copy(leftover: &Path, target: &Path) -> bool {
    let has = |directory: &Path, name| directory.join(name).symlink_metadata().is_ok();
    has(leftover, INVENTORY_NAME) && !has(target, INVENTORY_NAME)
}

/// The names of the files in a directory.
pub(super) fn names(directory: &Path) -> anyhow::Result<Vec<OsString>> {
    let entries =
        fs::read_dir(directory).and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect());
    entries.with_context(|| format!("listing {}", directory.display()))
}

#[cfg(test)]
mod tests {
    use rewake_manifest::MANIFEST_NAME;

    use super::*;

    #[test]
    fn a_copy_is_complete_before_a_file_of_the_old_image_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let [target, copy] = ["image", ".image.rewake-abcdef"].map(|name| root.path().join(name));
        [&target, &copy].into_iter().for_each(|directory| fs::create_dir(directory).unwrap());
        for name in ["pages-1.img", MANIFEST_NAME, INVENTORY_NAME] {
            fs::write(target.join(name), name).unwrap();
        }
        assert!(can_move(&target, &copy).unwrap(), "this is no lower layer");
        assert_eq!(names(&copy).unwrap().len(), 0);
        assert!(!is_only_copy(&copy, &target));
        let lease = ImageLease::shared(&target).unwrap().unwrap();
        let reader = ImageLease::shared(&target).unwrap().unwrap();
        let refused = copy_up(&target, &copy, Some(&lease)).unwrap_err().to_string();
        assert!(refused.contains("a restore reads its image"), "{refused}");
        assert!(!copy.exists() && names(&target).unwrap().len() == 3);
        drop(reader);
        fs::create_dir(&copy).unwrap();
        copy_up(&target, &copy, Some(&lease)).unwrap();
        assert!(!copy.exists());
        assert_eq!(fs::read_to_string(target.join("pages-1.img")).unwrap(), "pages-1.img");
        // A dump that was killed in between: the old image is in the copy only.
        fs::rename(&target, &copy).unwrap();
        fs::create_dir(&target).unwrap();
        fs::write(target.join("pages-1.img"), "").unwrap();
        assert!(is_only_copy(&copy, &target));
    }
}
