// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buffers that have the same bytes: those of one are read, and copied to all of them.

use crate::duplicate_finder::LEAST;
use crate::layout::Buffer;
use crate::pipeline::{Name, Process};

/// Of a buffer, others with the same bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Duplicates {
    /// Whose bytes are read for it.
    pub(crate) follows: Option<Name>,
    /// Those that its own are read for.
    pub(crate) followers: Vec<Name>,
}

/// Buffers at most that get the bytes of one: the copies of a chunk are one submission for each GPU, which has room for 2340, and somebody may wait behind
/// them. Of a chunk's 33 pieces that are long enough each may be cut by 16 holes in all.
const FOLLOWERS: usize = 16;

/// Makes those of a set that are loaded follow the one whose file comes first; whether there are any. What is unknown, small, of another size, or in a set already
/// is read for itself. Of very many with the same bytes several are read.
pub(crate) fn assign_sources(
    set: &[Name],
    files: &[usize],
    processes: &[Process<'_>],
    buffers: &mut [Vec<Option<Buffer>>],
) -> bool {
    let turn = |&(process, number): &Name| {
        let here = processes.get(process).and_then(|of| of.dmabufs.get(number)?.as_ref()).is_some();
        let buffer = of(buffers, (process, number))
            .filter(|of| here && of.bytes >= LEAST && of.twins == Duplicates::default())?;
        let file = files.iter().position(|file| *file == buffer.file);
        Some((buffer.bytes, file, number, process))
    };
    let mut free: Vec<_> = set.iter().filter_map(turn).collect();
    free.sort_unstable();
    free.dedup();
    let mut any = false;
    for of_one_size in free.chunk_by(|one, other| one.0 == other.0) {
        for set in of_one_size.chunks(1 + FOLLOWERS) {
            let mut names = set.iter().map(|(.., number, process)| (*process, *number));
            let Some(first) = names.next() else { continue };
            any |= assign_source(first, names.collect(), buffers);
        }
    }
    any
}

fn assign_source(first: Name, followers: Vec<Name>, buffers: &mut [Vec<Option<Buffer>>]) -> bool {
    let any = !followers.is_empty();
    let Some(leader) = &mut buffers[first.0][first.1] else { return false };
    let left = leader.left;
    leader.twins.followers.clone_from(&followers);
    for (process, number) in followers {
        if let Some(buffer) = &mut buffers[process][number] {
            // It is whole when all of the other one's chunks are done.
            (buffer.left, buffer.twins.follows) = (left, Some(first));
        }
    }
    any
}

/// The buffer whose bytes are read for this one: its own, if it follows none.
pub(crate) fn source_of(buffers: &[Vec<Option<Buffer>>], name: Name) -> Option<&Buffer> {
    let buffer = of(buffers, name)?;
    buffer.twins.follows.map_or(Some(buffer), |first| of(buffers, first))
}

fn of(buffers: &[Vec<Option<Buffer>>], (process, number): Name) -> Option<&Buffer> {
    buffers.get(process)?.get(number)?.as_ref()
}
