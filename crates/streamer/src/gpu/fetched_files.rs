// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files with GPU memory of which another host has some bytes. The session's fetcher writes them, and their presence is
//! in the same map as that of CPU memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::{Arc, OnceLock};

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_criu_images::is_gpu_pages_file;
use rewake_image_io::{BLOCK, Class, FetchReader, ImageFile, SentRequest};
use rewake_plugin_protocol::proto;

use crate::session::image::Image;

/// Ranges that are requested at once: a fetcher queues a limited number.
const AHEAD: usize = 64;
/// Time between two looks at the presence map, when the fetcher does not wake this thread.
const LOOK_MS: u16 = 1000;
/// The same, when the fetcher's queue was full.
const FULL_MS: u16 = 1;

/// The session's [`FetchedGpuFiles`], when it is open.
pub(crate) type SessionGpuFiles = Arc<OnceLock<FetchedGpuFiles>>;

/// The files of an image with GPU memory that a fetcher writes, and the reader that waits for them.
#[derive(Debug)]
pub struct FetchedGpuFiles {
    files: BTreeMap<String, Arc<ImageFile>>,
    reader: FetchReader,
}

/// Bytes of a file that must arrive.
struct NeededBytes<'a> {
    file: &'a ImageFile,
    range: Range<u64>,
    sent: SentRequest,
}

impl FetchedGpuFiles {
    /// Finds the files of a session's image: none if all bytes of it are here.
    pub(crate) fn new(image: &Image, reader: FetchReader) -> Self {
        let named = image.files().iter().filter(|file| file.source().is_some()).filter_map(|file| {
            let name = file.name().file_name()?.to_str()?;
            is_gpu_pages_file(name).then(|| (name.to_owned(), Arc::clone(file)))
        });
        Self { files: named.collect(), reader }
    }

    /// Returns a file by its name.
    pub(crate) fn file(&self, name: &str) -> Option<&Arc<ImageFile>> {
        self.files.get(name)
    }

    /// Returns the reader that the fetcher wakes.
    pub(super) fn reader(&self) -> FetchReader {
        self.reader.clone()
    }

    /// Waits until bytes have arrived. Files that are whole have all of theirs. The session limits the time that the
    /// fetcher takes.
    ///
    /// # Errors
    /// They are beyond the end of a file. Or no more bytes arrive.
    pub(super) fn wait_for(&self, needed: &[proto::Needed]) -> anyhow::Result<()> {
        let mut left = Vec::new();
        for proto::Needed { file, ranges } in needed {
            let Some(file) = self.file(file) else { continue };
            for proto::ByteRange { offset, length } in ranges {
                let end = offset.checked_add(*length).filter(|end| *end <= file.len());
                let end =
                    end.with_context(|| format!("the plugin needs bytes beyond {}", file.name().display()))?;
                // From a border of blocks on: whole blocks are requested.
                let range = offset / BLOCK as u64 * BLOCK as u64..end;
                left.push(NeededBytes { file, range, sent: SentRequest::default() });
            }
        }
        loop {
            self.reader.waker.drain();
            left.retain(|bytes| !bytes.has_arrived());
            if left.is_empty() {
                return Ok(());
            }
            let mut is_full = false;
            for bytes in left.iter_mut().take(AHEAD) {
                is_full |= !bytes.request(self.reader.number)?;
            }
            let limit = PollTimeout::from(if is_full { FULL_MS } else { LOOK_MS });
            match poll(&mut [PollFd::new(self.reader.waker.as_fd(), PollFlags::POLLIN)], limit) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno).context("waiting for bytes of another host"),
            }
        }
    }
}

impl NeededBytes<'_> {
    fn len(&self) -> usize {
        usize::try_from(self.range.end - self.range.start).unwrap_or(usize::MAX)
    }

    fn has_arrived(&self) -> bool {
        self.file.has(self.range.start, self.len())
    }

    /// Requests the bytes. Returns false if the fetcher has no room for the request.
    fn request(&mut self, reader: u8) -> anyhow::Result<bool> {
        let (name, len) = (self.file.name().display(), self.len());
        let fetched = self.file.source().with_context(|| format!("{name}: it is whole"))?;
        ensure!(
            !fetched.source.has_ended(),
            "{name}: bytes that are on another host do not arrive any more: see above"
        );
        Ok(fetched.request(reader, Class::Demand, (self.range.start, len), &mut self.sent))
    }
}
