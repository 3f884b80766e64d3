// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory file that has a plan, and its copies.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

pub(super) const SEALS: SealFlag =
    SealFlag::F_SEAL_WRITE.union(SealFlag::F_SEAL_SHRINK).union(SealFlag::F_SEAL_GROW);

/// Makes an empty memory file for a plan.
///
/// # Errors
/// EMFILE, ENOMEM.
pub(crate) fn memory_file() -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    Ok(memfd_create(c"rewake-plan", flags)?.into())
}

/// Seals a memory file against writing, shrinking and growing.
///
/// # Errors
/// EBUSY: a process has mapped it for writing.
pub(crate) fn seal(memory: &File) -> io::Result<()> {
    fcntl(memory, FcntlArg::F_ADD_SEALS(SEALS | SealFlag::F_SEAL_SEAL))?;
    Ok(())
}

/// Returns whether a memory file is sealed as [`seal`] does.
///
/// # Errors
/// EINVAL: it is no memory file.
pub(crate) fn is_sealed(memory: &File) -> io::Result<bool> {
    Ok(SealFlag::from_bits_truncate(fcntl(memory, FcntlArg::F_GET_SEALS)?).contains(SEALS))
}

/// Returns a sealed memory file with the bytes of a file.
///
/// # Errors
/// ENOMEM, or the file cannot be read.
pub(crate) fn copy_of(file: &File) -> io::Result<File> {
    let memory = memory_file()?;
    copy(file, &memory)?;
    seal(&memory)?;
    Ok(memory)
}

/// Copies a file from its beginning, whatever the offset of its descriptor is: other processes share that.
///
/// # Errors
/// ENOSPC, ENOMEM.
pub(crate) fn copy(from: &File, to: &File) -> io::Result<()> {
    let mut to = to;
    io::copy(&mut At { memory: from, offset: 0 }, &mut to).map(drop)
}

/// Reads the memory file at its own offset, because other processes may use the offset of the descriptor.
pub(super) struct At<'a> {
    pub(super) memory: &'a File,
    pub(super) offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.memory.read_at(buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}
