// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds other readers of a file: restores of the same image in independent processes.
//!
//! Each reader holds a read lock of its own open file (`fcntl(2)`, open file description locks). A query for
//! a write lock shows whether it is the only reader. No process waits for a lock. On remote file systems each
//! reader reads for itself: a query would be a request to the other host, and its readers there do not share
//! this page cache.

use std::fs::File;

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::statfs::{
    AFS_SUPER_MAGIC, CODA_SUPER_MAGIC, FUSE_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, fstatfs,
};

/// Remote file systems, and FUSE, which may be one. libc has no names for CIFS, SMB 2, Ceph and 9p
/// (`linux/magic.h`), nor for Lustre, GPFS and BeeGFS, which are not in Linux.
const REMOTE: [FsType; 12] = [
    NFS_SUPER_MAGIC,
    SMB_SUPER_MAGIC,
    FsType(0xff53_4d42),
    FsType(0xfe53_4d42),
    FsType(0x00c3_6400),
    AFS_SUPER_MAGIC,
    CODA_SUPER_MAGIC,
    FsType(0x0102_1997),
    FUSE_SUPER_MAGIC,
    FsType(0x0bd0_0bd0),
    FsType(0x4750_4653),
    FsType(0x1983_0326),
];

/// The byte that is locked: one that no file has, so that it does not conflict with other locks.
const BYTE: libc::off_t = libc::off_t::MAX - 1;

fn lock(kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: libc::c_short::try_from(kind).unwrap_or_default(),
        l_whence: libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: BYTE,
        l_len: 1,
        l_pid: 0,
    }
}

/// Whether the bytes of a file come from another host, or may.
pub(crate) fn is_remote(file: &File) -> bool {
    !fstatfs(file).is_ok_and(|of| !REMOTE.contains(&of.filesystem_type()))
}

/// Registers this reader of a file, until all descriptors of the open file are closed. Returns false where
/// other readers cannot find it.
pub(crate) fn join(file: &File) -> bool {
    !is_remote(file) && fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK))).is_ok()
}

/// Whether another reader has joined and has not left.
pub(crate) fn has_others(file: &File) -> bool {
    let mut found = lock(libc::F_WRLCK);
    let queried = fcntl(file, FcntlArg::F_OFD_GETLK(&mut found));
    queried.is_ok() && i32::from(found.l_type) == libc::F_RDLCK
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
    use std::path::Path;
    use std::sync::Arc;

    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

    use super::*;
    use crate::engine::ReadMode;
    use crate::files::testing::Pages;
    use crate::files::{Direction, FileRing, Finished, Request, TransferFile};
    use crate::{BLOCK, PagesFile};

    const PIECE: usize = 1 << 20;
    const PIECES: u64 = 16;

    fn open(path: &Path) -> Arc<TransferFile> {
        let with = |flags| fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = TransferFile::new(path, with(0).unwrap(), with(libc::O_DIRECT).ok());
        file.join();
        file
    }

    /// Reads a piece as a load does, and returns its bytes.
    fn read(file: &Arc<TransferFile>, piece: u64) -> Vec<u8> {
        let (mut ring, memory) = (FileRing::new(1).unwrap(), Pages::new(PIECE));
        let offset = piece * PIECE as u64;
        let (file, to, direction) = (Arc::clone(file), Arc::clone(&memory), Direction::Read);
        let request =
            Request { file, direction, offset, memory: to, at: 0, bytes: PIECE, needed: PIECE, token: 0 };
        ring.submit(request).unwrap();
        let mut over: Vec<Finished> = Vec::new();
        while over.is_empty() {
            ring.flush();
            ring.finished(&mut over);
        }
        over.pop().unwrap().result.unwrap();
        memory.get(0, PIECE)
    }

    #[test]
    fn a_reader_finds_others_while_they_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let one = fs::File::open(file.path()).unwrap();
        assert!(!has_others(&one));
        assert!(join(&one));
        assert!(!has_others(&one), "it finds itself");
        let two = fs::File::open(file.path()).unwrap();
        assert!(join(&two));
        assert!(has_others(&one) && has_others(&two));
        drop(two);
        assert!(!has_others(&one));
    }

    #[test]
    fn what_two_read_at_once_is_read_from_the_disk_once() {
        let temp = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for piece in 0..PIECES {
            temp.as_file()
                .write_all_at(&vec![u8::try_from(piece).unwrap(); PIECE], piece * PIECE as u64)
                .unwrap();
        }
        temp.as_file().sync_all().unwrap();
        let drop_cached =
            || posix_fadvise(temp.as_file(), 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
        drop_cached();
        let cached = |file: &TransferFile, piece: u64| file.is_cached(piece * PIECE as u64, PIECE);
        let one = open(temp.path());
        assert_eq!(read(&one, 0), [0; PIECE]);
        assert!(!cached(&one, 0), "alone it reads past the page cache");
        let two = open(temp.path());
        // The kernel may evict pages at any time: most of them suffice.
        let shared = (1..PIECES).filter(|piece| {
            let first = read(&one, *piece);
            let was_cached = cached(&two, *piece);
            assert!(first == read(&two, *piece) && first[0] == u8::try_from(*piece).unwrap());
            was_cached
        });
        assert!(shared.count() > 10);
        drop(two);
        let again = |piece: u64| {
            drop_cached();
            read(&one, piece);
            !cached(&one, piece)
        };
        assert!((1..PIECES).filter(|piece| again(*piece)).count() > 10, "alone again");
    }

    #[test]
    fn a_pages_file_that_two_read_is_read_through_the_page_cache() {
        let temp = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        temp.as_file().write_all_at(&vec![7; 1 << 20], 0).unwrap();
        temp.as_file().sync_all().unwrap();
        posix_fadvise(temp.as_file(), 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
        let one = PagesFile::open(temp.path()).unwrap();
        let alone = one.how(0, BLOCK);
        let two = PagesFile::open(temp.path()).unwrap();
        assert_eq!([&one, &two].map(|file| file.how(0, BLOCK)), [ReadMode::Buffered; 2]);
        drop(two);
        assert_eq!(one.how(0, BLOCK), alone, "alone again");
        assert_eq!(alone, if one.has_direct() { ReadMode::Direct } else { ReadMode::Buffered });
    }
}
