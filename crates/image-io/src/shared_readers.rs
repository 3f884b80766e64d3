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
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK))).is_ok()
}

/// Whether another reader has joined and has not left.
pub(crate) fn has_others(file: &File) -> bool {
    let mut found = lock(libc::F_WRLCK);
    let queried = fcntl(file, FcntlArg::F_OFD_GETLK(&mut found));
    queried.is_ok() && i32::from(found.l_type) == libc::F_RDLCK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_finds_others_while_they_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let one = File::open(file.path()).unwrap();
        assert!(!has_others(&one));
        assert!(join(&one));
        assert!(!has_others(&one), "it finds itself");
        let two = File::open(file.path()).unwrap();
        assert!(join(&two));
        assert!(has_others(&one) && has_others(&two));
        drop(two);
        assert!(!has_others(&one));
    }
}
