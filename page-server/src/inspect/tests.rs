// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests the reports of images that are made here. The complete expected texts are in `testdata/`.

use std::fs;
use std::path::{Path, PathBuf};

use rewake_criu_images::{
    Generation, IMAGE_VERSION, Inventory, Mm, PAGE, PageFlags, Pagemap, Task, TaskState, Vma, write,
};

use super::collect::collect;
use super::{InspectReport, Pages, Verdict, text};

const LAZY: PageFlags = PageFlags(6);
const EAGER: PageFlags = PageFlags(4);
const REMOTE: PageFlags = PageFlags(2);
const IN_PARENT: PageFlags = PageFlags(1);
const LAZY_IN_PARENT: PageFlags = PageFlags(3);

fn task(pid: u32, ppid: u32, state: TaskState, comm: &str, threads: &[u32]) -> Task {
    Task { pid, ppid, pgid: 7, sid: 7, threads: threads.to_vec(), state, comm: comm.into() }
}

fn vma(first: u64, pages: u64, prot: u32, flags: u32, status: u32) -> Vma {
    Vma {
        start: first * PAGE,
        end: (first + pages) * PAGE,
        prot,
        flags,
        status: status | 1,
        offset: 0,
        object: 0,
        advice: 0,
    }
}

/// Returns mappings: 16 pages of a program's text, 64 of heap, 8 of locked stack, and vsyscall.
fn mm() -> Mm {
    let vmas = vec![
        vma(0x400, 16, 5, 0x2, 1 << 6),
        vma(0x500, 64, 3, 0x22, 1 << 5 | 1 << 9),
        vma(0x600, 8, 3, 0x2022, 1 << 9),
        Vma {
            start: 0xffff_ffff_ff60_0000,
            end: 0xffff_ffff_ff60_1000,
            prot: 5,
            flags: 0x22,
            status: 1 << 2 | 1,
            offset: 0,
            object: 0,
            advice: 0,
        },
    ];
    Mm { vmas, guards: vec![vma(0x520, 1, 3, 0x22, 1 << 16)] }
}

/// Returns a pages file whose first `zeros` pages are zero.
fn pages(count: u64, zeros: u64) -> Vec<u8> {
    (0..count).flat_map(|page| vec![u8::from(page >= zeros); 4096]).collect()
}

fn memory(dir: &Path, pid: u32, pages_id: u32, runs: &[(u64, u64, PageFlags)], zeros: u64) {
    write::mm(dir, pid, &mm()).unwrap();
    let runs = runs.iter().map(|&(first, pages, flags)| (first * PAGE, pages, flags));
    let map = Pagemap::new(pages_id, Generation::Wide, runs);
    write::pagemap(dir, pid, &map).unwrap();
    write::pages(dir, pages_id, &pages(map.file_len / PAGE, zeros)).unwrap();
}

/// Makes an image of four tasks, one of them a zombie, with memory in the image and in a parent image.
fn family() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let (dir, parent) = (root.path().join("img"), root.path().join("before"));
    fs::create_dir(&dir).unwrap();
    fs::create_dir(&parent).unwrap();
    std::os::unix::fs::symlink("../before", dir.join("parent")).unwrap();
    let plugins = vec!["amdgpu_plugin".into()];
    let inventory = Inventory { version: IMAGE_VERSION, plugins, run_id: Some("5f1e-27".into()) };
    write::inventory(&dir, &inventory).unwrap();
    let tasks = [
        task(7, 0, TaskState::Alive, "server", &[7, 8, 9]),
        task(20, 7, TaskState::Stopped, "worker\u{1b}[2J", &[20]),
        task(21, 7, TaskState::Zombie, "gone", &[21]),
        task(30, 20, TaskState::Alive, "helper", &[30]),
    ];
    write::tasks(&dir, &tasks).unwrap();
    memory(
        &dir,
        7,
        1,
        &[(0x402, 2, EAGER), (0x500, 10, LAZY), (0x510, 20, LAZY_IN_PARENT), (0x600, 3, EAGER)],
        4,
    );
    memory(&parent, 7, 1, &[(0x510, 32, LAZY)], 0);
    memory(&dir, 20, 2, &[(0x402, 1, EAGER), (0x530, 8, LAZY)], 1);
    memory(&dir, 30, 3, &[(0x402, 1, EAGER)], 0);
    root
}

fn image(root: &tempfile::TempDir) -> PathBuf {
    root.path().join("img")
}

fn shown(root: &tempfile::TempDir, report: &InspectReport, vmas: bool) -> String {
    let mut out = Vec::new();
    text::write(report, vmas, &mut out).unwrap();
    anonymous(root, &String::from_utf8(out).unwrap())
}

/// Returns the text without the name of the temporary folder.
fn anonymous(root: &tempfile::TempDir, text: &str) -> String {
    text.replace(root.path().to_str().unwrap(), "/images")
}

fn compare(shown: &str, expected: &str) {
    assert!(shown == expected, "shown:\n{shown}\nexpected:\n{expected}");
}

#[test]
fn a_family_is_shown_with_its_memory_and_totals() {
    let root = family();
    let report = collect(&image(&root)).unwrap();
    compare(&shown(&root, &report, false), include_str!("testdata/family.txt"));
}

