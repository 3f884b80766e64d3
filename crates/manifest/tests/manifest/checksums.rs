// SPDX-License-Identifier: MIT OR Apache-2.0
//! A restore gets the checksums of an image that is as it was sealed, and of its parents.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::Path;

use rewake_criu_images::{Generation, ImageDir, Inventory, PageFlags, Pagemap, write};
use rewake_image_io::{block_checksum, checksum_of_zeros};
use rewake_manifest::{
    ImageChecksums, MANIFEST_NAME, ManifestError, PARTIAL_NAME, read_chain, read_checksums, seal,
};

const BLOCK: usize = 65_536;
/// More than two segments, with zeros in the second one, and a short block at the end.
const LENGTH: usize = (9 << 20) + 4096;

/// The memory of an image: ones, with zeros from 3 to 8.5 MiB.
fn memory() -> Vec<u8> {
    let mut bytes = vec![1; LENGTH];
    bytes[3 << 20..17 << 19].fill(0);
    bytes
}

fn fill(dir: &Path, run: &str) {
    fs::create_dir_all(dir).unwrap();
    let inventory = Inventory { version: 2, plugins: Vec::new(), run_id: Some(run.into()) };
    write::inventory(dir, &inventory).unwrap();
    let map = Pagemap::new(1, Generation::Wide, [(0x7000_0000, LENGTH as u64 / 4096, PageFlags::PRESENT)]);
    write::pagemap(dir, 7, &map).unwrap();
    write::pages(dir, 1, &memory()).unwrap();
}

fn sealed() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), "run");
    seal(dir.path()).unwrap();
    dir
}

fn read(dir: &Path) -> Result<Option<ImageChecksums>, ManifestError> {
    read_checksums(&ImageDir::open(dir).unwrap())
}

#[test]
fn each_block_of_memory_has_its_checksum_also_in_segments_of_zeros() {
    let dir = sealed();
    let image = read(dir.path()).unwrap().unwrap();
    assert_eq!(image.memory.keys().collect::<Vec<_>>(), ["pages-1.img"]);
    let found = &image.memory["pages-1.img"];
    let expected: Vec<u64> = memory().chunks(BLOCK).map(block_checksum).collect();
    assert!(
        found.checksums == expected && expected[64..128].iter().all(|of| *of == checksum_of_zeros(BLOCK))
    );
    let of = fs::metadata(dir.path().join("pages-1.img")).unwrap();
    assert_eq!((found.identity, found.length), ((of.dev(), of.ino()), LENGTH as u64));
    let has = |name, length| image.of(name, length).is_some();
    assert!(has("pages-1.img", LENGTH as u64));
    assert!(!has("pages-1.img", LENGTH as u64 - 1) && !has("pages-2.img", LENGTH as u64));
    assert!(!image.is_partial);
    // A partial copy has them, too: what has arrived is checked as the memory of any image.
    fs::rename(dir.path().join(MANIFEST_NAME), dir.path().join(PARTIAL_NAME)).unwrap();
    assert_eq!(read(dir.path()).unwrap().unwrap(), ImageChecksums { is_partial: true, ..image });
}

#[test]
fn an_image_without_a_manifest_has_no_checksums() {
    let dir = tempfile::tempdir().unwrap();
    fill(dir.path(), "run");
    assert_eq!(read(dir.path()).unwrap(), None);
}

