// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory file with an image's plans: the planner writes it, and every worker of the session reads it.
//!
//! A session must not parse an image: an image is hostile input. A successor must not look at the path
//! again: another image may be there by then (I7). So a [`Draft`] is written into a memory file, which is
//! sealed. A worker gets it together with the descriptors of the pages files, and checks every number in it.
//! The format, with all numbers little-endian:
//!
//! ```text
//! MAGIC [8], VERSION u32, digest of the image [32], id of the dump [32]
//! why the working set is not used: as a name; whether buffers belong to it u32; the tree's root: pid u32
//! directory: dev ino u64
//! leases u32, checksums u64: their numbers
//! memory of another host: length of a header u32 (0: there is none; 1: it goes into the files), bytes u64,
//!     bytes of the cache file u64; for 1: id of the image [32]
//! files u32, each: dev ino len u64, mtime ctime (i64 s, i64 ns), links u64, mode uid gid u32, name, path,
//!     is sealed u32, first checksum u64, number at the other host u32
//! tasks u32, each: pid u32, has memory u32, and if it has:
//!     files u32, each: index u32      first u32, each: start end u64
//!     working set u32, each: start end u64, rank u32
//!     extents u64, each: target offset pages u64, file u32
//! checksums, each: u64
//! name, path: length u32, bytes
//! ```
//!
//! The checksums are not read: each worker maps them.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use memmap2::Mmap;
use rewake_criu_images::{Digest, MAX_TASKS};
use rewake_image_io::{BlockChecksums, ChecksumTable, FileKey, FileState, ImageFile, keep_in_page_cache};
use rewake_page_protocol::HeaderLayout;
use rewake_pager::{Extent, PAGE_SIZE, Plan, Prefetch};

use super::draft::{Draft, DraftRemote, DraftTask, RemotePlace};
use super::file_place::FilePlace;
use super::plan_file::{At, is_sealed};
use super::remote_memory::RemoteMemory;
use super::{Image, TaskPlan};
use crate::cpu::space::REGISTERED;
use crate::working_set::MOST_RUNS;

const MAGIC: [u8; 8] = *b"rewakepl";
const VERSION: u32 = 7;
/// In the place of a header's length: memory goes into the files of the image.
const FILES: usize = 1;
/// The longest name or path, in bytes.
const MAX_NAME: u32 = 4096;
/// The bytes of a record of each kind.
const INDEX: u64 = 4;
const RANGE: u64 = 16;
const RANKED: u64 = 20;
const EXTENT: u64 = 28;
const CHECKSUM: u64 = 8;

impl Draft {
    /// Writes everything that a session needs into a memory file.
    ///
    /// # Errors
    /// EFBIG, ENOMEM.
    pub(crate) fn write(&self, memory: &File) -> io::Result<()> {
        let mut out = Output(BufWriter::new(memory));
        out.draft(self)?;
        out.0.flush()
    }
}

impl Image {
    /// Returns the sealed memory file, and for a successor the descriptors of the pages files, in the memory
    /// file's order, and of the leases.
    ///
    /// # Errors
    /// Fails with EMFILE.
    pub fn seal(&self) -> io::Result<(OwnedFd, Vec<BorrowedFd<'_>>)> {
        let sealed = self.sealed.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let files = self.files.iter().map(|file| file.as_fd());
        Ok((sealed.try_clone()?, files.chain(self.leases.iter().map(OwnedFd::as_fd)).collect()))
    }

    /// Reads a sealed memory file. `files` are the descriptors of the pages files, in the memory file's
    /// order, and of the leases. It looks up no path.
    ///
    /// # Errors
    /// Fails when `plan` is not sealed, is damaged or has another version. Also when a descriptor refers to
    /// another file, or the contents of the file may have changed.
    pub fn unseal(plan: BorrowedFd<'_>, files: Vec<OwnedFd>) -> anyhow::Result<Self> {
        Self::unseal_with(plan, files, |_| {
            bail!("its pages come from another host, and it has no presence map")
        })
    }

