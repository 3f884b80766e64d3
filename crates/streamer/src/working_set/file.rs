// SPDX-License-Identifier: MIT OR Apache-2.0
//! The file with the working set, beside the files of the image: JSON that is written completely or not at
//! all.
//!
//! A manifest does not name it, because it is recorded after the image was sealed. A file of another dump is
//! refused.

use std::os::fd::{AsFd as _, BorrowedFd};

use anyhow::{Context as _, ensure};
use rewake_criu_images::{Digest, ImageDir};
use rewake_manifest::{MAX_WORKING_SET, WORKING_SET_NAME};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{AccessedPages, BufferId, MOST_BUFFERS, MOST_RUNS, WorkingSet};
use crate::{sidecar_file, units};

/// What a user can do with a file that is not used.
pub(crate) const REMEDY: &str = "remove it, or restore with --record for a new one";
const VERSION: u32 = 2;

/// The file's contents.
#[derive(Debug, Serialize, Deserialize)]
struct WorkingSetFile {
    version: u32,
    /// [`ImageDir::dump_id`] in hexadecimal digits.
    dump: String,
    /// The pid of the task in the image, the address of the first page, the number of pages.
    pages: Vec<(u32, u64, u64)>,
    /// N of the process's `amdgpu-kfd-N.img`, the buffer's number there.
    buffers: Vec<(u32, usize)>,
}

/// Returns the working set of an image, or `None` if it has no such file. Each page is in it once, below the
/// last address.
///
/// # Errors
/// The file cannot be read, is damaged, or is of another dump.
pub fn of_image(images: &ImageDir) -> anyhow::Result<Option<WorkingSet>> {
    read(images.as_fd(), images.dump_id()?)
}

/// [`of_image`], for a directory whose dump is known.
///
/// # Errors
/// As there.
pub(crate) fn read(images: BorrowedFd<'_>, dump: Digest) -> anyhow::Result<Option<WorkingSet>> {
    sidecar_file::read(images, WORKING_SET_NAME, MAX_WORKING_SET)?.map(|text| parse(&text, dump)).transpose()
}

fn parse(text: &[u8], of: Digest) -> anyhow::Result<WorkingSet> {
    /// What all versions have.
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let Versioned { version } = serde_json::from_slice(text).context("it is damaged")?;
    ensure!(version == VERSION, "it is of version {version}, this program knows {VERSION}");
    let WorkingSetFile { dump, pages, buffers, .. } =
        serde_json::from_slice(text).context("it is damaged")?;
    ensure!(dump == of.to_string(), "it is of another dump");
    ensure!(pages.len() <= MOST_RUNS, "it has {} runs, where {MOST_RUNS} are the most", pages.len());
    ensure!(
        buffers.len() <= MOST_BUFFERS,
        "it has {} buffers, where {MOST_BUFFERS} are the most",
        buffers.len()
    );
    let pages = pages.into_iter().map(|(task, address, pages)| AccessedPages { task, address, pages });
    let pages: Vec<AccessedPages> = pages.collect();
    if let Some(run) = pages.iter().find(|run| run.addresses().is_none()) {
        anyhow::bail!(
            "{} pages from address {:#x} of task {} are no pages",
            run.pages,
            run.address,
            run.task
        );
    }
    let buffers = buffers.into_iter().map(|(kfd, buffer)| BufferId { kfd, buffer }).collect();
    // Each page once: no plan gets longer than its image and this file are.
    let mut found = WorkingSet::default().merged(WorkingSet { pages, buffers });
    // What one run of the file left of another may be several.
    found.split_off_excess();
    Ok(found)
}

/// What a recording added to the file.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddedToFile {
    /// Bytes of CPU memory.
    pub(crate) bytes: u64,
    pub(crate) buffers: usize,
}

/// Adds what was accessed to the working set of an image. A file of another dump, or a damaged one, is
/// replaced. Logs a warning where it has no room for all.
///
/// # Errors
/// The directory cannot be written to.
pub(crate) fn add(images: BorrowedFd<'_>, dump: Digest, accessed: WorkingSet) -> anyhow::Result<AddedToFile> {
    if accessed.is_empty() {
        return Ok(AddedToFile::default());
    }
    // Two threads of this program do it, and threads of other restores of the image.
    sidecar_file::alone(images, |images| add_alone(images, dump, accessed))
}

