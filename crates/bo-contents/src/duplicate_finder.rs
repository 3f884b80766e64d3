// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds buffers of an image that have the same bytes, once after a dump. Replicas of a model on several GPUs
//! have hundreds of them.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::thread;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use rewake_image_io::{TransferError, read_now};

use crate::pages::GpuPagesFile;
use crate::process::Name;

/// The smallest buffer that is compared: a smaller one is read as fast as it is compared.
pub(crate) const MIN_BYTES: u64 = 64 << 10;
/// The number of samples that are compared first, and the bytes of each.
const SAMPLES: usize = 8;
const SAMPLE_BYTES: usize = 64;
/// Bytes of a page.
const PAGE: u64 = 4096;
/// Bytes that are compared at once.
const COMPARE_BYTES: usize = 1 << 20;
/// The most different contents that one step distinguishes among buffers that were equal so far. Further ones
/// are assumed to be unique.
const MAX_CONTENTS: usize = 8;
/// The most reader threads: more than a disk needs.
const MAX_THREADS: usize = 8;

/// A buffer in its file.
#[derive(Debug, Clone, Copy)]
struct Candidate<'a> {
    name: Name,
    file: &'a GpuPagesFile,
    start: u64,
    bytes: u64,
}

impl Candidate<'_> {
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), TransferError> {
        read_now(&self.file.file, self.start + at, into)
    }

    /// Returns whether all is a hole, except the first and last page. These are shared with other buffers,
    /// because buffers start after the file's header.
    fn is_hole(&self) -> Result<bool, TransferError> {
        let end = self.start + self.bytes;
        Ok(self.file.file.data(self.start.next_multiple_of(PAGE), end - end % PAGE)?.is_none())
    }

    fn sample(&self, place: usize) -> Result<[u8; SAMPLE_BYTES], TransferError> {
        let mut sample = [0; SAMPLE_BYTES];
        let distance = (self.bytes - SAMPLE_BYTES as u64) / (SAMPLES as u64 - 1);
        self.read(distance * place as u64, &mut sample)?;
        Ok(sample)
    }

    /// As [`Candidate::read`], but drops the bytes from the page cache unless they were cached before.
    fn read_once(&self, at: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let was_cached = self.file.file.is_cached(self.start + at, into.len());
        self.read(at, into)?;
        if !was_cached {
            let all = into.len() as u64;
            advise(self.file, self.start + at, all, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        }
        Ok(())
    }
}

type Group<'a> = Vec<Candidate<'a>>;

/// Buffers that may have the same bytes: their sizes and samples are equal.
#[derive(Debug)]
pub struct Candidates<'a>(Vec<Group<'a>>);

/// Sets of buffers that have the same bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DuplicateSets {
    /// Sets of two buffers or more, by the file's index and the image's number. Each buffer is in one set at
    /// most, and all its bytes were compared. Holes are in no set: they are not read anyway.
    pub sets: Vec<Vec<Name>>,
    /// Whether more sets may exist, because not all buffers were compared to the end.
    pub cut_off: bool,
}

impl<'a> Candidates<'a> {
    /// Finds candidates with a few reads for each buffer.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn of(processes: &'a [Vec<GpuPagesFile>]) -> Result<Self, TransferError> {
        // Samples are far apart. What is compared later must not count as cached by other readers.
        disable_readahead(processes);
        let mut groups = group_by_size(processes)?;
        for place in 0..SAMPLES {
            let split = groups.into_iter().map(|group| split(group, |candidate| candidate.sample(place)));
            groups = split.collect::<Result<Vec<_>, _>>()?.concat();
        }
        Ok(Self(groups))
    }

    /// Returns an upper bound of the bytes that a comparison reads.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.iter().flatten().map(|candidate| candidate.bytes).sum()
    }

    /// Compares the candidates, the largest buffers first. `may_continue` is called before each MiB of a
    /// group, and false ends the comparison.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn compare(self, may_continue: impl Fn() -> bool + Sync) -> Result<DuplicateSets, TransferError> {
        let groups = Mutex::new(self.0.into_iter());
        let next = || groups.lock().unwrap_or_else(PoisonError::into_inner).next();
        let threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let found: Vec<Result<DuplicateSets, TransferError>> = thread::scope(|scope| {
            let work = || -> Result<DuplicateSets, TransferError> {
                let mut same = DuplicateSets::default();
                while let Some(group) = next() {
                    match sets_of(group, &may_continue)? {
                        Some(sets) => same.sets.extend(sets),
                        None => same.cut_off = true,
                    }
                }
                Ok(same)
            };
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().expect("a comparing thread panicked")).collect()
        });
        let mut all = DuplicateSets::default();
        for found in found {
            let DuplicateSets { sets, cut_off } = found?;
            all.sets.extend(sets);
            all.cut_off |= cut_off;
        }
        all.sets.sort_unstable();
        Ok(all)
    }
}