    /// [`Image::unseal`], for a plan whose memory another host may have: `remote` makes what that needs, or
    /// gives that of another worker.
    ///
    /// # Errors
    /// As for [`Image::unseal`], and the errors of `remote`.
    pub(crate) fn unseal_with(
        plan: BorrowedFd<'_>,
        files: Vec<OwnedFd>,
        remote: impl FnOnce(DraftRemote) -> anyhow::Result<RemoteMemory>,
    ) -> anyhow::Result<Self> {
        let plan = plan.try_clone_to_owned().context("the sealed plan of an image")?;
        let memory = File::from(plan.try_clone().context("the sealed plan of an image")?);
        ensure!(
            is_sealed(&memory).context("the sealed plan of an image")?,
            "the plan of an image is not sealed: expected the memory file that `rewake` made"
        );
        let len = memory.metadata().context("the sealed plan of an image")?.len();
        let mut input = Input { bytes: BufReader::new(At { memory: &memory, offset: 0 }), len, left: len };
        let table = checksum_table(&memory).context("mapping the sealed plan of an image")?;
        let image = input.image(files, &table, remote).with_context(|| {
            let at = len - input.left;
            format!("the sealed plan of an image, {len} bytes, at byte {at}; restore the image again")
        })?;
        Ok(Self { sealed: Some(plan), ..image })
    }
}

/// Maps a sealed memory file: its checksums are read where they are.
fn checksum_table(memory: &File) -> io::Result<ChecksumTable> {
    // SAFETY: the file is sealed against writing and shrinking, so its bytes neither change nor disappear.
    Ok(Arc::new(unsafe { Mmap::map(memory) }?))
}

/// Writes the format of this module.
struct Output<W: Write>(BufWriter<W>);

impl<W: Write> Output<W> {
    fn draft(&mut self, draft: &Draft) -> io::Result<()> {
        self.0.write_all(&MAGIC)?;
        self.u32(VERSION)?;
        self.0.write_all(&draft.digest.0)?;
        self.0.write_all(&draft.dump.0)?;
        self.text(draft.working_set_note.as_bytes())?;
        self.u32(u32::from(draft.has_first_buffers))?;
        self.u32(draft.root)?;
        self.u64(draft.directory.0)?;
        self.u64(draft.directory.1)?;
        self.count(draft.leases.len())?;
        self.u64(draft.checksums.len() as u64)?;
        self.remote(draft.remote)?;
        self.count(draft.files.len())?;
        for file in &draft.files {
            self.state(&file.state)?;
            self.text(file.path.as_os_str().as_bytes())?;
            self.u32(u32::from(file.checksums.is_some()))?;
            self.u64(file.checksums.unwrap_or_default() as u64)?;
            self.u32(file.number)?;
        }
        self.count(draft.tasks.len())?;
        for (pid, task) in &draft.tasks {
            self.u32(*pid)?;
            self.u32(u32::from(task.is_some()))?;
            if let Some(task) = task {
                self.task(task)?;
            }
        }
        draft.checksums.iter().try_for_each(|checksum| self.u64(*checksum))
    }

    fn remote(&mut self, remote: Option<DraftRemote>) -> io::Result<()> {
        let header = remote.map_or(0, |remote| match remote.place {
            RemotePlace::Cache(layout) => layout.len(),
            RemotePlace::Files(_) => FILES,
        });
        self.count(header)?;
        self.u64(remote.map_or(0, |remote| remote.len))?;
        self.u64(remote.map_or(0, |remote| remote.cache))?;
        match remote {
            Some(DraftRemote { place: RemotePlace::Files(id), .. }) => self.0.write_all(&id.0),
            _ => Ok(()),
        }
    }

