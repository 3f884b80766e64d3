// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checkpoint archives of podman and CRI-O: a tar, compressed or not, whose folder `checkpoint/` has CRIU's
//! files.
//!
//! An archive is hostile input. Only regular files of that folder are written, each into the directory
//! itself, under a name of one component. An archive with other paths or kinds of files in it is refused.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod error;
mod input;
mod names;

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use nix::fcntl::OFlag;
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{UnlinkatFlags, unlinkat};
use rewake_criu_images::FILE_MODE;
use rewake_process::beneath::Beneath;
use tar::{Archive, Entry, EntryType};

pub use error::{ArchiveError, Result};

use input::{ArchiveInput, decompressed};
use names::ArchivePlace;

/// The file that every checkpoint has.
const INVENTORY: &str = "inventory.img";
/// The most entries of an archive: with millions of tasks, its files would have no place in a directory
/// either.
const MAX_ENTRIES: u64 = 1 << 22;
/// How the keys of PAX begin that describe a file with holes: its data in the archive is not the file's.
const PAX_SPARSE: &[u8] = b"GNU.sparse.";
/// Bytes that are copied at once.
const BUFFER: usize = 1 << 18;
/// Bytes that are a hole if all of them are zeros: the least that file systems have holes of.
const PAGE: [u8; 4096] = [0; 4096];
/// Bytes, not counting pages of zeros, that each byte of an archive may become on average: gzip cannot make
/// more of a byte. zstd can make thirty times as many. For these [`FREE_SHARE`] is the limit, because the
/// memory of an honest program may have one byte everywhere, too.
const RATIO: u64 = 1032;
/// The part of the free space that an archive may fill without regard to its length.
const FREE_SHARE: u64 = 4;

/// What was extracted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ExtractReport {
    /// Files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Extracts CRIU's files into a directory, which must be empty or missing. After a failure it is as it was
/// before.
///
/// # Errors
/// The archive is cut, damaged, or no checkpoint; it has files that an image does not have; the directory is
/// not empty, or has no space.
pub fn extract(archive: &Path, directory: &Path) -> Result<ExtractReport> {
    let wrong = |what: String| ArchiveError::Archive { archive: archive.to_owned(), what };
    let file = File::open(archive).map_err(|reason| wrong(reason.to_string()))?;
    let length = match file.metadata() {
        Ok(found) if found.is_file() => found.len(),
        _ => return Err(wrong("it is no regular file".to_owned())),
    };
    let input = decompressed(BufReader::new(file)).map_err(|reason| wrong(reason.to_string()))?;
    let (opened, made) = make(directory)?;
    let report = ExtractReport::default();
    let mut extraction =
        Extraction { archive, length, directory, opened, free: None, written: Vec::new(), filled: 0, report };
    let extracted = extraction.all(input);
    if extracted.is_err() {
        for name in &extraction.written {
            // What is left is no image: it has no manifest.
            let _ = unlinkat(&extraction.opened, &**name, UnlinkatFlags::NoRemoveDir);
        }
        if made {
            let _ = fs::remove_dir(directory);
        }
    }
    extracted.map(|()| extraction.report)
}

/// Makes the directory, and opens it. With false: it exists, and is empty.
fn make(directory: &Path) -> Result<(Beneath, bool)> {
    let failed = |reason| ArchiveError::Directory { directory: directory.to_owned(), reason };
    let is_made = match fs::create_dir(directory) {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
        Err(error) => return Err(failed(error)),
    };
    let opened = Beneath::open(directory).map_err(failed)?;
    // By the descriptor: the path may name another directory by now.
    let path = format!("/proc/self/fd/{}", opened.as_fd().as_raw_fd());
    match fs::read_dir(path).map_err(failed)?.next() {
        None => Ok((opened, is_made)),
        Some(_) => Err(ArchiveError::NotEmpty { directory: directory.to_owned() }),
    }
}

struct Extraction<'a> {
    archive: &'a Path,
    /// The bytes of the archive.
    length: u64,
    /// For messages: another directory may have this path by now.
    directory: &'a Path,
    opened: Beneath,
    /// The bytes that were free before the first file.
    free: Option<u64>,
    /// The names of files that were made.
    written: Vec<String>,
    /// Bytes of files without their holes.
    filled: u64,
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
        let free = match self.free {
            Some(free) => free,
            None => {
                let space = fstatvfs(&self.opened).map_err(|errno| failed(errno.into()))?;
                *self.free.insert(space.blocks_available() * space.fragment_size())
            }
        };
        // Holes count, too: they are read, and whatever reads the image later reads them again.
        let total = self.report.bytes.saturating_add(length);
        if total > free {
            return Err(ArchiveError::Space { file: path, length: total, free });
        }
        let file = match self.opened.create(name, OFlag::O_EXCL, FILE_MODE) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(self.wrong(&format!("it has checkpoint/{name} twice")));
            }
            file => file.map_err(failed)?,
        };
        self.written.push(name.to_owned());
        self.copy(entry, &file, length, name)?.map_err(failed)?;
        self.report.files += 1;
        self.report.bytes += length;
        Ok(())
    }

    /// Copies the data of a file; pages of zeros become holes. The outer error is of the archive, the inner
    /// one of the file.
    fn copy<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        file: &File,
        length: u64,
        name: &str,
    ) -> Result<io::Result<()>> {
        if let Err(error) = file.set_len(length) {
            return Ok(Err(error));
        }
        let limit = self.length.saturating_mul(RATIO).max(self.free.unwrap_or_default() / FREE_SHARE);
        let (mut at, mut buffer) = (0, vec![0; BUFFER]);
        while at < length {
            let most = usize::try_from(length - at).unwrap_or(usize::MAX).min(BUFFER);
            match entry.read_exact(&mut buffer[..most]) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    return Err(self.wrong(&format!("it is cut in checkpoint/{name}")));
                }
                Err(error) => return Err(self.damaged(&error)),
            }
            for (offset, run) in runs(&buffer[..most]) {
                self.filled += run.len() as u64;
                if self.filled > limit {
                    let (archive, length) = (self.archive.to_owned(), self.length);
                    return Err(ArchiveError::Expands {
                        archive,
                        length,
                        limit,
                        ratio: RATIO,
                        share: FREE_SHARE,
                    });
                }
                if let Err(error) = file.write_all_at(run, at + offset) {
                    return Ok(Err(error));
                }
            }
            at += most as u64;
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

