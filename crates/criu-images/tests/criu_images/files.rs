// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that CRIU writes are read. Damaged ones are refused with file, offset, expected and found.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use crate::common::*;
use rewake_criu_images::{
    Generation, ImageDir, ImageError, Inventory, PAGE, PageFlags, Task, TaskState, write,
};

/// The start of a pagemap of CRIU 4.2: one present page.
const PAGEMAP_WIDE: &str = "19435654 25400856 02000000 0801 0e000000 0880c0bcb5febd15 1000 2004 2801";
const INVENTORY_MAGIC: &str = "16313158";
const PAGEMAP_MAGIC: &str = "19435654 25400856";
const MM_MAGIC: &str = "19435654 20284957";
const HEAD: &str = "02000000 0801";

fn pagemap(bytes: &[u8]) -> rewake_criu_images::Result<rewake_criu_images::Pagemap> {
    let images = Images::new();
    put(&images.path("a"), "pagemap-7.img", bytes);
    ImageDir::open(images.path("a"))?.pagemap(PID).map(|map| map.expect("the pagemap exists"))
}

#[test]
fn a_pagemap_of_criu_4_2_is_read() {
    let map = pagemap(&hex(PAGEMAP_WIDE)).unwrap();
    assert_eq!((map.pages_id, map.generation, map.file_len), (1, Generation::Wide, PAGE));
    let entry = map.entries[0];
    assert_eq!((entry.vaddr, entry.pages, entry.flags), (0x55ef_e6af_2000, 1, PageFlags::PRESENT));
}

#[test]
fn a_pagemap_of_criu_4_1_has_its_count_in_the_old_field() {
    let map = pagemap(&hex(&format!("{PAGEMAP_MAGIC}{HEAD} 07000000 088020 1003 2006"))).unwrap();
    assert_eq!((map.entries[0].vaddr, map.entries[0].pages, map.generation), (0x1000, 3, Generation::Narrow));
}

#[test]
fn entries_without_flags_are_present_in_parent_adds_its_flag() {
    let old = format!("{PAGEMAP_MAGIC}{HEAD} 05000000 088020 1001 07000000 088040 1001 1801");
    let map = pagemap(&hex(&old)).unwrap();
    assert_eq!(map.entries[0].flags, PageFlags::PRESENT);
    assert_eq!(map.entries[1].flags, PageFlags::PARENT);
    assert_eq!(map.file_len, PAGE);
}

#[test]
fn offsets_count_present_pages_only() {
    let runs = [(0x1000, 2, IN_PARENT), (0x5000, 3, LAZY), (0x9000, 1, REMOTE), (0xa000, 1, EAGER)];
    let map = rewake_criu_images::Pagemap::new(1, Generation::Wide, runs);
    assert_eq!(map.entries.iter().map(|entry| entry.file_offset / PAGE).collect::<Vec<_>>(), [0, 0, 3, 3]);
}

#[test]
fn hostile_pagemap_entries_are_refused_at_their_offset() {
    let refused = |entry: &str| {
        let len = format!("{:02x}000000", hex(entry).len());
        let error =
            pagemap(&hex(&format!("{PAGEMAP_MAGIC}{HEAD} 05000000 088040 1002 {len}{entry}"))).unwrap_err();
        assert!(matches!(error, ImageError::Damaged { offset: 23, .. }), "{error:?}");
        error.to_string()
    };
    assert!(refused("088060 1001").contains("expected an address from 0x4000"), "overlaps the entry before");
    assert!(refused("088020 1001").contains("found 1 pages at 0x1000"), "descends");
    assert!(refused("08818001 1001").contains("found 1 pages at 0x4001"), "not at a page");
    assert!(refused("08808001 1000").contains("found 0 pages"), "empty");
    assert!(refused("08808001").contains("pages None"), "no count");
    assert!(refused("1001").contains("address None"), "no address");
    assert!(
        refused("08808001 1000 28ffffffffffffffffff01").contains("18446744073709551615 pages"),
        "too long"
    );
    assert!(refused("0880e0ffffffffffffff01 1002").contains("expected whole pages inside"), "wraps around");
    assert!(refused("ff").contains("expected a pagemap record"), "not protobuf");
}

#[test]
fn a_length_is_checked() {
    let text = refusal(pagemap(&hex(&format!("{PAGEMAP_MAGIC}{HEAD} ff000000 08"))));
    assert!(text.contains("at byte 14: expected a record of 255 bytes, found 1 bytes to the end"), "{text}");
    let error = pagemap(&hex(&format!("{PAGEMAP_MAGIC}{HEAD} ffffffff 08"))).unwrap_err();
    assert!(
        matches!(error, ImageError::TooMany { offset: 14, found: 0xffff_ffff, limit: 65536, .. }),
        "{error:?}"
    );
    let text = refusal(pagemap(&hex(&format!("{PAGEMAP_MAGIC}{HEAD} ffff"))));
    assert!(text.contains("expected a record's length of 4 bytes, found 2 bytes"), "{text}");
}

