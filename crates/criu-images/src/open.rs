// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the files of an image directory. Every reader of images finds them here, so all of them follow the
//! same symbolic links.
//!
//! People keep images as directories of links, for example into a store that has equal files once. A reader
//! often has more rights than the user who made a link, so a link is followed only if one of these users owns
//! it:
//!
//! * root, or the user of this process: neither gains anything by a link.
//! * The owner of the directory that the link is in. That user could not open every file that this process
//!   can, so such a link may only lead to a file of the same user. That all users may read a file is not
//!   enough: it may be in a directory that its owner has closed to others, as images of other programs are.
//!
//! This is the kernel's own rule for directories that all users can write (`fs.protected_symlinks`), with the
//! second condition added. The same holds for each link that a link leads to, and for the link `parent`.
//! Directories on the way are found as the kernel finds them. What a link leads to is opened only once it is
//! known to be a regular file, because to open a device can have effects. Nothing is written through a link:
//! writers use `O_NOFOLLOW`.
//!
//! A server of images gives a [`Beneath`], too. Then no link leads out of the directory that is served,
//! because the server's rights are not the rights of the links' owners.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, readlinkat};
use nix::libc;
use nix::sys::stat::{FileStat, Mode, fstat};
use nix::unistd::geteuid;
use rewake_process::beneath::{Beneath, leads_out};

/// Links to follow from one name: as many as the kernel follows (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// Why a file of an image directory was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A symbolic link that is not followed.
    #[error("is a symbolic link {0}")]
    Link(LinkRefusal),
    /// Another kind of file.
    #[error("not a regular file")]
    NotRegular,
    /// The kernel's.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why a symbolic link is not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LinkRefusal {
    /// Another user made the link.
    #[error(
        "of user {owner} in a directory of user {directory}: it is followed only if it belongs to that user, \
         to root or to the user of this process; replace it with the file"
    )]
    Owner {
        /// The link's owner.
        owner: u32,
        /// The directory's owner.
        directory: u32,
    },
    /// The link's owner may be unable to read the file.
    #[error("of user {owner} to a file of user {of}; replace it with the file, or give the link to root")]
    Private {
        /// The link's owner.
        owner: u32,
        /// The file's owner.
        of: u32,
    },
    /// There is no file at its end.
    #[error("that leads to no file; restore the file, or remove the link")]
    Dangling,
    /// It leads out of the directory with the images.
    #[error("that leads out of the directory with the images; copy what it leads to into that directory")]
    LeadsOut,
    /// There are too many links on the way.
    #[error("to more than {MAX_LINKS} others")]
    TooMany,
}

/// A file that was found, and not opened yet.
#[derive(Debug)]
pub struct FoundFile {
    /// A descriptor with `O_PATH`.
    path: OwnedFd,
    /// The file's attributes.
    pub stat: FileStat,
}

impl FoundFile {
    /// Whether this is a regular file.
    #[must_use]
    pub fn is_regular(&self) -> bool {
        self.stat.st_mode & libc::S_IFMT == libc::S_IFREG
    }

    pub(crate) fn into_path(self) -> OwnedFd {
        self.path
    }
}

/// Finds a name of a directory, and follows it where it is a link; `None` where it does not exist.
///
/// # Errors
/// It is a link that is not followed, or the kernel refuses.
pub fn find(folder: impl AsFd, name: &OsStr) -> Result<Option<FoundFile>, OpenError> {
    find_within(folder, name, None)
}

