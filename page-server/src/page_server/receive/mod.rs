// SPDX-License-Identifier: MIT OR Apache-2.0
//! Receives the memory of `criu dump --page-server` and `criu pre-dump --page-server` as files of an image.
//!
//! * [`Receiver`]: what all clients of a server share. [`receive`]: one client.
//! * `incoming`: an image that is not complete yet: a hidden folder, whose files are moved when all are on
//!   the disk.
//! * `memory`: `pagemap-ID.img` and its `pages-N.img`, byte for byte as CRIU of the client's age writes them.
//! * `parent`: which pages the parent image has.
//! * `dedup`: `--auto-dedup`: pages that the new image has are punched out of its parents.

mod dedup;
mod incoming;
mod memory;
mod parent;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::{Generation, PAGE, PageFlags, PagemapId};
use rewake_manifest::MANIFEST_NAME;
use rewake_page_protocol::{CLOSED, CompressedPage, HeaderLayout, PageMessage, PageRun, PagesEncoding};
use rewake_page_protocol::{has_parent, opened};
use rewake_process::file_lock::DirectoryLock;
use tokio::sync::RwLock;
use tracing::{info, warn};

use crate::page_server::connection::PageConnection;
use crate::page_server::disk::in_thread;
use incoming::{Destination, IncomingImage};
use memory::ReceivedMemory;
use parent::{ParentImage, ParentPages};

/// Bytes of pages that a client's task has in memory at most.
const BUFFER: usize = 256 << 10;

/// How images are received.
#[derive(Debug, Default)]
pub struct ReceiveOptions {
    /// The image that all clients' images are incremental to; relative to the images directory.
    pub previous: Option<PathBuf>,
    /// Pages that an image has are removed from its parents.
    pub auto_dedup: bool,
    /// Each client's image gets a folder of its own below the images directory.
    pub own_folders: bool,
}

/// Receives images into a directory.
#[derive(Debug)]
pub struct Receiver {
    images: PathBuf,
    options: ReceiveOptions,
    /// The image that `previous` names, opened once.
    previous: Option<Arc<ParentImage>>,
    /// Of the directory, so that `rewake dump` and other servers do not write into it at the same time. None
    /// where each image gets a folder of its own, and on file systems without locks.
    _lock: Option<DirectoryLock>,
    /// Shared by clients whose image is being published.
    publishing: RwLock<()>,
}

impl Receiver {
    /// Checks the directory and the parent image, locks the directory, and removes what killed servers have
    /// left in it.
    ///
    /// # Errors
    /// The directory has a complete image, or another process writes into it. Or the parent does not exist,
    /// or the directory has another one already.
    pub fn new(images: &Path, options: ReceiveOptions) -> anyhow::Result<Self> {
        let shown = images.display();
        ensure!(
            images.join(MANIFEST_NAME).symlink_metadata().is_err(),
            "-D {shown}: it has a complete image ({MANIFEST_NAME}), which a received dump would damage: use \
             another directory, or remove that image first"
        );
        let lock = if options.own_folders { None } else { lock(images)? };
        let previous = options.previous.as_deref();
        let previous = previous.map(|path| ParentImage::named(images, path).map(Arc::new)).transpose()?;
        incoming::remove_leftovers(images)?;
        let publishing = RwLock::new(());
        Ok(Self { images: images.to_owned(), options, previous, _lock: lock, publishing })
    }

    /// Waits until no image is being published: each of them is visible, and its client has the answer.
    pub(crate) async fn settled(&self) {
        drop(self.publishing.write().await);
    }

    /// Returns the parent of the image that a client is about to send.
    fn parent(&self) -> anyhow::Result<Option<Arc<ParentImage>>> {
        match &self.previous {
            Some(previous) => Ok(Some(Arc::clone(previous))),
            None if self.options.own_folders => Ok(None),
            // A `criu dump` with the same images directory may have linked it since.
            None => Ok(ParentImage::linked(&self.images)?.map(Arc::new)),
        }
    }

    fn destination(&self) -> Destination {
        let images = self.images.clone();
        if self.options.own_folders {
            Destination::OwnFolder(images)
        } else {
            Destination::Among { images, previous: self.options.previous.clone() }
        }
    }
}

