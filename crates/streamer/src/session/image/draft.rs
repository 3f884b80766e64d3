// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parses an image and plans its restore. Only the planner does that, and tests.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::{
    Digest, Generation, ImageDir, ImageLease, LazyExtent, LazyMappings, LazyPlan, RemotePlan,
    is_gpu_pages_file,
};
use rewake_image_io::{BLOCK, FileState};
use rewake_manifest::{
    ImageChecksums, WORKING_SET_NAME, read_chain, read_checksums, read_partial_checksums, refuse_partial,
};
use rewake_page_protocol::HeaderLayout;
use rewake_pager::{Extent, PAGE_SIZE, Plan, Prefetch};

use crate::cpu::space::REGISTERED;
use crate::session::gpu_pinned::gpu_registered_ranges;
use crate::working_set::file::{self, REMEDY};

/// Bytes of the reason why a working set is not used.
const MAX_NOTE: usize = 1 << 10;

/// What a session needs of an image, as its planner found it.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    /// Device and inode of the image directory.
    pub(crate) directory: (u64, u64),
    /// See [`ImageDir::dump_id`].
    pub(crate) dump: Digest,
    pub(crate) digest: Digest,
    /// Why the recorded working set is not used; empty: it is, or there is none.
    pub(crate) working_set_note: String,
    /// Whether buffers of GPUs belong to the recorded working set.
    pub(crate) has_first_buffers: bool,
    /// The pages files of all tasks, each once. Also those with GPU memory of which another host has some
    /// bytes.
    pub(crate) files: Vec<DraftFile>,
    /// The root of the tree.
    pub(crate) root: u32,
    /// Tasks by the pid in the names of their images. None for those without memory (zombies).
    pub(crate) tasks: BTreeMap<u32, Option<DraftTask>>,
    /// What CRIU maps for the missing pages of all tasks, unless another host has them.
    pub(crate) mappings: LazyMappings,
    /// The leases of the image and its parents.
    pub(crate) leases: Vec<File>,
    /// The checksums of the files' blocks.
    pub(crate) checksums: Vec<u64>,
    /// The memory that another host has. The index of a cache file is the number of pages files.
    pub(crate) remote: Option<DraftRemote>,
    /// The id of the image, if it is sealed.
    pub(crate) sealed: Option<Digest>,
    /// The id proves each parent, too.
    pub(crate) covers_parents: bool,
    /// The index in `files` of each inode's file.
    by_inode: BTreeMap<(u64, u64), usize>,
}

/// A pages file.
#[derive(Debug)]
pub(crate) struct DraftFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    pub(crate) state: FileState,
    /// The place in [`Draft::checksums`] of its first block, or `None` if its image is not sealed.
    pub(crate) checksums: Option<usize>,
    /// Its number at the other host, if that has some of its bytes: in the manifest, or in the list of files
    /// that arrive. Else 0.
    pub(crate) number: u32,
}

/// Memory that another host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DraftRemote {
    /// Bytes that the presence map is for: of the cache file, and of all pages files, each up to the border
    /// of a block.
    pub(crate) len: u64,
    /// Bytes of the cache file.
    pub(crate) cache: u64,
    /// Where it is written.
    pub(crate) place: RemotePlace,
}

/// Where the memory of another host is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RemotePlace {
    /// Memory of tasks into a cache file that is to be made. The headers have the layout of the CRIU that
    /// made the image. The pages files have GPU memory.
    Cache(HeaderLayout),
    /// All into the pages files. The image has this id.
    Files(Digest),
}

/// The missing pages of one task.
#[derive(Debug)]
pub(crate) struct DraftTask {
    pub(crate) extents: Vec<Extent>,
    /// The files that the extents name by index, each as an index in [`Draft::files`].
    pub(crate) files: Vec<usize>,
    /// Addresses that are loaded before all others.
    pub(crate) first: Vec<Range<u64>>,
    /// The recorded working set.
    pub(crate) working_set: Vec<Prefetch>,
}