/// Finds the pages that are not zeros, with their offsets. Pages that follow each other are one run.
fn runs(bytes: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let is_zero = |start: usize| {
        let page = &bytes[start..bytes.len().min(start + PAGE.len())];
        page == &PAGE[..page.len()]
    };
    let mut next = 0;
    std::iter::from_fn(move || {
        let pages = |from: usize| (from..bytes.len()).step_by(PAGE.len());
        let start = pages(next).find(|start| !is_zero(*start))?;
        next = pages(start).find(|start| is_zero(*start)).unwrap_or(bytes.len());
        Some((start as u64, &bytes[start..next]))
    })
}

/// A path of an archive, for messages.
fn shown(path: &[u8]) -> String {
    const MOST: usize = 200;
    String::from_utf8_lossy(&path[..path.len().min(MOST)]).into_owned()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::MetadataExt as _;

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
    fn pages_of_zeros_become_holes() {
        let mut memory = vec![0; 8 << 20];
        // A page at a border of what is copied at once, and the last byte.
        memory[BUFFER - 1..=BUFFER].fill(7);
        *memory.last_mut().unwrap() = 7;
        memory.push(0);
        let tar = archive(&[
            ("checkpoint/inventory.img", EntryType::Regular, b"inventory"),
            ("checkpoint/pages-1.img", EntryType::Regular, &memory),
        ]);
        let folder = tempfile::tempdir().unwrap();
        let (archive, directory) = (folder.path().join("archive"), folder.path().join("image"));
        fs::write(&archive, zstd::encode_all(&*tar, 1).unwrap()).unwrap();
        extract(&archive, &directory).unwrap();
        let path = directory.join("pages-1.img");
        assert!(fs::read(&path).unwrap() == memory);
        let stored = fs::metadata(&path).unwrap().blocks() * 512;
        assert!(stored <= 64 << 10, "{stored} bytes of the file system");
    }

    /// Extracts an archive into a file system that has this space.
    fn extracted_into(free: u64, bytes: &[u8]) -> Result<u64> {
        let folder = tempfile::tempdir().unwrap();
        let (path, directory) = (folder.path().join("archive"), folder.path().join("image"));
        fs::write(&path, bytes).unwrap();
        let mut extraction = Extraction {
            archive: &path,
            length: bytes.len() as u64,
            directory: &directory,
            opened: make(&directory).unwrap().0,
            free: Some(free),
            written: Vec::new(),
            filled: 0,
            report: ExtractReport::default(),
        };
        let input = decompressed(BufReader::new(File::open(&path).unwrap())).unwrap();
        extraction.all(input).map(|()| extraction.report.bytes)
    }

    #[test]
    fn a_short_archive_does_not_fill_a_file_system() {
        let tar = archive(&[
            ("checkpoint/inventory.img", EntryType::Regular, b"inventory"),
            ("checkpoint/pages-1.img", EntryType::Regular, &[7; 8 << 20]),
        ]);
        let zstd = zstd::encode_all(&*tar, 1).unwrap();
        let refused = extracted_into(24 << 20, &zstd).unwrap_err();
        assert!(matches!(refused, ArchiveError::Expands { limit: 0x60_0000, .. }), "{refused}");
        // Where it leaves space, and where it is not short.
        for (free, bytes) in [(64 << 20, &zstd), (9 << 20, &tar)] {
            assert_eq!(extracted_into(free, bytes).unwrap(), (8 << 20) + 9);
        }
    }

    #[test]
    fn files_whose_sum_has_no_space_are_refused() {
        assert_eq!(extracted_into(10_009, &podman()).unwrap(), 10_009);
        let refused = extracted_into(10_008, &podman()).unwrap_err();
        assert!(matches!(refused, ArchiveError::Space { length: 10_009, free: 10_008, .. }), "{refused}");
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
            ("checkpoint/parent/secret.img", EntryType::Regular, "a folder in the checkpoint"),
            ("checkpoint/parent", EntryType::Link, "expected a regular file"),
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
