// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files and folders, with errors that name the act and the path.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// What failed, and where.
fn failed(act: &str, path: &Path) -> String {
    format!("{act} {}", path.display())
}

/// A file's text.
pub(crate) fn read(path: impl AsRef<Path>) -> anyhow::Result<String> {
    fs::read_to_string(&path).with_context(|| failed("read", path.as_ref()))
}

pub(crate) fn bytes(path: impl AsRef<Path>) -> anyhow::Result<Vec<u8>> {
    fs::read(&path).with_context(|| failed("read", path.as_ref()))
}

pub(crate) fn write(path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> anyhow::Result<()> {
    fs::write(&path, content).with_context(|| failed("write", path.as_ref()))
}

/// Writes a program.
pub(crate) fn write_program(path: &Path, text: &str) -> anyhow::Result<()> {
    write(path, text)?;
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(path, mode).with_context(|| failed("make executable:", path))
}

/// Opens a new, empty file.
pub(crate) fn create(path: &Path) -> anyhow::Result<File> {
    File::create(path).with_context(|| failed("create", path))
}

/// A file that one process at a time has; the lock ends with the file.
pub(crate) fn lock(path: &Path) -> anyhow::Result<File> {
    let file = create(path)?;
    file.lock().with_context(|| failed("lock", path))?;
    Ok(file)
}

/// Creates a folder with its parents.
pub(crate) fn create_folder(path: impl AsRef<Path>) -> anyhow::Result<()> {
    fs::create_dir_all(&path).with_context(|| failed("create", path.as_ref()))
}

/// Makes an empty folder, without files of an earlier run.
pub(crate) fn empty_folder(path: &Path) -> anyhow::Result<()> {
    remove(path)?;
    create_folder(path)
}

/// The paths in a folder, in order.
pub(crate) fn list(folder: impl AsRef<Path>) -> anyhow::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(&folder).and_then(|all| all.map(|entry| Ok(entry?.path())).collect());
    let mut paths: Vec<PathBuf> = paths.with_context(|| failed("list", folder.as_ref()))?;
    paths.sort();
    Ok(paths)
}

pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::copy(from, to).with_context(|| format!("{} to {}", failed("copy", from), to.display())).map(drop)
}

pub(crate) fn rename(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::rename(from, to).with_context(|| format!("{} to {}", failed("rename", from), to.display()))
}

/// Removes a file, or a folder with all in it, if there is one.
pub(crate) fn remove(path: impl AsRef<Path>) -> anyhow::Result<()> {
    let path = path.as_ref();
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| failed("remove", path))
        }
        _ => Ok(()),
    }
}
