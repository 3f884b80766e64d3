// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who else reads a file: other restores of the same image, in processes that know nothing of each other.
//!
//! Each holds a read lock of its own open file (`fcntl(2)`, open file description locks) and sees by a look for a write lock
//! whether it is the only one. No lock is waited for. On file systems of other hosts each reads for itself: a look would be a call of
//! that host, and who reads there shares no page cache with this one.

use std::fs::File;

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::statfs::{
    AFS_SUPER_MAGIC, CODA_SUPER_MAGIC, FUSE_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, fstatfs,
};

/// Those, and what may be one. Of CIFS, SMB 2, Ceph and 9p libc has no names (`linux/magic.h`), nor of Lustre, GPFS and BeeGFS, which are not Linux's own.
const OF_OTHER_HOSTS: [FsType; 12] = [
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

/// Locked: a byte that no file has, so that nobody who locks bytes of files is in the way.
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

/// Whether its bytes come from another host, or may.
pub(super) fn is_of_another_host(file: &File) -> bool {
    !fstatfs(file).is_ok_and(|of| !OF_OTHER_HOSTS.contains(&of.filesystem_type()))
}

/// From here on others know that this file is read, until all its descriptors are closed. False where they do not.
pub(super) fn join(file: &File) -> bool {
    !is_of_another_host(file) && fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK))).is_ok()
}

/// Whether somebody else has joined who has not left.
pub(super) fn has_others(file: &File) -> bool {
    let mut found = lock(libc::F_WRLCK);
    let looked = fcntl(file, FcntlArg::F_OFD_GETLK(&mut found));
    looked.is_ok() && i32::from(found.l_type) == libc::F_RDLCK
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
    use std::path::Path;
    use std::sync::Arc;

    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

    use super::super::testing::Pages;
    use super::super::{Direction, FileRing, Finished, Request, TransferFile};
    use super::*;

    const PIECE: usize = 1 << 20;
    const PIECES: u64 = 16;

    fn open(path: &Path) -> Arc<TransferFile> {
        let with = |flags| fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = TransferFile::new(path, with(0).unwrap(), with(libc::O_DIRECT).ok());
        file.join();
        file
    }

    /// Reads a piece as a load does; what came.
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
    fn a_reader_knows_of_others_as_long_as_they_are_there() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let one = fs::File::open(file.path()).unwrap();
        assert!(!has_others(&one));
        assert!(join(&one));
        assert!(!has_others(&one), "itself");
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
        // The kernel may take memory for something else: most of them.
        let shared = (1..PIECES).filter(|piece| {
            let of_one = read(&one, *piece);
            let was_there = cached(&two, *piece);
            assert!(of_one == read(&two, *piece) && of_one[0] == u8::try_from(*piece).unwrap());
            was_there
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
}
