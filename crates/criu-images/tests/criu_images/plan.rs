// SPDX-License-Identifier: MIT OR Apache-2.0
//! The plan has the place of every lazy page, or the image is refused.

use crate::common::*;
use rewake_criu_images::{ImageDir, ImageError, MAX_PARENTS, PAGE, PageFlags, PageStats};

#[test]
fn lazy_pages_are_found_and_eager_ones_left_out() {
    let images = Images::new();
    images.add("a", &[anonymous(10, 20)], &[(10, 2, EAGER), (12, 3, LAZY), (20, 1, EAGER), (21, 2, LAZY)]);
    let plan = images.plan("a").unwrap();
    assert_eq!(runs(&plan), [(12, 3, 0, 2), (21, 2, 0, 6)]);
    for (number, bytes) in contents(&plan) {
        assert_eq!(bytes, page(b'a', number));
    }
}

#[test]
fn runs_contiguous_in_memory_and_file_are_one_extent() {
    let images = Images::new();
    images.add("a", &[anonymous(10, 20)], &[(10, 4, LAZY), (14, 4, LAZY), (18, 1, EAGER), (19, 1, LAZY)]);
    assert_eq!(runs(&images.plan("a").unwrap()), [(10, 8, 0, 0), (19, 1, 0, 9)]);
}

#[test]
fn no_extent_crosses_a_border_between_mappings() {
    let images = Images::new();
    let vmas = [anonymous(10, 3), anonymous(13, 3), anonymous(16, 9)];
    images.add("a", &vmas, &[(11, 8, LAZY), (19, 1, LAZY)]);
    assert_eq!(runs(&images.plan("a").unwrap()), [(11, 2, 0, 0), (13, 3, 0, 2), (16, 4, 0, 5)]);
}

#[test]
fn a_guard_is_not_a_border() {
    let images = Images::new();
    let mut guard = anonymous(12, 1);
    guard.status = 1 << 16;
    let dir = images.add("a", &[anonymous(10, 9), guard], &[(10, 2, LAZY), (13, 2, LAZY)]);
    let mm = ImageDir::open(dir).unwrap().mm(PID).unwrap();
    assert_eq!((mm.vmas.len(), mm.guards.len()), (1, 1));
    assert_eq!(runs(&images.plan("a").unwrap()), [(10, 2, 0, 0), (13, 2, 0, 2)]);
}

#[test]
fn pages_in_parents_are_found_through_entries_of_any_length() {
    let images = Images::new();
    let vmas = [anonymous(10, 30)];
    images.add("child", &vmas, &[(10, 1, LAZY), (11, 9, LAZY_IN_PARENT), (20, 1, LAZY)]);
    images.add("parent", &vmas, &[(8, 5, LAZY), (13, 4, IN_PARENT), (17, 1, EAGER), (18, 8, LAZY)]);
    images.add("grandparent", &vmas, &[(10, 5, LAZY), (15, 5, LAZY)]);
    images.link("child", "parent");
    images.link("parent", "grandparent");
    let plan = images.plan("child").unwrap();
    assert_eq!(plan.files.len(), 3);
    let origin = |number| match number {
        10 | 20 => b'c',
        13..=16 => b'g',
        _ => b'p',
    };
    let contents = contents(&plan);
    assert_eq!(contents.iter().map(|(number, _)| *number).collect::<Vec<_>>(), (10..=20).collect::<Vec<_>>());
    for (number, bytes) in contents {
        assert_eq!(bytes, page(origin(number), number), "page {number}");
    }
}

#[test]
fn a_page_that_the_child_has_is_never_taken_from_the_parent() {
    let images = Images::new();
    images.add("child", &[anonymous(10, 9)], &[(10, 2, LAZY)]);
    let parent = images.add("parent", &[anonymous(10, 9)], &[(10, 2, LAZY)]);
    images.link("child", "parent");
    std::fs::write(parent.join("pages-1.img"), [0; 2 * 4096]).unwrap();
    for (number, bytes) in contents(&images.plan("child").unwrap()) {
        assert_eq!(bytes, page(b'c', number));
    }
}

#[test]
fn a_page_that_no_parent_has_is_refused() {
    let images = Images::new();
    let vmas = [anonymous(10, 30)];
    images.add("child", &vmas, &[(10, 9, LAZY_IN_PARENT)]);
    let text = refusal(images.plan("child"));
    assert!(text.contains("9 pages at 0xa000") && text.contains("child/parent"), "{text}");

    images.add("parent", &vmas, &[(10, 3, LAZY), (15, 9, LAZY)]);
    images.link("child", "parent");
    let text = refusal(images.plan("child"));
    assert!(text.contains("2 pages at 0xd000"), "{text}");

    images.add("parent", &vmas, &[(10, 3, LAZY)]);
    assert!(refusal(images.plan("child")).contains("6 pages at 0xd000"));

    std::fs::remove_file(images.path("parent/pagemap-7.img")).unwrap();
    assert!(refusal(images.plan("child")).contains("9 pages at 0xa000"));
}

#[test]
fn pages_that_only_a_page_server_has_are_counted() {
    let images = Images::new();
    images.add("a", &[anonymous(10, 30)], &[(10, 5, REMOTE), (15, 1, LAZY), (16, 2, REMOTE)]);
    let plan = images.plan("a").unwrap();
    assert_eq!(plan.remote_pages, 7);
    assert_eq!(runs(&plan), [(15, 1, 0, 0)], "remote pages take no space in the file");
}

