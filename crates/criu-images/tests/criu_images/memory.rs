// SPDX-License-Identifier: MIT OR Apache-2.0
//! A file can make a parser allocate only memory in proportion to its length, for any contents. One test
//! only: the count is for the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::common::hex;
use rewake_criu_images::fuzz::{FuzzKind, fuzz_one};

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting uses only atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller keeps GlobalAlloc's contract, which is System's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as in alloc.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Fixed buffers and messages.
const BASE: usize = 64 << 10;
/// Bytes of memory for one byte of a file: its copy in memory, a string of two bytes with its 24-byte header,
/// a vector that doubles while the old half still exists, and a margin.
const FACTOR: usize = 64;

fn peak(kind: FuzzKind, bytes: &[u8]) -> usize {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    fuzz_one(kind, bytes);
    PEAK.load(Relaxed) - before
}

fn file(header: &str, record: &[u8]) -> Vec<u8> {
    let mut bytes = hex(header);
    bytes.extend_from_slice(&u32::try_from(record.len()).unwrap().to_le_bytes());
    bytes.extend_from_slice(record);
    bytes
}

/// A file of CRIU's amdgpu plugin.
fn amdgpu(start: &str, rest: &[u8]) -> Vec<u8> {
    let contents = [&hex(start), rest].concat();
    [&(contents.len() as u64).to_le_bytes()[..], &contents].concat()
}

#[test]
fn memory_is_in_proportion_to_the_file_and_not_to_its_claims() {
    let wide_open = hex("19435654 25400856 02000000 0801 ffff0000 08");
    let mm = "19435654 20284957";
    let inputs = [
        ("a record that claims 64 KiB", FuzzKind::Pagemap, wide_open),
        ("a record that claims 256 MiB", FuzzKind::Mm, hex(&format!("{mm} 00000010 72"))),
        ("a record that claims 4 GiB", FuzzKind::Pstree, hex("19435654 30302750 ffffffff 08")),
        ("a million empty mappings", FuzzKind::Mm, file(mm, &hex("7200").repeat(1 << 20))),
        ("small mappings", FuzzKind::Mm, file(mm, &hex("720b 0800 108020 30223801 2000").repeat(1 << 16))),
        (
            "nested names",
            FuzzKind::Inventory,
            file("16313158", &{
                let mut record = hex("08026280a007");
                record.extend(hex("6200").repeat(60_000 + 1440));
                record
            }),
        ),
        ("many threads", FuzzKind::Pstree, file("19435654 30302750", &hex("2801").repeat(1 << 20))),
        ("contents that claim 256 MiB", FuzzKind::AmdgpuKfd, hex("0000001000000000 08")),
        // A million of them, as the file counts.
        ("empty nodes", FuzzKind::AmdgpuKfd, amdgpu("10808040 1800", &hex("2200").repeat(1 << 20))),
        ("empty buffers", FuzzKind::AmdgpuKfd, amdgpu("1000 1800 28808040", &hex("3200").repeat(1 << 20))),
        ("empty buffers", FuzzKind::AmdgpuRender, amdgpu("0801 20808040", &hex("2a00").repeat(1 << 20))),
        (
            "empty mappings",
            FuzzKind::AmdgpuRender,
            amdgpu("0801 2001 2a848080 01 48808040", &hex("5200").repeat(1 << 20)),
        ),
    ];
    for (name, kind, bytes) in inputs {
        let (peak, limit) = (peak(kind, &bytes), BASE + FACTOR * bytes.len());
        assert!(peak <= limit, "{name}: {} bytes took {peak}, expected at most {limit}", bytes.len());
    }
}
