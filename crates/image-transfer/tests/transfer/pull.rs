// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies of an image from a server of this process, over connections that are cut.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, NodeImage, Properties, kfd_name, pages_name};
use rewake_criu_images::{Generation, ImageLease, PageFlags, Pagemap, write};
use rewake_image_transfer::pull::{
    ImageSource, PullReport, complete, complete_image, pull, pull_eager, pull_eager_unread,
};
use rewake_image_transfer::server::connection::serve;
use rewake_image_transfer::server::exports::{Exports, ImageDirectory};
use rewake_manifest::{WORKING_SET_NAME, seal, verify};

use crate::scene::{CHUNK, Cut, Scene, inventory};

fn manifest_length(image: &Path) -> u64 {
    fs::metadata(image.join("rewake-manifest")).unwrap().len()
}

fn inventory_length(scene: &Scene) -> u64 {
    fs::metadata(scene.image().join("inventory.img")).unwrap().len()
}

#[test]
fn zeros_are_not_sent_and_duplicates_are_sent_once() {
    let scene = Scene::new();
    let report = scene.pull().unwrap();
    let sent = manifest_length(&scene.image()) + inventory_length(&scene) + 2 * CHUNK as u64;
    assert_eq!((report.files, report.sent, report.kept), (2, sent, 0));
    scene.assert_copied();
    assert_eq!(scene.pull().unwrap().sent, 0, "the directory has the image already");
}

#[test]
fn a_copy_continues_after_each_cut() {
    let scene = Scene::new();
    let (mut source, connections) = scene.source("web/1", CHUNK + CHUNK / 2).unwrap();
    pull(&mut source, &scene.copy(), None, &[]).unwrap();
    assert_eq!(connections.load(Ordering::Relaxed), 2, "each brings one of the two chunks");
    scene.assert_copied();
}

/// Bytes that no compression makes shorter: where a connection is cut does not depend on its speed.
fn noise(length: usize) -> Vec<u8> {
    let mut state: u64 = 1;
    let words = (0..length / 8).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    words.flat_map(u64::to_ne_bytes).collect()
}

#[test]
fn a_copy_outlives_any_number_of_cuts_that_bring_bytes() {
    /// More than the connections in a row that may bring nothing.
    const CHUNKS: usize = 8;
    let scene = Scene::new();
    fs::remove_file(scene.image().join("rewake-manifest")).unwrap();
    fs::write(scene.image().join("pages-1.img"), noise(CHUNKS * CHUNK)).unwrap();
    seal(&scene.image()).unwrap();
    let (mut source, connections) = scene.source("web/1", CHUNK + CHUNK / 2).unwrap();
    pull(&mut source, &scene.copy(), None, &[]).unwrap();
    assert_eq!(connections.load(Ordering::Relaxed), CHUNKS, "each brings one chunk");
    scene.assert_copied();
}

#[test]
fn a_peer_that_sends_no_whole_chunk_is_given_up() {
    let scene = Scene::new();
    let (mut source, connections) = scene.source("web/1", CHUNK / 2).unwrap();
    let error = pull(&mut source, &scene.copy(), None, &[]).unwrap_err();
    assert_eq!(format!("{error:#}"), "the peer closed the connection");
    assert_eq!(connections.load(Ordering::Relaxed), 6, "the first, and five attempts");
    assert!(!scene.copy().join("rewake-manifest").exists());

    let report = scene.pull().unwrap();
    assert_eq!(report.kept, inventory_length(&scene), "a cut copy is completed");
    scene.assert_copied();
}

#[test]
fn bytes_that_the_manifest_does_not_prove_are_refused() {
    let scene = Scene::new();
    let pages = fs::File::options().write(true).open(scene.image().join("pages-1.img")).unwrap();
    pages.write_all_at(b"x", CHUNK as u64 + 5).unwrap();
    let error = format!("{:#}", scene.pull().unwrap_err());
    let place =
        format!("pages-1.img: the {CHUNK} bytes from offset {CHUNK} are not those that the manifest proves");
    assert!(error.contains(&place), "{error}");
    assert!(!scene.copy().join("rewake-manifest").exists());
}

