// SPDX-License-Identifier: MIT OR Apache-2.0
//! Images are sealed, changed, and verified.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rewake_criu_images::{Generation, Inventory, MemoryPlace, PageFlags, Pagemap, add_arriving_file, write};
use rewake_manifest::{
    ImageDifference, MANIFEST_NAME, ManifestError, PARTIAL_NAME, SealReport, VerifyReport, seal, verify,
    verify_files,
};

const PAGE: usize = 4096;
const BLOCK: u64 = 65_536;
/// Where the memory of task 7 begins.
const START: u64 = 0x7000_0000_0000;

/// An image of one task with `pages` pages of memory.
fn image(pages: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), pages);
    dir
}

fn fill(dir: &Path, pages: u64) {
    let inventory = Inventory { version: 2, plugins: Vec::new(), run_id: Some("run".into()) };
    write::inventory(dir, &inventory).unwrap();
    let map = Pagemap::new(1, Generation::Wide, [(START, pages, PageFlags::PRESENT)]);
    write::pagemap(dir, 7, &map).unwrap();
    let bytes: Vec<u8> = (0..pages).flat_map(|page| [u8::try_from(page % 255 + 1).unwrap(); PAGE]).collect();
    write::pages(dir, 1, &bytes).unwrap();
    write::files(dir, &BTreeMap::from([(1, Some(PathBuf::from("/bin/true")))])).unwrap();
    fs::write(dir.join("tmpfs-dev-9.tar.gz.img"), vec![3; 70_000]).unwrap();
}

fn sealed(pages: u64) -> tempfile::TempDir {
    let dir = image(pages);
    seal(dir.path()).unwrap();
    dir
}

fn differences(dir: &Path) -> Vec<ImageDifference> {
    let mut found = Vec::new();
    let report = verify(dir, |difference| found.push(difference.clone())).unwrap();
    assert_eq!(report.differences, found.len() as u64);
    found
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
}

#[test]
fn a_sealed_image_is_as_it_was_sealed() {
    let dir = image(1000);
    let report = seal(dir.path()).unwrap();
    let lengths: u64 = dir
        .path()
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_name().to_str().unwrap().ends_with(".img"))
        .map(|entry| entry.metadata().unwrap().len())
        .sum();
    let manifest = fs::metadata(dir.path().join(MANIFEST_NAME)).unwrap();
    let expected = SealReport { files: 5, bytes: lengths, manifest_bytes: manifest.len(), ..report };
    assert_eq!(report, expected);
    assert_eq!((report.zero_bytes, report.duplicate_bytes, report.has_unsealed_parent), (0, 0, false));
    let found = verify(dir.path(), |difference| panic!("{difference}")).unwrap();
    assert_eq!(found, VerifyReport { id: report.id, files: 5, bytes: lengths, differences: 0 });
    let mode = fs::metadata(dir.path().join("inventory.img")).unwrap().permissions().mode();
    assert_eq!(manifest.permissions().mode(), mode, "who may read the image may read its manifest");
    assert!(!dir.path().join("rewake-manifest.new").exists());
}

#[test]
fn equal_images_have_one_id_with_and_without_holes() {
    let ids = [false, true].map(|with_holes| {
        let dir = image(4);
        let path = dir.path().join("pages-1.img");
        let mut bytes = vec![0; 9 << 20];
        bytes[5 << 20] = 1;
        if with_holes {
            let file = File::create(&path).unwrap();
            file.set_len(9 << 20).unwrap();
            file.write_all_at(&[1], 5 << 20).unwrap();
        } else {
            fs::write(&path, bytes).unwrap();
        }
        seal(dir.path()).unwrap()
    });
    assert_eq!(ids[0], ids[1]);
    assert!(ids[0].zero_bytes > 6 << 20, "{:?}", ids[0]);
    let other = seal(image(5).path()).unwrap();
    assert_ne!(ids[0].id, other.id);
}

#[test]
fn duplicate_chunks_are_counted() {
    let dir = image(4);
    let chunk: Vec<u8> = (0..2_u32 << 20).map(|at| u8::try_from(at % 251).unwrap()).collect();
    fs::write(dir.path().join("other.img"), [&chunk[..], &chunk, &[1]].concat()).unwrap();
    assert_eq!(seal(dir.path()).unwrap().duplicate_bytes, 2 << 20);
}