    fn state(&mut self, state: &FileState) -> io::Result<()> {
        let FileKey { dev, ino, len, mtime, ctime } = state.key;
        let times = [mtime.0, mtime.1, ctime.0, ctime.1].map(i64::cast_unsigned);
        [dev, ino, len]
            .into_iter()
            .chain(times)
            .chain([state.links])
            .try_for_each(|value| self.u64(value))?;
        [state.mode, state.owner.0, state.owner.1].into_iter().try_for_each(|value| self.u32(value))?;
        self.text(state.name.as_bytes())
    }

    fn task(&mut self, task: &DraftTask) -> io::Result<()> {
        self.count(task.files.len())?;
        for index in &task.files {
            self.count(*index)?;
        }
        self.count(task.first.len())?;
        for range in &task.first {
            self.u64(range.start)?;
            self.u64(range.end)?;
        }
        self.count(task.working_set.len())?;
        for Prefetch { addresses, rank } in &task.working_set {
            self.u64(addresses.start)?;
            self.u64(addresses.end)?;
            self.u32(*rank)?;
        }
        self.u64(task.extents.len() as u64)?;
        for extent in &task.extents {
            [extent.target, extent.file_offset, extent.pages]
                .into_iter()
                .try_for_each(|value| self.u64(value))?;
            self.u32(extent.file)?;
        }
        Ok(())
    }

    fn text(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.count(bytes.len())?;
        self.0.write_all(bytes)
    }

    fn count(&mut self, count: usize) -> io::Result<()> {
        self.u32(u32::try_from(count).map_err(io::Error::other)?)
    }

    fn u32(&mut self, value: u32) -> io::Result<()> {
        self.0.write_all(&value.to_le_bytes())
    }

    fn u64(&mut self, value: u64) -> io::Result<()> {
        self.0.write_all(&value.to_le_bytes())
    }
}

/// Reads the format of this module. It trusts no count: the memory that it uses is in proportion to the bytes
/// read.
struct Input<'a> {
    bytes: BufReader<At<'a>>,
    len: u64,
    left: u64,
}

