// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves an image to `criu lazy-pages --page-server`.
//!
//! The [planner](rewake_streamer::planner), a confined process, parses the image. So the pages that clients
//! get are those that a streamer would load: lazy pages, from the image or from its parents. A request for
//! any other page ends the client: no byte is ever invented.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::amdgpu::image_has_gpu;
use rewake_image_io::{BLOCK, ImageFile, read_now};
use rewake_page_protocol::{CLOSED, PageMessage, PageRun, WIDE_LEN, answer_header};
use rewake_pager::{FileRun, PAGE_SIZE};
use rewake_streamer::session::image::{Image, TaskPlan};
use tracing::{info, warn};

use crate::page_server::connection::PageConnection;
use crate::page_server::disk::in_thread;

/// Pages of one answer at most. CRIU requests 1024 at most; a client that requests more gets the first ones.
const MAX_ANSWER: u64 = 1024;
/// Bytes of an answer that a client's task has in memory at most.
const PIECE: usize = 256 << 10;

/// An image that clients may read.
#[derive(Debug)]
pub struct ServedImage {
    image: Image,
    /// For messages.
    path: String,
}

impl ServedImage {
    /// Has an image checked and planned.
    ///
    /// # Errors
    /// The image is damaged, lacks pages, or has GPU memory.
    pub fn open(images: &Path) -> anyhow::Result<Self> {
        let path = images.display().to_string();
        let has_gpu = image_has_gpu(images).with_context(|| format!("reading {path}"))?;
        ensure!(
            !has_gpu,
            "{path}: the image has GPU memory, which CRIU's page protocol cannot carry: copy the directory \
             to the host of the restore, and use `rewake restore` there"
        );
        Ok(Self { image: rewake_streamer::planner::open(images, &[])?, path })
    }

    /// Returns the number of lazy pages.
    #[must_use]
    pub fn lazy_pages(&self) -> u64 {
        self.image.lazy_pages()
    }

    fn task(&self, pid: u32) -> anyhow::Result<&TaskPlan> {
        let found = self.image.plan(pid);
        found.with_context(|| format!("a request for task {pid}: {} has no memory of such a task", self.path))
    }
}

/// Serves one client to its end.
///
/// # Errors
/// The client violates the protocol, requests pages that the image does not have, or ends without its last
/// message; or a file cannot be read.
pub(crate) async fn serve(image: &ServedImage, connection: &mut PageConnection) -> anyhow::Result<()> {
    let (mut pages, mut answers) = (0u64, 0u64);
    let mut answer = AnswerBuffer { buffer: vec![0; WIDE_LEN + PIECE + 2 * BLOCK] };
    loop {
        match connection.next().await? {
            Some(PageMessage::Get { pid, run }) => {
                pages += answer.send(image, connection, pid, run).await?;
                answers += 1;
            }
            Some(PageMessage::Close { forced }) => {
                connection.send(&CLOSED).await?;
                info!("client {}: done, {pages} pages in {answers} answers", connection.peer());
                if !forced && let Err(error) = connection.closed().await {
                    warn!("client {}: {error:#}", connection.peer());
                }
                return Ok(());
            }
            Some(_) => bail!(
                "the client sends memory: this server serves an image; `rewake page-server` without \
                 --lazy-pages receives dumps"
            ),
            None => bail!(
                "the client ended its connection without its last message, after {pages} pages in {answers} \
                 answers: whether its restore has all memory is not known"
            ),
        }
    }
}

/// Memory for answers: room for a header, then pages. Of a sealed file whole blocks are read, so pages may
/// have others of their block before and after them.
struct AnswerBuffer {
    buffer: Vec<u8>,
}

impl AnswerBuffer {
    /// Answers a request. Returns the number of pages that it sent.
    async fn send(
        &mut self,
        image: &ServedImage,
        connection: &mut PageConnection,
        pid: u32,
        wanted: PageRun,
    ) -> anyhow::Result<u64> {
        let task = image.task(pid)?;
        let runs = runs(task, wanted);
        let pages: u64 = runs.iter().map(|run| run.pages).sum();
        ensure!(
            pages > 0,
            "a request for the page at {:#x} of task {pid}: {} has no lazy page there",
            wanted.vaddr(),
            image.path
        );
        let mut header = connection.header(&answer_header(pid, PageRun::new(wanted.vaddr(), pages)?))?;
        for run in runs {
            let file = task.files.get(run.file as usize).context("a file of the plan")?;
            let mut left = run.pages * PAGE_SIZE;
            let mut offset = run.file_offset;
            while left > 0 {
                let len = usize::try_from(left).unwrap_or(usize::MAX).min(PIECE);
                let place = self.read(file, offset..offset + len as u64).await?;
                // The header goes out with the first bytes.
                let start = place.start - header.len();
                self.buffer[start..place.start].copy_from_slice(&header);
                connection.send_answer(&self.buffer[start..place.end], header.len()).await?;
                header.clear();
                (left, offset) = (left - len as u64, offset + len as u64);
            }
        }
        Ok(pages)
    }

    /// Reads bytes of a file behind the room for the header, and checks them if the file is sealed. Returns
    /// where in the buffer they are.
    async fn read(&mut self, file: &Arc<ImageFile>, range: Range<u64>) -> anyhow::Result<Range<usize>> {
        let len = usize::try_from(range.end - range.start)?;
        let cached = file.read_verified(range.clone(), &mut self.buffer[WIDE_LEN..], true)?;
        if cached.len() == len {
            return Ok(WIDE_LEN + cached.start..WIDE_LEN + cached.end);
        }
        let unit = file.read_unit() as u64;
        let start = range.start / unit * unit;
        let whole = usize::try_from(range.end.next_multiple_of(unit).min(file.len()) - start)?;
        let (file, mut buffer) = (Arc::clone(file), std::mem::take(&mut self.buffer));
        self.buffer = in_thread(move || {
            let into = &mut buffer[WIDE_LEN..WIDE_LEN + whole];
            read_now(&file, start, into)?;
            file.verify(start, into)?;
            Ok(buffer)
        })
        .await?;
        let first = WIDE_LEN + usize::try_from(range.start - start)?;
        Ok(first..first + len)
    }
}

/// Returns the places of the first pages of a request, without a gap between them.
fn runs(task: &TaskPlan, wanted: PageRun) -> Vec<FileRun> {
    let mut left = wanted.pages().min(MAX_ANSWER);
    let mut at = wanted.vaddr();
    let mut found = Vec::new();
    while left > 0
        && let Some(mut run) = task.plan.file_run(at)
    {
        run.pages = run.pages.min(left);
        left -= run.pages;
        at += run.pages * PAGE_SIZE;
        found.push(run);
    }
    found
}
