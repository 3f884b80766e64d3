// SPDX-License-Identifier: MIT OR Apache-2.0
//! The render nodes that a task opens.
//!
//! A container's `/dev` comes from its image, so it has the nodes of the GPUs that the container had, and not
//! of those that it gets. A missing node is made, as container engines make it when they start a container:
//! an open file of another root's `/dev` would work, but CRIU could not dump the program again. The device
//! cgroup still decides whether the task may make and open it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, mknod, stat, umask};
use nix::unistd::{Gid, Uid, fchownat};
use rewake_amdgpu_uapi::render::Render;
use rewake_criu_plugin::Answer;

#[derive(Debug, thiserror::Error)]
enum BadNode {
    #[error("look at {}, as CRIU's main process sees it", .0.display())]
    OfHost(PathBuf, #[source] Errno),
    #[error("open {} in this task's root", .0.display())]
    Open(PathBuf, #[source] Errno),
    #[error(
        "make {}, which this task's /dev does not have, because /dev is of the image: mount the host's \
         /dev/dri into the container",
        .0.display()
    )]
    Make(PathBuf, #[source] Errno),
    #[error("{} in this task's root is another file than that of the host", .0.display())]
    Other(PathBuf),
}

/// The render nodes of the machine, by their minor numbers, as CRIU's main process sees them. Tasks inherit
/// them.
#[derive(Debug)]
pub(super) struct RenderNodes(BTreeMap<u32, nix::Result<FileStat>>);

impl RenderNodes {
    /// Looks at the nodes. Called in CRIU's main process, because a task sees the `/dev` of its own root.
    pub(super) fn of_host(minors: impl Iterator<Item = u32>) -> Self {
        // A GPU whose node is hidden from CRIU may be one that the image does not use.
        Self(minors.map(|minor| (minor, stat(&path(minor)))).collect())
    }

    /// Opens `/dev/dri/renderD<minor>` of this task's root.
    pub(super) fn open(&self, minor: u32) -> Answer<Render> {
        let path = path(minor);
        let of_host = self.0.get(&minor).copied().unwrap_or(Err(Errno::ENOENT));
        let of_host = of_host.map_err(|errno| BadNode::OfHost(path.clone(), errno))?;
        let failed = |errno| BadNode::Open(path.clone(), errno);
        let found = match look(&path) {
            Err(Errno::ENOENT) => {
                match make_node(&path, &of_host) {
                    // Another task of the container has made it.
                    Ok(()) | Err(Errno::EEXIST) => look(&path),
                    Err(errno) => return Err(BadNode::Make(path, errno).into()),
                }
            }
            found => found,
        };
        // The image decides what lies in its /dev, and opening a device may already do something.
        let (_, found) = found.map_err(failed)?;
        if !is_same_device(&found, &of_host) {
            return Err(BadNode::Other(path).into());
        }
        let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NOCTTY;
        let file = open(&path, flags, Mode::empty()).map_err(failed)?;
        // Another container may have this /dev too, and may have put another file there since.
        if !is_same_device(&fstat(&file).map_err(failed)?, &of_host) {
            return Err(BadNode::Other(path).into());
        }
        Ok(Render::of(file, minor))
    }
}

fn path(minor: u32) -> PathBuf {
    format!("/dev/dri/renderD{minor}").into()
}

/// Looks at a file without opening the device that it may be.
fn look(path: &Path) -> nix::Result<(OwnedFd, FileStat)> {
    let place = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW, Mode::empty())?;
    let found = fstat(&place)?;
    Ok((place, found))
}

fn is_same_device(found: &FileStat, of_host: &FileStat) -> bool {
    found.st_rdev == of_host.st_rdev && found.st_mode & libc::S_IFMT == libc::S_IFCHR
}

/// Makes the node with the number, the owner and the access that it has on the host.
fn make_node(path: &Path, of_host: &FileStat) -> nix::Result<()> {
    let before = umask(Mode::empty());
    let made = mknod(path, SFlag::S_IFCHR, Mode::from_bits_truncate(of_host.st_mode), of_host.st_rdev);
    umask(before);
    made?;
    let (user, group) = (Uid::from_raw(of_host.st_uid), Gid::from_raw(of_host.st_gid));
    let (place, made) = look(path)?;
    if !is_same_device(&made, of_host) {
        return Err(Errno::EEXIST);
    }
    fchownat(place, "", Some(user), Some(group), AtFlags::AT_EMPTY_PATH)
}