impl Draft {
    /// Reads and checks everything that a session needs.
    ///
    /// # Errors
    /// Fails when a file is missing, damaged or truncated, or when the image lacks pages.
    pub(crate) fn read(images: &ImageDir) -> anyhow::Result<Self> {
        let parents = images.ancestors();
        let chain: Vec<&ImageDir> = [images].into_iter().chain(&parents).collect();
        chain.iter().try_for_each(|images| refuse_partial(images))?;
        let mut draft = Self { leases: leases(&chain)?, ..Self::of(images)? }.tasks(images)?;
        draft.add_checksums_of(&chain, read_chain(&chain)?)?;
        Ok(draft)
    }

    /// [`Draft::add_checksums`], for images each of whose pages files must have some: the planner has opened
    /// the files at another time than the manifest was read.
    pub(super) fn add_checksums_of(
        &mut self,
        chain: &[&ImageDir],
        checksums: Vec<Option<ImageChecksums>>,
    ) -> anyhow::Result<()> {
        let sealed = chain.iter().zip(&checksums).filter(|(_, of)| of.is_some());
        let sealed: Vec<PathBuf> = sealed.map(|(images, _)| images.path().to_owned()).collect();
        self.add_checksums(checksums)?;
        for file in self.files.iter().filter(|file| file.checksums.is_none()) {
            let is_sealed = file.path.parent().is_some_and(|folder| sealed.iter().any(|of| of == folder));
            ensure!(
                !is_sealed,
                "{}: the image's manifest has another file, or does not name it as memory; restore another \
                 copy, or seal the image again if it is right",
                file.path.display()
            );
        }
        Ok(())
    }

    /// [`Draft::read`], for a session that gets all lazy pages from a page server, and the files that
    /// [arrive](ImageDir::arriving_files). What the server sends has no checksums.
    ///
    /// # Errors
    /// Fails when a file is missing or damaged.
    pub(crate) fn read_remote(images: &ImageDir) -> anyhow::Result<Self> {
        // CRIU 4.2 and later, where no pagemap says another age.
        let place = RemotePlace::Cache(HeaderLayout::Wide);
        let remote = Some(DraftRemote { len: 0, cache: 0, place });
        let mut draft = Self { leases: leases(&[images])?, ..Self::of(images)? };
        for (number, name) in images.arriving_files()?.into_iter().enumerate() {
            let (path, file, _) = images.file(&name)?.with_context(|| format!("{name}: it is missing"))?;
            let at = draft.file(file, path)?;
            draft.files[at].number = u32::try_from(number)?;
        }
        let mut draft = Self { remote, ..draft }.tasks(images)?;
        let files = draft.file_blocks()?;
        if let Some(remote) = &mut draft.remote {
            remote.len = remote.cache.checked_add(files).context("the lengths of the files")?;
        }
        Ok(draft)
    }

    /// [`Draft::read`], for a session that gets missing blocks from an image server. No other program may
    /// write into the directory meanwhile.
    ///
    /// # Errors
    /// As for [`Draft::read`]. Or the image is complete or incremental, or another program has the directory.
    pub(crate) fn read_partial(images: &ImageDir) -> anyhow::Result<Self> {
        let mut leases = leases(&[images])?;
        leases.push(lock_directory(images)?);
        Self::read_fetched(images, leases, read_partial_checksums(images)?)
    }

    /// [`Draft::read_partial`], for an image in the node's cache. Only the agent's fetcher writes into it,
    /// and the agent may have completed it by now.
    ///
    /// # Errors
    /// As for [`Draft::read`].
    pub(crate) fn read_in_cache(images: &ImageDir) -> anyhow::Result<Self> {
        let checksums = read_checksums(images)?;
        let checksums = checksums.with_context(|| format!("{}: no manifest", images.path().display()))?;
        Self::read_fetched(images, leases(&[images])?, checksums)
    }

