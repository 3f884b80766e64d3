// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the bytes of one buffer for all buffers that have the same bytes.

use crate::buffer::{Duplicates, StoredBuffer};
use crate::duplicate_finder::MIN_BYTES;
use crate::process::{Name, ProcessBuffers};

/// The most buffers that one read serves. The copies of a chunk are one submission for each GPU, which has
/// room for 2340, and demands may wait for them. Each of a chunk's 33 pieces that are long enough may be
/// split by 16 holes in all.
const MAX_FOLLOWERS: usize = 16;

/// Makes the loaded buffers of a set followers of the one whose file is first. Returns whether there are
/// any. A buffer is read by itself if it is unknown, small, of another size or in a set already. A large set
/// has several sources.
pub(crate) fn assign_sources(
    set: &[Name],
    files: &[usize],
    processes: &[ProcessBuffers<'_>],
    buffers: &mut [Vec<Option<StoredBuffer>>],
) -> bool {
    let turn = |&(process, number): &Name| {
        let here = processes.get(process).and_then(|of| of.dmabufs.get(number)?.as_ref()).is_some();
        let buffer = of(buffers, (process, number))
            .filter(|of| here && of.bytes >= MIN_BYTES && of.duplicates == Duplicates::default())?;
        let file = files.iter().position(|file| *file == buffer.file);
        Some((buffer.bytes, file, number, process))
    };
    let mut free: Vec<_> = set.iter().filter_map(turn).collect();
    free.sort_unstable();
    free.dedup();
    let mut any = false;
    for of_one_size in free.chunk_by(|one, other| one.0 == other.0) {
        for set in of_one_size.chunks(1 + MAX_FOLLOWERS) {
            let mut names = set.iter().map(|(.., number, process)| (*process, *number));
            let Some(first) = names.next() else { continue };
            any |= assign_source(first, names.collect(), buffers);
        }
    }
    any
}

fn assign_source(first: Name, followers: Vec<Name>, buffers: &mut [Vec<Option<StoredBuffer>>]) -> bool {
    let any = !followers.is_empty();
    let Some(leader) = &mut buffers[first.0][first.1] else { return false };
    let left = leader.left;
    leader.duplicates.followers.clone_from(&followers);
    for (process, number) in followers {
        if let Some(buffer) = &mut buffers[process][number] {
            // A follower is resident when all chunks of its source are done.
            (buffer.left, buffer.duplicates.source) = (left, Some(first));
        }
    }
    any
}

/// Returns the buffer whose bytes are read for this one: itself, if it has no other source.
pub(crate) fn source_of(buffers: &[Vec<Option<StoredBuffer>>], name: Name) -> Option<&StoredBuffer> {
    let buffer = of(buffers, name)?;
    buffer.duplicates.source.map_or(Some(buffer), |first| of(buffers, first))
}

fn of(buffers: &[Vec<Option<StoredBuffer>>], (process, number): Name) -> Option<&StoredBuffer> {
    buffers.get(process)?.get(number)?.as_ref()
}
