// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files of a program: all must exist at the destination, and those that it has mapped privately must be
//! equal there.
//!
//! Pages of such a mapping that the program has not written are not sent. Of another version of a library
//! they would be wrong bytes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rewake_process::maps::Mapping;
use rewake_process::names::lines;
use serde::{Deserialize, Serialize};

use crate::file_hasher::{FileDigest, FileHasher};
use crate::text_path::TextPath;

/// Bytes of executables and libraries that are hashed; further ones are compared by their size alone.
pub(crate) const MAX_HASHED: u64 = 256 << 20;

/// Regular files that a program has open or mapped, and that have a name.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct ProgramFiles {
    facts: BTreeMap<TextPath, FileFacts>,
    /// Executables and libraries, with a link to what is mapped.
    #[serde(skip)]
    executables: BTreeMap<TextPath, PathBuf>,
}

/// What a file must be.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FileFacts {
    /// Its bytes, if it is mapped privately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<FileDigest>,
}

/// Names of files that a host has not as the source has them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FileDifferences {
    pub(crate) absent: Vec<String>,
    /// Other files have these names.
    pub(crate) different: Vec<String>,
    /// Files whose digests were not compared.
    pub(crate) not_hashed: Vec<String>,
}

impl ProgramFiles {
    /// Adds the files of a process.
    pub(crate) fn add(&mut self, pid: i32) -> anyhow::Result<()> {
        let folder = format!("/proc/{pid}/fd");
        for entry in fs::read_dir(&folder).with_context(|| format!("listing {folder}"))? {
            let link = entry.with_context(|| format!("listing {folder}"))?.path();
            if let Some(path) = named_file(&link) {
                self.facts.entry(path.into()).or_default();
            }
        }
        let maps = format!("/proc/{pid}/maps");
        let text = fs::read(&maps).with_context(|| format!("reading {maps}"))?;
        for mapping in lines(&text).filter_map(FileMapping::parse) {
            let link = mapping.link(pid);
            // The program may have unmapped it.
            if let Some(path) = named_file(&link) {
                self.add_mapped(path.into(), link, &mapping)?;
            }
        }
        Ok(())
    }

    fn add_mapped(&mut self, path: TextPath, link: PathBuf, mapping: &FileMapping) -> anyhow::Result<()> {
        let facts = self.facts.entry(path.clone()).or_default();
        if !mapping.is_private {
            return Ok(());
        }
        if facts.size.is_none() {
            // Of what is mapped, and not of what has the name by now.
            let found = fs::metadata(&link).with_context(|| format!("reading {}", path.display()))?;
            facts.size = Some(found.len());
        }
        if mapping.is_executable {
            self.executables.entry(path).or_insert(link);
        }
        Ok(())
    }

    /// Hashes executables and libraries. Returns those that are compared by their size alone: they are too
    /// large, or could not be read in time.
    pub(crate) fn hash(&mut self, hasher: &mut FileHasher) -> Vec<String> {
        let (mut hashed, mut left_out) = (0_u64, Vec::new());
        for (path, link) in &self.executables {
            let facts = self.facts.entry(path.clone()).or_default();
            let size = facts.size.unwrap_or_default();
            let sum = hashed.saturating_add(size);
            // The program may have unmapped it.
            let digest = (sum <= MAX_HASHED).then(|| hasher.hash(link, size).ok().flatten()).flatten();
            facts.digest = digest;
            match digest {
                Some(_) => hashed = sum,
                None => left_out.push(path.printable()),
            }
        }
        left_out
    }

