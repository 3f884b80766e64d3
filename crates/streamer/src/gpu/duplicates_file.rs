// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps in a file of the image directory which GPU buffers have the same bytes. A restore reads those bytes
//! once and copies them to all of these buffers.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rewake_bo_contents::{
    Candidates, DUPLICATES_FILE, DuplicateSets, EARLIER_DUPLICATES_FILE, GpuPagesFile, folder,
};
use rewake_criu_images::amdgpu::{GpuFile, KfdImage};
use rewake_criu_images::{INVENTORY_NAME, ImageDir};
use serde::{Deserialize, Serialize};

use crate::gpu::plugin_folder::image_files;
use crate::sidecar_file;

const VERSION: u32 = 1;
/// The most bytes of the inventory, which identifies the dump: sets of another dump would give buffers wrong bytes.
/// CRIU's has some hundred.
const MOST_OF_INVENTORY: u64 = 1 << 16;
/// The most buffers in all sets.
const MOST: usize = 1 << 16;
/// The most bytes of a file with [`MOST`] buffers.
const MOST_BYTES: u64 = 4 << 20;

/// A buffer: N of its process's `amdgpu-kfd-N.img`, and its number there.
pub(crate) type Twin = (u32, usize);

/// The file's contents.
#[derive(Debug, Serialize, Deserialize)]
struct Twins {
    version: u32,
    /// The bytes of the dump's inventory, in hexadecimal digits.
    inventory: String,
    sets: Vec<Vec<Twin>>,
}

/// Removes the file of an earlier dump.
///
/// # Errors
/// It cannot be removed.
pub fn forget(images: &Path) -> anyhow::Result<()> {
    let folder = File::open(images).with_context(|| images.display().to_string())?;
    folder::remove(folder.as_fd(), EARLIER_DUPLICATES_FILE)?;
    Ok(folder::remove(folder.as_fd(), DUPLICATES_FILE)?)
}

/// The result of [`find`].
#[derive(Debug, PartialEq, Eq)]
pub struct DuplicateSearch {
    /// The number of buffers that need not be read.
    pub spared: usize,
    /// Whether the time limit ended before all were compared.
    pub cut_off: bool,
}

/// Finds buffers with the same bytes in a dumped image, and writes the file. `begins` gets the number of
/// bytes to compare and returns the time limit: what was found by then is kept.
///
/// # Errors
/// The image cannot be read, or the directory not written to.
pub fn find(images: &Path, begins: impl FnOnce(u64) -> Duration) -> anyhow::Result<DuplicateSearch> {
    let folder = File::open(images).with_context(|| images.display().to_string())?;
    let (processes, files): (Vec<_>, Vec<_>) = pages_files(images, folder.as_fd())?.into_iter().unzip();
    let start = Instant::now();
    let alike = Candidates::of(&files)?;
    let limit = begins(alike.bytes());
    let DuplicateSets { mut sets, cut_off } = alike.compare(|| start.elapsed() < limit)?;
    if sets.is_empty() {
        return Ok(DuplicateSearch { spared: 0, cut_off });
    }
    // The sets that save the most bytes first.
    sets.sort_by_key(|set| {
        let size = set.first().map_or(0, |(place, number)| processes[*place].1.buffers[*number].size);
        Reverse(size.saturating_mul(set.len() as u64 - 1))
    });
    let named = |set: Vec<(usize, usize)>| {
        set.into_iter().map(|(place, buffer)| (processes[place].0, buffer)).collect()
    };
    let spared = write(folder.as_fd(), sets.into_iter().map(named).collect())?;
    Ok(DuplicateSearch { spared, cut_off })
}

/// A process's number in the image, and its image of KFD.
type Computing = (u32, KfdImage);

fn pages_files(images: &Path, folder: BorrowedFd<'_>) -> anyhow::Result<Vec<(Computing, Vec<GpuPagesFile>)>> {
    let directory = ImageDir::open(images)?;
    let mut all = Vec::new();
    for file in image_files(images)? {
        let GpuFile::Kfd(id) = file else { continue };
        let Some(image) = directory.kfd(id)? else { continue };
        let gpus = image.nodes.iter().map(|node| node.properties.gpu_id).filter(|id| *id != 0);
        let files = gpus.map(|gpu| match GpuPagesFile::open(folder, id, &image, gpu, 0) {
            Err(error) if error.is_missing() => Ok(None),
            file => file.map(Some),
        });
        let files: Vec<Option<GpuPagesFile>> = files.collect::<Result<_, _>>()?;
        all.push(((id, image), files.into_iter().flatten().collect()));
    }
    Ok(all)
}

/// Writes the sets, of more than [`MOST`] buffers the first.
fn write(images: BorrowedFd<'_>, mut sets: Vec<Vec<Twin>>) -> anyhow::Result<usize> {
    let mut left = MOST;
    for set in &mut sets {
        set.truncate(left);
        left -= set.len();
    }
    sets.retain(|set| set.len() > 1);
    let spared = sets.iter().map(|set| set.len() - 1).sum();
    let mut text = serde_json::to_vec(&Twins { version: VERSION, inventory: inventory(images)?, sets })?;
    text.push(b'\n');
    sidecar_file::write(images, DUPLICATES_FILE, &text)?;
    Ok(spared)
}

/// Returns the sets; none if the image has no such file.
///
/// # Errors
/// It cannot be read, is damaged, or was made for another dump.
pub(crate) fn read(images: BorrowedFd<'_>) -> anyhow::Result<Vec<Vec<Twin>>> {
    let names = (DUPLICATES_FILE, EARLIER_DUPLICATES_FILE);
    let parse = |text: &[u8]| parse(text, images);
    Ok(sidecar_file::read_renamed(images, names, MOST_BYTES, parse)?.unwrap_or_default())
}

