// SPDX-License-Identifier: MIT OR Apache-2.0
//! Directories that no name and no symbolic link leads out of (`openat2(2)`). What another user, another host
//! or an image names is opened here. The kernel holds each lookup below the directory, so a link that
//! is exchanged during a lookup leads out no more than any other.
//!
//! Before Linux 5.6 there is no such call, and everything here fails. Nothing falls back to a plain `openat`.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::Mode;

/// Lookups of one name: the kernel answers EAGAIN when a directory on the way is renamed meanwhile.
const MAX_LOOKUPS: usize = 128;

/// A directory, below which things are opened.
#[derive(Debug)]
pub struct Beneath(OwnedFd);

impl AsFd for Beneath {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Beneath {
    /// Takes a directory's descriptor.
    fn from(directory: OwnedFd) -> Self {
        Self(directory)
    }
}

impl Beneath {
    /// Opens a directory. Its own path is the caller's, and may have links.
    ///
    /// # Errors
    /// It is no directory, or may not be read.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(Self(nix::fcntl::open(path, flags, Mode::empty())?))
    }

    /// Opens what a path below the directory names. Links are followed as long as they stay below it.
    ///
    /// # Errors
    /// The path or a link of it leads out of the directory ([`leads_out`]), or the kernel refuses.
    pub fn at(&self, path: impl AsRef<Path>, flags: OFlag) -> io::Result<OwnedFd> {
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS;
        self.look_up(path.as_ref(), flags, Mode::empty(), resolve)
    }

    /// Opens what a path below the directory names, and follows no link.
    ///
    /// # Errors
    /// There is a link on the way (ELOOP), the path leads out of the directory, or the kernel refuses.
    pub fn unlinked(&self, path: impl AsRef<Path>, flags: OFlag) -> io::Result<OwnedFd> {
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        self.look_up(path.as_ref(), flags, Mode::empty(), resolve)
    }

    /// Opens a file of the directory to read and write it, and makes it where it is missing.
    ///
    /// # Errors
    /// There is a link on the way (ELOOP), the path leads out of the directory, or the kernel refuses.
    pub fn create(&self, path: impl AsRef<Path>, flags: OFlag, mode: u32) -> io::Result<File> {
        let flags = flags | OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NONBLOCK;
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        self.look_up(path.as_ref(), flags, Mode::from_bits_truncate(mode), resolve).map(File::from)
    }

    /// Returns where an open file or directory is: its path below this directory, without links. `None` if it
    /// is elsewhere. The kernel knows that of the open file itself, so a name that is exchanged meanwhile
    /// does not count.
    ///
    /// # Errors
    /// There is no `/proc`.
    pub fn place(&self, of: impl AsFd) -> io::Result<Option<PathBuf>> {
        let (root, path) = (path_of(self)?, path_of(of)?);
        Ok(path.strip_prefix(root).ok().map(Path::to_owned))
    }

    fn look_up(&self, path: &Path, flags: OFlag, mode: Mode, resolve: ResolveFlag) -> io::Result<OwnedFd> {
        let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).mode(mode).resolve(resolve);
        for _ in 0..MAX_LOOKUPS {
            match openat2(self, path, how) {
                Err(Errno::EAGAIN) => {}
                Err(Errno::ENOSYS) => {
                    let what = "this kernel has no openat2(2): Linux 5.6 or newer is needed";
                    return Err(io::Error::new(io::ErrorKind::Unsupported, what));
                }
                found => return Ok(found?),
            }
        }
        Err(Errno::EAGAIN.into())
    }
}

/// Whether a lookup failed because a path or a link leads out of the directory.
#[must_use]
pub fn leads_out(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EXDEV as i32)
}

/// The kernel's path of an open file.
fn path_of(file: impl AsFd) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    /// `root/a/image`, and beside `root` a file and a directory with the same names.
    fn scene() -> (tempfile::TempDir, Beneath) {
        let dir = tempfile::tempdir().unwrap();
        for (folder, text) in [("root/a/image", "inside"), ("outside/image", "outside")] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
            fs::write(dir.path().join(folder).join("file"), text).unwrap();
        }
        let root = Beneath::open(&dir.path().join("root")).unwrap();
        (dir, root)
    }

    const READ: OFlag = OFlag::O_RDONLY;

    #[test]
    fn no_name_and_no_link_leads_out() {
        let (dir, root) = scene();
        let at = |name: &str| dir.path().join("root/a").join(name);
        let outside = dir.path().join("outside/image");
        symlink("image", at("near")).unwrap();
        symlink("../a/near", at("far")).unwrap();
        symlink("../../outside/image", at("relative")).unwrap();
        symlink(&outside, at("absolute")).unwrap();
        symlink("relative", at("chain")).unwrap();
        // A link of /proc, to a directory that is below.
        let magic = format!("/proc/self/fd/{}", root.as_fd().as_raw_fd());
        symlink(&magic, at("magic")).unwrap();
        for name in ["a/image/file", "a/near/file", "a/far/file", "a/../a/image/file"] {
            let mut text = String::new();
            io::Read::read_to_string(&mut File::from(root.at(name, READ).unwrap()), &mut text).unwrap();
            assert_eq!(text, "inside", "{name}");
        }
        for name in ["a/relative/file", "a/absolute", "a/chain", "../outside", "/etc", "a/magic", &magic] {
            assert!(leads_out(&root.at(name, READ).unwrap_err()), "{name}");
        }
        let refused = root.unlinked("a/near/file", READ).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(Errno::ELOOP as i32));
        let refused = root.create("a/absolute/file", OFlag::empty(), 0o600).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(Errno::ELOOP as i32));
        root.create("a/image/made", OFlag::O_EXCL, 0o600).unwrap();
    }

    #[test]
    fn a_place_is_where_a_file_is_and_not_how_it_was_named() {
        let (dir, root) = scene();
        symlink("image", dir.path().join("root/a/near")).unwrap();
        let place = |file: OwnedFd| root.place(file).unwrap();
        assert_eq!(place(root.at("a/near/file", READ).unwrap()).unwrap(), Path::new("a/image/file"));
        assert_eq!(place(root.at(".", READ).unwrap()).unwrap(), Path::new(""));
        let outside = Beneath::open(&dir.path().join("outside")).unwrap();
        assert_eq!(place(outside.at("image", READ).unwrap()), None);
        // A directory whose name begins as the root's does.
        fs::create_dir(dir.path().join("root2")).unwrap();
        assert_eq!(place(Beneath::open(&dir.path().join("root2")).unwrap().at(".", READ).unwrap()), None);
    }

    #[test]
    fn a_link_that_is_exchanged_all_the_time_never_leads_out() {
        /// Lookups that found the file inside.
        const FOUND: usize = 200;
        let (dir, root) = scene();
        let at = |name: &str| dir.path().join("root/a").join(name);
        let outside = dir.path().join("outside/image");
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    for target in [Path::new("image"), &outside, Path::new("../../outside/image")] {
                        symlink(target, at("new")).unwrap();
                        fs::rename(at("new"), at("link")).unwrap();
                    }
                }
            });
            let texts = std::iter::repeat_with(|| root.at("a/link/file", READ)).flatten().map(|file| {
                let mut text = String::new();
                io::Read::read_to_string(&mut File::from(file), &mut text).map(|_| text)
            });
            // The other thread ends before this one asserts anything.
            let wrong = texts.take(FOUND).find(|text| !matches!(text.as_deref(), Ok("inside")));
            is_done.store(true, Ordering::Relaxed);
            assert!(wrong.is_none(), "{wrong:?}");
        });
    }
}