#[test]
fn a_file_of_another_kind_is_refused() {
    let text = refusal(pagemap(&hex("19435654 20284957")));
    assert!(
        text.contains("pagemap-7.img: at byte 4: expected pagemap 0x56084025, found 0x57492820"),
        "{text}"
    );
    assert!(refusal(pagemap(&hex("16313158"))).contains("expected the common image magic 0x54564319"));
    assert!(refusal(pagemap(&[])).contains("at byte 0: expected the common image magic, found 0 bytes"));
    assert!(refusal(pagemap(&hex(PAGEMAP_MAGIC))).contains("expected a pagemap record, found the end"));
}

#[test]
fn a_directory_or_a_pipe_in_place_of_a_file_is_refused() {
    let images = Images::new();
    std::fs::create_dir_all(images.path("a/inventory.img")).unwrap();
    nix::unistd::mkfifo(&images.path("a/pstree.img"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let image = ImageDir::open(images.path("a")).unwrap();
    assert!(refusal(image.inventory()).contains("expected a regular file"));
    assert!(refusal(image.tasks()).contains("expected a regular file"));
}

#[test]
fn an_inventory_has_plugins_and_run_other_versions_are_refused() {
    let images = Images::new();
    let dir = images.path("a");
    std::fs::create_dir_all(&dir).unwrap();
    let inventory =
        Inventory { version: 2, plugins: vec!["amdgpu_plugin".into()], run_id: Some("run".into()) };
    write::inventory(&dir, &inventory).unwrap();
    let image = ImageDir::open(&dir).unwrap();
    assert_eq!(image.inventory().unwrap(), inventory);

    put(&dir, "inventory.img", &hex(&format!("{INVENTORY_MAGIC} 02000000 0803")));
    let compressed = refusal(image.inventory());
    assert!(compressed.contains("image version 3 (compressed pages"), "{compressed}");
    assert!(compressed.contains("dump again without --compress"), "{compressed}");
    put(&dir, "inventory.img", &hex(&format!("{INVENTORY_MAGIC} 00000000")));
    assert!(refusal(image.inventory()).contains("expected image version 2, found none"));
    put(&dir, "inventory.img", &hex(&format!("{INVENTORY_MAGIC} 02000000 0802 00")));
    assert!(
        refusal(image.inventory()).contains("at byte 10: expected the end of the file, found 1 bytes more")
    );
}

fn task(pid: u32, ppid: u32, state: TaskState) -> Task {
    Task { pid, ppid, pgid: 1, sid: 1, threads: vec![pid, pid + 100], state, comm: "name".into() }
}

#[test]
fn tasks_have_their_states_and_zombies_no_memory() {
    let images = Images::new();
    let dir = images.path("a");
    std::fs::create_dir_all(&dir).unwrap();
    let states =
        [TaskState::Alive, TaskState::Stopped, TaskState::Dead, TaskState::Zombie, TaskState::Unknown(99)];
    let tasks: Vec<Task> = (1..).zip(states).map(|(pid, state)| task(pid, pid - 1, state)).collect();
    write::tasks(&dir, &tasks).unwrap();
    let image = ImageDir::open(&dir).unwrap();
    assert_eq!(image.tasks().unwrap(), tasks);
    assert_eq!(states.map(TaskState::has_memory), [true, true, false, false, true]);

    put(&dir, "core-2.img", &hex("19435654 47380555 00000000"));
    assert!(
        refusal(image.tasks()).contains("core-2.img: at byte 8: expected the state of a task, found none")
    );
    std::fs::remove_file(dir.join("core-2.img")).unwrap();
    assert!(
        refusal(image.tasks()).contains("core-2.img: expected the task's state, but there is no such file")
    );
}

#[test]
fn a_name_that_was_cut_in_mid_character_is_read() {
    let images = Images::new();
    // A core as CRIU 4.2 writes it: state, exit code, and 15 bytes of a name.
    let name = "736572766575722d c3a9 6c c3a9 76 c3";
    let core = hex(&format!("19435654 47380555 17000000 1a15 0801 1000 320f {name}"));
    put(&images.path("a"), "core-1.img", &core);
    let image = ImageDir::open(images.path("a")).unwrap();
    let expected = (TaskState::Alive, b"serveur-\xc3\xa9l\xc3\xa9v\xc3".to_vec());
    assert_eq!(image.core(1).unwrap(), expected);
}

#[test]
fn trees_with_impossible_pids_are_refused() {
    let images = Images::new();
    let tree = |records: &str| {
        put(&images.path("a"), "pstree.img", &hex(&format!("19435654 30302750 {records}")));
        refusal(ImageDir::open(images.path("a")).unwrap().tasks())
    };
    assert!(tree("").contains("expected a process tree record, found the end of the file"));
    assert!(tree("02000000 0800").contains("expected a pid from 1 to 2^31-1, found 0"));
    assert!(tree("00000000").contains("found 0"));
    assert!(tree("06000000 08ffffffff0f").contains("found 4294967295"));
    assert!(
        tree("02000000 0805 02000000 0805")
            .contains("at byte 14: expected every pid once, found pid 5 again")
    );
}

#[test]
fn hostile_mappings_are_refused() {
    let images = Images::new();
    let mm = |record: &str| {
        let len = format!("{:02x}000000", hex(record).len());
        put(&images.path("a"), "mm-7.img", &hex(&format!("{MM_MAGIC} {len}{record}")));
        ImageDir::open(images.path("a")).unwrap().mm(PID)
    };
    let good = "08 8020 10 8040 30 22 38 01";
    let vma = |body: &str| format!("72 {:02x} {body}", hex(body).len());
    assert_eq!(mm(&vma(good)).unwrap().vmas.len(), 1);
    assert_eq!(mm(&format!("0801 110000000000000000 1d00000000 {}", vma(good))).unwrap().vmas.len(), 1);
    assert!(refusal(mm(&vma(""))).contains("expected a mapping with start"));
    assert!(refusal(mm(&vma("088040 108020 3022 3801"))).contains("start < end, found 0x2000-0x1000"));
    assert!(refusal(mm(&vma("088120 108040 3022 3801"))).contains("whole pages"));
    assert!(refusal(mm(&format!("{}{}", vma(good), vma(good)))).contains("found 0x1000-0x2000 and 0x1000"));
    assert!(refusal(mm("7205")).contains("expected a field inside the record, found a length of 5, 0 bytes"));
    assert!(refusal(mm("72ffffffffffffffffff01")).contains("expected a field inside"));
    assert!(refusal(mm("73")).contains("wire type"));
    assert!(refusal(mm("80")).contains("varint"));
}

const FILES_MAGIC: &str = "19435654 38313056";

fn files(records: &[&str]) -> rewake_criu_images::Result<BTreeMap<u32, Option<PathBuf>>> {
    let images = Images::new();
    let record = |text: &&str| format!("{:02x}000000 {text}", hex(text).len());
    let records: String = records.iter().map(record).collect();
    put(&images.path("a"), "files.img", &hex(&format!("{FILES_MAGIC}{records}")));
    ImageDir::open(images.path("a"))?.files().map(|files| files.expect("files.img exists"))
}

#[test]
fn files_have_their_paths_or_none() {
    // As CRIU 4.2.1 writes a device, whose path need not be UTF-8, and a memfd.
    let device = "0801 1002 1a06 0802 3202 2fff";
    let memfd = "0812 1005 a201 04 0805 1000";
    let path = PathBuf::from(OsString::from_vec(b"/\xff".to_vec()));
    assert_eq!(files(&[device, memfd]).unwrap(), BTreeMap::from([(2, Some(path)), (5, None)]));
    assert_eq!(ImageDir::open(Images::new().add("a", &[], &[])).unwrap().files().unwrap(), None);
}

#[test]
fn damaged_files_are_refused() {
    assert!(refusal(files(&["0801"])).contains("a file with an id"));
    assert!(refusal(files(&["1002 1a00"])).contains("a file with its path, found 0x2 without a path"));
    let path = "1002 1a03 3201 2f";
    assert!(refusal(files(&[path, path])).contains("every path once, found another path of 0x2"));
}

#[test]
fn a_mapping_names_its_file() {
    let vma = |status, object| rewake_criu_images::Vma { status, object, ..anonymous(1, 1) };
    assert_eq!(vma(1 << 7 | 1, 9).file(), Some(9), "shared");
    assert_eq!(vma(1 << 27 | 1 << 6 | 1, 9).file(), Some(9), "private, of a device");
    assert_eq!(vma(1 << 8 | 1, 9).file(), None, "shared memory has its own numbers");
    assert_eq!(vma(1 << 7 | 1, 1 << 32).file(), None, "no file has such a number");
}

#[test]
fn mappings_are_sorted_and_have_kinds() {
    let images = Images::new();
    let dir = images.add("a", &[anonymous(50, 1), anonymous(10, 1)], &[]);
    let mm = ImageDir::open(dir).unwrap().mm(PID).unwrap();
    assert_eq!(mm.vmas.iter().map(|vma| vma.start / PAGE).collect::<Vec<_>>(), [10, 50]);
    let kind = |status| rewake_criu_images::Vma { status, ..anonymous(1, 1) }.kind();
    let shown = [1 << 9 | 1, 1 << 9 | 1 << 5 | 1, 1 << 6 | 1, 1 << 3 | 1 << 9, 1 << 27, 1].map(kind);
    assert_eq!(shown, ["anon-private", "heap", "file-private", "vdso", "plugin", "other"]);
}

#[test]
fn memory_is_lazy_only_if_criu_registers_it() {
    let lazy = |flags, status| rewake_criu_images::Vma { flags, status, ..anonymous(1, 1) }.can_be_lazy();
    assert!(lazy(0x22, 1 << 9 | 1), "private anonymous");
    assert!(lazy(0x122, 1 << 9 | 1 << 1), "a stack that grows down");
    assert!(!lazy(0x02, 1 << 6), "private file");
    assert!(!lazy(0x21, 1 << 8), "shared anonymous");
    assert!(!lazy(0x2022, 1 << 9), "locked");
    assert!(!lazy(0x4_0022, 1 << 9), "huge pages");
    assert!(!lazy(0x22, 1 << 3) && !lazy(0x22, 1 << 12) && !lazy(0x22, 1 << 2), "the kernel's own");
}

#[test]
fn a_view_is_read_and_a_file_that_its_link_does_not_lead_to_is_an_error() {
    let images = Images::new();
    let dir = images.add("a", &[anonymous(1, 2)], &[(1, 2, LAZY)]);
    let expected = runs(&images.plan("a").unwrap());
    for name in ["pages-1.img", "mm-7.img", "pagemap-7.img"] {
        let (file, target) = (dir.join(name), images.path("target"));
        std::fs::rename(&file, &target).unwrap();
        std::os::unix::fs::symlink("../target", &file).unwrap();
        assert_eq!(runs(&images.plan("a").unwrap()), expected);
        // An image without a pagemap has no memory of the task: a link that leads nowhere must not say that.
        std::fs::rename(&target, images.path("away")).unwrap();
        let error = images.plan("a").unwrap_err();
        assert!(
            matches!(&error, ImageError::SymbolicLink { file: named, .. } if *named == file),
            "{error:?}"
        );
        assert!(error.to_string().contains("is a symbolic link that leads to no file"), "{error}");
        std::fs::rename(images.path("away"), &file).unwrap();
    }
}

#[test]
fn an_open_directory_is_read_after_another_takes_its_name() {
    let images = Images::new();
    images.add("a", &[anonymous(1, 2)], &[(1, 2, LAZY)]);
    let open = ImageDir::open(images.path("a")).unwrap();
    std::fs::rename(images.path("a"), images.path("b")).unwrap();
    images.add("a", &[anonymous(8, 9)], &[(8, 9, LAZY)]);
    assert_eq!(runs(&open.lazy_plan(PID).unwrap()), [(1, 2, 0, 0)]);
}

#[test]
fn a_digest_covers_the_parsed_files_and_parents() {
    let digest = |images: &Images| {
        let open = ImageDir::open(images.path("child")).unwrap();
        open.lazy_plan(PID).unwrap();
        open.digest()
    };
    let made = |flags| {
        let images = Images::new();
        images.add("parent", &[anonymous(1, 3)], &[(1, 3, flags)]);
        images.add("child", &[anonymous(1, 3)], &[(1, 2, LAZY_IN_PARENT)]);
        images.link("child", "parent");
        images
    };
    let (one, same, other) = (made(LAZY), made(LAZY), made(EAGER));
    assert_eq!(digest(&one), digest(&same), "paths and times are not included");
    assert_ne!(digest(&one), digest(&other), "the parent's pagemap is another");
    std::fs::write(one.path("child/pages-1.img"), [1; 4096]).unwrap();
    assert_eq!(digest(&one), digest(&same), "contents of memory are not included");
    let text = digest(&one).to_string();
    assert!(text.len() == 64 && text.chars().all(|digit| digit.is_ascii_hexdigit()), "{text}");
    assert_eq!(format!("{:.12}", digest(&one)), text[..12]);
    assert_ne!(ImageDir::open(one.path("child")).unwrap().digest(), digest(&one), "no file was parsed");
}

#[test]
fn an_error_names_its_cause_once() {
    let error = ImageDir::open("/nowhere/at/all").unwrap_err();
    assert_eq!(error.to_string().matches("os error 2").count(), 1, "{error}");
    // A caller that prints the chain of causes adds no text.
    assert!(std::error::Error::source(&error).is_none());
}
