// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which buffers of an image have the same bytes: replicas of a model on several GPUs have hundreds. Looked for once, when it has been dumped.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, PoisonError};
use std::thread;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::folder::FileError;
use crate::pages::PagesFile;
use crate::pipeline::Name;

/// In the image directory: what was found there. Whoever writes other pages there makes what is in it worthless.
pub const TWINS: &str = "rewake-twins.json";
/// Smaller ones are read as fast as they are told apart.
pub(crate) const LEAST: u64 = 64 << 10;
/// What is looked at first of buffers of one size: so many places, so many bytes at each.
const PLACES: usize = 8;
const SAMPLE: usize = 64;
/// Bytes of a page.
const PAGE: u64 = 4096;
/// Compared at once.
const STEP: usize = 1 << 20;
/// Of buffers that were the same so far, so many different contents are told apart in each step; others are taken for unlike.
const CONTENTS: usize = 8;
/// Readers at most: more than a disk needs.
const THREADS: usize = 8;

/// A buffer in its file.
#[derive(Debug, Clone, Copy)]
struct Candidate<'a> {
    name: Name,
    file: &'a PagesFile,
    start: u64,
    bytes: u64,
}

impl Candidate<'_> {
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), FileError> {
        let read = self.file.file.file().read_exact_at(into, self.start + at);
        read.map_err(FileError::of("read", &self.file.name))
    }

    /// But for its first page and its last, which are others', too: buffers begin behind the file's header.
    fn is_hole(&self) -> Result<bool, FileError> {
        let end = self.start + self.bytes;
        let data = self.file.data(self.start.next_multiple_of(PAGE), end - end % PAGE);
        Ok(data.map_err(FileError::of("search", &self.file.name))?.is_none())
    }

    fn sample(&self, place: usize) -> Result<[u8; SAMPLE], FileError> {
        let mut sample = [0; SAMPLE];
        let apart = (self.bytes - SAMPLE as u64) / (PLACES as u64 - 1);
        self.read(apart * place as u64, &mut sample)?;
        Ok(sample)
    }

    /// As [`Candidate::read`], once: what others have in the page cache is not put out for it.
    fn pass(&self, at: u64, into: &mut [u8]) -> Result<(), FileError> {
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

/// Buffers that look the same: by their size, and some bytes of each.
#[derive(Debug)]
pub struct Candidates<'a>(Vec<Group<'a>>);

/// Those that have the same bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DuplicateSets {
    /// Each of two buffers at least and every buffer in one at most, by the files' place and the image's number. All bytes were compared. Holes are in none:
    /// nothing is read for them anyway.
    pub sets: Vec<Vec<Name>>,
    /// Whether there may be more: not all were compared to their end.
    pub cut_off: bool,
}

impl<'a> Candidates<'a> {
    /// Looks for them: a few reads for each buffer.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn of(processes: &'a [Vec<PagesFile>]) -> Result<Self, FileError> {
        // What is looked at is far apart; and what is compared is not to be taken for what others have read.
        without_reading_ahead(processes);
        let mut groups = of_one_size(processes)?;
        for place in 0..PLACES {
            let split = groups.into_iter().map(|group| split(group, |candidate| candidate.sample(place)));
            groups = split.collect::<Result<Vec<_>, _>>()?.concat();
        }
        Ok(Self(groups))
    }

    /// Bytes that are read to compare them, at most.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.iter().flatten().map(|candidate| candidate.bytes).sum()
    }

    /// Compares them as long as that `may_go_on`, which is asked before each MiB of a group; the largest buffers first.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn compare(self, may_go_on: impl Fn() -> bool + Sync) -> Result<DuplicateSets, FileError> {
        let groups = Mutex::new(self.0.into_iter());
        let next = || groups.lock().unwrap_or_else(PoisonError::into_inner).next();
        let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS);
        let found: Vec<Result<DuplicateSets, FileError>> = thread::scope(|scope| {
            let work = || -> Result<DuplicateSets, FileError> {
                let mut same = DuplicateSets::default();
                while let Some(group) = next() {
                    match sets_of(group, &may_go_on)? {
                        Some(sets) => same.sets.extend(sets),
                        None => same.cut_off = true,
                    }
                }
                Ok(same)
            };
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().expect("it has not panicked")).collect()
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

fn without_reading_ahead(processes: &[Vec<PagesFile>]) {
    let files = processes.iter().flatten();
    files.for_each(|file| advise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM));
}

fn advise(file: &PagesFile, start: u64, bytes: u64, advice: PosixFadviseAdvice) {
    // Where the kernel does not take it, nothing is lost.
    let _ = posix_fadvise(file.file.file(), start.cast_signed(), bytes.cast_signed(), advice);
}

/// The largest first: no thread has one of them left when the others have ended.
fn of_one_size(processes: &[Vec<PagesFile>]) -> Result<Vec<Group<'_>>, FileError> {
    let mut sizes: BTreeMap<Reverse<u64>, Group<'_>> = BTreeMap::new();
    for (process, file) in
        (0..).zip(processes).flat_map(|(process, files)| files.iter().map(move |file| (process, file)))
    {
        for stretch in file.stretches().iter().filter(|stretch| stretch.bytes >= LEAST) {
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

/// By what is read of each; without those that are the only ones.
fn split<'a, T: Ord>(
    group: Group<'a>,
    read: impl Fn(&Candidate<'a>) -> Result<T, FileError>,
) -> Result<Vec<Group<'a>>, FileError> {
    let mut by_content: BTreeMap<T, Group<'a>> = BTreeMap::new();
    for candidate in group {
        by_content.entry(read(&candidate)?).or_default().push(candidate);
    }
    Ok(by_content.into_values().filter(|group| group.len() > 1).collect())
}

/// Of buffers that look the same; none if it took too long.
fn sets_of(group: Group<'_>, may_go_on: impl Fn() -> bool) -> Result<Option<Vec<Vec<Name>>>, FileError> {
    let bytes = group.first().map_or(0, |candidate| candidate.bytes);
    let mut groups = vec![group];
    let mut buffer = vec![0; STEP];
    for at in (0..bytes).step_by(STEP) {
        if groups.is_empty() {
            break;
        }
        if !may_go_on() {
            return Ok(None);
        }
        let length = usize::try_from(bytes - at).unwrap_or(STEP).min(STEP);
        let mut still = Vec::new();
        for group in groups {
            still.extend(step(group, at, &mut buffer[..length])?);
        }
        groups = still;
    }
    let names = |group: Group<'_>| {
        let mut names: Vec<Name> = group.iter().map(|candidate| candidate.name).collect();
        names.sort_unstable();
        names
    };
    Ok(Some(groups.into_iter().map(names).collect()))
}

/// Those that are the same in these bytes, too.
fn step<'a>(group: Group<'a>, at: u64, buffer: &mut [u8]) -> Result<Vec<Group<'a>>, FileError> {
    let mut contents: Vec<(Vec<u8>, Group<'a>)> = Vec::new();
    for candidate in group {
        candidate.pass(at, buffer)?;
        match contents.iter().position(|(content, _)| content == buffer) {
            Some(place) => contents[place].1.push(candidate),
            None if contents.len() < CONTENTS => contents.push((buffer.to_vec(), vec![candidate])),
            None => {}
        }
    }
    Ok(contents.into_iter().map(|(_, same)| same).filter(|same| same.len() > 1).collect())
}
