// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores of sealed images: a program never sees a byte that was not sealed, and a session leases its
//! image.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::signal::Signal;
use rewake_tests::images::{self, LAZY, PARENT, Pagemap, split};
use rewake_tests::process::soon;
use rewake_tests::scene::{ACT, END};
use rewake_tests::server::rewake;
use rewake_tests::sessions::{own_sessions, recover, restored_and_parked, served_again};
use rewake_tests::{Criu, Scene, need};

/// Enough that most is missing when the restore has finished.
const MIB: usize = 64;

fn seal(images: &Path) {
    let output = Command::new(rewake().unwrap()).arg("seal").arg(images).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A dumped and sealed program.
fn sealed(criu: &Criu, scenario: &str) -> Scene {
    let scene = Scene::dumped(criu, scenario, MIB).unwrap();
    seal(&scene.images());
    scene
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}

/// Writes the files of a directory to the disk, and drops them from the page cache; or reads them into it.
fn set_cached(images: &Path, is_cached: bool) {
    for entry in fs::read_dir(images).unwrap().map(Result::unwrap).filter(|of| of.path().is_file()) {
        if is_cached {
            fs::read(entry.path()).unwrap();
            continue;
        }
        let file = File::open(entry.path()).unwrap();
        file.sync_all().unwrap();
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    }
}

/// Restores an image with a wrong byte in `folder`: the program is killed, and one line says which byte.
fn killed_for_a_wrong_byte(scene: &Scene, folder: &Path, pages: &Path) {
    let mut server = scene.serve().unwrap();
    scene.go().unwrap();
    // CRIU fails if a page that it accesses itself is in the wrong block.
    let restored = scene.restore();
    if restored.is_ok() {
        let verdict = scene.verdict(ACT).unwrap();
        assert!(verdict.killed(), "{verdict:?}: {}", server.text());
    }
    assert_eq!(server.ended(END).unwrap().code(), Some(1));
    let text = server.text();
    let name = pages.file_name().unwrap().to_str().unwrap();
    let is_it = |line: &&str| line.contains("some are not those that were sealed") && line.contains(name);
    let line = text.lines().find(is_it).unwrap_or_else(|| panic!("no reason: {text}"));
    for part in [&*format!("memory of process {}, address 0x", scene.pid()), "offset ", "`rewake verify`"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(line.contains(&*folder.file_name().unwrap().to_string_lossy()), "{line}");
}

#[test]
fn a_sealed_image_is_restored_from_page_cache_and_disk() {
    for criu in Criu::both() {
        let criu = need!(criu);
        for scenario in ["plain", "random"] {
            let mut scene = sealed(&criu, scenario);
            for is_cached in [false, true] {
                set_cached(&scene.images(), is_cached);
                scene.stop().unwrap();
                scene.play().unwrap();
                scene.next_round().unwrap();
            }
        }
    }
}

#[test]
fn a_program_never_sees_a_wrong_byte_and_a_line_names_it() {
    let criu = need!(Criu::main());
    for (scenario, is_cached) in [("plain", false), ("plain", true), ("random", false), ("random", true)] {
        let scene = sealed(&criu, scenario);
        let pages = scene.images().join("pages-1.img");
        flip(&pages, fs::metadata(&pages).unwrap().len() / 2);
        set_cached(&scene.images(), is_cached);
        killed_for_a_wrong_byte(&scene, &scene.images(), &pages);
    }
}

#[test]
fn a_hole_in_the_place_of_sealed_bytes_ends_the_session() {
    let criu = need!(Criu::main());
    let scene = sealed(&criu, "plain");
    let pages = scene.images().join("pages-1.img");
    let middle = fs::metadata(&pages).unwrap().len() / 2 / 65536 * 65536;
    let file = OpenOptions::new().write(true).open(&pages).unwrap();
    let how =
        nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE | nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
    nix::fcntl::fallocate(&file, how, middle.cast_signed(), 4 * 65536).unwrap();
    killed_for_a_wrong_byte(&scene, &scene.images(), &pages);
}

/// Spoils a sealed image: a session is refused with one line that has `parts`.
fn refused(parts: &[&str], spoil: impl FnOnce(&Scene)) {
    let criu = need!(Criu::main());
    let scene = sealed(&criu, "plain");
    spoil(&scene);
    let refusal = scene.setup().unwrap().start().unwrap().expect_err("the server serves this");
    assert!(refusal.status.code().is_some_and(|code| code != 0), "{}\n{}", refusal.status, refusal.text);
    assert!(refusal.line_with(parts), "no line holds all of {parts:?}:\n{}", refusal.text);
}

#[test]
fn a_file_that_was_added_removed_or_cut_is_refused_at_the_start() {
    refused(&["core-77.img: not sealed: it was added later", "`rewake verify`"], |scene| {
        fs::write(scene.images().join("core-77.img"), "").unwrap();
    });
    refused(&["seccomp.img: missing", "copy the image again"], |scene| {
        fs::remove_file(scene.images().join("seccomp.img")).unwrap();
    });
    refused(&["files.img: longer: "], |scene| {
        let path = scene.images().join("files.img");
        let length = fs::metadata(&path).unwrap().len();
        OpenOptions::new().write(true).open(path).unwrap().set_len(length + 1).unwrap();
    });
    refused(&["rewake-manifest: damaged"], |scene| flip(&scene.images().join("rewake-manifest"), 99));
}

/// An image whose older pages are in its parent, `images/before`.
fn incremental(criu: &Criu) -> Scene {
    let scene = Scene::dumped(criu, "random", MIB).unwrap();
    split(&scene.images(), "before", scene.pid(), PARENT | LAZY, false).unwrap();
    scene.stop().unwrap();
    scene
}

fn parent_pages(scene: &Scene) -> std::path::PathBuf {
    let before = scene.images().join("before");
    let pagemap = Pagemap::read(&images::pagemap_path(&before, scene.pid())).unwrap();
    images::pages_path(&before, &pagemap)
}

#[test]
fn pages_of_a_parent_are_checked_with_the_parents_manifest() {
    let criu = need!(Criu::main());
    for seals_child in [false, true] {
        let mut scene = incremental(&criu);
        seal(&scene.images().join("before"));
        if seals_child {
            seal(&scene.images());
        }
        scene.play().unwrap();
        scene.next_round().unwrap();
        let pages = parent_pages(&scene);
        flip(&pages, fs::metadata(&pages).unwrap().len() / 2);
        killed_for_a_wrong_byte(&scene, &scene.images().join("parent"), &pages);
    }
}

#[test]
fn a_parent_that_was_replaced_is_refused_with_a_way_out() {
    let criu = need!(Criu::main());
    let scene = incremental(&criu);
    let before = scene.images().join("before");
    seal(&before);
    seal(&scene.images());
    let refusal = |parts: &[&str]| {
        let refusal = scene.setup().unwrap().start().unwrap().expect_err("the server serves this");
        assert!(refusal.line_with(parts), "{parts:?}: {}", refusal.text);
    };
    fs::remove_file(before.join("rewake-manifest")).unwrap();
    refusal(&["its parent is another image", "found an image without a manifest"]);
    flip(&parent_pages(&scene), 5000);
    seal(&before);
    refusal(&["its parent is another image", "restore with a copy of the old parent", "`rewake seal`"]);
}

/// Whether a process leases the image.
fn is_leased(images: &Path) -> bool {
    File::open(images.join("inventory.img")).unwrap().try_lock().is_err()
}

#[test]
fn a_session_leases_its_image_and_parents_until_it_ends() {
    let criu = need!(Criu::main());
    let scene = incremental(&criu);
    let both = [scene.images(), scene.images().join("before")];
    let leased = || both.each_ref().map(|images| is_leased(images));
    let mut server = scene.serve().unwrap();
    assert_eq!(leased(), [true; 2], "while it waits for a restore");
    scene.restore_and_stop(&mut server).unwrap();
    assert!(server.kill_worker());
    server.continues().unwrap();
    assert_eq!(leased(), [true; 2], "a successor has the leases");
    scene.go().unwrap();
    scene.expect_good_end(&mut server).unwrap();
    assert!(soon(|| leased() == [false; 2]));
}

/// Between the death of all processes and `rewake recover` no process has the lease (docs/threat-model.md).
#[test]
fn a_recovered_session_leases_its_image_again() {
    let criu = need!(Criu::main());
    own_sessions().unwrap();
    for _ in 0..5 {
        let scene = Scene::dumped(&criu, "plain", 4 * MIB).unwrap();
        let mut server = scene.serve().unwrap();
        if !restored_and_parked(&scene, &server) {
            continue;
        }
        server.signal_group(Signal::SIGKILL).unwrap();
        server.all_ended(END).unwrap();
        let mut recovering = recover().unwrap().spawn().unwrap();
        let mut was_leased = false;
        while recovering.try_wait().unwrap().is_none() {
            was_leased |= is_leased(&scene.images());
        }
        let output = recovering.wait_with_output().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), rewake_tests::Verdict::Ok);
        // The streamer may have finished before it was killed.
        if served_again(&output) == 0 {
            continue;
        }
        assert!(was_leased);
        assert!(soon(|| !is_leased(&scene.images())));
        return;
    }
    panic!("no streamer was killed while memory was missing");
}