    /// Compares with this host. A file that has a digest is hashed, however large it is.
    pub(crate) fn compare(&self, hasher: &mut FileHasher) -> FileDifferences {
        let mut found = FileDifferences::default();
        for (path, facts) in &self.facts {
            let shown = path.printable();
            let Ok(here) = fs::metadata(path) else {
                found.absent.push(shown);
                continue;
            };
            let Some(size) = facts.size else { continue };
            if here.len() != size || !here.is_file() {
                found.different.push(shown);
                continue;
            }
            let Some(expected) = facts.digest else { continue };
            match hasher.hash(path, size) {
                Ok(Some(digest)) if digest == expected => {}
                Ok(Some(_)) => found.different.push(shown),
                Ok(None) | Err(_) => found.not_hashed.push(shown),
            }
        }
        found
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
    /// Reads a line of `/proc/PID/maps`, or `None` if it is no file's.
    fn parse(line: &[u8]) -> Option<Self> {
        let mapping = Mapping::parse(line).filter(|mapping| mapping.inode != 0)?;
        let (is_private, is_executable) = (!mapping.is_shared(), mapping.is_executable());
        Some(Self { start: mapping.start, end: mapping.end, is_private, is_executable })
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

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs::File;
    use std::os::unix::ffi::OsStrExt as _;
    use std::time::Duration;

    use super::*;
    use crate::file_hasher::HASH_LIMIT;

    const LIBRARY: FileMapping = FileMapping { start: 0, end: 1, is_private: true, is_executable: true };
    const DATA: FileMapping = FileMapping { is_executable: false, ..LIBRARY };

    impl ProgramFiles {
        /// Adds a file that must exist.
        pub(crate) fn add_name(&mut self, path: &str) {
            self.facts.entry(PathBuf::from(path).into()).or_default();
        }

        pub(crate) fn has(&self, path: &Path) -> bool {
            self.facts.contains_key(path)
        }

        /// Adds a file that the program has mapped.
        fn map(&mut self, path: &Path, mapping: &FileMapping) {
            self.add_mapped(path.to_owned().into(), path.to_owned(), mapping).unwrap();
        }

        fn hashed(mut self) -> Self {
            assert_eq!(self.hash(&mut FileHasher::new(HASH_LIMIT)), [""; 0]);
            self
        }

        fn compared(&self) -> FileDifferences {
            self.compare(&mut FileHasher::new(HASH_LIMIT))
        }
    }

    fn different(path: &Path) -> FileDifferences {
        FileDifferences { different: vec![path.display().to_string()], ..FileDifferences::default() }
    }

    #[test]
    fn executables_are_hashed_and_equal_on_their_own_host() {
        let mut files = ProgramFiles::default();
        files.add(std::process::id().cast_signed()).unwrap();
        let own = std::env::current_exe().unwrap();
        let left_out = files.hash(&mut FileHasher::new(HASH_LIMIT));
        let is_small = fs::metadata(&own).unwrap().len() <= MAX_HASHED;
        assert_eq!(files.facts[&*own].digest.is_some(), is_small, "{left_out:?}");
        let hashed = files.facts.values().filter(|facts| facts.digest.is_some()).count();
        assert!(hashed >= 2, "libraries: {files:?}");
        assert_eq!(files.compared(), FileDifferences::default());
    }

    #[test]
    fn another_version_of_a_library_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libx.so");
        let mut files = ProgramFiles::default();
        fs::write(&path, "version 1").unwrap();
        files.map(&path, &LIBRARY);
        let files = files.hashed();
        assert_eq!(files.compared(), FileDifferences::default());
        for other in ["version 2", "version 10"] {
            fs::write(&path, other).unwrap();
            assert_eq!(files.compared(), different(&path), "{other}");
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(files.compared().absent, [path.display().to_string()]);
    }

    #[test]
    fn much_data_leaves_libraries_compared() {
        let folder = tempfile::tempdir().unwrap();
        let (data, library) = (folder.path().join("a"), folder.path().join("libx.so"));
        File::create(&data).unwrap().set_len(MAX_HASHED + 1).unwrap();
        fs::write(&library, "version 1").unwrap();
        let mut files = ProgramFiles::default();
        files.map(&data, &DATA);
        files.map(&library, &LIBRARY);
        let files = files.hashed();
        fs::write(&library, "version 2").unwrap();
        assert_eq!(files.compared(), different(&library));
    }

    #[test]
    fn a_library_that_is_too_large_is_compared_by_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let (large, small) = (folder.path().join("a"), folder.path().join("b"));
        File::create(&large).unwrap().set_len(MAX_HASHED + 1).unwrap();
        fs::write(&small, "version 1").unwrap();
        let mut files = ProgramFiles::default();
        files.map(&large, &LIBRARY);
        files.map(&small, &LIBRARY);
        let left_out = files.hash(&mut FileHasher::new(HASH_LIMIT));
        assert_eq!(left_out, [large.display().to_string()]);
        assert!(files.facts[&*large].digest.is_none() && files.facts[&*small].digest.is_some());
    }

    #[test]
    fn a_digest_that_is_not_compared_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libx.so");
        fs::write(&path, "version 1").unwrap();
        let mut files = ProgramFiles::default();
        files.map(&path, &LIBRARY);
        let mut files = files.hashed();
        let no_time = || FileHasher::new(Duration::ZERO);
        assert_eq!(files.compare(&mut no_time()).not_hashed, [path.display().to_string()]);
        // A source that lies.
        let facts = FileFacts { size: Some(0), digest: files.facts[&*path].digest };
        files.facts = BTreeMap::from([(PathBuf::from("/proc/kmsg").into(), facts)]);
        assert_eq!(files.compared().not_hashed, ["/proc/kmsg"]);
        // At the source it is compared by its size.
        assert_eq!(files.hash(&mut no_time()), [path.display().to_string()]);
        assert_eq!(files.facts[&*path].digest, None);
    }