fn disable_readahead(processes: &[Vec<GpuPagesFile>]) {
    let files = processes.iter().flatten();
    files.for_each(|file| advise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM));
}

fn advise(file: &GpuPagesFile, start: u64, bytes: u64, advice: PosixFadviseAdvice) {
    // The advice is optional: nothing depends on it.
    let _ = posix_fadvise(&*file.file, start.cast_signed(), bytes.cast_signed(), advice);
}

/// Groups buffers by size, the largest first, so that no thread starts on a large one when the others have
/// ended.
fn group_by_size(processes: &[Vec<GpuPagesFile>]) -> Result<Vec<Group<'_>>, TransferError> {
    let mut sizes: BTreeMap<Reverse<u64>, Group<'_>> = BTreeMap::new();
    for (process, file) in
        (0..).zip(processes).flat_map(|(process, files)| files.iter().map(move |file| (process, file)))
    {
        for stretch in file.stretches().iter().filter(|stretch| stretch.bytes >= MIN_BYTES) {
            let name = (process, stretch.buffer);
            let candidate = Candidate { name, file, start: stretch.start, bytes: stretch.bytes };
            sizes.entry(Reverse(stretch.bytes)).or_default().push(candidate);
        }
    }
    let mut groups = Vec::new();
    for mut group in sizes.into_values().filter(|group| group.len() > 1) {
        let holes: Vec<bool> = group.iter().map(Candidate::is_hole).collect::<Result<_, _>>()?;
        let mut holes = holes.into_iter();
        group.retain(|_| !holes.next().unwrap_or_default());
        groups.push(group);
    }
    Ok(groups)
}

/// Splits a group by the value that `read` returns, and drops groups of one.
fn split<'a, T: Ord>(
    group: Group<'a>,
    read: impl Fn(&Candidate<'a>) -> Result<T, TransferError>,
) -> Result<Vec<Group<'a>>, TransferError> {
    let mut by_content: BTreeMap<T, Group<'a>> = BTreeMap::new();
    for candidate in group {
        by_content.entry(read(&candidate)?).or_default().push(candidate);
    }
    Ok(by_content.into_values().filter(|group| group.len() > 1).collect())
}

/// Compares a group to its end, and returns its sets. Returns None if it was cut off.
fn sets_of(
    group: Group<'_>,
    may_continue: impl Fn() -> bool,
) -> Result<Option<Vec<Vec<Name>>>, TransferError> {
    let bytes = group.first().map_or(0, |candidate| candidate.bytes);
    let mut groups = vec![group];
    let mut buffer = vec![0; COMPARE_BYTES];
    for at in (0..bytes).step_by(COMPARE_BYTES) {
        if groups.is_empty() {
            break;
        }
        if !may_continue() {
            return Ok(None);
        }
        let length = usize::try_from(bytes - at).unwrap_or(COMPARE_BYTES).min(COMPARE_BYTES);
        let mut next_groups = Vec::new();
        for group in groups {
            next_groups.extend(split_by_content(group, at, &mut buffer[..length])?);
        }
        groups = next_groups;
    }
    let names = |group: Group<'_>| {
        let mut names: Vec<Name> = group.iter().map(|candidate| candidate.name).collect();
        names.sort_unstable();
        names
    };
    Ok(Some(groups.into_iter().map(names).collect()))
}

/// Splits a group by these bytes, and drops groups of one.
fn split_by_content<'a>(
    group: Group<'a>,
    at: u64,
    buffer: &mut [u8],
) -> Result<Vec<Group<'a>>, TransferError> {
    let mut contents: Vec<(Vec<u8>, Group<'a>)> = Vec::new();
    for candidate in group {
        candidate.read_once(at, buffer)?;
        match contents.iter().position(|(content, _)| content == buffer) {
            Some(place) => contents[place].1.push(candidate),
            None if contents.len() < MAX_CONTENTS => contents.push((buffer.to_vec(), vec![candidate])),
            None => {}
        }
    }
    Ok(contents.into_iter().map(|(_, same)| same).filter(|same| same.len() > 1).collect())
}