#[test]
fn a_flipped_bit_of_memory_is_found_by_its_block_and_address() {
    let dir = sealed(1000);
    flip(&dir.path().join("pages-1.img"), 3 * BLOCK + 4097);
    let place = MemoryPlace::Task { pid: 7, address: START + 3 * BLOCK };
    let (file, offset) = ("pages-1.img".to_owned(), 3 * BLOCK);
    let expected = ImageDifference::Bytes { file, offset, length: BLOCK, place: Some(place) };
    assert_eq!(differences(dir.path()), std::slice::from_ref(&expected));
    assert_eq!(
        expected.to_string(),
        "pages-1.img: wrong bytes in the 65536 from offset 196608 (process 7, address 0x700000030000)"
    );
}

#[test]
fn a_flipped_bit_of_any_other_file_is_found_by_its_name() {
    let dir = sealed(4);
    for name in ["inventory.img", "pagemap-7.img", "files.img", "tmpfs-dev-9.tar.gz.img"] {
        let path = dir.path().join(name);
        let length = fs::metadata(&path).unwrap().len();
        flip(&path, length - 1);
        let found = differences(dir.path());
        let expected = ImageDifference::Bytes { file: name.to_owned(), offset: 0, length, place: None };
        assert_eq!(found, [expected]);
        flip(&path, length - 1);
    }
    assert_eq!(differences(dir.path()), []);
}

#[test]
fn wrong_blocks_that_follow_each_other_are_one_line() {
    let dir = sealed(1000);
    let path = dir.path().join("pages-1.img");
    // Across the border of two chunks and of two segments is one range, too.
    [0, BLOCK, 5 * BLOCK, 999 * PAGE as u64].iter().for_each(|at| flip(&path, *at));
    let ranges: Vec<(u64, u64)> = differences(dir.path())
        .iter()
        .map(|of| match of {
            ImageDifference::Bytes { offset, length, .. } => (*offset, *length),
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(ranges, [(0, 2 * BLOCK), (5 * BLOCK, BLOCK), (62 * BLOCK, 1000 * PAGE as u64 - 62 * BLOCK)]);
}

#[test]
fn bytes_in_the_place_of_zeros_are_found() {
    let dir = image(4);
    let path = dir.path().join("pages-1.img");
    File::create(&path).unwrap().set_len(5 << 20).unwrap();
    seal(dir.path()).unwrap();
    flip(&path, (4 << 20) + 5);
    let expected =
        ImageDifference::Bytes { file: "pages-1.img".into(), offset: 4 << 20, length: BLOCK, place: None };
    assert_eq!(differences(dir.path()), [expected]);
}

#[test]
fn files_that_are_shorter_longer_missing_or_new_are_found() {
    let dir = sealed(1000);
    let path = |name| dir.path().join(name);
    OpenOptions::new().write(true).open(path("pages-1.img")).unwrap().set_len(100_000).unwrap();
    fs::write(path("tmpfs-dev-9.tar.gz.img"), vec![3; 70_001]).unwrap();
    fs::remove_file(path("files.img")).unwrap();
    fs::write(path("pagemap-8.img"), "").unwrap();
    let length = |file: &str, sealed, found| ImageDifference::Length { file: file.into(), sealed, found };
    let expected = [
        ImageDifference::Missing { file: "files.img".into() },
        length("pages-1.img", 1000 * PAGE as u64, 100_000),
        length("tmpfs-dev-9.tar.gz.img", 70_000, 70_001),
        ImageDifference::Added { file: "pagemap-8.img".into() },
    ];
    assert_eq!(differences(dir.path()), expected);
    assert_eq!(expected[1].to_string(), "pages-1.img: truncated: 100000 bytes, sealed with 4096000");
}

#[test]
fn a_view_of_an_image_is_sealed_and_nothing_is_written_through_its_links() {
    let (real, view) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fill(real.path(), 4);
    let files = || {
        let all = fs::read_dir(real.path()).unwrap().map(|entry| entry.unwrap());
        let mut all: Vec<_> = all.map(|it| (it.file_name(), fs::read(it.path()).unwrap())).collect();
        all.sort();
        all
    };
    let before = files();
    for (name, _) in &before {
        symlink(real.path().join(name), view.path().join(name)).unwrap();
    }
    // A link in the place of the file that is written: a manifest takes its place.
    symlink(real.path().join("files.img"), view.path().join("rewake-manifest.new")).unwrap();
    let sealed = seal(view.path()).unwrap();
    assert_eq!(differences(view.path()), []);
    assert_eq!(files(), before);
    assert_eq!(seal(real.path()).unwrap().id, sealed.id, "the image is the same one");
    fs::remove_file(real.path().join("files.img")).unwrap();
    let found = differences(view.path());
    assert!(
        matches!(&found[..], [ImageDifference::Unreadable { file, reason }]
            if file == "files.img" && reason.contains("leads to no file")),
        "{found:?}"
    );
}

#[test]
fn logs_and_other_files_are_no_part_of_an_image() {
    let dir = sealed(4);
    for name in ["dump.log", "stats-dump", "notes.txt", "rewake-working-set.json"] {
        fs::write(dir.path().join(name), "written later").unwrap();
    }
    assert_eq!(differences(dir.path()), []);
}

#[test]
fn an_image_without_a_manifest_is_not_sealed_and_says_what_to_do() {
    let dir = image(4);
    let error = verify(dir.path(), |difference| panic!("{difference}")).unwrap_err();
    assert!(matches!(error, ManifestError::NotSealed { .. }));
    assert!(
        error.to_string().contains("not sealed") && error.to_string().contains("`rewake seal`"),
        "{error}"
    );
}

#[test]
fn a_directory_without_an_inventory_and_a_sealed_one_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("pages-1.img"), [1; PAGE]).unwrap();
    let error = seal(dir.path()).unwrap_err();
    assert!(error.to_string().contains("inventory.img"), "{error}");
    assert!(!dir.path().join(MANIFEST_NAME).exists());
    let dir = sealed(4);
    let error = seal(dir.path()).unwrap_err();
    assert!(matches!(error, ManifestError::AlreadySealed { .. }), "{error}");
}

