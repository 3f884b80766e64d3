// SPDX-License-Identifier: MIT OR Apache-2.0
//! An open image directory. Every file is opened relative to it, so that no other directory can take its
//! place. A file's name is one component; [`crate::open`] says which symbolic links are followed.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use rewake_process::beneath::{Beneath, leads_out};

use crate::digest::{Digest, HashingReader, ParsedFiles};
use crate::error::{ImageError, Result};
use crate::files;
use crate::frame::{self, FileKind, Records};
use crate::inventory::{self, Inventory};
use crate::mm::{self, Mm};
use crate::open::{self, LinkRefusal, OpenError};
use crate::pagemap::{self, Pagemap, PagemapId};
use crate::tasks::{self, Task, TaskState};

/// The file that every image has, which differs in each dump.
pub const INVENTORY_NAME: &str = "inventory.img";

/// The longest chain of parents that is followed. Each level has a descriptor, and a series of more
/// incremental dumps should start again with a full one.
pub const MAX_PARENTS: usize = 128;

/// An open image directory.
#[derive(Debug)]
pub struct ImageDir {
    fd: OwnedFd,
    path: PathBuf,
    /// Device and inode of this directory and of its descendants, whose `parent` links led here.
    lineage: Vec<(u64, u64)>,
    parsed: ParsedFiles,
    /// No link of this image and of its parents leads out of here.
    root: Option<Arc<Beneath>>,
}