    #[test]
    fn data_is_compared_by_its_size_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        let mut files = ProgramFiles::default();
        fs::write(&path, "12345").unwrap();
        files.map(&path, &DATA);
        let files = files.hashed();
        fs::write(&path, "54321").unwrap();
        assert_eq!(files.compared(), FileDifferences::default());
        fs::write(&path, "1234").unwrap();
        assert_eq!(files.compared(), different(&path));
        // Shared memory may have any size: it travels.
        let mut files = ProgramFiles::default();
        files.map(&path, &FileMapping { is_private: false, ..DATA });
        fs::write(&path, "").unwrap();
        assert_eq!(files.hashed().compared(), FileDifferences::default());
    }

    #[test]
    fn an_offer_has_each_file_once_and_no_empty_field() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libx.so");
        fs::write(&path, "version 1").unwrap();
        let mut files = ProgramFiles::default();
        for mapping in [LIBRARY, DATA, LIBRARY] {
            files.map(&path, &mapping);
        }
        files.add_name("/data");
        let files = files.hashed();
        let digest = blake3::hash(b"version 1");
        let expected = format!(r#"{{"/data":{{}},"{}":{{"size":9,"digest":"{digest}"}}}}"#, path.display());
        let text = serde_json::to_string(&files).unwrap();
        assert_eq!(text, expected);
        let read: ProgramFiles = serde_json::from_str(&text).unwrap();
        assert_eq!(read.facts, files.facts);
    }

    #[test]
    fn a_file_whose_name_is_not_utf_8_is_offered_and_compared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(OsStr::from_bytes(b"donn\xe9es\x1b[2J"));
        fs::write(&path, "version 1").unwrap();
        let mut files = ProgramFiles::default();
        files.map(&path, &LIBRARY);
        let offer = serde_json::to_string(&files.hashed()).unwrap();
        let there: ProgramFiles = serde_json::from_str(&offer).unwrap();
        assert_eq!(there.compared(), FileDifferences::default());
        fs::remove_file(&path).unwrap();
        let shown = format!("{}/donn\u{fffd}es\\u{{1b}}[2J", folder.path().display());
        assert_eq!(there.compared().absent, [shown]);
    }

    #[test]
    fn lines_of_maps_are_read() {
        let parse = |line: &str| FileMapping::parse(line.as_bytes());
        let mapping = |is_private, is_executable| {
            Some(FileMapping { start: 0x7f00, end: 0x8f00, is_private, is_executable })
        };
        assert_eq!(parse("7f00-8f00 r-xp 00000000 08:01 77   /usr/bin/x y"), mapping(true, true));
        assert_eq!(parse("7f00-8f00 rw-s 00000000 08:01 77   /data"), mapping(false, false));
        assert_eq!(parse("7f00-8f00 rw-p 00000000 00:00 0    [heap]"), None);
        assert_eq!(mapping(true, true).unwrap().link(9), Path::new("/proc/9/map_files/7f00-8f00"));
    }
}
