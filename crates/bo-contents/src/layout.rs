// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whose the files are, which of their chunks have bytes of which buffer, and which process's come first.

use std::ops::RangeInclusive;

use rewake_sdma_copy::Bo;

use crate::chunk_schedule::{ChunkSchedule, put_first, small_first};
use crate::dedup::{Duplicates, source_of};
use crate::pages::{CHUNK, PagesFile};
use crate::pipeline::Process;

/// A file, whose it is and what copies its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessLayout<'a> {
    pub(crate) file: &'a PagesFile,
    pub(crate) process: usize,
    pub(crate) engine: usize,
}

/// A buffer that has bytes in a file.
#[derive(Debug, Clone)]
pub(crate) struct Buffer {
    /// Which file of all processes'.
    pub(crate) file: usize,
    /// That it has bytes in.
    pub(crate) chunks: RangeInclusive<u64>,
    /// Those of them that are not done; of one that follows another, of that one's.
    pub(crate) left: u64,
    /// Of all of it.
    pub(crate) bytes: u64,
    /// What the engine calls it, from the first copy to the last.
    pub(crate) bo: Option<Bo>,
    /// Buffers with the same bytes.
    pub(crate) twins: Duplicates,
}

/// All files that have chunks, and the render nodes of their GPUs, each once.
pub(crate) fn parts<'a>(processes: &'a [Process<'a>]) -> (Vec<ProcessLayout<'a>>, Vec<u32>) {
    let (mut parts, mut minors) = (Vec::new(), Vec::new());
    let files = processes.iter().enumerate();
    let files = files.flat_map(|(process, of)| of.files.iter().map(move |file| (process, file)));
    for (process, file) in files.filter(|(_, file)| file.chunks() > 0) {
        let engine = minors.iter().position(|minor| *minor == file.minor).unwrap_or_else(|| {
            minors.push(file.minor);
            minors.len() - 1
        });
        parts.push(ProcessLayout { file, process, engine });
    }
    (parts, minors)
}

/// What has bytes in a file, by process and buffer.
pub(crate) fn buffers(processes: &[Process<'_>], parts: &[ProcessLayout<'_>]) -> Vec<Vec<Option<Buffer>>> {
    let mut buffers: Vec<Vec<Option<Buffer>>> =
        processes.iter().map(|process| vec![None; process.dmabufs.len()]).collect();
    for (file, part) in parts.iter().enumerate() {
        for stretch in part.file.stretches() {
            let buffer = stretch.chunks().map(|chunks| {
                let left = chunks.end() - chunks.start() + 1;
                Buffer { file, chunks, left, bytes: stretch.bytes, bo: None, twins: Duplicates::default() }
            });
            buffers[part.process][stretch.buffer] = buffer;
        }
    }
    buffers
}

/// How many buffers of each process are to be moved.
pub(crate) fn remaining(processes: &[Process<'_>], buffers: &[Vec<Option<Buffer>>]) -> Vec<usize> {
    let missing = |(of, buffers): (&Process<'_>, &Vec<Option<Buffer>>)| {
        let both = of.dmabufs.iter().zip(buffers);
        both.filter(|(dmabuf, buffer)| dmabuf.is_some() && buffer.is_some()).count()
    };
    processes.iter().zip(buffers).map(missing).collect()
}

/// All files, in the order in which they are loaded behind running processes: the process with the fewest bytes comes first, and of its GPUs that
/// with the fewest. Each can go on when it has all of them, whatever the others wait for.
pub(crate) fn smallest_first(processes: &[Process<'_>], parts: &[ProcessLayout<'_>]) -> Vec<usize> {
    let mut of_process = vec![0; processes.len()];
    let of_part: Vec<u64> = parts.iter().map(|part| processes[part.process].bytes_in(part.file)).collect();
    parts.iter().zip(&of_part).for_each(|(part, bytes)| of_process[part.process] += bytes);
    let mut files: Vec<usize> = (0..parts.len()).collect();
    files.sort_by_key(|file| {
        let process = parts[*file].process;
        (of_process[process], process, of_part[*file])
    });
    files
}

/// The order of what is loaded behind running processes, these files one after the other. Of each, buffers that are `wanted` first (process and buffer)
/// come first, then small buffers before large ones: there are many of them in a chunk, and it costs nothing.
pub(crate) fn background_schedule(
    processes: &[Process<'_>],
    parts: &[ProcessLayout<'_>],
    buffers: &[Vec<Option<Buffer>>],
    files: Vec<usize>,
    wanted: &[(usize, usize)],
) -> ChunkSchedule {
    let groups = files.into_iter().map(|file| vec![file]).collect();
    let first = chunks_of(processes, parts.len(), buffers, wanted);
    let of_each = parts.iter().zip(&first);
    ChunkSchedule::new(
        of_each.map(|(part, first)| put_first(first, small_chunks_first(processes, part))),
        groups,
    )
}

/// By file: the chunks of buffers that are loaded; others have none.
fn chunks_of(
    processes: &[Process<'_>],
    files: usize,
    buffers: &[Vec<Option<Buffer>>],
    wanted: &[(usize, usize)],
) -> Vec<Vec<u64>> {
    let mut chunks = vec![Vec::new(); files];
    for (process, number) in wanted {
        let here = processes.get(*process).and_then(|of| of.dmabufs.get(*number)?.as_ref()).is_some();
        if here && let Some(Buffer { file, chunks: of_it, .. }) = source_of(buffers, (*process, *number)) {
            chunks[*file].extend(of_it.clone());
        }
    }
    chunks
}

fn small_chunks_first(processes: &[Process<'_>], part: &ProcessLayout<'_>) -> Vec<u64> {
    let here = &processes[part.process].dmabufs;
    let mut small = vec![0; usize::try_from(part.file.chunks()).unwrap_or(usize::MAX)];
    let stretches = part.file.stretches().iter();
    for stretch in stretches.filter(|of| of.bytes < CHUNK && here[of.buffer].is_some()) {
        for number in stretch.chunks().into_iter().flatten() {
            small[usize::try_from(number).unwrap_or(usize::MAX)] += 1;
        }
    }
    small_first(&small)
}
