// SPDX-License-Identifier: MIT OR Apache-2.0
//! Written images are read back; no bytes make a parser panic or exceed its memory limit.

use crate::common::*;
use proptest::prelude::*;
use rewake_criu_images::fuzz::{FuzzKind, fuzz_one};
use rewake_criu_images::{
    Generation, ImageDir, Inventory, Mm, PAGE, PageFlags, Pagemap, Task, TaskState, Vma, write,
};

const HEADERS: [(FuzzKind, &str); 6] = [
    (FuzzKind::Inventory, "16313158"),
    (FuzzKind::Pstree, "19435654 30302750"),
    (FuzzKind::Core, "19435654 47380555"),
    (FuzzKind::Mm, "19435654 20284957"),
    (FuzzKind::Pagemap, "19435654 25400856"),
    (FuzzKind::Files, "19435654 38313056"),
];

proptest! {
    #[test]
    fn names_are_read_as_written(
        comm in proptest::collection::vec(any::<u8>(), 0..16),
        plugins in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..16), 0..3),
        run_id: Option<Vec<u8>>,
    ) {
        let images = Images::new();
        let dir = images.add("a", &[], &[]);
        let state = TaskState::Alive;
        let task = Task { pid: PID, ppid: 0, pgid: 1, sid: 1, threads: vec![PID], state, comm };
        write::tasks(&dir, std::slice::from_ref(&task)).unwrap();
        let inventory = Inventory { version: 2, plugins, run_id };
        write::inventory(&dir, &inventory).unwrap();
        let image = ImageDir::open(dir).unwrap();
        prop_assert_eq!(image.tasks().unwrap(), [task]);
        prop_assert_eq!(image.inventory().unwrap(), inventory);
    }

    #[test]
    fn a_pagemap_is_read_as_written(
        runs in proptest::collection::vec((0_u64..1 << 20, 1_u64..1 << 20, 0_u32..16), 0..200),
        pages_id: u32,
        narrow: bool,
    ) {
        let mut next = 0;
        let runs = runs.into_iter().map(|(gap, pages, flags)| {
            let first = next + gap;
            next = first + pages;
            (first * PAGE, pages, PageFlags(flags))
        });
        let generation = if narrow { Generation::Narrow } else { Generation::Wide };
        let mut map = Pagemap::new(pages_id, generation, runs);
        if map.entries.is_empty() {
            map.generation = Generation::Wide;
        }
        let images = Images::new();
        let dir = images.add("a", &[], &[]);
        write::pagemap(&dir, PID, &map).unwrap();
        prop_assert_eq!(ImageDir::open(dir).unwrap().pagemap(PID).unwrap(), Some(map));
    }

    #[test]
    fn mappings_are_read_as_written(
        vmas in proptest::collection::vec((0_u64..1 << 20, 1_u64..1 << 20, any::<[u32; 4]>()), 0..200),
    ) {
        let mut mm = Mm::default();
        let mut next = 0;
        for (gap, pages, [prot, flags, status, object]) in vmas {
            let start = next + gap * PAGE;
            next = start + pages * PAGE;
            let (object, advice) = (object.into(), 0);
            let vma = Vma { start, end: next, prot, flags, status, offset: 0, object, advice };
            if status & 1 << 16 != 0 { mm.guards.push(vma) } else { mm.vmas.push(vma) }
        }
        let images = Images::new();
        let dir = images.add("a", &[], &[]);
        write::mm(&dir, PID, &mm).unwrap();
        prop_assert_eq!(ImageDir::open(dir).unwrap().mm(PID).unwrap(), mm);
    }

    #[test]
    fn no_bytes_make_a_parser_panic(
        records in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..64), 0..8),
        tail in proptest::collection::vec(any::<u8>(), 0..8),
    ) {
        for (kind, header) in HEADERS {
            let mut bytes = hex(header);
            for record in &records {
                bytes.extend_from_slice(&u32::try_from(record.len()).unwrap().to_le_bytes());
                bytes.extend_from_slice(record);
            }
            bytes.extend_from_slice(&tail);
            fuzz_one(kind, &bytes);
            fuzz_one(kind, &tail);
        }
    }
}
