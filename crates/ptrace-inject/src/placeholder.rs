// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds a process's placeholders, and the pages in them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt as _;

use crate::abi;
use crate::error::Error;
use crate::maps::{self, FileId, MapsEntry};

/// A shared mapping of a part of the placeholder file in a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaceholderMapping {
    /// The address in the process.
    pub address: u64,
    /// The length in bytes.
    pub length: u64,
    /// The offset in the file.
    pub offset: u64,
    /// `PROT_*`.
    pub protection: i32,
}

/// Returns the mappings of a range of the placeholder file, by address. The process may run.
///
/// # Errors
/// The process has ended, or `file` has no metadata.
pub fn placeholder_mappings(
    pid: i32,
    file: BorrowedFd<'_>,
    range: Range<u64>,
) -> Result<Vec<PlaceholderMapping>, Error> {
    let file = identity(file).map_err(|source| Error::Call { pid, call: "stat the placeholder", source })?;
    Ok(parts(&maps::read(pid)?, file, &[range]).concat())
}

pub(crate) fn identity(file: BorrowedFd<'_>) -> io::Result<FileId> {
    let metadata = File::from(file.try_clone_to_owned()?).metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Returns, for each range, its parts in shared mappings of `file`, by address. The ranges do not overlap;
/// mappings may.
pub(crate) fn parts(
    mappings: &[MapsEntry],
    file: FileId,
    ranges: &[Range<u64>],
) -> Vec<Vec<PlaceholderMapping>> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_unstable_by_key(|place| ranges[*place].start);
    let mut parts = vec![Vec::new(); ranges.len()];
    for mapping in mappings.iter().filter(|mapping| mapping.shared && mapping.file == file) {
        let end = mapping.offset + (mapping.end - mapping.start);
        let first = order.partition_point(|place| ranges[*place].end <= mapping.offset);
        for &place in order[first..].iter().take_while(|place| ranges[**place].start < end) {
            parts[place].extend(cut(mapping, &ranges[place]));
        }
    }
    parts
}

/// Returns the part of a range that a mapping shows.
fn cut(mapping: &MapsEntry, range: &Range<u64>) -> Option<PlaceholderMapping> {
    let first = mapping.offset.max(range.start);
    let last = (mapping.offset + (mapping.end - mapping.start)).min(range.end);
    (first < last).then(|| PlaceholderMapping {
        address: mapping.start + (first - mapping.offset),
        length: last - first,
        offset: first,
        protection: mapping.protection,
    })
}

/// Returns the parts of `offset..offset + length` of the placeholder file that have pages. UFFDIO_COPY
/// created these pages, and the program may have changed them since. Read them with `pread(2)` while the
/// process is stopped, and write them to the device before the swap.
///
/// # Errors
/// The errors of `lseek(2)`, which moves the position of the open file. Mappings do not use that position.
pub fn populated_ranges(
    placeholder: BorrowedFd<'_>,
    offset: u64,
    length: u64,
) -> io::Result<Vec<Range<u64>>> {
    let end = offset + length;
    let mut found = Vec::new();
    let mut at = offset;
    while at < end {
        let Some(start) = abi::next_data(placeholder, at)?.filter(|start| *start < end) else { break };
        at = abi::next_hole(placeholder, start)?.min(end);
        found.push(start..at);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::FileExt as _;

    const FILE: FileId = (7, 70);

    fn mapping(start: u64, offset: u64, length: u64) -> MapsEntry {
        let (end, protection) = (start + length, libc::PROT_READ);
        MapsEntry { start, end, protection, executable: false, shared: true, offset, file: FILE, vdso: false }
    }

    #[test]
    fn each_range_has_exactly_its_parts_of_all_mappings() {
        let mappings = [
            // Two ranges, and the gap between them.
            mapping(0x10_0000, 0x1000, 0x7000),
            // The same bytes once more.
            mapping(0x20_0000, 0x2000, 0x1000),
            mapping(0x30_0000, 0x9000, 0x1000),
            MapsEntry { shared: false, ..mapping(0x40_0000, 0, 0x10000) },
            MapsEntry { file: (7, 71), ..mapping(0x50_0000, 0, 0x10000) },
        ];
        let ranges = [0x6000..0x8000, 0x9000..0xa000, 0xb000..0xc000, 0..0x4000];
        let found = parts(&mappings, FILE, &ranges);
        let found: Vec<Vec<_>> = found
            .iter()
            .map(|parts| parts.iter().map(|part| (part.address, part.offset, part.length)).collect())
            .collect();
        let last = vec![(0x10_0000, 0x1000, 0x3000), (0x20_0000, 0x2000, 0x1000)];
        let expected =
            [vec![(0x10_5000, 0x6000, 0x2000)], vec![(0x30_0000, 0x9000, 0x1000)], Vec::new(), last];
        assert_eq!(found, expected);
    }

    #[test]
    fn written_pages_are_populated_and_cut_to_the_range() {
        let file = abi::memory_file(c"placeholder", 16 * 4096).unwrap();
        file.write_all_at(&[1; 3 * 4096], 2 * 4096).unwrap();
        file.write_all_at(&[1], 9 * 4096 + 5).unwrap();
        let all = populated_ranges(file.as_fd(), 0, 16 * 4096).unwrap();
        assert_eq!(all, [2 * 4096..5 * 4096, 9 * 4096..10 * 4096]);
        let cut = populated_ranges(file.as_fd(), 3 * 4096, 6 * 4096 + 4096).unwrap();
        assert_eq!(cut, [3 * 4096..5 * 4096, 9 * 4096..10 * 4096]);
        assert_eq!(populated_ranges(file.as_fd(), 10 * 4096, 6 * 4096).unwrap(), []);
    }
}
