// SPDX-License-Identifier: MIT OR Apache-2.0
//! Puts files into the page cache or out of it, and checks both with mincore.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use memmap2::Mmap;
use nix::errno::Errno;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

const PAGE: usize = 4096;
const READ_SIZE: usize = 1 << 20;
/// Less than this share in the cache is cold, more than the rest is warm.
const TOLERANCE: f64 = 0.01;

/// Reads the files so that all of them is cached.
///
/// # Errors
/// The kernel did not keep them: there is too little memory for a warm run.
pub(crate) fn load_files(paths: &[PathBuf]) -> anyhow::Result<()> {
    for path in paths {
        let mut file = File::open(path).with_context(|| path.display().to_string())?;
        let mut buffer = vec![0; READ_SIZE];
        while file.read(&mut buffer).with_context(|| path.display().to_string())? > 0 {}
        let share = cached_share(path)?;
        if share < 1.0 - TOLERANCE {
            bail!("only {:.1} % of {} stays cached: measure with less memory", share * 100.0, path.display());
        }
    }
    Ok(())
}

/// Makes the kernel drop the files' clean pages; all caches of the machine if that is not enough.
///
/// # Errors
/// They stay cached, as on tmpfs.
pub(crate) fn drop_files(paths: &[PathBuf]) -> anyhow::Result<()> {
    for path in paths {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        file.sync_all().with_context(|| path.display().to_string())?;
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).context("POSIX_FADV_DONTNEED")?;
        let is_empty = file.metadata().with_context(|| path.display().to_string())?.len() == 0;
        if is_empty || cached_share(path)? <= TOLERANCE {
            continue;
        }
        std::fs::write("/proc/sys/vm/drop_caches", "1").context("writing /proc/sys/vm/drop_caches")?;
        let share = cached_share(path)?;
        if share > TOLERANCE {
            let (path, share) = (path.display(), share * 100.0);
            bail!("{share:.1} % of {path} stays cached: is --dir on tmpfs? A cold run needs a real disk");
        }
    }
    Ok(())
}

/// Brings the files into the page cache, or out of it.
pub(crate) fn bring(paths: &[PathBuf], cached: bool) -> anyhow::Result<()> {
    if cached { load_files(paths) } else { drop_files(paths) }
}

/// The files of a folder.
pub(crate) fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let list = std::fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    list.map(|entry| Ok(entry.with_context(|| format!("list {}", folder.display()))?.path())).collect()
}

/// Share of the file's pages in the page cache, 0 to 1.
fn cached_share(path: &Path) -> anyhow::Result<f64> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    if file.metadata()?.len() == 0 {
        return Ok(1.0);
    }
    // SAFETY: it is never read through.
    let map = unsafe { Mmap::map(&file) }.with_context(|| format!("mmap of {}", path.display()))?;
    let mut present = vec![0_u8; map.len().div_ceil(PAGE)];
    let start = map.as_ptr().cast_mut().cast();
    // SAFETY: the mapping is that long, and the vector has one byte for each of its pages.
    let result = unsafe { libc::mincore(start, map.len(), present.as_mut_ptr()) };
    Errno::result(result).with_context(|| format!("mincore of {}", path.display()))?;
    let cached = present.iter().filter(|&&page| page & 1 == 1).count();
    Ok(cached as f64 / present.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_file_is_cached_until_dropped_and_again_when_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pages");
        std::fs::write(&path, vec![1; 8 << 20]).unwrap();
        assert!(cached_share(&path).unwrap() > 0.99);
        let paths = [path.clone()];
        if let Err(error) = drop_files(&paths) {
            eprintln!("skipped: {error:#}");
            return;
        }
        assert!(cached_share(&path).unwrap() <= TOLERANCE);
        load_files(&paths).unwrap();
        assert!(cached_share(&path).unwrap() > 0.99);
    }
}