#[test]
fn files_of_a_sealed_image_are_compared_by_names_and_lengths_without_being_read() {
    let dir = sealed(4);
    let found = || {
        let mut found = Vec::new();
        let report = verify_files(dir.path(), |difference| found.push(difference.to_string())).unwrap();
        assert_eq!(report.differences, found.len() as u64);
        (report, found)
    };
    let (report, differences) = found();
    assert_eq!((report, differences), (verify(dir.path(), |_| ()).unwrap(), Vec::new()));
    let path = dir.path().join("pages-1.img");
    let mut bytes = fs::read(&path).unwrap();
    bytes[0] ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert_eq!(found().1, [""; 0], "a wrong byte is for `verify`");
    assert_eq!(verify(dir.path(), |_| ()).unwrap().differences, 1);
    fs::write(&path, &bytes[1..]).unwrap();
    fs::write(dir.path().join("pagemap-9.img"), "").unwrap();
    let differences = found().1;
    assert!(
        differences.len() == 2 && differences[0].starts_with("pages-1.img: truncated"),
        "{differences:?}"
    );
    assert!(differences[1].starts_with("pagemap-9.img: not sealed"), "{differences:?}");
}

#[test]
fn a_partial_copy_is_neither_sealed_nor_verified() {
    let dir = sealed(4);
    let (whole, partial) = (dir.path().join(MANIFEST_NAME), dir.path().join(PARTIAL_NAME));
    fs::rename(&whole, &partial).unwrap();
    let error = seal(dir.path()).unwrap_err();
    assert!(matches!(error, ManifestError::Partial { .. }), "{error}");
    assert!(!whole.exists());
    // A name alone makes no whole image.
    fs::copy(&partial, &whole).unwrap();
    let error = verify(dir.path(), |_| ()).unwrap_err();
    assert!(matches!(error, ManifestError::Partial { .. }), "{error}");
}