#[test]
fn a_long_line_of_parents_is_cut() {
    let root = family();
    let mut report = collect(&image(&root)).unwrap();
    let text = |report: &InspectReport| {
        let text = shown(&root, report, false);
        let lines =
            text.lines().skip(1).take_while(|line| line.starts_with("parent:") || line.starts_with(' '));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    report.parent_dirs = (1..=8).map(|number| format!("/{number}")).collect();
    assert_eq!(text(&report).len(), 8);
    report.parent_dirs = (1..=128).map(|number| format!("/{number}")).collect();
    assert_eq!(text(&report)[6..], ["parent:  /7", "         ... and 120 more", "parent:  /128"]);
}

#[test]
fn every_mapping_is_shown_on_request() {
    let root = family();
    let report = collect(&image(&root)).unwrap();
    compare(&shown(&root, &report, true), include_str!("testdata/family-vmas.txt"));
}

#[test]
fn json_has_the_documented_shape() {
    let root = family();
    let report = collect(&image(&root)).unwrap();
    let json = serde_json::to_string_pretty(&report).unwrap() + "\n";
    compare(&anonymous(&root, &json), include_str!("testdata/family.json"));
}

#[test]
fn a_damaged_image_shows_what_is_readable_and_each_damage_once() {
    let root = family();
    let dir = image(&root);
    fs::write(dir.join("core-30.img"), b"?").unwrap();
    fs::write(dir.join("mm-20.img"), b"\x19\x43\x56\x54").unwrap();
    fs::File::options().write(true).open(dir.join("pages-1.img")).unwrap().set_len(9 * PAGE).unwrap();
    fs::remove_file(dir.join("inventory.img")).unwrap();
    let report = collect(&dir).unwrap();
    assert_eq!(report.damage.len(), 4, "{:#?}", report.damage);
    compare(&shown(&root, &report, false), include_str!("testdata/damaged.txt"));
}

#[test]
fn without_a_process_tree_only_files_and_damage_are_shown() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(image(&root)).unwrap();
    let report = collect(&image(&root)).unwrap();
    compare(&shown(&root, &report, true), include_str!("testdata/empty.txt"));
}

#[test]
fn names_that_are_not_utf_8_are_shown_and_are_no_damage() {
    let root = family();
    let dir = image(&root);
    let comm = b"serveur-\xc3\xa9l\xc3\xa9v\xc3".to_vec();
    write::tasks(&dir, &[Task { comm, ..task(7, 0, TaskState::Alive, "", &[7]) }]).unwrap();
    let inventory =
        Inventory { version: IMAGE_VERSION, plugins: vec![b"caf\xe9".to_vec()], run_id: Some(vec![0xff]) };
    write::inventory(&dir, &inventory).unwrap();
    let report = collect(&dir).unwrap();
    assert_eq!(report.damage, [""; 0]);
    let text = shown(&root, &report, false);
    for name in ["  serveur-élév\u{fffd}\n", "plugins: caf\u{fffd}\n", "run id:  \u{fffd}\n"] {
        assert!(text.contains(name), "{name:?} in {text}");
    }
    assert_eq!(serde_json::to_value(&report).unwrap()["tasks"][0]["comm"], "serveur-élév\u{fffd}");
}

#[test]
fn a_missing_directory_is_an_error() {
    let error = collect(Path::new("/nowhere/at/all")).unwrap_err().to_string();
    assert!(error.contains("/nowhere/at/all"), "{error}");
}

#[test]
fn a_dump_with_a_page_server_needs_it_and_is_not_damaged() {
    let root = family();
    memory(&image(&root), 20, 2, &[(0x530, 8, REMOTE)], 0);
    let report = collect(&image(&root)).unwrap();
    assert_eq!((report.lazy.verdict, report.damage.len()), (Verdict::NeedsPageServer, 0));
    assert_eq!(report.totals.pages.remote, 8);
    assert!(report.lazy.reason.unwrap().starts_with("8 pages "));
}

#[test]
fn eager_pages_of_a_missing_parent_are_damage() {
    let root = family();
    let dir = image(&root);
    memory(&dir, 30, 3, &[(0x402, 5, IN_PARENT)], 0);
    let report = collect(&dir).unwrap();
    assert_eq!(report.damage.len(), 1, "{:#?}", report.damage);
    assert!(report.damage[0].contains("pagemap-30.img: 5 pages at 0x402000"), "{:#?}", report.damage);
}

#[test]
fn tasks_that_descend_from_themselves_are_shown_once_each() {
    let root = family();
    let tasks = [
        task(7, 20, TaskState::Alive, "a", &[7]),
        task(20, 7, TaskState::Alive, "b", &[20]),
        task(21, 21, TaskState::Zombie, "c", &[]),
    ];
    write::tasks(&image(&root), &tasks).unwrap();
    let pids: Vec<_> = collect(&image(&root)).unwrap().tasks.iter().map(|task| task.pid).collect();
    assert_eq!(pids, [7, 20, 21]);
}

#[test]
fn sums_of_a_hostile_image_stay_in_range() {
    let mut pages = Pages { total: u64::MAX, ..Pages::default() };
    pages.add(&Pages { total: 1, ..Pages::default() });
    assert_eq!(pages.total, u64::MAX);
    let root = family();
    let dir = image(&root);
    for (pid, pages_id) in [(7, 1), (20, 2), (30, 3)] {
        let map = Pagemap::new(pages_id, Generation::Wide, [(0, (1 << 52) - 1, PageFlags(0))]);
        write::pagemap(&dir, pid, &map).unwrap();
        let whole = Vma {
            start: 0,
            end: u64::MAX - 0xfff,
            prot: 0,
            flags: 0,
            status: 0,
            offset: 0,
            object: 0,
            advice: 0,
        };
        write::mm(&dir, pid, &Mm { vmas: vec![whole], guards: Vec::new() }).unwrap();
    }
    let report = collect(&dir).unwrap();
    assert_eq!(report.totals.mapped_bytes, u64::MAX);
    assert!(shown(&root, &report, true).contains("15.9 EiB"));
}
