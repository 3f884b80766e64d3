// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where a process has a `syscall` instruction. Nothing is written to it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use crate::maps::{Mapping, NO_FILE};

const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes of one mapping that are searched: the vdso has 8 KiB, the C library 2 MiB.
const SEARCHED: u64 = 4 << 20;
/// Bytes read at a time. Memory that is still missing gives EIO, for all of them.
const PIECE: usize = 4096;

/// The address of a `syscall` instruction: the vdso's, or any in the executable part of a file.
pub(crate) fn find(mappings: &[Mapping], memory: &File) -> Option<u64> {
    let vdso = mappings.iter().filter(|mapping| mapping.vdso);
    let files = mappings.iter().filter(|mapping| mapping.file != NO_FILE);
    vdso.chain(files).filter(|mapping| mapping.executable).find_map(|mapping| search(mapping, memory))
}

fn search(mapping: &Mapping, memory: &File) -> Option<u64> {
    let end = mapping.end.min(mapping.start + SEARCHED);
    let mut piece = [0; PIECE];
    (mapping.start..end).step_by(PIECE).find_map(|start| {
        memory.read_exact_at(&mut piece, start).ok()?;
        let at = piece.windows(2).position(|bytes| bytes == SYSCALL)?;
        Some(start + at as u64)
    })
}
