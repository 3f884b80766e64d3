// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which pages of a process are its own. The kernel skips addresses without page tables, so that a terabyte
//! of which little was written takes no longer than what was written (`PAGEMAP_SCAN` of Linux 6.7:
//! `Documentation/admin-guide/mm/pagemap.rst`, `include/uapi/linux/fs.h`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;

use crate::check;

/// `PAGEMAP_SCAN`: `_IOWR('f', 16, struct pm_scan_arg)`.
const SCAN: libc::Ioctl = 0xc060_6610;
/// Categories of pages: `PAGE_IS_FILE` (or of shared memory), `PAGE_IS_PRESENT`, `PAGE_IS_SWAPPED`.
const FILE_OR_SHARED: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
/// Ranges of one call.
const REGIONS: usize = 512;

/// `struct pm_scan_arg`.
#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(size_of::<ScanArgument>() == 96 && size_of::<PageRegion>() == 24);
const _: () = assert!(SCAN >> 16 & 0x3fff == size_of::<ScanArgument>() as libc::Ioctl);

/// Calls `found` with the addresses of a range that have private pages, in memory or swap, in ascending
/// order. `pagemap` is a process's `/proc/PID/pagemap`. Both ends of the range are multiples of the page
/// size.
///
/// # Errors
/// The kernel is older than Linux 6.7 (ENOTTY), or the process has ended.
pub fn private_pages(pagemap: &File, range: Range<u64>, mut found: impl FnMut(Range<u64>)) -> io::Result<()> {
    let mut regions = [PageRegion::default(); REGIONS];
    let mut start = range.start;
    while start < range.end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            flags: 0,
            start,
            end: range.end,
            walk_end: 0,
            vec: regions.as_mut_ptr().expose_provenance() as u64,
            vec_len: REGIONS as u64,
            max_pages: 0,
            category_inverted: FILE_OR_SHARED,
            category_mask: FILE_OR_SHARED,
            category_anyof_mask: PRESENT | SWAPPED,
            return_mask: 0,
        };
        // SAFETY: the kernel reads and writes `argument`, and writes `vec_len` regions at most to `vec`.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), SCAN, &raw mut argument) };
        let count = usize::try_from(check(count.into())?).unwrap_or_default().min(REGIONS);
        regions[..count].iter().for_each(|region| found(region.start..region.end));
        if argument.walk_end <= start {
            return Err(io::Error::other("PAGEMAP_SCAN makes no progress"));
        }
        start = argument.walk_end;
    }
    Ok(())
}