impl Input<'_> {
    fn image(
        &mut self,
        mut descriptors: Vec<OwnedFd>,
        table: &ChecksumTable,
        remote: impl FnOnce(DraftRemote) -> anyhow::Result<RemoteMemory>,
    ) -> anyhow::Result<Image> {
        ensure!(self.array()? == MAGIC, "expected the magic number of a plan");
        let version = self.u32()?;
        ensure!(version == VERSION, "expected version {VERSION}, found {version}: another `rewake` made it");
        let (digest, dump) = (Digest(self.array()?), Digest(self.array()?));
        let working_set_note = self.text()?.to_string_lossy().into_owned();
        let has_first_buffers = self.u32()? != 0;
        let root = self.u32()?;
        let directory = (self.u64()?, self.u64()?);
        let (leases, checksums) = (self.u32()?, self.u64()?);
        let first = checksums.checked_mul(CHECKSUM).and_then(|bytes| self.len.checked_sub(bytes));
        let first = first.with_context(|| format!("{checksums} checksums in {} bytes", self.len))?;
        let mut remote = self.remote()?.map(remote).transpose()?;
        let count = self.u32()?;
        ensure!(
            u64::from(count) + u64::from(leases) == descriptors.len() as u64,
            "expected {count} pages files and {leases} leases, found {} descriptors",
            descriptors.len()
        );
        let leases = descriptors.split_off(count as usize);
        let working_set = Image { working_set_note, has_first_buffers, ..Image::default() };
        let mut image = Image { root, digest, dump, directory, leases, ..working_set };
        let mut inodes = HashSet::new();
        let mut place = FilePlace::new(remote.as_mut());
        for descriptor in descriptors {
            let file = self.file(descriptor, &mut place)?;
            self.verify(&file, table, first)?;
            place.numbered(self.u32()?, &file)?;
            ensure!(
                inodes.insert((file.key().dev, file.key().ino)),
                "{} appears twice",
                file.name().display()
            );
            image.files.push(file);
        }
        place.end()?;
        keep_in_page_cache(image.files.iter().map(|file| &**file));
        let cache = remote.as_ref().and_then(RemoteMemory::cache);
        let all: Vec<_> = image.files.iter().chain(cache).cloned().collect();
        image.remote = remote;
        let tasks = self.u32()?;
        ensure!(tasks as usize <= MAX_TASKS, "{tasks} tasks, more than MAX_TASKS = {MAX_TASKS}");
        for _ in 0..tasks {
            let pid = self.u32()?;
            let plan = match self.u32()? {
                0 => None,
                1 => Some(self.task(&all).with_context(|| format!("task {pid}"))?),
                other => bail!("task {pid}: expected 0 or 1 for its memory, found {other}"),
            };
            ensure!(image.plans.insert(pid, plan).is_none(), "task {pid} appears twice");
        }
        let left = self.len - first;
        ensure!(self.left == left, "expected {left} bytes of checksums, found {}", self.left);
        Ok(image)
    }

    /// Has the blocks of a sealed file checked with the checksums of the table, which begin at byte `first`.
    fn verify(&mut self, file: &ImageFile, table: &ChecksumTable, first: u64) -> anyhow::Result<()> {
        let (is_sealed, at) = (self.u32()?, self.u64()?);
        if is_sealed == 0 {
            return Ok(());
        }
        let start = at.checked_mul(CHECKSUM).and_then(|bytes| bytes.checked_add(first));
        let start = start.and_then(|start| usize::try_from(start).ok());
        let checksums = start.and_then(|start| BlockChecksums::new(Arc::clone(table), start, file.len()));
        let beyond = || format!("the checksums of {} from number {at} on", file.name().display());
        file.verify_with(checksums.with_context(beyond)?);
        Ok(())
    }

    fn remote(&mut self) -> anyhow::Result<Option<DraftRemote>> {
        let (header, len, cache) = (self.u32()? as usize, self.u64()?, self.u64()?);
        ensure!(cache <= len, "a cache file of {cache} bytes, of {len} bytes of another host");
        let layouts = [HeaderLayout::Narrow, HeaderLayout::Wide];
        match layouts.into_iter().find(|layout| layout.len() == header) {
            Some(layout) => Ok(Some(DraftRemote { len, cache, place: RemotePlace::Cache(layout) })),
            None if header == FILES => {
                Ok(Some(DraftRemote { len, cache, place: RemotePlace::Files(Digest(self.array()?)) }))
            }
            None if (header, len) == (0, 0) => Ok(None),
            None => bail!("headers of {header} bytes, and {len} bytes of another host"),
        }
    }

    fn file(&mut self, descriptor: OwnedFd, place: &mut FilePlace<'_>) -> anyhow::Result<Arc<ImageFile>> {
        let [dev, ino, len] = [self.u64()?, self.u64()?, self.u64()?];
        let mut time = || anyhow::Ok((self.u64()?.cast_signed(), self.u64()?.cast_signed()));
        let (mtime, ctime) = (time()?, time()?);
        let links = self.u64()?;
        let (mode, owner) = (self.u32()?, (self.u32()?, self.u32()?));
        let (name, path) = (self.text()?, PathBuf::from(self.text()?));
        let state = FileState { key: FileKey { dev, ino, len, mtime, ctime }, links, mode, owner, name };
        match place.fetched(len)? {
            None => Ok(ImageFile::inherit(File::from(descriptor), path, state)?),
            Some(fetched) => {
                let file = ImageFile::fetched(File::from(descriptor), path, fetched)?;
                let found = file.key();
                ensure!(
                    (found.dev, found.ino, found.len) == (dev, ino, len),
                    "{}: another file than was planned",
                    file.name().display()
                );
                Ok(file)
            }
        }
    }

    fn task(&mut self, all: &[Arc<ImageFile>]) -> anyhow::Result<TaskPlan> {
        let count = u64::from(self.u32()?);
        self.has_room(count, INDEX)?;
        let mut files = Vec::new();
        for _ in 0..count {
            let index = self.u32()?;
            let file = all.get(index as usize);
            files.push(Arc::clone(file.with_context(|| format!("file {index} of {}", all.len()))?));
        }
        let count = u64::from(self.u32()?);
        self.has_room(count, RANGE)?;
        let mut first = Vec::new();
        for _ in 0..count {
            first.push(self.range()?);
        }
        let working_set = self.working_set()?;
        let count = self.u64()?;
        self.has_room(count, EXTENT)?;
        let mut extents = Vec::new();
        for _ in 0..count {
            extents.push(self.extent(&files)?);
        }
        let plan = Arc::new(Plan::new(extents)?);
        Ok(TaskPlan { plan, files: Arc::new(files), first, working_set })
    }

    fn working_set(&mut self) -> anyhow::Result<Vec<Prefetch>> {
        let count = u64::from(self.u32()?);
        self.has_room(count, RANKED)?;
        ensure!(count <= MOST_RUNS as u64, "{count} runs of a working set, where {MOST_RUNS} are the most");
        let mut runs = Vec::new();
        for _ in 0..count {
            let run = Prefetch { addresses: self.range()?, rank: self.u32()? };
            let Range { start, end } = run.addresses;
            ensure!((start | end) % PAGE_SIZE == 0, "expected pages, found {start:#x}..{end:#x}");
            ensure!(run.rank > REGISTERED, "rank {} is not one of a working set", run.rank);
            runs.push(run);
        }
        // Each takes memory for each extent that it is in: together no more than runs and extents.
        let mut ranges: Vec<&Range<u64>> = runs.iter().map(|run| &run.addresses).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let overlap = ranges.windows(2).find(|pair| pair[0].end > pair[1].start);
        ensure!(overlap.is_none(), "runs of a working set overlap: {overlap:x?}");
        Ok(runs)
    }

    fn range(&mut self) -> anyhow::Result<Range<u64>> {
        let range = self.u64()?..self.u64()?;
        ensure!(range.start < range.end, "expected a range of addresses, found {range:#x?}");
        Ok(range)
    }

    fn extent(&mut self, files: &[Arc<ImageFile>]) -> anyhow::Result<Extent> {
        let [target, file_offset, pages] = [self.u64()?, self.u64()?, self.u64()?];
        let extent = Extent { target, file: self.u32()?, file_offset, pages };
        let file =
            files.get(extent.file as usize).context("an extent of a file that the task does not have")?;
        let end = pages.checked_mul(PAGE_SIZE).and_then(|bytes| bytes.checked_add(file_offset));
        let inside = pages > 0 && end.is_some_and(|end| end <= file.len());
        ensure!(inside, "{extent:x?} is not in {}, {} bytes", file.name().display(), file.len());
        Ok(extent)
    }

    /// Checks that `count` records fit into the rest of the file.
    fn has_room(&self, count: u64, record: u64) -> anyhow::Result<()> {
        ensure!(count <= self.left / record, "{count} records where {} bytes are left", self.left);
        Ok(())
    }

    fn text(&mut self) -> anyhow::Result<OsString> {
        let len = self.u32()?;
        ensure!(len <= MAX_NAME, "a name of {len} bytes, more than MAX_NAME = {MAX_NAME}");
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes)?;
        Ok(OsString::from_vec(bytes))
    }

    fn u32(&mut self) -> anyhow::Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> anyhow::Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> anyhow::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> anyhow::Result<()> {
        let left = self.left.checked_sub(bytes.len() as u64);
        let left = left.with_context(|| format!("expected {} bytes more before the end", bytes.len()))?;
        self.bytes.read_exact(bytes)?;
        self.left = left;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