fn add_alone(images: BorrowedFd<'_>, dump: Digest, accessed: WorkingSet) -> anyhow::Result<AddedToFile> {
    let earlier = read(images, dump).ok().flatten().unwrap_or_default();
    let (bytes, known) = (earlier.bytes(), earlier.buffers.len());
    let mut all = earlier.merged(accessed);
    let excess = all.split_off_excess();
    if !excess.is_empty() {
        let (bytes, buffers) = (units::bytes(excess.bytes()), excess.buffers.len());
        warn!(
            "{WORKING_SET_NAME}: {bytes} of CPU memory and {buffers} buffers are left out: it has at most \
             {MOST_RUNS} runs of pages and {MOST_BUFFERS} buffers"
        );
    }
    let added = AddedToFile { bytes: all.bytes() - bytes, buffers: all.buffers.len() - known };
    let WorkingSet { pages, buffers } = all;
    let file = WorkingSetFile {
        version: VERSION,
        dump: dump.to_string(),
        pages: pages.into_iter().map(|run| (run.task, run.address, run.pages)).collect(),
        buffers: buffers.into_iter().map(|of| (of.kfd, of.buffer)).collect(),
    };
    let mut text = serde_json::to_vec(&file)?;
    text.push(b'\n');
    sidecar_file::write(images, WORKING_SET_NAME, &text)?;
    Ok(added)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const DUMP: Digest = Digest([7; 32]);

    fn images() -> (tempfile::TempDir, File) {
        let folder = tempfile::tempdir().unwrap();
        let open = File::open(folder.path()).unwrap();
        (folder, open)
    }

    fn run(page: u64) -> AccessedPages {
        AccessedPages { task: 9, address: page << 12, pages: 3 }
    }

    fn of(buffer: usize) -> BufferId {
        BufferId { kfd: 4, buffer }
    }

    #[test]
    fn a_working_set_is_read_in_order_and_a_later_one_is_added() {
        let (folder, images) = images();
        assert_eq!(read(images.as_fd(), DUMP).unwrap(), None);
        let pages = WorkingSet { pages: vec![run(70), run(20)], buffers: vec![] };
        add(images.as_fd(), DUMP, pages).unwrap();
        let buffers = WorkingSet { pages: vec![run(20), run(0)], buffers: vec![of(7), of(1)] };
        let added = add(images.as_fd(), DUMP, buffers).unwrap();
        assert_eq!(added, AddedToFile { bytes: 3 << 12, buffers: 2 });
        let both = WorkingSet { pages: vec![run(70), run(20), run(0)], buffers: vec![of(7), of(1)] };
        assert_eq!(read(images.as_fd(), DUMP).unwrap(), Some(both));
        assert_eq!(folder.path().read_dir().unwrap().count(), 1, "nothing else is left there");
    }

    #[test]
    fn recordings_at_once_are_all_added() {
        let (folder, images) = images();
        std::thread::scope(|scope| {
            for buffer in 0..16 {
                let accessed = WorkingSet { pages: vec![run(10 * buffer as u64)], buffers: vec![of(buffer)] };
                let images = images.as_fd();
                scope.spawn(move || add(images, DUMP, accessed).unwrap());
            }
        });
        let read = read(images.as_fd(), DUMP).unwrap().unwrap();
        assert_eq!((read.pages.len(), read.buffers.len()), (16, 16));
        assert_eq!(folder.path().read_dir().unwrap().count(), 1, "nothing else is left there");
    }

    #[test]
    fn a_file_of_another_dump_is_refused_and_replaced() {
        let (_folder, images) = images();
        add(images.as_fd(), Digest([8; 32]), WorkingSet { pages: vec![run(0)], buffers: vec![] }).unwrap();
        let error = read(images.as_fd(), DUMP).unwrap_err().to_string();
        assert_eq!(error, "it is of another dump");
        let own = WorkingSet { pages: vec![run(5)], buffers: vec![] };
        add(images.as_fd(), DUMP, own.clone()).unwrap();
        assert_eq!(read(images.as_fd(), DUMP).unwrap(), Some(own));
    }

    #[test]
    fn as_many_as_can_be_written_can_be_read() {
        let (_folder, images) = images();
        let far = |n: u64| AccessedPages {
            task: u32::MAX,
            address: (0x7_ffff_0000 - 9999 * n) << 12,
            pages: 1 << 13,
        };
        let buffers =
            (0..=MOST_BUFFERS).map(|n| BufferId { kfd: u32::MAX, buffer: usize::MAX - n }).collect();
        let most = WorkingSet { pages: (0..=MOST_RUNS as u64).map(far).collect(), buffers };
        add(images.as_fd(), DUMP, most).unwrap();
        let read = read(images.as_fd(), DUMP).unwrap().unwrap();
        assert_eq!((read.pages.len(), read.buffers.len()), (MOST_RUNS, MOST_BUFFERS));
    }

    #[test]
    fn a_file_that_makes_no_sense_is_refused() {
        let (folder, images) = images();
        let error = |text: &str| {
            std::fs::write(folder.path().join(WORKING_SET_NAME), text).unwrap();
            format!("{:#}", read(images.as_fd(), DUMP).unwrap_err())
        };
        let file = |version: u32, pages: &str, buffers: &str| {
            format!(r#"{{"version":{version},"dump":"{DUMP}","pages":[{pages}],"buffers":[{buffers}]}}"#)
        };
        for text in ["", "[]", r#"{"version":2}"#, &file(2, "[1,-1,1]", "")] {
            assert!(error(text).starts_with("it is damaged: "), "{text}");
        }
        assert!(error(r#"{"version":1,"touched":[]}"#).contains("of version 1, this program knows 2"));
        for (address, pages) in [(1, 1), (4096, 0), (4096, u64::MAX), (u64::MAX - 4095, 1)] {
            let run = format!("[1,{address},{pages}]");
            assert!(error(&file(2, &run, "")).contains("are no pages"), "{run}");
        }
        let many = vec!["[1,0,1]"; MOST_RUNS + 1].join(",");
        assert!(error(&file(2, &many, "")).contains("32769 runs, where 32768"));
        let many = vec!["[3,1]"; MOST_BUFFERS + 1].join(",");
        assert!(error(&file(2, "", &many)).contains("16385 buffers"));
        assert!(error(&" ".repeat(usize::try_from(MAX_WORKING_SET).unwrap() + 1)).contains("more than"));
        std::fs::remove_file(folder.path().join(WORKING_SET_NAME)).unwrap();
        std::fs::create_dir(folder.path().join(WORKING_SET_NAME)).unwrap();
        assert!(read(images.as_fd(), DUMP).is_err(), "a folder of that name");
    }
}