impl AsFd for ImageDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl ImageDir {
    /// Opens a directory. No file in it is read yet.
    ///
    /// # Errors
    /// The directory does not exist, is not a directory, or may not be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let fd =
            open_dir(nix::fcntl::AT_FDCWD, &path).map_err(|errno| io_error("open", &path, errno.into()))?;
        Self::from_fd(fd, path, Vec::new(), ParsedFiles::default())
    }

    /// Opens a directory below another one. No link on the way, of this image or of its parents leads out of
    /// that one.
    ///
    /// # Errors
    /// As for [`ImageDir::open`]. Or the name leads out.
    pub fn open_beneath(root: &Arc<Beneath>, name: impl AsRef<Path>) -> Result<Self> {
        let (name, flags) = (name.as_ref(), OFlag::O_RDONLY | OFlag::O_DIRECTORY);
        let fd = root.at(name, flags).map_err(|error| match leads_out(&error) {
            true => ImageError::SymbolicLink { file: name.to_owned(), refusal: LinkRefusal::LeadsOut },
            false => io_error("open", name, error),
        })?;
        let dir = Self::from_fd(fd, name.to_owned(), Vec::new(), ParsedFiles::default())?;
        Ok(Self { root: Some(Arc::clone(root)), ..dir })
    }

    /// Takes a directory's descriptor; `path` is for messages.
    ///
    /// # Errors
    /// The kernel refuses to give its identity.
    pub fn of(fd: OwnedFd, path: impl AsRef<Path>) -> Result<Self> {
        Self::from_fd(fd, path.as_ref().to_path_buf(), Vec::new(), ParsedFiles::default())
    }

    fn from_fd(
        fd: OwnedFd,
        path: PathBuf,
        mut lineage: Vec<(u64, u64)>,
        parsed: ParsedFiles,
    ) -> Result<Self> {
        let dir = File::from(fd);
        let meta = dir.metadata().map_err(|error| io_error("stat", &path, error))?;
        let id = (meta.dev(), meta.ino());
        if lineage.contains(&id) {
            return Err(ImageError::ParentCycle { file: path });
        }
        if lineage.len() > MAX_PARENTS {
            return Err(ImageError::TooManyParents { file: path, limit: MAX_PARENTS });
        }
        lineage.push(id);
        Ok(Self { fd: dir.into(), path, lineage, parsed, root: None })
    }

    /// The path for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device and inode of the directory.
    #[must_use]
    pub fn id(&self) -> (u64, u64) {
        self.lineage.last().copied().unwrap_or_default()
    }

    /// Opens the directory of the `parent` link, that one's, and so on, up to the first that cannot be
    /// opened.
    #[must_use]
    pub fn ancestors(&self) -> Vec<Self> {
        let parent = |dir: &Self| dir.parent().ok().flatten();
        std::iter::successors(parent(self), parent).collect()
    }

    /// Opens the directory `parent`, or the one that a link of this name leads to; `None` without one, or
    /// with a dangling link.
    ///
    /// # Errors
    /// The link leads back to a descendant, exceeds [`MAX_PARENTS`], or is not followed.
    pub fn parent(&self) -> Result<Option<Self>> {
        let path = self.path.join("parent");
        let found = match open::find_within(self, OsStr::new("parent"), self.root.as_deref()) {
            Err(OpenError::Link(LinkRefusal::Dangling)) => Ok(None),
            found => found.map_err(|error| named(error, "open", &path)),
        };
        let Some(found) = found? else { return Ok(None) };
        let fd = open_dir(found.into_path(), Path::new("."))
            .map_err(|errno| io_error("open", &path, errno.into()))?;
        let parent = Self::from_fd(fd, path, self.lineage.clone(), self.parsed.clone())?;
        Ok(Some(Self { root: self.root.clone(), ..parent }))
    }

    /// Returns a digest of every file of CRIU that this directory and its parents have parsed so far, with
    /// their paths in the image. Two directories with the same digest after the same parsing had the same
    /// bytes in these files. Contents of memory (`pages-N.img`, files of GPUs) are not included.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.parsed.digest()
    }

    /// Returns a digest that identifies the dump: copies of an image have the same. It covers the inventory,
    /// in which CRIU writes the time of the dump since boot and, from version 4.1, the id of its run.
    ///
    /// # Errors
    /// As for [`ImageDir::inventory`].
    pub fn dump_id(&self) -> Result<Digest> {
        let fd = self.fd.try_clone().map_err(|error| io_error("open", &self.path, error))?;
        let alone = Self { root: self.root.clone(), ..Self::of(fd, &self.path)? };
        alone.inventory()?;
        Ok(alone.digest())
    }

    /// Reads the inventory.
    ///
    /// # Errors
    /// The file is missing, damaged, or of another version of the format.
    pub fn inventory(&self) -> Result<Inventory> {
        inventory::parse(self.required(INVENTORY_NAME, &frame::INVENTORY, "the inventory of a CRIU image")?)
    }

    /// Reads all tasks, zombies included, parents before children.
    ///
    /// # Errors
    /// `pstree.img` or a task's `core-PID.img` is missing or damaged.
    pub fn tasks(&self) -> Result<Vec<Task>> {
        let mut tasks = self.tree()?;
        for task in &mut tasks {
            (task.state, task.comm) = self.core(task.pid)?;
        }
        Ok(tasks)
    }

    /// Reads the tasks as [`ImageDir::tasks`] does, but without states and short names. It works where a
    /// `core-PID.img` is damaged.
    ///
    /// # Errors
    /// `pstree.img` is missing or damaged.
    pub fn tree(&self) -> Result<Vec<Task>> {
        tasks::parse_tree(self.required("pstree.img", &frame::PSTREE, "the process tree of a CRIU image")?)
    }

    /// Reads the state and the short name of a task.
    ///
    /// # Errors
    /// The task's `core-PID.img` is missing or damaged.
    pub fn core(&self, pid: u32) -> Result<(TaskState, Vec<u8>)> {
        tasks::parse_core(self.required(&format!("core-{pid}.img"), &frame::CORE, "the task's state")?)
    }

    /// Reads the mappings of a task.
    ///
    /// # Errors
    /// The file is missing (zombies have none) or damaged.
    pub fn mm(&self, pid: u32) -> Result<Mm> {
        mm::parse(self.required(&format!("mm-{pid}.img"), &frame::MM, "the task's mappings")?)
    }

    /// Reads the paths of all files that tasks had open or mapped, by file id. A file without a path (a pipe,
    /// a socket, a memfd) has `None`. Returns `None` without a `files.img`.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn files(&self) -> Result<Option<BTreeMap<u32, Option<PathBuf>>>> {
        self.records("files.img", &frame::FILES)?.map(files::parse).transpose()
    }

    /// Reads the pagemap of a task; `None` where this directory has no pages of it.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn pagemap(&self, pid: u32) -> Result<Option<Pagemap>> {
        self.pagemap_of(PagemapId::Task(pid))
    }

    /// Reads the pagemap of a task or of a shared memory object; `None` where this directory has no pages of
    /// it.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn pagemap_of(&self, id: PagemapId) -> Result<Option<Pagemap>> {
        self.records(&id.file_name(), &frame::PAGEMAP)?.map(pagemap::parse).transpose()
    }

    /// Opens a regular file for reading. Returns its path for messages and its length in bytes; `None` where
    /// it does not exist.
    ///
    /// # Errors
    /// It is a symbolic link that is not followed, or no regular file, or cannot be opened.
    pub fn file(&self, name: &str) -> Result<Option<(PathBuf, File, u64)>> {
        let path = self.path.join(name);
        let opened = self.open_file(OsStr::new(name)).map_err(|error| named(error, "open", &path));
        let Some(file) = opened? else { return Ok(None) };
        let meta = file.metadata().map_err(|error| io_error("stat", &path, error))?;
        Ok(Some((path, file, meta.len())))
    }

    /// Opens the files that symbolic links of this directory lead to, one after the other; none for links
    /// that are not followed. A process that confines itself asks for these first: they may lie in any
    /// directory.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub fn linked_files(&self) -> Result<impl Iterator<Item = File>> {
        let links = self.entries()?.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
        // The reader of a file that is not opened reports why.
        Ok(links.filter_map(move |link| self.open_file(&link.file_name()).ok().flatten()))
    }

    fn open_file(&self, name: &OsStr) -> Result<Option<File>, OpenError> {
        open::open_within(self, name, self.root.as_deref())
    }

    /// The files of this directory.
    pub(crate) fn entries(&self) -> Result<impl Iterator<Item = fs::DirEntry>> {
        // By the descriptor: the path may name another directory by now.
        let entries = fs::read_dir(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
        Ok(entries.map_err(|error| io_error("list", &self.path, error))?.flatten())
    }

    pub(crate) fn records(
        &self,
        name: &str,
        kind: &'static FileKind,
    ) -> Result<Option<Records<HashingReader<File>>>> {
        let Some((path, file, len)) = self.file(name)? else { return Ok(None) };
        let name = "parent/".repeat(self.lineage.len() - 1) + name;
        Records::new(kind, &path, self.parsed.reader(name, file), len).map(Some)
    }

    fn required(
        &self,
        name: &str,
        kind: &'static FileKind,
        expected: &'static str,
    ) -> Result<Records<HashingReader<File>>> {
        let missing = || ImageError::Missing { file: self.path.join(name), expected };
        self.records(name, kind)?.ok_or_else(missing)
    }
}

fn open_dir(at: impl AsFd, path: &Path) -> nix::Result<OwnedFd> {
    openat(at, path, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
}

fn named(error: OpenError, act: &'static str, file: &Path) -> ImageError {
    let file = file.to_path_buf();
    match error {
        OpenError::Link(refusal) => ImageError::SymbolicLink { file, refusal },
        OpenError::NotRegular => {
            let (expected, found) = ("a regular file".into(), "another kind of file".into());
            ImageError::Unsupported { file, expected, found }
        }
        OpenError::Io(source) => ImageError::Io { act, file, source },
    }
}

pub(crate) fn io_error(act: &'static str, file: &Path, source: io::Error) -> ImageError {
    ImageError::Io { act, file: file.to_path_buf(), source }
}