#[test]
fn what_a_cut_copy_of_another_image_left_is_not_kept() {
    let scene = Scene::new();
    scene.pull().unwrap();
    // As if a copy of another image with these bytes had been cut, and then one of this image before its
    // files.
    let pages = fs::File::options().write(true).open(scene.copy().join("pages-1.img")).unwrap();
    pages.write_all_at(b"x", 2 * CHUNK as u64).unwrap();
    let (manifest, partial) =
        (scene.copy().join("rewake-manifest"), scene.copy().join("rewake-manifest.partial"));
    let own = fs::read(&manifest).unwrap();
    fs::remove_file(&manifest).unwrap();
    fs::write(&partial, "of another image").unwrap();
    let mut source = scene.source("web/1", own.len() + 200).unwrap().0;
    pull(&mut source, &scene.copy(), None, &[]).unwrap_err();
    assert_eq!(fs::read(&partial).unwrap(), own);
    scene.pull().unwrap();
    scene.assert_copied();
}

#[test]
fn bytes_in_the_place_of_zeros_are_refused_and_mended() {
    let scene = Scene::new();
    let (manifest, partial) = ("rewake-manifest", "rewake-manifest.partial");
    // A segment of zeros has no chunks.
    fs::remove_file(scene.image().join(manifest)).unwrap();
    fs::write(scene.image().join("pages-2.img"), vec![0; 2 * CHUNK]).unwrap();
    seal(&scene.image()).unwrap();
    scene.pull().unwrap();
    for (name, offset, length) in [("pages-1.img", 2 * CHUNK, CHUNK), ("pages-2.img", 0, 2 * CHUNK)] {
        // As a server leaves it that has sent other bytes for a block with the end of a chunk and zeros.
        fs::rename(scene.copy().join(manifest), scene.copy().join(partial)).unwrap();
        let file = fs::File::options().write(true).open(scene.copy().join(name)).unwrap();
        file.write_all_at(b"x", offset as u64 + 5).unwrap();
        let error = complete(&scene.copy()).unwrap_err().to_string();
        let place = format!("{name}: the {length} bytes from offset {offset} are not those");
        assert!(error.contains(&place) && scene.copy().join(partial).exists(), "{error}");
        scene.pull().unwrap();
        scene.assert_copied();
    }
    fs::rename(scene.copy().join(manifest), scene.copy().join(partial)).unwrap();
    complete(&scene.copy()).unwrap();
    scene.assert_copied();
}

#[test]
fn two_copies_into_a_directory_do_not_meet() {
    let scene = Scene::new();
    fs::create_dir_all(scene.copy()).unwrap();
    let lock = fs::File::open(scene.copy()).unwrap();
    lock.lock().unwrap();
    let error = format!("{:#}", scene.pull().unwrap_err());
    assert!(error.ends_with("another program writes an image into it: wait until it has ended"), "{error}");
    lock.unlock().unwrap();
    scene.pull().unwrap();
}

#[test]
fn a_directory_with_another_image_is_refused() {
    let scene = Scene::new();
    fs::create_dir_all(scene.copy()).unwrap();
    inventory(&scene.copy(), 3);
    let error = format!("{:#}", scene.pull().unwrap_err());
    assert!(
        error.ends_with("it has files of an image without a manifest: choose an empty directory"),
        "{error}"
    );
    seal(&scene.copy()).unwrap();
    let error = format!("{:#}", scene.pull().unwrap_err());
    assert!(error.ends_with("choose another directory"), "{error}");
}

#[test]
fn another_image_than_the_expected_one_is_refused() {
    let scene = Scene::new();
    let id = verify(&scene.image(), |_| ()).unwrap().id.to_string();
    let go = |expected: &str| {
        pull(&mut scene.source("web/1", usize::MAX).unwrap().0, &scene.copy(), Some(expected), &[])
    };
    for wrong in [&*"0123456789abcdef".repeat(2), &id[..31], &id[..16], ""] {
        let error = go(wrong).unwrap_err().to_string();
        assert!(error.starts_with(&format!("the source has image {id}, expected {wrong:?}")), "{error}");
        assert!(!scene.copy().exists());
    }
    go(&id[..32]).unwrap();
    scene.assert_copied();
}

