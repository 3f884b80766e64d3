// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of a program: all must exist at the destination, and those that it has mapped privately must be equal there.
//!
//! Pages of such a mapping that the program has not written are not sent. Of another version of a library they would be
//! wrong bytes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

/// Bytes of executables and libraries that are hashed; further ones are compared by their size alone.
const MAX_HASHED: u64 = 256 << 20;
/// Bytes of a file that are read at once.
const PIECE: usize = 1 << 20;

/// A digest of a file's bytes: BLAKE3.
type FileDigest = [u8; 32];

/// Regular files that a program has open or mapped, and that have a name.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProgramFiles(BTreeMap<PathBuf, FileFacts>);

/// What a file must be.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FileFacts {
    /// Its bytes, if it is mapped privately.
    size: Option<u64>,
    digest: Option<FileDigest>,
}

impl ProgramFiles {
    /// Adds those of a process.
    pub(crate) fn add(&mut self, pid: i32) -> anyhow::Result<()> {
        let folder = format!("/proc/{pid}/fd");
        for entry in fs::read_dir(&folder).with_context(|| format!("listing {folder}"))? {
            let link = entry.with_context(|| format!("listing {folder}"))?.path();
            if let Some(path) = named_file(&link) {
                self.0.entry(path).or_default();
            }
        }
        let maps = format!("/proc/{pid}/maps");
        let text = fs::read_to_string(&maps).with_context(|| format!("reading {maps}"))?;
        for mapping in text.lines().filter_map(FileMapping::parse) {
            let link = mapping.link(pid);
            // The program may have unmapped it.
            if let Some(path) = named_file(&link) {
                self.add_mapped(&path, &link, &mapping)?;
            }
        }
        Ok(())
    }

    fn add_mapped(&mut self, path: &Path, link: &Path, mapping: &FileMapping) -> anyhow::Result<()> {
        let hashed: u64 =
            self.0.values().filter(|facts| facts.digest.is_some()).filter_map(|facts| facts.size).sum();
        let facts = self.0.entry(path.to_owned()).or_default();
        if !mapping.is_private {
            return Ok(());
        }
        // What is mapped, and not what has the name by now.
        let facts_of = || -> io::Result<FileFacts> {
            let size = fs::metadata(link)?.len();
            let is_hashed = mapping.is_executable && hashed.saturating_add(size) <= MAX_HASHED;
            Ok(FileFacts { size: Some(size), digest: is_hashed.then(|| digest(link)).transpose()? })
        };
        if facts.digest.is_none() && (mapping.is_executable || facts.size.is_none()) {
            *facts = facts_of().with_context(|| format!("reading {}", path.display()))?;
        }
        Ok(())
    }

    /// Compares with this host. Returns files that do not exist here, and files that differ.
    pub(crate) fn compare(&self) -> (Vec<String>, Vec<String>) {
        let (mut absent, mut different, mut hashed) = (Vec::new(), Vec::new(), 0_u64);
        for (path, facts) in &self.0 {
            let shown = path.display();
            let Ok(found) = fs::metadata(path) else {
                absent.push(shown.to_string());
                continue;
            };
            let Some(size) = facts.size else { continue };
            if found.len() != size || !found.is_file() {
                different.push(format!("{shown} ({} bytes here, {size} at the source)", found.len()));
                continue;
            }
            hashed = hashed.saturating_add(size);
            let Some(expected) = facts.digest.filter(|_| hashed <= MAX_HASHED) else { continue };
            match digest(path) {
                Ok(digest) if digest == expected => {}
                Ok(_) => different.push(format!("{shown} (other contents here)")),
                Err(error) => different.push(format!("{shown} ({error})")),
            }
        }
        (absent, different)
    }
}

/// A mapping of a file.
#[derive(Debug, PartialEq, Eq)]
struct FileMapping {
    start: u64,
    end: u64,
    is_private: bool,
    is_executable: bool,
}

