// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restartable sequences (rseq(2)): code that restarts if its thread loses the CPU inside it.
//!
//! The kernel forgets the sequence as soon as the thread returns to other code, such as an injected call
//! (`kernel/rseq.c: rseq_ip_fixup`). So the thread is moved to the sequence's abort handler first, as the
//! stop would do anyway.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use crate::abi::{self, Registers, Tid};

/// The offset of `rseq_cs` in `struct rseq` (`include/uapi/linux/rseq.h`): the current sequence, or null.
const PRESENT: u64 = 8;

/// A sequence: `struct rseq_cs`.
struct Sequence {
    start: u64,
    length: u64,
    abort: u64,
}

/// Moves a thread's instruction pointer out of a restartable sequence.
pub(crate) fn leave(tid: Tid, memory: &File, registers: &mut Registers) {
    let Some(sequence) = present(tid, memory) else { return };
    if registers.rip.wrapping_sub(sequence.start) < sequence.length {
        registers.rip = sequence.abort;
    }
}

/// Returns the current sequence. Missing memory also means None, as a thread in a sequence has just written
/// there.
fn present(tid: Tid, memory: &File) -> Option<Sequence> {
    let area = abi::rseq(tid).ok()?.rseq_abi_pointer;
    let word = |address| {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, address).ok().map(|()| u64::from_le_bytes(bytes))
    };
    let sequence = word((area != 0).then(|| area + PRESENT)?).filter(|sequence| *sequence != 0)?;
    // Two u32 precede these fields: version and flags.
    Some(Sequence { start: word(sequence + 8)?, length: word(sequence + 16)?, abort: word(sequence + 24)? })
}