/// [`find`], for links that must not lead out of `root`.
pub(crate) fn find_within(
    folder: impl AsFd,
    name: &OsStr,
    root: Option<&Beneath>,
) -> Result<Option<FoundFile>, OpenError> {
    let Some(mut found) = look(folder.as_fd(), name)? else { return Ok(None) };
    let caller = geteuid().as_raw();
    let mut at = folder.as_fd().try_clone_to_owned()?;
    let mut owners = Vec::new();
    for _ in 0..MAX_LINKS {
        if found.stat.st_mode & libc::S_IFMT != libc::S_IFLNK {
            check_target(&found.stat, &owners)?;
            return Ok(Some(found));
        }
        let (owner, directory) = (found.stat.st_uid, fstat(&at).map_err(io::Error::from)?.st_uid);
        if owner != 0 && owner != caller {
            if owner != directory {
                return Err(OpenError::Link(LinkRefusal::Owner { owner, directory }));
            }
            owners.push(owner);
        }
        // The text of this very link: another one may have its name by now.
        let target = readlinkat(&found.path, "").map_err(io::Error::from)?;
        let target = Path::new(&target);
        let Some(name) = target.file_name() else { return Err(OpenError::NotRegular) };
        at = match target.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            Some(parent) => follow(&at, parent, root)?,
            None => at,
        };
        found = look(&at, name)?.ok_or(OpenError::Link(LinkRefusal::Dangling))?;
    }
    Err(OpenError::Link(LinkRefusal::TooMany))
}

/// Opens the directory that a link leads through, from the directory that the link is in.
fn follow(at: &OwnedFd, path: &Path, root: Option<&Beneath>) -> Result<OwnedFd, OpenError> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
    let followed = match root {
        // No `openat2(2)`: the planner's filter of system calls could not see its flags.
        None => openat(at, path, flags | OFlag::O_CLOEXEC, Mode::empty()).map_err(io::Error::from),
        // The kernel holds a lookup below the directory where it begins, so it begins at the root.
        Some(root) => match root.place(at)? {
            Some(place) => root.at(place.join(path), flags),
            None => Err(Errno::EXDEV.into()),
        },
    };
    followed.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => OpenError::Link(LinkRefusal::Dangling),
        _ if leads_out(&error) => OpenError::Link(LinkRefusal::LeadsOut),
        _ => OpenError::Io(error),
    })
}

/// Opens a regular file of a directory for reading; `None` where it does not exist.
///
/// # Errors
/// As for [`find`]. Or it is another kind of file.
pub fn open(folder: impl AsFd, name: &OsStr) -> Result<Option<File>, OpenError> {
    open_within(folder, name, None)
}

/// [`open`], for links that must not lead out of `root`.
pub(crate) fn open_within(
    folder: impl AsFd,
    name: &OsStr,
    root: Option<&Beneath>,
) -> Result<Option<File>, OpenError> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOCTTY | OFlag::O_NONBLOCK;
    // Most files are no links. O_NONBLOCK: to open a FIFO by mistake must be refused below, not block here.
    let opened = match openat(folder.as_fd(), name, flags | OFlag::O_NOFOLLOW, Mode::empty()) {
        Err(Errno::ELOOP) => {
            let Some(found) = find_within(folder, name, root)? else { return Ok(None) };
            if !found.is_regular() {
                return Err(OpenError::NotRegular);
            }
            // By the descriptor: this is the file that was checked.
            let path = format!("/proc/self/fd/{}", found.path.as_raw_fd());
            let opened = openat(nix::fcntl::AT_FDCWD, path.as_str(), flags, Mode::empty());
            // Without /proc the file is not absent.
            Ok(opened.map_err(|errno| OpenError::Io(errno.into()))?)
        }
        opened => opened,
    };
    let file = match opened {
        Ok(fd) => File::from(fd),
        Err(Errno::ENOENT) => return Ok(None),
        Err(errno) => return Err(OpenError::Io(errno.into())),
    };
    if file.metadata()?.is_file() { Ok(Some(file)) } else { Err(OpenError::NotRegular) }
}