#[test]
fn only_sealed_images_below_the_directory_are_served() {
    let scene = Scene::new();
    let outside = scene.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    inventory(&outside, 4);
    seal(&outside).unwrap();
    let refused = |name: &str| format!("{:#}", scene.source(name, usize::MAX).unwrap_err());
    for name in ["../outside", "web/../../outside", "/etc", ""] {
        let expected = format!("refused: {name:?}: expected the name of an image, a path without `..`");
        assert_eq!(refused(name), expected);
    }
    assert!(refused("web/2").starts_with("refused: image web/2: "), "{}", refused("web/2"));
    fs::create_dir(scene.dir.path().join("exports/web/2")).unwrap();
    assert!(refused("web/2").contains("rewake seal"), "{}", refused("web/2"));
}

#[test]
fn an_incremental_image_needs_its_parent_beside_it() {
    let scene = Scene::new();
    let child = scene.dir.path().join("exports/web/2");
    fs::create_dir(&child).unwrap();
    inventory(&child, 2);
    symlink("../1", child.join("parent")).unwrap();
    seal(&child).unwrap();
    let copy = scene.dir.path().join("copies/2");
    let go = || pull(&mut scene.source("web/2", usize::MAX).unwrap().0, &copy, None, &[]);
    let error = pull_eager(&mut scene.source("web/2", usize::MAX).unwrap().0, &copy, None, &[]).unwrap_err();
    assert!(error.to_string().contains("the image is incremental") && !copy.exists(), "{error}");
    let error = format!("{:#}", go().unwrap_err());
    assert!(error.contains("copy the parent image to"), "{error}");
    let eager = pull_eager(&mut scene.source("web/2", usize::MAX).unwrap().0, &copy, None, &[]);
    let error = eager.unwrap_err().to_string();
    assert!(error.contains("with `rewake pull`"), "{error}");
    scene.pull().unwrap();
    go().unwrap();
    assert_eq!(fs::read_link(copy.join("parent")).unwrap(), Path::new("../1"));
    verify(&copy, |difference| panic!("{difference}")).unwrap();
}

#[test]
fn a_parent_may_be_a_directory_of_its_child() {
    let scene = Scene::new();
    let exports = scene.dir.path().join("exports/web");
    let child = exports.join("2");
    fs::create_dir(&child).unwrap();
    inventory(&child, 2);
    fs::rename(exports.join("1"), child.join("parent")).unwrap();
    seal(&child).unwrap();
    let copies = scene.dir.path().join("copies");
    let go = |image: &str, to: &str| {
        pull(&mut scene.source(image, usize::MAX).unwrap().0, &copies.join(to), None, &[])
    };
    let error = format!("{:#}", go("web/2", "2").unwrap_err());
    assert!(error.contains("copy the parent image to") && error.contains("2/parent first"), "{error}");
    fs::remove_dir_all(copies.join("2")).unwrap();
    go("web/2/parent", "2/parent").unwrap();
    go("web/2", "2").unwrap();
    assert!(copies.join("2/parent/pages-1.img").is_file());
    verify(&copies.join("2"), |difference| panic!("{difference}")).unwrap();
    go("web/2/parent", "3/parent").unwrap();
    let error = format!("{:#}", go("web/2/parent", "3").unwrap_err());
    assert!(error.contains("3/parent: the image has no parent"), "{error}");
}

/// Adds a pagemap: the first page is not lazy, and the first chunk of the second address is zeros.
fn with_pagemap(scene: &Scene) -> Vec<u8> {
    let image = scene.image();
    fs::remove_file(image.join("rewake-manifest")).unwrap();
    let (eager, lazy) = (PageFlags(4), PageFlags(6));
    let chunk = CHUNK as u64;
    let runs = [(chunk, 1, eager), (2 * chunk, 1536, lazy)];
    let map = Pagemap::new(1, Generation::Wide, runs);
    write::pagemap(&image, 7, &map).unwrap();
    let memory: Vec<u8> = [1, 0, 2, 3]
        .into_iter()
        .zip([4096, CHUNK, CHUNK, CHUNK])
        .flat_map(|(byte, length)| std::iter::repeat_n(byte, length))
        .collect();
    fs::write(image.join("pages-1.img"), &memory).unwrap();
    seal(&image).unwrap();
    memory
}