fn lock(images: &Path) -> anyhow::Result<Option<DirectoryLock>> {
    match DirectoryLock::take(images) {
        Ok(None) => bail!(
            "-D {}: a dump or another page server writes into it: use another directory, or wait until \
             that has ended",
            images.display()
        ),
        // Remote file systems may have no locks of directories.
        lock => Ok(lock.ok().flatten()),
    }
}

/// Receives the image of one client.
///
/// # Errors
/// The client violates the protocol or ends early, or the image cannot be written. Nothing of it is visible
/// then.
pub(crate) async fn receive(receiver: &Receiver, connection: &mut PageConnection) -> anyhow::Result<()> {
    let parent = receiver.parent()?;
    let image = IncomingImage::new(receiver.destination())?;
    let mut reception = Reception { parent, image, open: None, buffer: vec![0; BUFFER], pages: 0 };
    match reception.receive(connection).await {
        Ok(forced) => reception.close(receiver, connection, forced).await,
        Err(error) => {
            // Its files may be long, so this is done in a thread, while other clients are served.
            in_thread(move || {
                drop(reception);
                Ok(())
            })
            .await?;
            Err(error)
        }
    }
}

/// An image while it is received.
struct Reception {
    parent: Option<Arc<ParentImage>>,
    image: IncomingImage,
    open: Option<OpenMemory>,
    buffer: Vec<u8>,
    /// Pages with bytes, so far.
    pages: u64,
}

/// The memory whose pages are received.
struct OpenMemory {
    id: PagemapId,
    files: ReceivedMemory,
    parent: Option<ParentPages>,
}

impl Reception {
    /// Receives all memories, up to the closing message. Returns whether that was a forced one.
    async fn receive(&mut self, connection: &mut PageConnection) -> anyhow::Result<bool> {
        loop {
            let Some(message) = connection.next().await? else {
                bail!("the client ended its connection before its last message: its image is not complete")
            };
            match message {
                PageMessage::Open { id, wants_answer } => {
                    let found = self.open(id, connection.layout()).await?;
                    if wants_answer {
                        connection.send(&opened(found)).await?;
                    }
                }
                PageMessage::AskParent { id } => {
                    let found = self.parent_pages(id).await?.is_some();
                    connection.send(&has_parent(found)).await?;
                }
                PageMessage::Add { id, run, flags, encoding } => {
                    self.add(connection, id, run, flags, encoding).await?;
                }
                PageMessage::Get { pid, .. } => bail!(
                    "the client requests pages of task {pid}: this server receives dumps; `rewake \
                     page-server --lazy-pages` serves images"
                ),
                PageMessage::Close { forced } => {
                    self.finish_memory().await?;
                    return Ok(forced);
                }
            }
        }
    }

    /// Begins a memory. Returns whether the parent image has pages of it.
    async fn open(&mut self, id: PagemapId, layout: HeaderLayout) -> anyhow::Result<bool> {
        self.finish_memory().await?;
        let parent = self.parent_pages(id).await?;
        let generation = match layout {
            HeaderLayout::Narrow => Generation::Narrow,
            HeaderLayout::Wide => Generation::Wide,
        };
        let found = parent.is_some();
        let files = self.image.create(id, generation)?;
        self.open = Some(OpenMemory { id, files, parent });
        Ok(found)
    }

    async fn parent_pages(&self, id: PagemapId) -> anyhow::Result<Option<ParentPages>> {
        let Some(parent) = self.parent.clone() else { return Ok(None) };
        in_thread(move || parent.pages(id)).await
    }

    /// Writes the rest of the open memory, and waits until it is on the disk.
    async fn finish_memory(&mut self) -> anyhow::Result<()> {
        let Some(OpenMemory { files, .. }) = self.open.take() else { return Ok(()) };
        in_thread(move || files.finish()).await
    }

