// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the parts of pages files that `criu restore --lazy-pages` reads itself.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::dir::ImageDir;
use crate::error::Result;
use crate::frame;
use crate::memory_files::pagemap_owner;
use crate::pagemap::{PageFlags, PagemapReader};
use crate::plan::pages_name;

impl ImageDir {
    /// Returns the pages that are not lazy, by pages file: ranges of bytes in ascending order. `names` are
    /// the files of this directory. A pages file that no pagemap names is not in it.
    ///
    /// # Errors
    /// A pagemap is damaged or cannot be read.
    pub fn eager_ranges<'a>(
        &self,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<BTreeMap<String, Vec<Range<u64>>>> {
        let mut found: BTreeMap<String, Vec<Range<u64>>> = BTreeMap::new();
        for name in names.filter(|name| pagemap_owner(name).is_some()) {
            let Some(records) = self.records(name, &frame::PAGEMAP)? else { continue };
            let mut read = PagemapReader::new(records)?;
            let ranges = found.entry(pages_name(read.pages_id)).or_default();
            while let Some((_, entry)) = read.next()? {
                if !entry.flags.has(PageFlags::PRESENT) || entry.flags.has(PageFlags::LAZY) {
                    continue;
                }
                let end = entry.file_offset + (entry.end() - entry.vaddr);
                match ranges.last_mut() {
                    Some(last) if last.end == entry.file_offset => last.end = end,
                    _ => ranges.push(entry.file_offset..end),
                }
            }
        }
        // Two pagemaps may name one file.
        found.values_mut().for_each(|ranges| ranges.sort_unstable_by_key(|range| range.start));
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE;
    use crate::pagemap::{Generation, Pagemap};
    use crate::write;

    #[test]
    fn pages_that_are_present_and_not_lazy_are_eager() {
        let dir = tempfile::tempdir().unwrap();
        let (lazy, eager) = (PageFlags(6), PageFlags::PRESENT);
        let runs = [
            (0x1000, 2, eager),
            (0x9000, 3, eager),
            (0x10_0000, 4, lazy),
            (0x20_0000, 9, PageFlags::PARENT),
            (0x30_0000, 1, eager),
        ];
        let map = Pagemap::new(3, Generation::Wide, runs.iter().copied());
        write::pagemap(dir.path(), 7, &map).unwrap();
        let images = ImageDir::open(dir.path()).unwrap();
        let found = images.eager_ranges(["core-7.img", "pagemap-7.img"].into_iter()).unwrap();
        let ranges = vec![0..5 * PAGE, 9 * PAGE..10 * PAGE];
        assert_eq!(found, BTreeMap::from([("pages-3.img".to_owned(), ranges)]));
    }
}