#[test]
fn an_image_whose_gpu_memory_arrives_is_neither_sealed_nor_verified() {
    let dir = image(4);
    add_arriving_file(dir.path(), "amdgpu-pages-1-00ab.img").unwrap();
    let error = seal(dir.path()).unwrap_err();
    assert!(matches!(error, ManifestError::Arriving { .. }), "{error}");
    let dir = sealed(4);
    add_arriving_file(dir.path(), "amdgpu-pages-1-00ab.img").unwrap();
    let error = verify(dir.path(), |_| ()).unwrap_err();
    assert!(matches!(error, ManifestError::Arriving { .. }), "{error}");
}

#[test]
fn an_image_that_changes_while_it_is_read_is_not_sealed() {
    let dir = image(1000);
    let path = dir.path().join("pages-1.img");
    File::create(&path).unwrap().set_len(256 << 20).unwrap();
    let done = AtomicBool::new(false);
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            // Every other page has bytes, so that all is read.
            let mut at = 0;
            while !done.load(Ordering::Relaxed) {
                file.write_all_at(&[1; PAGE], at % (256 << 20)).unwrap();
                at += 2 * PAGE as u64;
                if at % (1 << 20) == 0 {
                    thread::sleep(Duration::from_micros(100));
                }
            }
        });
        thread::sleep(Duration::from_millis(50));
        let sealed = seal(dir.path());
        done.store(true, Ordering::Relaxed);
        sealed.unwrap_err()
    });
    assert!(matches!(&error, ManifestError::Changed { file, .. } if *file == path), "{error}");
    assert!(!dir.path().join(MANIFEST_NAME).exists() && !dir.path().join("rewake-manifest.new").exists());
}

#[test]
fn a_parent_may_be_a_directory_of_its_child() {
    let dir = tempfile::tempdir().unwrap();
    let [parent, child] = ["1", "2"].map(|name| dir.path().join(name));
    [&parent, &child].into_iter().for_each(|image| {
        fs::create_dir(image).unwrap();
        fill(image, 4);
    });
    seal(&parent).unwrap();
    symlink("../1", child.join("parent")).unwrap();
    seal(&child).unwrap();
    // As `cp -rL` leaves them: the child was sealed with a link.
    fs::remove_file(child.join("parent")).unwrap();
    fs::rename(&parent, child.join("parent")).unwrap();
    assert_eq!(differences(&child), []);
    fs::remove_file(child.join(MANIFEST_NAME)).unwrap();
    assert!(!seal(&child).unwrap().has_unsealed_parent);
    assert_eq!(differences(&child), []);
    fs::remove_file(child.join("parent").join(MANIFEST_NAME)).unwrap();
    fs::write(child.join("parent/files.img"), "other").unwrap();
    seal(&child.join("parent")).unwrap();
    let found = differences(&child);
    assert!(
        matches!(&found[..], [ImageDifference::Parent { what }] if what.contains("another image")),
        "{found:?}"
    );
}

#[test]
fn a_parent_must_be_the_one_that_was_sealed() {
    let dir = tempfile::tempdir().unwrap();
    let [parent, child] = ["1", "2"].map(|name| dir.path().join(name));
    [&parent, &child].into_iter().for_each(|image| {
        fs::create_dir(image).unwrap();
        fill(image, 4);
    });
    symlink("../1", child.join("parent")).unwrap();
    assert!(seal(&child).unwrap().has_unsealed_parent);
    assert_eq!(differences(&child), []);
    fs::remove_file(child.join(MANIFEST_NAME)).unwrap();
    seal(&parent).unwrap();
    assert!(!seal(&child).unwrap().has_unsealed_parent);
    assert_eq!(differences(&child), []);
    // Another image in the parent's place.
    fs::remove_file(parent.join(MANIFEST_NAME)).unwrap();
    fs::write(parent.join("files.img"), "other").unwrap();
    seal(&parent).unwrap();
    let found = differences(&child);
    assert!(
        matches!(&found[..], [ImageDifference::Parent { what }] if what.contains("another image")),
        "{found:?}"
    );
    fs::remove_file(child.join("parent")).unwrap();
    assert_eq!(differences(&child), [ImageDifference::Parent { what: "missing".into() }]);
    symlink("../2", parent.join("parent")).unwrap();
    let added = "not sealed: it was added later".into();
    assert_eq!(differences(&parent), [ImageDifference::Parent { what: added }]);
}
