// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files with GPU memory that a destination requests while the program runs there. At the source they are
//! whole, and answered as pages of a [task](rewake_page_protocol::file_task). At the destination they have
//! their length, and are listed for CRIU's plugin and the streamer ([`rewake_criu_images::ARRIVING_NAME`]).

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use rewake_criu_images::{
    ARRIVING_NAME, FILE_MODE, GPU_HEADER, ImageDir, add_arriving_file, is_gpu_pages_file,
};
use rewake_page_protocol::PageRun;

use crate::frame::Frame;
use crate::image_files::{place, text_name};

const PAGE: u64 = 4096;
/// Pages of one answer at most.
const MAX_PAGES: u64 = 1024;
/// Bytes that are reserved at once: a file cannot be written meanwhile.
const RESERVED_PIECE: i64 = 64 << 20;

/// The open files of a source's image that a destination may request, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct ArrivingFiles(Vec<(PathBuf, File)>);

impl ArrivingFiles {
    /// Opens the arriving files of an image. They are numbered in the order of their names, so a later agent
    /// gives them the same numbers.
    pub(crate) fn open(images: &Path) -> anyhow::Result<Self> {
        let listing = || format!("listing {}", images.display());
        let mut paths = Vec::new();
        for entry in fs::read_dir(images).with_context(listing)? {
            let entry = entry.with_context(listing)?;
            if entry.file_name().to_str().is_some_and(is_gpu_pages_file) {
                paths.push(entry.path());
            }
        }
        paths.sort();
        let open = |path: PathBuf| {
            let file = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
            Ok((path, file))
        };
        Ok(Self(paths.into_iter().map(open).collect::<anyhow::Result<_>>()?))
    }

    /// Returns what names each file to the destination.
    pub(crate) fn frames(&self) -> anyhow::Result<Vec<Frame>> {
        let frame = |(number, (path, file)): (usize, &(PathBuf, File))| {
            let reading = || format!("reading {}", path.display());
            let len = file.metadata().with_context(reading)?.len();
            // CRIU's plugin compares it when it opens the file.
            let mut head = vec![0; usize::try_from(len.min(GPU_HEADER))?];
            file.read_exact_at(&mut head, 0).with_context(reading)?;
            let name = text_name(path)?.to_owned();
            Ok(Frame::ArrivingFile { number: u32::try_from(number)?, len, name, head })
        };
        self.0.iter().enumerate().map(frame).collect()
    }

    /// Reads the first pages of a run. The last page of the file has zeros after its end.
    pub(crate) fn read(&self, number: u32, run: PageRun) -> anyhow::Result<Vec<u8>> {
        let file = usize::try_from(number).ok().and_then(|number| self.0.get(number));
        let (path, file) = file.with_context(|| format!("the image has no file {number} of GPU memory"))?;
        let reading = || format!("reading {} pages at {:#x} of {}", run.pages(), run.vaddr(), path.display());
        let left = file.metadata().with_context(reading)?.len().saturating_sub(run.vaddr());
        let pages = run.pages().min(MAX_PAGES).min(left.div_ceil(PAGE));
        ensure!(pages > 0, "{}: they are beyond its end", reading());
        let mut bytes = vec![0; usize::try_from(pages * PAGE)?];
        let stored = usize::try_from(left)?.min(bytes.len());
        file.read_exact_at(&mut bytes[..stored], run.vaddr()).with_context(reading)?;
        Ok(bytes)
    }
}

/// Makes a file of a destination's image that arrives later. The first one begins the list. A file that an
/// earlier connection has made stays.
pub(crate) fn make(images: &Path, number: u32, len: u64, name: &str, head: &[u8]) -> anyhow::Result<()> {
    let path = place(images, name)?;
    ensure!(
        is_gpu_pages_file(name) && head.len() as u64 <= len,
        "{name:?}, {len} bytes: expected a file with GPU memory"
    );
    if number == 0 {
        // An earlier connection may have begun it.
        let _ = fs::remove_file(images.join(ARRIVING_NAME));
    }
    let listed = ImageDir::open(images)?.arriving_files()?.len();
    ensure!(listed == number as usize, "file {number} of GPU memory after {listed} others");
    let making = || format!("making {} with {len} bytes", path.display());
    let file = File::options().create(true).write(true).truncate(false).mode(FILE_MODE).open(&path);
    let file = file.with_context(making)?;
    file.set_len(len).with_context(making)?;
    file.write_all_at(head, 0).with_context(making)?;
    Ok(add_arriving_file(images, name)?)
}

