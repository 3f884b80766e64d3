// SPDX-License-Identifier: MIT OR Apache-2.0
//! Small images, made by hand.
#![allow(dead_code)]

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rewake_criu_images::{Generation, ImageDir, LazyPlan, Mm, PAGE, PageFlags, Pagemap, Vma, write};

/// The task of all images of the tests.
pub(crate) const PID: u32 = 7;
/// Present and lazy: the flags of ordinary memory in a plain dump.
pub(crate) const LAZY: PageFlags = PageFlags(6);
/// Present, not lazy.
pub(crate) const EAGER: PageFlags = PageFlags(4);
/// In the parent, not lazy: CRIU marks unchanged pages like this.
pub(crate) const IN_PARENT: PageFlags = PageFlags(1);
/// In the parent, lazy.
pub(crate) const LAZY_IN_PARENT: PageFlags = PageFlags(3);
/// Neither in this image nor in a parent.
pub(crate) const REMOTE: PageFlags = PageFlags(2);

/// Private anonymous memory of these pages.
pub(crate) fn anonymous(first: u64, pages: u64) -> Vma {
    Vma {
        start: first * PAGE,
        end: (first + pages) * PAGE,
        prot: 3,
        flags: 0x22,
        status: 1 << 9 | 1,
        offset: 0,
        object: 0,
        advice: 0,
    }
}

/// Content that distinguishes every page of every image.
pub(crate) fn page(image: u8, number: u64) -> Vec<u8> {
    let mut bytes = vec![image; 4096];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// A temporary folder of images.
pub(crate) struct Images {
    root: tempfile::TempDir,
}

impl Images {
    pub(crate) fn new() -> Self {
        Self { root: tempfile::tempdir().expect("a temporary folder") }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Makes an image with these mappings and runs (first page, pages, flags). The content of every present
    /// page is `page(name's first byte, its number)`.
    pub(crate) fn add(&self, name: &str, vmas: &[Vma], runs: &[(u64, u64, PageFlags)]) -> PathBuf {
        let dir = self.path(name);
        std::fs::create_dir_all(&dir).expect("a folder");
        write::mm(&dir, PID, &Mm { vmas: vmas.to_vec(), guards: Vec::new() }).expect("mm");
        let runs = runs.iter().map(|&(first, pages, flags)| (first * PAGE, pages, flags));
        let map = Pagemap::new(1, Generation::Wide, runs);
        write::pagemap(&dir, PID, &map).expect("pagemap");
        let present = map.entries.iter().filter(|entry| entry.flags.has(PageFlags::PRESENT));
        let numbers = present.flat_map(|entry| entry.vaddr / PAGE..entry.end() / PAGE);
        let bytes: Vec<u8> = numbers.flat_map(|number| page(name.as_bytes()[0], number)).collect();
        write::pages(&dir, 1, &bytes).expect("pages");
        dir
    }

    /// Makes `parent` the parent of `child`.
    pub(crate) fn link(&self, child: &str, parent: &str) {
        std::os::unix::fs::symlink(format!("../{parent}"), self.path(child).join("parent")).expect("a link");
    }

    pub(crate) fn plan(&self, name: &str) -> rewake_criu_images::Result<LazyPlan> {
        ImageDir::open(self.path(name))?.lazy_plan(PID)
    }
}

/// Reads every page of a plan from its file: (number of the page, content).
pub(crate) fn contents(plan: &LazyPlan) -> Vec<(u64, Vec<u8>)> {
    let mut pages = Vec::new();
    for extent in &plan.extents {
        for index in 0..extent.pages {
            let mut bytes = vec![0; 4096];
            let file = &plan.files[extent.file as usize].file;
            file.read_exact_at(&mut bytes, extent.file_offset + index * PAGE)
                .expect("the page is in the file");
            pages.push((extent.vaddr / PAGE + index, bytes));
        }
    }
    pages
}

/// Returns the text of an error.
pub(crate) fn refusal<T>(result: rewake_criu_images::Result<T>) -> String {
    match result {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    }
}

/// Returns the runs of a plan: (first page, pages, file, page in the file).
pub(crate) fn runs(plan: &LazyPlan) -> Vec<(u64, u64, u32, u64)> {
    let run = |extent: &rewake_criu_images::LazyExtent| {
        (extent.vaddr / PAGE, extent.pages, extent.file, extent.file_offset / PAGE)
    };
    plan.extents.iter().map(run).collect()
}

/// Converts hexadecimal digits and blanks to bytes.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).expect("two digits")).collect()
}

/// Writes a file of an image.
pub(crate) fn put(dir: &Path, name: &str, bytes: &[u8]) {
    std::fs::create_dir_all(dir).expect("a folder");
    std::fs::write(dir.join(name), bytes).expect("a file");
}