/// Finds a name without following it.
fn look(folder: impl AsFd, name: &OsStr) -> io::Result<Option<FoundFile>> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    match openat(folder, name, flags, Mode::empty()) {
        Ok(path) => {
            let stat = fstat(&path)?;
            Ok(Some(FoundFile { path, stat }))
        }
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Checks that the file is that of the users who made the links. That all users may read a file says nothing:
/// it may be in a directory that its user has not opened to others, as images of other programs are.
fn check_target(file: &FileStat, owners: &[u32]) -> Result<(), OpenError> {
    match owners.iter().find(|owner| **owner != file.st_uid) {
        None => Ok(()),
        Some(owner) => Err(OpenError::Link(LinkRefusal::Private { owner: *owner, of: file.st_uid })),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, lchown, symlink};

    use rewake_skip::skip;

    use super::*;

    const ONE: u32 = 65_534;
    const OTHER: u32 = 65_533;

    /// Opens `name` of a directory.
    fn opened(directory: &Path, name: &str) -> Result<Option<File>, OpenError> {
        open(File::open(directory).unwrap(), OsStr::new(name))
    }

    fn refusal(directory: &Path, name: &str) -> LinkRefusal {
        match opened(directory, name) {
            Err(OpenError::Link(refusal)) => refusal,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn own_links_are_followed_to_regular_files_only() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir(at("images")).unwrap();
        fs::write(at("file"), "bytes").unwrap();
        symlink("../file", at("images/relative")).unwrap();
        symlink(at("file"), at("images/absolute")).unwrap();
        symlink("relative", at("images/chain")).unwrap();
        symlink("round", at("images/round")).unwrap();
        symlink("../nothing", at("images/dangling")).unwrap();
        symlink("../nowhere/file", at("images/far")).unwrap();
        symlink("..", at("images/up")).unwrap();
        symlink("../images", at("images/directory")).unwrap();
        symlink("/dev/null", at("images/device")).unwrap();
        let images = at("images");
        let inode = |name| opened(&images, name).unwrap().unwrap().metadata().unwrap().ino();
        let expected = fs::metadata(at("file")).unwrap().ino();
        assert_eq!(["relative", "absolute", "chain"].map(inode), [expected; 3]);
        assert_eq!(refusal(&images, "round"), LinkRefusal::TooMany);
        assert_eq!(["dangling", "far"].map(|name| refusal(&images, name)), [LinkRefusal::Dangling; 2]);
        for name in ["up", "directory", "device"] {
            assert!(matches!(opened(&images, name), Err(OpenError::NotRegular)), "{name}");
        }
        assert!(opened(&images, "absent").unwrap().is_none());
    }

    #[test]
    fn a_link_must_belong_to_root_the_caller_or_the_directory() {
        if !geteuid().is_root() {
            skip!("only root gives files to other users");
        }
        let root = tempfile::tempdir().unwrap();
        let (images, file) = (root.path().join("images"), root.path().join("file"));
        fs::create_dir(&images).unwrap();
        fs::write(&file, "bytes").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let link = images.join("link");
        symlink("../file", &link).unwrap();
        let give = |to: u32| lchown(&link, Some(to), None).unwrap();
        chown(&images, Some(ONE), None).unwrap();
        // A link of the caller leads anywhere.
        opened(&images, "link").unwrap().unwrap();
        give(OTHER);
        assert_eq!(refusal(&images, "link"), LinkRefusal::Owner { owner: OTHER, directory: ONE });
        // The owner of the directory could not read the file.
        give(ONE);
        assert_eq!(refusal(&images, "link"), LinkRefusal::Private { owner: ONE, of: 0 });
        symlink("link", images.join("chain")).unwrap();
        assert_eq!(refusal(&images, "chain"), LinkRefusal::Private { owner: ONE, of: 0 });
        // A directory above may be closed to the link's owner.
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        assert_eq!(refusal(&images, "link"), LinkRefusal::Private { owner: ONE, of: 0 });
        chown(&file, Some(ONE), None).unwrap();
        opened(&images, "link").unwrap().unwrap();
        // The link is in a directory of another user, to which a link of the caller leads.
        let view = root.path().join("view");
        fs::create_dir(&view).unwrap();
        symlink("../images/link", view.join("link")).unwrap();
        opened(&view, "link").unwrap().unwrap();
        give(OTHER);
        assert_eq!(refusal(&view, "link"), LinkRefusal::Owner { owner: OTHER, directory: ONE });
    }
}