    fn read_fetched(images: &ImageDir, leases: Vec<File>, checksums: ImageChecksums) -> anyhow::Result<Self> {
        ensure!(checksums.parent.is_none(), "{}: the image is incremental", images.path().display());
        let mut draft = Self { leases, ..Self::of(images)? }.tasks(images)?;
        for name in checksums.memory.keys().filter(|name| is_gpu_pages_file(name)) {
            let (path, file, _) = images.file(name)?.with_context(|| format!("{name}: it is missing"))?;
            draft.file(file, path)?;
        }
        let id = checksums.id;
        draft.add_checksums(vec![Some(checksums)])?;
        for file in &draft.files {
            ensure!(file.number > 0, "{}: it is in no manifest", file.path.display());
        }
        let place = RemotePlace::Files(id);
        draft.remote = Some(DraftRemote { len: draft.file_blocks()?, cache: 0, place });
        Ok(draft)
    }

    /// Returns the length of all files, each up to the border of a block.
    fn file_blocks(&self) -> anyhow::Result<u64> {
        let blocks = self.files.iter().map(|file| file.state.key.len.checked_next_multiple_of(BLOCK as u64));
        let sum = |all: u64, blocks: Option<u64>| all.checked_add(blocks?);
        blocks.into_iter().try_fold(0, sum).context("the lengths of the files")
    }

    pub(super) fn of(images: &ImageDir) -> anyhow::Result<Self> {
        Ok(Self { directory: images.id(), dump: images.dump_id()?, ..Self::default() })
    }

    pub(super) fn tasks(self, images: &ImageDir) -> anyhow::Result<Self> {
        let mut draft = self;
        let mut first = gpu_registered_ranges(images);
        let mut accessed = draft.working_set(images);
        let tasks = images.tasks()?;
        draft.root = tasks.first().map_or(0, |task| task.pid);
        for task in tasks {
            let first = first.remove(&task.pid).unwrap_or_default();
            let working_set = accessed.remove(&task.pid).unwrap_or_default();
            let plan = if task.state.has_memory() {
                Some(DraftTask { working_set, ..draft.task(images, task.pid, first)? })
            } else {
                None
            };
            draft.tasks.insert(task.pid, plan);
        }
        draft.digest = images.digest();
        Ok(draft)
    }

    /// Reads the working set by task. Without one the restore is right, too.
    fn working_set(&mut self, images: &ImageDir) -> BTreeMap<u32, Vec<Prefetch>> {
        let read = file::read(images.as_fd(), self.dump).unwrap_or_else(|error| {
            self.working_set_note =
                format!("{}/{WORKING_SET_NAME} is not used: {error:#}: {REMEDY}", images.path().display());
            self.working_set_note.truncate(self.working_set_note.floor_char_boundary(MAX_NOTE));
            None
        });
        let working_set = read.unwrap_or_default();
        self.has_first_buffers = !working_set.buffers.is_empty();
        working_set.by_task(REGISTERED + 1)
    }

    fn task(&mut self, images: &ImageDir, pid: u32, first: Vec<Range<u64>>) -> anyhow::Result<DraftTask> {
        if let Some(remote) = &mut self.remote {
            return remote.task(images, pid, first, self.files.len());
        }
        let LazyPlan { files, extents, remote_pages, mappings } = images.lazy_plan(pid)?;
        self.mappings.join(&mappings);
        let pagemap = || format!("{}/pagemap-{pid}.img", images.path().display());
        if remote_pages > 0 {
            bail!(
                "{}: {remote_pages} pages are not in the image (it was made by `criu dump --lazy-pages`): \
                 they can only come from that dump's page server (`rewake lazy-pages --page-server --address \
                 A --port P`)",
                pagemap()
            );
        }
        let plan = Plan::new(extents.into_iter().map(|of| extent(of, 0)).collect()).with_context(pagemap)?;
        let files = files.into_iter().map(|file| self.file(file.file, file.path));
        let files = files.collect::<anyhow::Result<_>>()?;
        Ok(DraftTask { extents: plan.into_extents(), files, first, working_set: Vec::new() })
    }

