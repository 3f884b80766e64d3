// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoint archives of podman and CRI-O: a tar, as it is or compressed, whose folder `checkpoint/` has CRIU's files.
//!
//! An archive is hostile input. Only regular files of that folder are written, each into the directory itself, under a
//! name of one component. An archive with other paths or kinds of files in it is refused.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod error;
mod input;
mod names;

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;
use rewake_criu_images::FILE_MODE;
use tar::{Archive, Entry, EntryType};

pub use error::{ArchiveError, Result};

use input::{ArchiveInput, decompressed};
use names::ArchivePlace;

/// The file that every checkpoint has.
const INVENTORY: &str = "inventory.img";
/// The most entries of an archive: with millions of tasks, its files would have no place in a directory either.
const MAX_ENTRIES: u64 = 1 << 22;
/// How the keys of PAX begin that describe a file with holes: its data in the archive is not the file's.
const PAX_SPARSE: &[u8] = b"GNU.sparse.";
/// Bytes that are copied at once.
const BUFFER: usize = 1 << 18;

/// What was extracted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExtractReport {
    /// Files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Extracts CRIU's files into a directory, which must be empty or missing. After a failure it is as it was before.
///
/// # Errors
/// The archive is cut, damaged, or no checkpoint; it has files that an image does not have; the directory is not empty,
/// or has no space.
pub fn extract(archive: &Path, directory: &Path) -> Result<ExtractReport> {
    let wrong = |what: String| ArchiveError::Archive { archive: archive.to_owned(), what };
    let file = File::open(archive).map_err(|reason| wrong(reason.to_string()))?;
    let is_file = file.metadata().is_ok_and(|found| found.is_file());
    if !is_file {
        return Err(wrong("it is no regular file".to_owned()));
    }
    let input = decompressed(BufReader::new(file)).map_err(|reason| wrong(reason.to_string()))?;
    let made = make(directory)?;
    let mut extraction =
        Extraction { archive, directory, written: Vec::new(), report: ExtractReport::default() };
    let extracted = extraction.all(input);
    if extracted.is_err() {
        for path in &extraction.written {
            // What is left is no image: it has no manifest.
            let _ = fs::remove_file(path);
        }
        if made {
            let _ = fs::remove_dir(directory);
        }
    }
    extracted.map(|()| extraction.report)
}

/// Makes the directory. Returns false if it exists, and is empty.
fn make(directory: &Path) -> Result<bool> {
    let failed = |reason| ArchiveError::Directory { directory: directory.to_owned(), reason };
    match fs::create_dir(directory) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    match fs::read_dir(directory).map_err(failed)?.next() {
        None => Ok(false),
        Some(_) => Err(ArchiveError::NotEmpty { directory: directory.to_owned() }),
    }
}

struct Extraction<'a> {
    archive: &'a Path,
    directory: &'a Path,
    written: Vec<PathBuf>,
    report: ExtractReport,
}