#[test]
fn lazy_pages_outside_lazy_memory_are_refused() {
    let images = Images::new();
    images.add("a", &[anonymous(10, 3), anonymous(15, 3)], &[(11, 5, LAZY)]);
    let text = refusal(images.plan("a"));
    assert!(text.contains("2 lazy pages at 0xd000 are in no mapping"), "{text}");

    let locked = rewake_criu_images::Vma { flags: 0x2022, ..anonymous(10, 3) };
    images.add("a", &[locked], &[(11, 1, LAZY)]);
    let text = refusal(images.plan("a"));
    assert!(text.contains("1 lazy pages at 0xb000 are in anon-private"), "{text}");
}

#[test]
fn a_truncated_pages_file_is_refused_with_both_lengths() {
    let images = Images::new();
    let dir = images.add("a", &[anonymous(10, 9)], &[(10, 2, EAGER), (12, 2, LAZY)]);
    let file = std::fs::File::options().write(true).open(dir.join("pages-1.img")).unwrap();
    file.set_len(4 * PAGE - 1).unwrap();
    let error = images.plan("a").unwrap_err();
    assert!(matches!(error, ImageError::PagesTruncated { len: 16383, expected: 16384, .. }), "{error}");
    assert!(error.to_string().contains("pages-1.img: 16383 bytes, expected 16384"), "{error}");
    assert!(error.to_string().contains("dump again"), "{error}");
}

#[test]
fn a_truncated_pages_file_of_a_parent_is_refused() {
    let images = Images::new();
    images.add("child", &[anonymous(10, 9)], &[(10, 2, LAZY_IN_PARENT)]);
    let parent = images.add("parent", &[anonymous(10, 9)], &[(10, 2, LAZY)]);
    images.link("child", "parent");
    std::fs::write(parent.join("pages-1.img"), [0; 4096]).unwrap();
    assert!(refusal(images.plan("child")).contains("parent/pages-1.img: 4096 bytes, expected 8192"));
}

#[test]
fn missing_files_are_refused_by_name() {
    let images = Images::new();
    let dir = images.add("a", &[anonymous(10, 9)], &[(10, 2, LAZY)]);
    for name in ["pages-1.img", "pagemap-7.img", "mm-7.img"] {
        std::fs::remove_file(dir.join(name)).unwrap();
        let error = images.plan("a").unwrap_err();
        assert!(matches!(&error, ImageError::Missing { file, .. } if file.ends_with(name)), "{error}");
    }
    assert!(refusal(ImageDir::open(dir.join("none"))).contains("cannot open"));
}

#[test]
fn a_chain_of_parents_that_has_no_end_is_refused() {
    let images = Images::new();
    for name in ["a", "b"] {
        images.add(name, &[anonymous(10, 9)], &[(10, 2, LAZY_IN_PARENT)]);
    }
    images.link("a", "b");
    images.link("b", "a");
    assert!(matches!(images.plan("a"), Err(ImageError::ParentCycle { .. })));
}

#[test]
fn the_longest_chain_of_parents_is_followed_one_more_refused() {
    let images = Images::new();
    let name = |level: usize| format!("{level}");
    for level in 0..=MAX_PARENTS + 1 {
        images.add(&name(level), &[anonymous(10, 9)], &[(10, 2, LAZY_IN_PARENT)]);
        if level > 0 {
            images.link(&name(level - 1), &name(level));
        }
    }
    assert!(matches!(images.plan("0"), Err(ImageError::TooManyParents { limit: MAX_PARENTS, .. })));
    images.add(&name(MAX_PARENTS), &[anonymous(10, 9)], &[(10, 2, LAZY)]);
    assert_eq!(contents(&images.plan("0").unwrap()).len(), 2);
}

#[test]
fn a_parent_without_lazy_pages_is_not_opened() {
    let images = Images::new();
    images.add("a", &[anonymous(10, 9)], &[(10, 1, LAZY), (11, 2, IN_PARENT)]);
    images.link("a", "a");
    assert_eq!(runs(&images.plan("a").unwrap()), [(10, 1, 0, 0)]);
}

#[test]
fn the_summary_counts_each_page_by_place_and_by_time() {
    let images = Images::new();
    let all = [(10, 1, LAZY), (11, 2, EAGER), (13, 4, IN_PARENT), (17, 8, LAZY_IN_PARENT), (25, 16, REMOTE)];
    let dir = images.add("a", &[anonymous(10, 90)], &all);
    let image = ImageDir::open(&dir).unwrap();
    let stats = image.pagemap(PID).unwrap().unwrap().stats();
    let wanted = PageStats { total: 31, present: 3, in_parent: 12, remote: 16, lazy: 25, eager: 6 };
    assert_eq!(stats, wanted);
    assert_eq!(image.zero_pages(PID).unwrap(), 0);
    let mut bytes = vec![0; 3 * 4096];
    bytes[4096 + 4095] = 1;
    std::fs::write(dir.join("pages-1.img"), bytes).unwrap();
    assert_eq!(image.zero_pages(PID).unwrap(), 2);
}

#[test]
fn unknown_flags_are_kept() {
    let images = Images::new();
    let dir = images.add("a", &[anonymous(10, 90)], &[(10, 1, PageFlags(0x86))]);
    assert_eq!(ImageDir::open(dir).unwrap().pagemap(PID).unwrap().unwrap().entries[0].flags, PageFlags(0x86));
    assert_eq!(runs(&images.plan("a").unwrap()), [(10, 1, 0, 0)]);
}
