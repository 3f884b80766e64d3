// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files of one memory: its pagemap and its pages.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use rewake_criu_images::{
    FILE_MODE, Generation, MAX_PAGEMAP_ENTRIES, PageFlags, PagemapEntry, PagemapId, pagemap_head,
    pagemap_record, pages_name,
};
use rewake_page_protocol::PageRun;

/// `pagemap-ID.img` and `pages-N.img`, while they are written.
#[derive(Debug)]
pub(super) struct ReceivedMemory {
    id: PagemapId,
    generation: Generation,
    pagemap: BufWriter<File>,
    pages: File,
    /// The pages file's path, for messages.
    path: PathBuf,
    /// The end of the last entry.
    end: u64,
    entries: usize,
    /// Bytes of pages, holes included.
    len: u64,
}

impl ReceivedMemory {
    /// Makes the files in `folder`, which has none of these names.
    pub(super) fn create(
        folder: &Path,
        id: PagemapId,
        pages_id: u32,
        generation: Generation,
    ) -> anyhow::Result<Self> {
        let (pagemap, _) = create(folder, &id.file_name())?;
        let (pages, path) = create(folder, &pages_name(pages_id))?;
        let mut pagemap = BufWriter::new(pagemap);
        pagemap.write_all(&pagemap_head(pages_id)).with_context(|| writing(&path))?;
        Ok(Self { id, generation, pagemap, pages, path, end: 0, entries: 0, len: 0 })
    }

    /// Adds an entry. Entries ascend: readers of pagemaps rely on it.
    pub(super) fn add(&mut self, run: PageRun, flags: PageFlags) -> anyhow::Result<()> {
        let id = self.id;
        ensure!(
            run.vaddr() >= self.end,
            "{} pages of {id} at {:#x}: expected an address from {:#x}, after the pages before",
            run.pages(),
            run.vaddr(),
            self.end
        );
        ensure!(
            self.entries < MAX_PAGEMAP_ENTRIES,
            "{id} has more runs of pages than MAX_PAGEMAP_ENTRIES = {MAX_PAGEMAP_ENTRIES}"
        );
        let entry = PagemapEntry { vaddr: run.vaddr(), pages: run.pages(), flags, file_offset: self.len };
        let record = pagemap_record(&entry, self.generation);
        let record =
            record.with_context(|| format!("{} pages of {id}: too many for its CRIU", run.pages()))?;
        self.pagemap.write_all(&record).with_context(|| writing(&self.path))?;
        self.end = run.end();
        self.entries += 1;
        Ok(())
    }

    /// Appends bytes of present pages.
    pub(super) fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.pages.write_all(bytes).with_context(|| writing(&self.path))?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Appends zeros, as a hole of the file.
    pub(super) fn skip_zeros(&mut self, bytes: u64) -> anyhow::Result<()> {
        self.len += bytes;
        self.pages.seek(SeekFrom::Start(self.len)).map(drop).with_context(|| writing(&self.path))
    }

    /// Waits until both files are on the disk.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        let Self { pagemap, pages, path, len, .. } = self;
        let sync = || -> io::Result<()> {
            pages.set_len(len)?;
            pages.sync_all()?;
            pagemap.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
        };
        sync().with_context(|| writing(&path))
    }
}

/// Makes a file of the image.
fn create(folder: &Path, name: &str) -> anyhow::Result<(File, PathBuf)> {
    let path = folder.join(name);
    let file = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&path);
    Ok((file.with_context(|| writing(&path))?, path))
}

fn writing(path: &Path) -> String {
    format!("writing {}", path.display())
}