impl FileMapping {
    /// Reads a line of `/proc/PID/maps`; none if it is no file's.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_whitespace();
        let (addresses, rights, inode) = (fields.next()?, fields.next()?, fields.nth(2)?);
        let (start, end) = addresses.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (is_private, is_executable) = (rights.ends_with('p'), rights.contains('x'));
        (inode != "0").then_some(Self { start: number(start)?, end: number(end)?, is_private, is_executable })
    }

    /// The link to what is mapped.
    fn link(&self, pid: i32) -> PathBuf {
        format!("/proc/{pid}/map_files/{:x}-{:x}", self.start, self.end).into()
    }
}

/// The path of a link of `/proc`, if it is a regular file that has a name.
fn named_file(link: &Path) -> Option<PathBuf> {
    fs::read_link(link).ok().filter(|path| path.is_absolute() && path.is_file())
}

/// The digest of a file.
fn digest(path: &Path) -> io::Result<FileDigest> {
    let mut file = File::open(path)?;
    let (mut hasher, mut piece) = (blake3::Hasher::new(), vec![0; PIECE]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(*hasher.finalize().as_bytes()),
            len => drop(hasher.update(&piece[..len])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl ProgramFiles {
        /// Adds a file that must exist.
        pub(crate) fn add_name(&mut self, path: &str) {
            self.0.entry(path.into()).or_default();
        }

        pub(crate) fn has(&self, path: &Path) -> bool {
            self.0.contains_key(path)
        }
    }

    #[test]
    fn executables_are_hashed_and_equal_on_their_own_host() {
        let mut files = ProgramFiles::default();
        files.add(std::process::id().cast_signed()).unwrap();
        let own = &files.0[&std::env::current_exe().unwrap()];
        assert!(own.digest.is_some() || own.size.unwrap() > MAX_HASHED, "{own:?}");
        let hashed = files.0.values().filter(|facts| facts.digest.is_some()).count();
        assert!(hashed >= 2, "libraries: {files:?}");
        assert_eq!(files.compare(), (Vec::new(), Vec::new()));
    }

    #[test]
    fn another_version_of_a_library_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libx.so");
        let shown = path.display().to_string();
        let mapping = FileMapping { start: 0, end: 1, is_private: true, is_executable: true };
        let mut files = ProgramFiles::default();
        fs::write(&path, "version 1").unwrap();
        files.add_mapped(&path, &path, &mapping).unwrap();
        assert_eq!(files.compare(), (Vec::new(), Vec::new()));
        fs::write(&path, "version 2").unwrap();
        assert_eq!(files.compare().1, [format!("{shown} (other contents here)")]);
        fs::write(&path, "version 10").unwrap();
        assert_eq!(files.compare().1, [format!("{shown} (10 bytes here, 9 at the source)")]);
        fs::remove_file(&path).unwrap();
        assert_eq!(files.compare(), (vec![shown], Vec::new()));
    }

    #[test]
    fn data_is_compared_by_its_size_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        let mapping = FileMapping { start: 0, end: 1, is_private: true, is_executable: false };
        let mut files = ProgramFiles::default();
        fs::write(&path, "12345").unwrap();
        files.add_mapped(&path, &path, &mapping).unwrap();
        fs::write(&path, "54321").unwrap();
        assert_eq!(files.compare(), (Vec::new(), Vec::new()));
        fs::write(&path, "1234").unwrap();
        assert_eq!(files.compare().1.len(), 1);
        // Shared memory may have any size: it travels.
        let shared = FileMapping { is_private: false, ..mapping };
        let mut files = ProgramFiles::default();
        files.add_mapped(&path, &path, &shared).unwrap();
        fs::write(&path, "").unwrap();
        assert_eq!(files.compare(), (Vec::new(), Vec::new()));
    }

    #[test]
    fn lines_of_maps_are_read() {
        let parse = FileMapping::parse;
        let mapping = |is_private, is_executable| {
            Some(FileMapping { start: 0x7f00, end: 0x8f00, is_private, is_executable })
        };
        assert_eq!(parse("7f00-8f00 r-xp 00000000 08:01 77   /usr/bin/x y"), mapping(true, true));
        assert_eq!(parse("7f00-8f00 rw-s 00000000 08:01 77   /data"), mapping(false, false));
        assert_eq!(parse("7f00-8f00 rw-p 00000000 00:00 0    [heap]"), None);
        assert_eq!(mapping(true, true).unwrap().link(9), Path::new("/proc/9/map_files/7f00-8f00"));
    }
}