#[test]
fn what_is_lazy_is_left_and_can_be_brought_by_another_program() {
    let scene = Scene::new();
    let memory = with_pagemap(&scene);
    let eager =
        || pull_eager(&mut scene.source("web/1", usize::MAX).unwrap().0, &scene.copy(), None, &[]).unwrap();
    let first = eager();
    assert_eq!((first.left, first.kept), (2 * CHUNK as u64, 0));
    let pages = scene.copy().join("pages-1.img");
    let copied = fs::read(&pages).unwrap();
    assert!(copied.len() == memory.len() && copied[..4096] == memory[..4096]);
    assert!(copied[4096..].iter().all(|byte| *byte == 0), "no lazy byte was sent");
    assert_eq!(complete_image(&scene.copy(), None).unwrap(), None);
    let error = complete(&scene.copy()).unwrap_err().to_string();
    assert!(error.contains("`rewake pull` brings them"), "{error}");

    // The restore has brought one of two chunks, and was killed.
    let file = fs::File::options().write(true).open(&pages).unwrap();
    let at = 4096 + CHUNK;
    file.write_all_at(&memory[at..at + CHUNK], at as u64).unwrap();
    let second = eager();
    assert_eq!((second.left, second.sent), (CHUNK as u64, 0), "nothing is sent twice");
    let mut source = scene.source("web/1", usize::MAX).unwrap().0;
    let unread = pull_eager_unread(&mut source, &scene.copy(), None, &[]).unwrap();
    assert_eq!((unread.left, unread.sent), (2 * CHUNK as u64, 0), "what is lazy is not read");
    assert!(fs::read(&pages).unwrap()[at..at + CHUNK] == memory[at..at + CHUNK]);
    file.write_all_at(&memory[at..], at as u64).unwrap();
    assert_eq!(complete(&scene.copy()).unwrap(), first.id);
    scene.assert_copied();
    assert_eq!(complete_image(&scene.copy(), None).unwrap(), Some(first.id));
    assert!(complete_image(&scene.copy(), Some("0000")).is_err());
    assert_eq!(eager(), PullReport { id: first.id, files: 0, bytes: 0, sent: 0, kept: 0, left: 0 });
}

#[test]
fn the_space_of_what_arrives_later_is_reserved() {
    /// The unit of `st_blocks` (stat(2)).
    const SECTOR: u64 = 512;
    let scene = Scene::new();
    let memory = with_pagemap(&scene);
    pull_eager(&mut scene.source("web/1", usize::MAX).unwrap().0, &scene.copy(), None, &[]).unwrap();
    // Without it a full disk would end the restored program later, and not the restore at its start. A chunk
    // of zeros takes no space.
    let allocated = fs::metadata(scene.copy().join("pages-1.img")).unwrap().blocks() * SECTOR;
    assert!(allocated >= (memory.len() - CHUNK) as u64, "{allocated} bytes");
}

#[test]
fn files_that_a_restore_reads_are_not_removed() {
    let scene = Scene::new();
    let memory = with_pagemap(&scene);
    let eager = || pull_eager(&mut scene.source("web/1", usize::MAX).unwrap().0, &scene.copy(), None, &[]);
    eager().unwrap();
    let (partial, pages) = (scene.copy().join("rewake-manifest.partial"), scene.copy().join("pages-1.img"));
    let file = fs::File::options().write(true).open(&pages).unwrap();
    file.write_all_at(&memory[4096..], 4096).unwrap();
    fs::write(&partial, "damaged").unwrap();
    let lease = ImageLease::shared(&scene.copy()).unwrap().unwrap();
    let error = eager().unwrap_err().to_string();
    assert!(error.contains("a restore reads its files"), "{error}");
    assert!(fs::read(&pages).unwrap() == memory);
    drop(lease);
    assert_eq!(eager().unwrap().left, 2 * CHUNK as u64);
}

