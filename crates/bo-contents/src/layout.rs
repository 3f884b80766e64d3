// SPDX-License-Identifier: MIT OR Apache-2.0
//! Maps files to processes, GPUs and buffers, and orders the files of a load.

use crate::buffer::{Duplicates, StoredBuffer};
use crate::chunk_schedule::{ChunkSchedule, prioritize, small_first};
use crate::dedup::source_of;
use crate::pages::{CHUNK, GpuPagesFile};
use crate::process::ProcessBuffers;

/// A file with its process and the engine that copies its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileEntry<'a> {
    pub(crate) file: &'a GpuPagesFile,
    pub(crate) process: usize,
    pub(crate) engine: usize,
}

/// Returns all files that have chunks, and the render nodes of their GPUs, each once.
pub(crate) fn file_entries<'a>(processes: &'a [ProcessBuffers<'a>]) -> (Vec<FileEntry<'a>>, Vec<u32>) {
    let (mut entries, mut minors) = (Vec::new(), Vec::new());
    let files = processes.iter().enumerate();
    let files = files.flat_map(|(process, of)| of.files.iter().map(move |file| (process, file)));
    for (process, file) in files.filter(|(_, file)| file.chunks() > 0) {
        let engine = minors.iter().position(|minor| *minor == file.minor).unwrap_or_else(|| {
            minors.push(file.minor);
            minors.len() - 1
        });
        entries.push(FileEntry { file, process, engine });
    }
    (entries, minors)
}

/// Returns the buffers that have bytes in a file, by process and number.
pub(crate) fn buffers(
    processes: &[ProcessBuffers<'_>],
    entries: &[FileEntry<'_>],
) -> Vec<Vec<Option<StoredBuffer>>> {
    let mut buffers: Vec<Vec<Option<StoredBuffer>>> =
        processes.iter().map(|process| vec![None; process.dmabufs.len()]).collect();
    for (file, entry) in entries.iter().enumerate() {
        for stretch in entry.file.stretches() {
            let buffer = stretch.chunks().map(|chunks| {
                let left = chunks.end() - chunks.start() + 1;
                StoredBuffer {
                    file,
                    chunks,
                    left,
                    bytes: stretch.bytes,
                    bo: None,
                    duplicates: Duplicates::default(),
                }
            });
            buffers[entry.process][stretch.buffer] = buffer;
        }
    }
    buffers
}

/// Returns the number of buffers that are loaded or saved, by process.
pub(crate) fn remaining(
    processes: &[ProcessBuffers<'_>],
    buffers: &[Vec<Option<StoredBuffer>>],
) -> Vec<usize> {
    let missing = |(of, buffers): (&ProcessBuffers<'_>, &Vec<Option<StoredBuffer>>)| {
        let both = of.dmabufs.iter().zip(buffers);
        both.filter(|(dmabuf, buffer)| dmabuf.is_some() && buffer.is_some()).count()
    };
    processes.iter().zip(buffers).map(missing).collect()
}

/// Returns all files in the order of a background load. The process with the fewest bytes is first, and
/// within it the GPU with the fewest. So its queues resume early, whatever the others wait for.
pub(crate) fn smallest_first(processes: &[ProcessBuffers<'_>], entries: &[FileEntry<'_>]) -> Vec<usize> {
    let mut of_process = vec![0; processes.len()];
    let of_entry: Vec<u64> =
        entries.iter().map(|entry| processes[entry.process].bytes_in(entry.file)).collect();
    entries.iter().zip(&of_entry).for_each(|(entry, bytes)| of_process[entry.process] += bytes);
    let mut files: Vec<usize> = (0..entries.len()).collect();
    files.sort_by_key(|file| {
        let process = entries[*file].process;
        (of_process[process], process, of_entry[*file])
    });
    files
}

/// Returns the schedule of a background load of these files, one after the other. In each file, `wanted`
/// buffers (process and number) are first. Small buffers precede large ones, because a chunk holds many of
/// them at no extra cost.
pub(crate) fn background_schedule(
    processes: &[ProcessBuffers<'_>],
    entries: &[FileEntry<'_>],
    buffers: &[Vec<Option<StoredBuffer>>],
    files: Vec<usize>,
    wanted: &[(usize, usize)],
) -> ChunkSchedule {
    let groups = files.into_iter().map(|file| vec![file]).collect();
    let first = chunks_of(processes, entries.len(), buffers, wanted);
    let of_each = entries.iter().zip(&first);
    ChunkSchedule::new(
        of_each.map(|(entry, first)| prioritize(first, small_chunks_first(processes, entry))),
        groups,
    )
}

/// Returns the chunks of the loaded buffers among `wanted`, by file.
fn chunks_of(
    processes: &[ProcessBuffers<'_>],
    files: usize,
    buffers: &[Vec<Option<StoredBuffer>>],
    wanted: &[(usize, usize)],
) -> Vec<Vec<u64>> {
    let mut chunks = vec![Vec::new(); files];
    for (process, number) in wanted {
        let here = processes.get(*process).and_then(|of| of.dmabufs.get(*number)?.as_ref()).is_some();
        if here
            && let Some(StoredBuffer { file, chunks: of_it, .. }) = source_of(buffers, (*process, *number))
        {
            chunks[*file].extend(of_it.clone());
        }
    }
    chunks
}

fn small_chunks_first(processes: &[ProcessBuffers<'_>], entry: &FileEntry<'_>) -> Vec<u64> {
    let here = &processes[entry.process].dmabufs;
    let mut small = vec![0; usize::try_from(entry.file.chunks()).unwrap_or(usize::MAX)];
    let stretches = entry.file.stretches().iter();
    for stretch in stretches.filter(|of| of.bytes < CHUNK && here[of.buffer].is_some()) {
        for number in stretch.chunks().into_iter().flatten() {
            small[usize::try_from(number).unwrap_or(usize::MAX)] += 1;
        }
    }
    small_first(&small)
}