/// Reserves the space of all files that arrive later.
pub(crate) fn reserve(images: &Path) -> anyhow::Result<()> {
    for name in ImageDir::open(images)?.arriving_files()? {
        let path = images.join(name);
        let reserving = || format!("reserving space for {}", path.display());
        let file = File::options().write(true).open(&path).with_context(reserving)?;
        let len = i64::try_from(file.metadata().with_context(reserving)?.len()).with_context(reserving)?;
        let mut offset = 0;
        while offset < len {
            let piece = RESERVED_PIECE.min(len - offset);
            match fallocate(&file, FallocateFlags::empty(), offset, piece) {
                Ok(()) => offset += piece,
                Err(Errno::EINTR) => {}
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => {
                    let path = path.display();
                    tracing::warn!(
                        "{path}: its file system reserves no space: the program is lost if it gets full"
                    );
                    break;
                }
                Err(errno) => return Err(errno).with_context(|| format!("{}, {len} bytes", reserving())),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const NAMES: [&str; 2] = ["amdgpu-pages-1-00ab.img", "amdgpu-pages-2-00ab.img"];

    fn source() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = [vec![9; 8], vec![1; 4096], vec![2; 4096]].concat();
        fs::write(folder.path().join(NAMES[1]), bytes).unwrap();
        fs::write(folder.path().join(NAMES[0]), [7; 8]).unwrap();
        fs::write(folder.path().join("core-1.img"), "x").unwrap();
        folder
    }

    fn run(vaddr: u64, pages: u64) -> PageRun {
        PageRun::new(vaddr, pages).unwrap()
    }

    #[test]
    fn a_source_answers_by_numbers_in_the_order_of_names() {
        let folder = source();
        let files = ArrivingFiles::open(folder.path()).unwrap();
        let frame = |number, len, head: [u8; 8]| {
            let name = NAMES[number as usize].to_owned();
            Frame::ArrivingFile { number, len, name, head: head.to_vec() }
        };
        assert_eq!(files.frames().unwrap(), [frame(0, 8, [7; 8]), frame(1, 8200, [9; 8])]);
        let all = files.read(1, run(0, 9)).unwrap();
        assert_eq!((all.len(), all[7], all[8], all[8199], all[8200]), (3 * 4096, 9, 1, 2, 0));
        assert_eq!(files.read(1, run(4096, 1)).unwrap(), all[4096..8192]);
        assert!(files.read(1, run(3 * 4096, 1)).is_err() && files.read(2, run(0, 1)).is_err());
    }

    #[test]
    fn a_destination_makes_files_and_lists_them_in_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let images = folder.path();
        let list = || ImageDir::open(images).unwrap().arriving_files().unwrap();
        // The second connection begins again.
        for _ in 0..2 {
            make(images, 0, 8200, NAMES[0], &[9; 8]).unwrap();
            assert_eq!(list(), NAMES[..1]);
            make(images, 1, 0, NAMES[1], &[]).unwrap();
            assert_eq!(list(), NAMES);
        }
        let bytes = fs::read(images.join(NAMES[0])).unwrap();
        assert_eq!((bytes.len(), &bytes[..9]), (8200, &[9, 9, 9, 9, 9, 9, 9, 9, 0][..]));
        for (number, len, name, head) in [
            (2, 8, "pages-1.img", &[][..]),
            (2, 8, "amdgpu-pages-../x.img", &[]),
            (3, 8, "amdgpu-pages-3-1.img", &[]),
            (2, 4, "amdgpu-pages-3-1.img", &[0; 8]),
            (2, u64::MAX, "amdgpu-pages-3-1.img", &[]),
        ] {
            assert!(make(images, number, len, name, head).is_err(), "{number} {len} {name}");
        }
        assert_eq!(list(), NAMES);
    }

    #[test]
    fn reserved_space_is_kept_on_the_next_connection() {
        let folder = tempfile::tempdir().unwrap();
        let (images, len) = (folder.path(), (96 << 20) + 8);
        reserve(images).unwrap();
        make(images, 0, len, NAMES[0], &[9; 8]).unwrap();
        make(images, 1, 0, NAMES[1], &[]).unwrap();
        let reserved = || fs::metadata(images.join(NAMES[0])).unwrap().blocks() * 512;
        assert!(reserved() < 1 << 20, "{}", reserved());
        reserve(images).unwrap();
        assert!(reserved() >= len, "{}", reserved());
        make(images, 0, len, NAMES[0], &[9; 8]).unwrap();
        assert!(reserved() >= len, "{}", reserved());
    }
}
