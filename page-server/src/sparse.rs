// SPDX-License-Identifier: MIT OR Apache-2.0
//! Turns zeros in the pages files of a dump into holes: a restore does not read holes from the disk.
//!
//! CRIU leaves out pages that a program has never accessed, and writes all others. Each queue of a GPU has a
//! save area of tens of MiB in the program's memory. The driver uses little of it, and a restore loads it
//! before the program runs.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use rewake_image_io::{BLOCK, ImageFile};

/// Bytes of one read.
const STEP: usize = 1 << 20;

const _: () = assert!(STEP.is_multiple_of(BLOCK));

/// Turns whole zero blocks (64 KiB, the unit of restores) in all `pages-*.img` of the folder into holes, and
/// returns the bytes of new holes: 0 if the file system has no holes.
///
/// Only blocks in the page cache are read (Linux 6.5 and newer report which).
///
/// # Errors
/// A file cannot be read or changed; all others are processed. The contents of the image stay the same.
pub fn punch_zero_blocks(images: &Path) -> anyhow::Result<u64> {
    let files = pages_files(images).with_context(|| images.display().to_string())?;
    let punch = |path: PathBuf| punch_zero_blocks_of(&path).with_context(|| path.display().to_string());
    let punched: Vec<anyhow::Result<u64>> = files.into_iter().map(punch).collect();
    punched.into_iter().sum()
}

fn pages_files(images: &Path) -> io::Result<Vec<PathBuf>> {
    let is_one = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("pages-")
            && name.ends_with(".img")
            && path.symlink_metadata().is_ok_and(|of| of.is_file())
    };
    let paths = fs::read_dir(images)?.map(|entry| entry.map(|entry| entry.path()));
    Ok(paths.collect::<io::Result<Vec<_>>>()?.into_iter().filter(is_one).collect())
}

fn punch_zero_blocks_of(path: &Path) -> anyhow::Result<u64> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let length = file.metadata()?.len();
    let pages = ImageFile::from_file(file.try_clone()?, path)?;
    let (mut buffer, mut punched_bytes, mut zeros) = (vec![0; STEP], 0, 0..0);
    // The last block may be shorter; it is not punched.
    let end = length / BLOCK as u64 * BLOCK as u64;
    for start in (0..end).step_by(STEP) {
        let length = usize::try_from(end - start).unwrap_or(STEP).min(STEP);
        if !pages.is_cached(start, length) {
            continue;
        }
        file.read_exact_at(&mut buffer[..length], start)?;
        for (block, bytes) in buffer[..length].chunks_exact(BLOCK).enumerate() {
            if bytes.iter().all(|byte| *byte == 0) {
                let at = start + (block * BLOCK) as u64;
                if zeros.end != at {
                    punched_bytes += punch(&file, &zeros)?;
                    zeros = at..at;
                }
                zeros.end += BLOCK as u64;
            }
        }
    }
    punched_bytes += punch(&file, &zeros)?;
    Ok(punched_bytes)
}

fn punch(file: &File, zeros: &Range<u64>) -> anyhow::Result<u64> {
    let bytes = zeros.end - zeros.start;
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    if bytes == 0 {
        return Ok(0);
    }
    match fallocate(file, mode, i64::try_from(zeros.start)?, i64::try_from(bytes)?) {
        Ok(()) => Ok(bytes),
        Err(Errno::EOPNOTSUPP) => Ok(0),
        Err(errno) => Err(errno).context("making a hole of zeros"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const BLOCK: usize = super::BLOCK;

    #[test]
    fn zeros_become_holes_and_every_byte_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pages-7.img");
        // Zeros at the beginning, across two steps, less than a block of them, and at the end, which is no
        // whole block.
        let mut bytes = vec![1_u8; 3 * STEP + BLOCK + 4096];
        let zeros = [0..BLOCK, STEP - BLOCK..STEP + 2 * BLOCK, 2 * STEP + 4096..2 * STEP + BLOCK];
        zeros.into_iter().for_each(|range| bytes[range].fill(0));
        bytes[3 * STEP..].fill(0);
        fs::write(&path, &bytes).unwrap();
        fs::write(folder.path().join("amdgpu-pages-1-1.img"), vec![0; STEP]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let before = fs::metadata(&path).unwrap().blocks() * 512;

        assert_eq!(punch_zero_blocks(folder.path()).unwrap(), 5 * BLOCK as u64);
        assert_eq!(fs::read(&path).unwrap(), bytes);
        File::open(&path).unwrap().sync_all().unwrap();
        let after = fs::metadata(&path).unwrap().blocks() * 512;
        assert!(after <= before - 5 * BLOCK as u64, "{before} bytes on the disk became {after}");
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = format!("{:#}", punch_zero_blocks(Path::new("/nowhere/images")).unwrap_err());
        assert!(error.starts_with("/nowhere/images: "), "{error}");
    }
}
