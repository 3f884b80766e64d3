// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds a `syscall` instruction in a process, without writing to it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use crate::maps::{MapsEntry, NO_FILE};

const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// The most bytes of a mapping that are searched: the vdso has 8 KiB, the C library 2 MiB.
const MAX_SEARCH: u64 = 4 << 20;
/// Bytes of one read. A read of missing memory fails with EIO as a whole.
const READ_SIZE: usize = 4096;

/// Returns the address of a `syscall` instruction: the vdso's, or one in an executable file mapping.
pub(crate) fn find(mappings: &[MapsEntry], memory: &File) -> Option<u64> {
    let vdso = mappings.iter().filter(|mapping| mapping.vdso);
    let files = mappings.iter().filter(|mapping| mapping.file != NO_FILE);
    vdso.chain(files).filter(|mapping| mapping.executable).find_map(|mapping| search(mapping, memory))
}

fn search(mapping: &MapsEntry, memory: &File) -> Option<u64> {
    let end = mapping.end.min(mapping.start + MAX_SEARCH);
    let mut piece = [0; READ_SIZE];
    (mapping.start..end).step_by(READ_SIZE).find_map(|start| {
        memory.read_exact_at(&mut piece, start).ok()?;
        let at = piece.windows(2).position(|bytes| bytes == SYSCALL)?;
        Some(start + at as u64)
    })
}