#[test]
fn of_gpu_memory_the_header_is_copied_and_the_rest_is_left() {
    let scene = Scene::new();
    let image = scene.image();
    fs::remove_file(image.join("rewake-manifest")).unwrap();
    let buffer = |size| KfdBuffer { size, gpu_id: 7, alloc_flags: 1, ..KfdBuffer::default() };
    let node =
        NodeImage { properties: Properties { gpu_id: 7, ..Properties::default() }, ..NodeImage::default() };
    let chunk = CHUNK as u64;
    let kfd = KfdImage {
        pid: 7,
        nodes: vec![node],
        buffers: vec![buffer(4096), buffer(3 * chunk)],
        ..KfdImage::default()
    };
    fs::write(image.join(kfd_name(3)), kfd.to_bytes()).unwrap();
    let (_, length) = kfd.pages(7);
    let mut memory = vec![7; usize::try_from(length).unwrap()];
    memory[..8].copy_from_slice(&(length - 8).to_le_bytes());
    fs::write(image.join(pages_name(3, 7)), &memory).unwrap();
    seal(&image).unwrap();
    let report =
        pull_eager(&mut scene.source("web/1", usize::MAX).unwrap().0, &scene.copy(), None, &[]).unwrap();
    // The first block has the start of the large buffer, whose first chunk is copied, too.
    assert_eq!(report.left, 2 * chunk);
    let copied = fs::read(scene.copy().join(pages_name(3, 7))).unwrap();
    let eager = 8 + 4096 + CHUNK;
    assert!(copied[..eager] == memory[..eager] && copied[eager..].iter().all(|byte| *byte == 0));
    scene.pull().unwrap();
    scene.assert_copied();
}

#[test]
fn a_recorded_working_set_is_copied_and_one_that_is_there_stays() {
    let scene = Scene::new();
    let copied = |scene: &Scene| fs::read_to_string(scene.copy().join(WORKING_SET_NAME)).ok();
    scene.pull().unwrap();
    assert_eq!(copied(&scene), None);
    fs::remove_dir_all(scene.copy()).unwrap();
    fs::write(scene.image().join(WORKING_SET_NAME), "recorded there").unwrap();
    // Cut in the middle of the chunks: the connections are counted.
    let (mut source, connections) = scene.source("web/1", CHUNK * 3 / 2).unwrap();
    pull(&mut source, &scene.copy(), None, &[]).unwrap();
    assert!(connections.load(Ordering::Relaxed) > 1);
    assert_eq!(copied(&scene).as_deref(), Some("recorded there"));
    scene.assert_copied();
    // The rest of a copy that was cut, whose restore has recorded meanwhile.
    fs::rename(scene.copy().join("rewake-manifest"), scene.copy().join("rewake-manifest.partial")).unwrap();
    fs::write(scene.copy().join(WORKING_SET_NAME), "recorded here").unwrap();
    scene.pull().unwrap();
    assert_eq!(copied(&scene).as_deref(), Some("recorded here"));
    scene.assert_copied();
}

/// A source whose first connection ends after `cut_after` bytes to the client. Then the `next` working set
/// takes the place of the first, or the image has none any more.
fn cut_once(scene: &Scene, cut_after: usize, next: Option<&'static str>) -> ImageSource {
    let exports = ImageDirectory::new(&scene.dir.path().join("exports")).unwrap();
    let exports = Arc::new(Exports::new(Arc::new(exports)));
    let (path, mut connections) = (scene.image().join(WORKING_SET_NAME), 0);
    let connect = move || {
        connections += 1;
        if connections == 2 {
            fs::remove_file(&path)?;
            next.map_or(Ok(()), |next| fs::write(&path, next))?;
        }
        let (ours, mut theirs) = UnixStream::pair()?;
        let exports = Arc::clone(&exports);
        std::thread::spawn(move || serve(&exports, &mut theirs, |_, _| Ok(())));
        let left = if connections == 1 { cut_after } else { usize::MAX };
        Ok(Box::new(Cut { stream: ours, left }) as Box<_>)
    };
    ImageSource::open(connect, "web/1").unwrap()
}

#[test]
fn a_working_set_that_changes_during_a_cut_is_the_new_one() {
    for next in [Some("recorded later, and longer"), Some("short"), None] {
        let scene = Scene::new();
        fs::write(scene.image().join(WORKING_SET_NAME), [b'x'; 10_000]).unwrap();
        let in_its_middle = usize::try_from(manifest_length(&scene.image())).unwrap() + 5000;
        pull(&mut cut_once(&scene, in_its_middle, next), &scene.copy(), None, &[]).unwrap();
        let copied = fs::read_to_string(scene.copy().join(WORKING_SET_NAME)).ok();
        assert_eq!(copied.as_deref(), next);
        scene.assert_copied();
    }
}