    async fn add(
        &mut self,
        connection: &mut PageConnection,
        id: PagemapId,
        run: PageRun,
        flags: PageFlags,
        encoding: PagesEncoding,
    ) -> anyhow::Result<()> {
        let open = self.open.as_mut().filter(|open| open.id == id);
        let open =
            open.with_context(|| format!("pages of {id}, which the client has not opened before them"))?;
        if flags.has(PageFlags::PARENT) {
            let parent = open.parent.as_ref();
            let parent = parent.with_context(|| {
                format!(
                    "{} pages of {id} at {:#x} are said to be in a parent image, and there is none: \
                     name it with --prev-images-dir",
                    run.pages(),
                    run.vaddr()
                )
            })?;
            parent.check(run)?;
            return open.files.add(run, flags);
        }
        ensure!(
            flags.has(PageFlags::PRESENT),
            "{} pages of {id} at {:#x} are in no image: a `criu dump --lazy-pages` keeps them, and serves \
             them itself",
            run.pages(),
            run.vaddr()
        );
        open.files.add(run, flags)?;
        self.pages += run.pages();
        match encoding {
            PagesEncoding::Raw => self.copy_raw(connection, run).await,
            PagesEncoding::Lz4 => self.copy_compressed(connection, run).await,
        }
    }

    async fn copy_raw(&mut self, connection: &mut PageConnection, run: PageRun) -> anyhow::Result<()> {
        let open = self.open.as_mut().context("no open memory")?;
        let mut left = run.pages() * PAGE;
        while left > 0 {
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(BUFFER);
            let bytes = &mut self.buffer[..len];
            connection.fill(bytes).await?;
            open.files.write(bytes)?;
            left -= len as u64;
        }
        Ok(())
    }

    async fn copy_compressed(&mut self, connection: &mut PageConnection, run: PageRun) -> anyhow::Result<()> {
        let open = self.open.as_mut().context("no open memory")?;
        let (packed, rest) = self.buffer.split_at_mut(PAGE_LEN);
        let page = &mut rest[..PAGE_LEN];
        for number in 0..run.pages() {
            let mut length = [0; 4];
            connection.fill(&mut length).await?;
            match CompressedPage::parse(length)? {
                CompressedPage::Zero => open.files.skip_zeros(PAGE)?,
                CompressedPage::Raw => {
                    connection.fill(page).await?;
                    open.files.write(page)?;
                }
                CompressedPage::Lz4(length) => {
                    let packed = &mut packed[..length as usize];
                    connection.fill(packed).await?;
                    let unpacked = lz4_flex::block::decompress_into(packed, page);
                    ensure!(
                        unpacked.as_ref().is_ok_and(|len| *len == PAGE_LEN),
                        "the compressed page at {:#x} of {}: expected {PAGE_LEN} bytes, found {unpacked:?}",
                        run.vaddr() + number * PAGE,
                        open.id
                    );
                    open.files.write(page)?;
                }
            }
        }
        Ok(())
    }

    /// Makes the image visible, and confirms that to the client. All memories are on the disk. A server that
    /// is about to end waits for this ([`Receiver::settled`]).
    async fn close(
        self,
        receiver: &Receiver,
        connection: &mut PageConnection,
        forced: bool,
    ) -> anyhow::Result<()> {
        let (image, pages) = (self.image, self.pages);
        let memories: Vec<PagemapId> = image.memories().collect();
        let _publishing = receiver.publishing.read().await;
        let folder = in_thread(move || image.publish()).await?;
        let shown = folder.display();
        info!("client {}: {} memories, {pages} pages: {shown}", connection.peer(), memories.len());
        let answered = connection.send(&CLOSED).await;
        if let Err(error) = &answered {
            // The image is visible, which is what this server's exit code says.
            warn!(
                "client {}: its dump fails, because it did not get the answer: {error:#}",
                connection.peer()
            );
        }
        if let Some(parent) = self.parent.filter(|_| receiver.options.auto_dedup && answered.is_ok()) {
            // The image is complete: a parent that cannot be changed is no failure of the dump.
            let punched = in_thread(move || dedup::punch_all(&folder, &memories, &parent)).await;
            let bytes = punched.inspect_err(|error| warn!("--auto-dedup: parents keep old pages: {error:#}"));
            info!("client {}: {} bytes removed from parents", connection.peer(), bytes.unwrap_or(0));
        }
        if !forced
            && answered.is_ok()
            && let Err(error) = connection.closed().await
        {
            warn!("client {}: {error:#}", connection.peer());
        }
        Ok(())
    }
}

/// [`PAGE`] as a buffer length.
const PAGE_LEN: usize = 4096;
const _: () = assert!(PAGE_LEN as u64 == PAGE && PAGE_LEN * 2 <= BUFFER);