impl Extraction<'_> {
    fn all(&mut self, input: ArchiveInput) -> Result<()> {
        let limit = input.limit();
        let mut archive = Archive::new(input);
        let (mut count, mut has_inventory) = (0, false);
        let mut entries = archive.entries().map_err(|error| self.damaged(&error))?;
        loop {
            limit.set();
            let entry = entries.next().transpose().map_err(|error| self.damaged(&error))?;
            limit.lift();
            let Some(mut entry) = entry else { break };
            count += 1;
            if count > MAX_ENTRIES {
                return Err(self.wrong(&format!("it has more than {MAX_ENTRIES} entries")));
            }
            let path = entry.path_bytes().into_owned();
            self.check_sparse(&mut entry, &path)?;
            let place =
                ArchivePlace::of(&path).map_err(|what| self.wrong(&format!("{}: {what}", shown(&path))))?;
            if let ArchivePlace::Checkpoint(name) = place {
                self.check_kind(&entry, &path, name.as_deref())?;
                if let Some(name) = name {
                    has_inventory |= name == INVENTORY;
                    self.file(&mut entry, &name)?;
                }
            }
            // What is left of its data must not count as headers of the next.
            io::copy(&mut entry, &mut io::sink()).map_err(|error| self.damaged(&error))?;
        }
        let mut input = archive.into_inner();
        if input.has_ended() {
            return Err(self.wrong("it is cut: the end of a tar is missing"));
        }
        input.finish().map_err(|error| self.wrong(&format!("it is damaged, or cut at its end: {error}")))?;
        if !has_inventory {
            let what = "it has no file checkpoint/inventory.img: no checkpoint of podman or CRI-O";
            return Err(self.wrong(what));
        }
        Ok(())
    }

    /// Refuses a file with holes in a form of PAX. The form of GNU's own headers is read.
    fn check_sparse<R: Read>(&self, entry: &mut Entry<'_, R>, path: &[u8]) -> Result<()> {
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() || kind.is_pax_local_extensions() {
            // Their keys are their data, of any length; no entry gets those.
            return Ok(());
        }
        for extension in entry.pax_extensions().map_err(|error| self.damaged(&error))?.into_iter().flatten() {
            let key = extension.map_err(|error| self.damaged(&error))?.key_bytes();
            if key.starts_with(PAX_SPARSE) {
                let what = "a file with holes in a form of PAX: make the archive with `tar --format=gnu`, or \
                            without --sparse";
                return Err(self.wrong(&format!("{}: {what}", shown(path))));
            }
        }
        Ok(())
    }

    /// Refuses what is neither the folder nor a regular file in it.
    fn check_kind<R: Read>(&self, entry: &Entry<'_, R>, path: &[u8], name: Option<&str>) -> Result<()> {
        let kind = entry.header().entry_type();
        let is_right = match name {
            None => kind == EntryType::Directory,
            Some(_) => matches!(kind, EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse),
        };
        if is_right {
            return Ok(());
        }
        if kind == EntryType::Symlink && name == Some("parent") {
            return Err(self.wrong(
                "it is an incremental checkpoint, and its parent is not in it: make a full checkpoint",
            ));
        }
        Err(self.wrong(&format!("{}: expected a regular file, found one of type {kind:?}", shown(path))))
    }

    fn file<R: Read>(&mut self, entry: &mut Entry<'_, R>, name: &str) -> Result<()> {
        let (path, length) = (self.directory.join(name), entry.size());
        let failed = |reason| ArchiveError::Directory { directory: path.clone(), reason };
        let space = statvfs(self.directory).map_err(|errno| failed(errno.into()))?;
        let free = space.blocks_available() * space.fragment_size();
        if length > free {
            return Err(ArchiveError::Space { file: path, length, free });
        }
        let file = File::options().write(true).create_new(true).mode(FILE_MODE).open(&path);
        let file = match file {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(self.wrong(&format!("it has checkpoint/{name} twice")));
            }
            file => file.map_err(failed)?,
        };
        self.written.push(path.clone());
        self.copy(entry, file, length, name)?.map_err(failed)?;
        self.report.files += 1;
        self.report.bytes += length;
        Ok(())
    }

    /// Copies the data of a file. The outer error is of the archive, the inner one of the file.
    fn copy<R: Read>(
        &self,
        entry: &mut Entry<'_, R>,
        mut file: File,
        length: u64,
        name: &str,
    ) -> Result<io::Result<()>> {
        let (mut left, mut buffer) = (length, vec![0; BUFFER]);
        while left > 0 {
            let read = match entry.read(&mut buffer) {
                Ok(0) => return Err(self.wrong(&format!("it is cut in checkpoint/{name}"))),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.damaged(&error)),
            };
            if let Err(error) = file.write_all(&buffer[..read]) {
                return Ok(Err(error));
            }
            left = left.saturating_sub(read as u64);
        }
        Ok(Ok(()))
    }

    fn damaged(&self, error: &io::Error) -> ArchiveError {
        self.wrong(&format!("no tar, or one that is cut or damaged: {error}"))
    }

    fn wrong(&self, what: &str) -> ArchiveError {
        // A name in an archive may have anything in it.
        let line: String = what.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
        ArchiveError::Archive { archive: self.archive.to_owned(), what: line }
    }
}