/// Why the checksums of a spoilt image are not given.
fn refusal(spoil: impl FnOnce(&Path)) -> String {
    let dir = sealed();
    spoil(dir.path());
    let error = read(dir.path()).unwrap_err();
    assert!(matches!(error, ManifestError::Differs { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("`rewake verify`"), "{text}");
    text.strip_prefix(&format!("{}/", dir.path().display())).unwrap().to_owned()
}

#[test]
fn files_that_do_not_match_the_manifest_are_refused_by_name() {
    let added = refusal(|dir| fs::write(dir.join("core-8.img"), "").unwrap());
    assert!(added.starts_with("core-8.img: not sealed"), "{added}");
    let removed = refusal(|dir| fs::remove_file(dir.join("pagemap-7.img")).unwrap());
    assert!(removed.starts_with("pagemap-7.img: missing"), "{removed}");
    let cut = refusal(|dir| {
        OpenOptions::new().write(true).open(dir.join("pages-1.img")).unwrap().set_len(5000).unwrap();
    });
    assert!(cut.starts_with("pages-1.img: truncated: 5000 bytes, sealed with 9441280"), "{cut}");
    let changed = refusal(|dir| {
        let file = OpenOptions::new().write(true).open(dir.join("pagemap-7.img")).unwrap();
        let length = file.metadata().unwrap().len();
        file.write_all_at(&[0xff], length - 1).unwrap();
    });
    assert!(changed.starts_with("pagemap-7.img: wrong bytes in the "), "{changed}");
    let linked = refusal(|dir| symlink(dir, dir.join("parent")).unwrap());
    assert!(linked.starts_with("parent: not sealed: it was added later"), "{linked}");
}

#[test]
fn a_damaged_manifest_is_refused() {
    let dir = sealed();
    let path = dir.path().join(MANIFEST_NAME);
    let mut bytes = fs::read(&path).unwrap();
    bytes[100] ^= 1;
    fs::write(&path, bytes).unwrap();
    let error = read(dir.path()).unwrap_err();
    assert!(matches!(error, ManifestError::Damaged { .. }), "{error}");
}

/// An image in `2` whose parent is in `1`.
fn child_and_parent(seals_parent: bool) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let [parent, child] = ["1", "2"].map(|name| root.path().join(name));
    fill(&parent, "first");
    if seals_parent {
        seal(&parent).unwrap();
    }
    fill(&child, "second");
    symlink("../1", child.join("parent")).unwrap();
    seal(&child).unwrap();
    root
}

fn chain(root: &Path) -> Result<Vec<bool>, ManifestError> {
    let child = ImageDir::open(root.join("2")).unwrap();
    let parents = child.ancestors();
    let chain: Vec<&ImageDir> = [&child].into_iter().chain(&parents).collect();
    read_chain(&chain).map(|all| all.iter().map(Option::is_some).collect())
}

#[test]
fn a_parent_has_checksums_if_it_is_sealed() {
    let root = child_and_parent(true);
    assert_eq!(chain(root.path()).unwrap(), [true, true]);
    fs::remove_file(root.path().join("2").join(MANIFEST_NAME)).unwrap();
    assert_eq!(chain(root.path()).unwrap(), [false, true], "of a child that is not sealed");
    let root = child_and_parent(false);
    assert_eq!(chain(root.path()).unwrap(), [true, false]);
    seal(&root.path().join("1")).unwrap();
    assert_eq!(chain(root.path()).unwrap(), [true, true], "it was sealed after its child");
}

#[test]
fn another_parent_than_was_sealed_is_refused_with_a_way_out() {
    let root = child_and_parent(true);
    let parent = root.path().join("1");
    let refusal = || {
        let error = chain(root.path()).unwrap_err();
        assert!(matches!(error, ManifestError::AnotherParent { .. }), "{error}");
        error.to_string()
    };
    fs::remove_file(parent.join(MANIFEST_NAME)).unwrap();
    assert!(refusal().contains("found an image without a manifest"));
    fill(&parent, "third");
    let id = seal(&parent).unwrap().id;
    let text = refusal();
    assert!(text.contains(&format!("found {id}")) && text.contains("a copy of the old parent"), "{text}");
    fs::remove_dir_all(&parent).unwrap();
    assert!(refusal().contains("found an image without a manifest"));
    fs::remove_file(root.path().join("2/parent")).unwrap();
    let error = chain(root.path()).unwrap_err().to_string();
    assert!(error.contains("parent: missing"), "{error}");
}
