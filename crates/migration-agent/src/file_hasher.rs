// SPDX-License-Identifier: MIT OR Apache-2.0
//! Digests of files, for so long at most.
//!
//! A peer may name any path. So only a regular file is opened, on a file system that just keeps files:
//! reading one of `/proc` may wait for ever, or take what another program waits for.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::statfs::{
    BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC,
    TMPFS_MAGIC, XFS_SUPER_MAGIC, fstatfs,
};
use serde::{Deserialize, Serialize};

/// Time in which the files of one program are hashed.
pub(crate) const HASH_LIMIT: Duration = Duration::from_secs(10);
/// File systems whose files are hashed. `EXT4_SUPER_MAGIC` is that of ext2 and ext3, too.
const HASHED: [FsType; 7] = [
    EXT4_SUPER_MAGIC,
    XFS_SUPER_MAGIC,
    BTRFS_SUPER_MAGIC,
    F2FS_SUPER_MAGIC,
    OVERLAYFS_SUPER_MAGIC,
    TMPFS_MAGIC,
    NFS_SUPER_MAGIC,
];
/// Bytes of a file that are read at once.
const PIECE: usize = 1 << 20;

/// The BLAKE3 digest of a file's bytes. Its text is hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct FileDigest(blake3::Hash);

impl From<FileDigest> for String {
    fn from(digest: FileDigest) -> Self {
        digest.0.to_hex().as_str().to_owned()
    }
}

impl TryFrom<String> for FileDigest {
    type Error = blake3::HexError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        blake3::Hash::from_hex(text).map(Self)
    }
}

/// Hashes files until its time has passed.
#[derive(Debug)]
pub(crate) struct FileHasher {
    deadline: Instant,
    piece: Vec<u8>,
}

impl FileHasher {
    /// Begins now.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { deadline: Instant::now() + limit, piece: vec![0; PIECE] }
    }

    /// The digest of a file's first `size` bytes, or `None` if the time has passed, or if its file system is
    /// not one of [`HASHED`].
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn hash(&mut self, path: &Path, size: u64) -> io::Result<Option<FileDigest>> {
        // This opens no device, and waits for no writer.
        let place = File::options().read(true).custom_flags(OFlag::O_PATH.bits()).open(path)?;
        if !place.metadata()?.is_file() || !HASHED.contains(&fstatfs(&place)?.filesystem_type()) {
            return Ok(None);
        }
        let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let same = format!("/proc/self/fd/{}", place.as_raw_fd());
        let mut file = File::options().read(true).custom_flags(flags.bits()).open(same)?.take(size);
        let mut hasher = blake3::Hasher::new();
        while Instant::now() < self.deadline {
            match file.read(&mut self.piece)? {
                0 => return Ok(Some(FileDigest(hasher.finalize()))),
                len => drop(hasher.update(&self.piece[..len])),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn hash(path: &str, size: u64) -> Option<FileDigest> {
        FileHasher::new(HASH_LIMIT).hash(Path::new(path), size).unwrap()
    }

    #[test]
    fn so_many_bytes_of_a_regular_file_are_hashed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "12345").unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(hash(path, 5), Some(FileDigest(blake3::hash(b"12345"))));
        assert_eq!(hash(path, 3), Some(FileDigest(blake3::hash(b"123"))));
        let late = FileHasher::new(Duration::ZERO).hash(Path::new(path), 5).unwrap();
        assert_eq!(late, None);
        assert!(FileHasher::new(HASH_LIMIT).hash(Path::new("/no/such/file"), 1).is_err());
    }

    /// The kernel's log ends never, and takes what is read from others.
    #[test]
    fn files_that_the_kernel_makes_are_not_read() {
        for path in ["/proc/kmsg", "/proc/self/status", "/sys/kernel/mm/transparent_hugepage/enabled"] {
            assert_eq!(hash(path, 0), None, "{path}");
        }
        for path in ["/dev/zero", "/dev", "/dev/null"] {
            assert_eq!(hash(path, u64::MAX), None, "{path}");
        }
    }

    #[test]
    fn a_pipe_without_a_writer_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(hash(path.to_str().unwrap(), 1), None);
    }

    #[test]
    fn a_digest_travels_as_hexadecimal_text() {
        let digest = FileDigest(blake3::hash(b"12345"));
        let text = serde_json::to_string(&digest).unwrap();
        assert_eq!(text.len(), 66);
        assert_eq!(serde_json::from_str::<FileDigest>(&text).unwrap(), digest);
        assert!(serde_json::from_str::<FileDigest>("\"12\"").is_err());
    }
}