/// A path of an archive, for messages.
fn shown(path: &[u8]) -> String {
    const MOST: usize = 200;
    String::from_utf8_lossy(&path[..path.len().min(MOST)]).into_owned()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use tar::{Builder, Header};

    use super::*;

    /// An archive with these files, whatever their paths are.
    fn archive(files: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
        let mut tar = Builder::new(Vec::new());
        for (path, kind, bytes) in files {
            let mut header = Header::new_gnu();
            header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
            header.set_entry_type(*kind);
            header.set_size(bytes.len() as u64);
            header.set_mode(0o4777);
            header.set_cksum();
            tar.append(&header, *bytes).unwrap();
        }
        tar.into_inner().unwrap()
    }

    /// One of podman's.
    fn podman() -> Vec<u8> {
        archive(&[
            ("config.dump", EntryType::Regular, b"{}"),
            ("checkpoint/", EntryType::Directory, b""),
            ("checkpoint/inventory.img", EntryType::Regular, b"inventory"),
            ("checkpoint/pages-1.img", EntryType::Regular, &[7; 10_000]),
            ("dev", EntryType::Symlink, b""),
        ])
    }

    /// The files of a directory, by name.
    type Files = Vec<(String, Vec<u8>)>;

    fn extracted(bytes: &[u8]) -> (Result<ExtractReport, String>, Files) {
        let folder = tempfile::tempdir().unwrap();
        let (archive, directory) = (folder.path().join("archive"), folder.path().join("image"));
        fs::write(&archive, bytes).unwrap();
        let report = extract(&archive, &directory).map_err(|error| error.to_string());
        let files = fs::read_dir(&directory).into_iter().flatten().flatten().map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        });
        let mut files: Vec<_> = files.collect();
        files.sort();
        assert!(report.is_ok() || !directory.exists(), "{report:?}");
        // Nothing is written elsewhere.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1 + usize::from(report.is_ok()));
        (report, files)
    }

    fn refused(bytes: &[u8]) -> String {
        let (report, _) = extracted(bytes);
        let said = report.unwrap_err();
        assert_eq!(said.lines().count(), 1, "{said}");
        said
    }

    #[test]
    fn files_of_the_checkpoint_are_extracted_and_no_others() {
        let tar = podman();
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(&tar).unwrap();
        for bytes in [tar.clone(), gzip.finish().unwrap(), zstd::encode_all(&*tar, 1).unwrap()] {
            let (report, files) = extracted(&bytes);
            assert_eq!(report, Ok(ExtractReport { files: 2, bytes: 10_009 }));
            let expected = [("inventory.img", b"inventory".to_vec()), ("pages-1.img", vec![7; 10_000])];
            assert_eq!(files, expected.map(|(name, bytes)| (name.to_owned(), bytes)));
        }
    }

    #[test]
    fn another_compression_is_named() {
        for (start, name) in [(&b"\xfd7zXZ\0"[..], "xz"), (b"BZh91AY", "bzip2"), (b"\x04\x22\x4d\x18", "lz4")]
        {
            let bytes = [start, &[7; 2000]].concat();
            let (report, files) = extracted(&bytes);
            let refused = report.unwrap_err();
            let expected = format!("it is compressed with {name}: expected a tar");
            assert!(refused.contains(&expected) && refused.lines().count() == 1, "{refused}");
            assert!(files.is_empty());
        }
    }

    #[test]
    fn an_archive_that_is_cut_anywhere_is_refused() {
        let tar = podman();
        let zstd = zstd::encode_all(&*tar, 1).unwrap();
        for (bytes, step) in [(&tar, 256), (&zstd, 7)] {
            // Of the two blocks of zeros at the end of a tar, both are necessary.
            let end = if step == 256 { tar.len() - 512 } else { zstd.len() };
            for length in (0..end).step_by(step) {
                refused(&bytes[..length]);
            }
        }
    }

    #[test]
    fn a_flipped_byte_of_a_compressed_archive_is_refused() {
        let tar = podman();
        let mut gzip = GzEncoder::new(Vec::new(), Compression::none());
        gzip.write_all(&tar).unwrap();
        let mut zstd = zstd::Encoder::new(Vec::new(), 1).unwrap();
        zstd.include_checksum(true).unwrap();
        zstd.write_all(&tar).unwrap();
        for bytes in [gzip.finish().unwrap(), zstd.finish().unwrap()] {
            assert_eq!(extracted(&bytes).0, Ok(ExtractReport { files: 2, bytes: 10_009 }));
            // Where the data of the inventory is, and the checksum at the end.
            let data = bytes.windows(9).position(|found| found == b"inventory");
            for place in [data.unwrap_or(bytes.len() - 2), bytes.len() - 4] {
                let mut flipped = bytes.clone();
                flipped[place] ^= 1;
                refused(&flipped);
            }
        }
    }

    #[test]
    fn only_zeros_may_follow_the_end_of_a_tar() {
        let tar = podman();
        assert!(extracted(&[&*tar, &[0; 10_240]].concat()).0.is_ok());
        assert!(refused(&[&*tar, b"x"].concat()).contains("bytes behind the end of the tar"));
        let long = vec![0; (1 << 20) + 1];
        assert!(refused(&[&*tar, &*long].concat()).contains("bytes behind the end of the tar"));
    }

    #[test]
    fn a_file_with_holes_in_a_form_of_pax_is_refused() {
        for path in ["checkpoint/pages-1.img", "checkpoint/GNUSparseFile.1/pages-1.img"] {
            let mut tar = Builder::new(Vec::new());
            tar.append_pax_extensions([("GNU.sparse.size", &b"8192"[..])]).unwrap();
            let mut header = Header::new_ustar();
            header.set_size(4);
            tar.append_data(&mut header, path, &b"data"[..]).unwrap();
            let said = refused(&tar.into_inner().unwrap());
            assert!(said.contains(&format!("{path}: a file with holes")), "{said}");
        }
    }

    #[test]
    fn other_kinds_and_paths_of_files_are_refused() {
        let inventory = ("checkpoint/inventory.img", EntryType::Regular, &b"inventory"[..]);
        for (path, kind, expected) in [
            ("checkpoint/a", EntryType::Symlink, "expected a regular file"),
            ("checkpoint/a", EntryType::Link, "expected a regular file"),
            ("checkpoint/a", EntryType::Char, "expected a regular file"),
            ("checkpoint/a", EntryType::Fifo, "expected a regular file"),
            ("checkpoint/a", EntryType::Directory, "expected a regular file"),
            ("checkpoint/parent", EntryType::Symlink, "an incremental checkpoint"),
            ("checkpoint", EntryType::Symlink, "expected a regular file"),
            ("/etc/a", EntryType::Regular, "an absolute path"),
            ("checkpoint/../../a", EntryType::Regular, "a path with `..`"),
            ("../a", EntryType::Regular, "a path with `..`"),
            ("checkpoint/inventory.img", EntryType::Regular, "checkpoint/inventory.img twice"),
            ("checkpoint/rewake-manifest", EntryType::Regular, "a file of a sealed image"),
            ("checkpoint/rewake-manifest.partial", EntryType::Regular, "a file of a sealed image"),
            ("checkpoint/rewake-arriving", EntryType::Regular, "a file of a sealed image"),
        ] {
            let said = refused(&archive(&[inventory, (path, kind, b"")]));
            assert!(said.contains(expected), "{path}: {said}");
        }
    }

    #[test]
    fn what_is_no_checkpoint_is_named() {
        for bytes in [archive(&[("config.dump", EntryType::Regular, b"{}")]), archive(&[])] {
            assert!(refused(&bytes).contains("it has no file checkpoint/inventory.img"));
        }
        for bytes in [&b""[..], b"no tar", &[0x1f, 0x8b, 3], &[0x28, 0xb5, 0x2f, 0xfd, 9, 9, 9, 9]] {
            refused(bytes);
        }
    }

    #[test]
    fn a_name_that_does_not_fit_into_memory_is_refused() {
        let name = vec![b'a'; 2 << 20];
        let said = refused(&archive(&[("x", EntryType::GNULongName, &name[..])]));
        assert!(said.contains("headers of more than"), "{said}");
    }

    #[test]
    fn a_directory_with_files_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let archive = folder.path().join("archive");
        fs::write(&archive, podman()).unwrap();
        let said = extract(&archive, folder.path()).unwrap_err().to_string();
        assert!(said.ends_with(": not empty: use a new directory"), "{said}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
