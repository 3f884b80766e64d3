// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads and writes Rewake's own files in an image directory. A file is written completely or not at all,
//! and read up to a bound.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::stat::Mode;
use rewake_bo_contents::folder;
use rewake_process::file_lock::acquired;

/// The longest wait for another writer, which needs milliseconds.
const LOCK_LIMIT: Duration = Duration::from_secs(2);
/// Time between two attempts to lock.
const LOCK_INTERVAL: Duration = Duration::from_millis(5);

/// Has `change` read and replace files of the directory while no other program does. File systems without
/// locks of directories let all do it.
///
/// # Errors
/// Another program has the lock for too long, or `change` fails.
pub(crate) fn alone<T>(
    images: BorrowedFd<'_>,
    change: impl FnOnce(BorrowedFd<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    // An open file of its own: a copy of the descriptor has the same lock.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let directory =
        File::from(openat(images, ".", flags, Mode::empty()).context("open the image directory")?);
    let began = Instant::now();
    while let Ok(false) = acquired(directory.try_lock()) {
        ensure!(began.elapsed() < LOCK_LIMIT, "another program has locked the image directory");
        std::thread::sleep(LOCK_INTERVAL);
    }
    change(directory.as_fd())
}

/// Writes the file and replaces an earlier one.
///
/// # Errors
/// The directory cannot be written to.
pub(crate) fn write(images: BorrowedFd<'_>, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
    // The name until the file is complete. Writers of other pid namespaces may have this process's id.
    let part = format!("{name}.{:016x}", random().context("/dev/urandom")?);
    let written = write_new(images, &part, bytes).with_context(|| format!("write {part}"));
    let renamed = written.and_then(|()| {
        renameat(images, part.as_str(), images, name).with_context(|| format!("rename {part} to {name}"))
    });
    if renamed.is_err() {
        // The first error counts.
        let _ = folder::remove(images, &part);
    }
    renamed
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Writes a file that did not exist. Its bytes are on the disk before its name is.
fn write_new(images: BorrowedFd<'_>, name: &str, bytes: &[u8]) -> io::Result<()> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    let mut file = File::from(openat(images, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?);
    file.write_all(bytes)?;
    file.sync_data()
}

/// Returns the file's bytes, or `None` if the file does not exist.
///
/// # Errors
/// It cannot be read, or has more than `most` bytes.
pub(crate) fn read(images: BorrowedFd<'_>, name: &str, most: u64) -> anyhow::Result<Option<Vec<u8>>> {
    match folder::open(images, name) {
        Err(error) if error.is_missing() => Ok(None),
        file => bounded(file?, most).map(Some),
    }
}

fn bounded(file: File, most: u64) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= most, "it has more than {most} bytes");
    Ok(bytes)
}