    /// Adds the checksums of the files, from the manifest of the directory that each is in.
    fn add_checksums(&mut self, chain: Vec<Option<ImageChecksums>>) -> anyhow::Result<()> {
        self.sealed = chain.first().and_then(|image| image.as_ref().map(|image| image.id));
        self.covers_parents = chain.iter().all(|image| {
            let proves = |image: &ImageChecksums| image.parent.as_ref().is_none_or(|of| of.id.is_some());
            image.as_ref().is_some_and(proves)
        });
        for (name, memory) in chain.into_iter().flatten().flat_map(|image| image.memory) {
            let Some(file) = self.by_inode.get(&memory.identity).and_then(|at| self.files.get_mut(*at))
            else {
                continue;
            };
            ensure!(file.state.key.len == memory.length, "{name}: its length changed while it was opened");
            file.checksums = Some(self.checksums.len());
            file.number = memory.number;
            self.checksums.extend(memory.checksums);
        }
        Ok(())
    }

    /// Returns the index of an open file. A file that another task has already is closed.
    fn file(&mut self, file: File, path: PathBuf) -> anyhow::Result<usize> {
        let state = FileState::of(&file).with_context(|| format!("stat {}", path.display()))?;
        let at = *self.by_inode.entry((state.key.dev, state.key.ino)).or_insert(self.files.len());
        if at == self.files.len() {
            self.files.push(DraftFile { file, path, state, checksums: None, number: 0 });
        }
        Ok(at)
    }
}

impl DraftRemote {
    /// Returns whether a page server has the memory, and not an image server or the agent.
    pub(crate) fn is_of_page_server(&self) -> bool {
        matches!(self.place, RemotePlace::Cache(_))
    }

    /// Gives a task's lazy pages a place at the end of the cache file, from a border of blocks on: no block
    /// has pages of two tasks. `index` is that of the cache file.
    fn task(
        &mut self,
        images: &ImageDir,
        pid: u32,
        first: Vec<Range<u64>>,
        index: usize,
    ) -> anyhow::Result<DraftTask> {
        let RemotePlan { extents, generation } = images.remote_plan(pid)?;
        if generation == Some(Generation::Narrow) {
            self.place = RemotePlace::Cache(HeaderLayout::Narrow);
        }
        let base = self.cache;
        let extents: Vec<Extent> = extents.into_iter().map(|of| extent(of, base)).collect();
        let pages: u64 = extents.iter().map(|extent| extent.pages).sum();
        self.cache = (base + pages * PAGE_SIZE).next_multiple_of(BLOCK as u64);
        let pagemap = || format!("{}/pagemap-{pid}.img", images.path().display());
        let plan = Plan::new(extents).with_context(pagemap)?;
        let extents = plan.into_extents();
        Ok(DraftTask { extents, files: vec![index], first, working_set: Vec::new() })
    }
}

/// Locks a directory against other programs that write an image into it.
fn lock_directory(images: &ImageDir) -> anyhow::Result<File> {
    let directory = File::from(images.as_fd().try_clone_to_owned()?);
    match directory.try_lock() {
        Ok(()) => Ok(directory),
        Err(TryLockError::WouldBlock) => {
            bail!(
                "{}: another program writes an image into it: wait until it has ended",
                images.path().display()
            )
        }
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("locking {}", images.path().display()))
        }
    }
}

/// Leases an image and its parents.
fn leases(chain: &[&ImageDir]) -> anyhow::Result<Vec<File>> {
    let leases = chain.iter().filter_map(|images| ImageLease::of(images).transpose());
    leases.map(|lease| Ok(lease?.into_file())).collect()
}

fn extent(of: LazyExtent, base: u64) -> Extent {
    Extent { target: of.vaddr, file: of.file, file_offset: base + of.file_offset, pages: of.pages }
}
