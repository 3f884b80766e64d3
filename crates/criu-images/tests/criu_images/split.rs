// SPDX-License-Identifier: MIT OR Apache-2.0
//! A plain image that was split into a chain of parents still has every page at its place.

use std::collections::BTreeMap;

use crate::common::*;
use proptest::prelude::*;
use rewake_criu_images::write::{PagePlace, split_into_parent};
use rewake_criu_images::{Generation, ImageDir, PAGE, PageFlags, Pagemap, write};

fn entries(images: &Images, name: &str) -> Vec<(u64, u64, u32)> {
    let map = ImageDir::open(images.path(name)).unwrap().pagemap(PID).unwrap().unwrap();
    map.entries.iter().map(|entry| (entry.vaddr / PAGE, entry.pages, entry.flags.0)).collect()
}

fn split(images: &Images, child: &str, parent: &str, place: impl Fn(u64) -> PagePlace) {
    split_into_parent(&images.path(child), PID, &images.path(parent), |vaddr, _| place(vaddr / PAGE))
        .unwrap();
}

#[test]
fn the_child_marks_pages_of_the_parent_and_the_parent_has_them() {
    let images = Images::new();
    images.add("a", &[anonymous(10, 20)], &[(10, 4, LAZY), (20, 2, EAGER)]);
    split(&images, "a", "b", |page| match page {
        11 | 12 => PagePlace::Parent,
        13 | 21 => PagePlace::LazyParent,
        _ => PagePlace::Here,
    });
    let (lazy, eager, parent, lazy_parent) = (LAZY.0, EAGER.0, IN_PARENT.0, LAZY_IN_PARENT.0);
    let wanted = [(10, 1, lazy), (11, 2, parent), (13, 1, lazy_parent), (20, 1, eager), (21, 1, parent)];
    assert_eq!(entries(&images, "a"), wanted);
    assert_eq!(entries(&images, "b"), [(11, 3, lazy), (21, 1, eager)]);
    let read = |name: &str| std::fs::read(images.path(name)).unwrap();
    assert_eq!(read("a/pages-1.img"), [page(b'a', 10), page(b'a', 20)].concat());
    assert_eq!(
        read("b/pages-1.img"),
        [page(b'a', 11), page(b'a', 12), page(b'a', 13), page(b'a', 21)].concat()
    );
    assert_eq!(std::fs::read_link(images.path("a/parent")).unwrap().to_str(), Some("../b"));
    let numbers: Vec<u64> = contents(&images.plan("a").unwrap()).iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [10, 13], "pages that stay eager are not planned");
}

#[test]
fn entries_keep_the_generation_of_the_input() {
    for generation in [Generation::Narrow, Generation::Wide] {
        let images = Images::new();
        let dir = images.add("a", &[anonymous(10, 20)], &[(10, 4, LAZY)]);
        write::pagemap(&dir, PID, &Pagemap::new(1, generation, [(10 * PAGE, 4, LAZY)])).unwrap();
        split(&images, "a", "b", |page| if page == 11 { PagePlace::Parent } else { PagePlace::Here });
        for name in ["a", "b"] {
            let map = ImageDir::open(images.path(name)).unwrap().pagemap(PID).unwrap().unwrap();
            assert_eq!(map.generation, generation, "{name}");
        }
    }
}

#[test]
fn a_second_parent_or_a_task_that_exists_already_is_refused() {
    let images = Images::new();
    let dir = images.add("a", &[anonymous(10, 20)], &[(10, 4, LAZY)]);
    split(&images, "a", "b", |_| PagePlace::Parent);
    let again = |parent: &str| split_into_parent(&dir, PID, &images.path(parent), |_, _| PagePlace::Here);
    assert!(refusal(again("b")).contains("expected a parent without this task"));
    assert!(refusal(again("c")).contains("expected a link to"));
    assert!(
        refusal(split_into_parent(&dir, 8, &images.path("b"), |_, _| PagePlace::Here))
            .contains("pagemap-8.img")
    );
}

/// An image of runs in mappings, and for every page its level in the chain.
fn layout() -> impl Strategy<Value = (Vec<(u64, u64, bool)>, Vec<u8>)> {
    let run = (0_u64..3, 1_u64..6, any::<bool>());
    (proptest::collection::vec(run, 1..12), proptest::collection::vec(0_u8..3, 60))
}

proptest! {
    #[test]
    fn every_lazy_page_keeps_its_content_in_a_chain_of_three((runs, levels) in layout()) {
        let images = Images::new();
        let mut next = 10;
        let mut placed: Vec<(u64, u64, PageFlags)> = Vec::new();
        for (gap, pages, lazy) in runs {
            placed.push((next + gap, pages, if lazy { LAZY } else { EAGER }));
            next += gap + pages;
        }
        let vmas: Vec<_> = (0..next / 7 + 1).map(|vma| anonymous(vma * 7, 7)).collect();
        images.add("a", &vmas, &placed);
        let before: BTreeMap<_, _> = contents(&images.plan("a").unwrap()).into_iter().collect();
        let level = |page: u64| levels[usize::try_from(page).unwrap() % levels.len()];
        let place = |is_in_parent| if is_in_parent { PagePlace::LazyParent } else { PagePlace::Here };
        split(&images, "a", "b", |page| place(level(page) > 0));
        split(&images, "b", "c", |page| place(level(page) > 1));
        let plan = images.plan("a").unwrap();
        for extent in &plan.extents {
            prop_assert_eq!(extent.vaddr / PAGE / 7, (extent.end() / PAGE - 1) / 7, "crosses a border");
        }
        let after = contents(&plan);
        prop_assert_eq!(after.len(), before.len(), "no page twice");
        prop_assert_eq!(after.into_iter().collect::<BTreeMap<_, _>>(), before);
    }
}