fn parse(text: &[u8], images: BorrowedFd<'_>) -> anyhow::Result<Vec<Vec<Twin>>> {
    let Twins { version, inventory: of, sets } = serde_json::from_slice(text).context("it is damaged")?;
    ensure!(version == VERSION, "it is of version {version}, this program knows {VERSION}");
    ensure!(of == inventory(images)?, "it is of another dump");
    let count: usize = sets.iter().map(Vec::len).sum();
    ensure!(count <= MOST, "it has {count} buffers, where {MOST} are the most");
    Ok(sets)
}

fn inventory(images: BorrowedFd<'_>) -> anyhow::Result<String> {
    let bytes = sidecar_file::read(images, INVENTORY_NAME, MOST_OF_INVENTORY).context(INVENTORY_NAME)?;
    let bytes = bytes.with_context(|| format!("{INVENTORY_NAME} is missing"))?;
    Ok(bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    fn images() -> (tempfile::TempDir, OwnedFd) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(INVENTORY_NAME), [0x16, 0x31, 0xff, 0]).unwrap();
        let open = File::open(folder.path()).unwrap().into();
        (folder, open)
    }

    #[test]
    fn written_sets_are_read_and_as_many_buffers_are_spared() {
        let (folder, images) = images();
        assert_eq!(read(images.as_fd()).unwrap(), Vec::<Vec<Twin>>::new());
        let sets = vec![vec![(3, 1), (4, 1), (5, 1)], vec![(3, 0), (3, 7)]];
        assert_eq!(write(images.as_fd(), sets.clone()).unwrap(), 3);
        assert_eq!(read(images.as_fd()).unwrap(), sets);
        assert_eq!(folder.path().read_dir().unwrap().count(), 2, "nothing else is left there");
    }

    #[test]
    fn a_file_of_an_earlier_release_is_read_and_removed_by_a_later_dump() {
        let (folder, images) = images();
        let earlier = folder.path().join("rewake-twins.json");
        write(images.as_fd(), vec![vec![(3, 0), (3, 7)]]).unwrap();
        std::fs::rename(folder.path().join(DUPLICATES_FILE), &earlier).unwrap();
        assert_eq!(read(images.as_fd()).unwrap(), [[(3, 0), (3, 7)]]);
        forget(folder.path()).unwrap();
        assert!(!earlier.exists());
    }

    #[test]
    fn as_many_as_can_be_written_can_be_read() {
        let (_folder, images) = images();
        let pair = |number| vec![(u32::MAX, usize::MAX - number), (u32::MAX - 1, usize::MAX)];
        let sets = (0..=MOST / 2).map(pair).collect();
        assert_eq!(write(images.as_fd(), sets).unwrap(), MOST / 2);
        assert_eq!(read(images.as_fd()).unwrap().len(), MOST / 2);
        let one = vec![(0..=MOST).map(|number| (u32::MAX, usize::MAX - number)).collect(), pair(0)];
        assert_eq!(write(images.as_fd(), one).unwrap(), MOST - 1);
        assert_eq!(read(images.as_fd()).unwrap()[0].len(), MOST);
    }

    #[test]
    fn a_file_of_another_dump_or_that_makes_no_sense_is_refused() {
        let (folder, images) = images();
        let error = |text: &str| {
            std::fs::write(folder.path().join(DUPLICATES_FILE), text).unwrap();
            format!("{:#}", read(images.as_fd()).unwrap_err())
        };
        for text in
            ["", "[]", r#"{"version":1,"inventory":"1631ff00","sets":[[[3,-1]]]}"#, r#"{"version":1,"#]
        {
            assert!(error(text).starts_with("it is damaged: "), "{text}");
        }
        assert!(error(r#"{"version":2,"inventory":"1631ff00","sets":[]}"#).contains("version 2"));
        for inventory in ["", "1631ff", "1631ff0000", "1631FF00"] {
            let text = format!(r#"{{"version":1,"inventory":"{inventory}","sets":[]}}"#);
            assert_eq!(error(&text), "it is of another dump");
        }
        let most = usize::try_from(MOST_BYTES).unwrap();
        assert!(error(&" ".repeat(most + 1)).contains("more than 4194304 bytes"));
        let many = vec!["[3,1]"; MOST + 1].join(",");
        let many = format!(r#"{{"version":1,"inventory":"1631ff00","sets":[[{many}]]}}"#);
        assert!(error(&many).contains("the most"));
        std::fs::remove_file(folder.path().join(INVENTORY_NAME)).unwrap();
        assert!(error(r#"{"version":1,"inventory":"","sets":[]}"#).contains(INVENTORY_NAME));
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = format!("{:#}", find(Path::new("/nowhere/images"), |_| Duration::MAX).unwrap_err());
        assert!(error.starts_with("/nowhere/images: "), "{error}");
    }

    #[test]
    fn an_image_without_gpus_gets_no_file_and_an_earlier_one_is_removed() {
        let (folder, _images) = images();
        std::fs::write(folder.path().join(DUPLICATES_FILE), "of another dump").unwrap();
        forget(folder.path()).unwrap();
        forget(folder.path()).unwrap();
        let found = find(folder.path(), Duration::from_secs).unwrap();
        assert_eq!(found, DuplicateSearch { spared: 0, cut_off: false });
        assert!(!folder.path().join(DUPLICATES_FILE).exists());
    }
}
