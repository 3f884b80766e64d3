// SPDX-License-Identifier: MIT OR Apache-2.0
//! What it costs to check the blocks of an image while they are loaded. A fill reads a block into a buffer
//! that stays in the CPU's cache, checks it, and copies it to its place. So each block is copied from a large
//! memory to a small buffer and then hashed; the time of the copy alone is subtracted.

use std::hint::black_box;
use std::time::Instant;

use anyhow::ensure;
use clap::Args;
use rewake_testkit::Random;

use crate::report::{Spread, Table};

/// Bytes of a block, and of a chunk of GPU memory.
const BLOCK: usize = 64 << 10;
const CHUNK: usize = 2 << 20;
/// CPU time of a fill in seconds per GB, with all that it does (`rewake-bench lazy`).
const FILL: f64 = 0.375;

/// Options of `checksums`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Memory that is read in each round, in MiB
    #[arg(long, default_value_t = 256)]
    size_mib: usize,
    /// Rounds; each runs every candidate once
    #[arg(long, default_value_t = 7)]
    rounds: usize,
}

/// A way to check a buffer.
struct Checksum {
    name: &'static str,
    /// Bytes that are checked at once.
    unit: usize,
    check: fn(&[u8]) -> u64,
}

const CANDIDATES: [Checksum; 9] = [
    Checksum { name: "copy only", unit: BLOCK, check: |_| 0 },
    Checksum { name: "CRC-32C", unit: BLOCK, check: |bytes| crc(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) },
    Checksum {
        name: "CRC-64/NVME",
        unit: BLOCK,
        check: |bytes| crc(crc_fast::CrcAlgorithm::Crc64Nvme, bytes),
    },
    Checksum { name: "XXH3-64", unit: BLOCK, check: twox_hash::XxHash3_64::oneshot },
    Checksum { name: "XXH3-128", unit: BLOCK, check: |bytes| low(twox_hash::XxHash3_128::oneshot(bytes)) },
    Checksum { name: "HighwayHash-64", unit: BLOCK, check: highway_hash },
    Checksum { name: "BLAKE3", unit: BLOCK, check: blake3_hash },
    Checksum { name: "copy only, 2 MiB", unit: CHUNK, check: |_| 0 },
    Checksum { name: "BLAKE3, 2 MiB", unit: CHUNK, check: blake3_hash },
];

fn crc(algorithm: crc_fast::CrcAlgorithm, bytes: &[u8]) -> u64 {
    crc_fast::checksum(algorithm, bytes)
}

fn low(hash: u128) -> u64 {
    u64::try_from(hash & u128::from(u64::MAX)).unwrap_or_default()
}

fn highway_hash(bytes: &[u8]) -> u64 {
    use highway::HighwayHash as _;
    highway::HighwayHasher::new(highway::Key::default()).hash64(bytes)
}

fn blake3_hash(bytes: &[u8]) -> u64 {
    let hash = blake3::hash(bytes);
    u64::from_le_bytes(*hash.as_bytes().first_chunk().unwrap_or(&[0; 8]))
}

/// Measures all candidates, and prints a table in Markdown.
///
/// # Errors
/// An option is out of range.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    ensure!((4..=65_536).contains(&options.size_mib), "--size-mib: 4 to 65536");
    ensure!((1..=1000).contains(&options.rounds), "--rounds: 1 to 1000");
    let memory = memory(options.size_mib << 20);
    let mut times = vec![Vec::new(); CANDIDATES.len()];
    for _ in 0..options.rounds {
        for (candidate, times) in CANDIDATES.iter().zip(&mut times) {
            times.push(time(candidate, &memory));
        }
    }
    let medians: Vec<f64> =
        times.into_iter().map(|times| Spread::of(times).map_or(0.0, |all| all.median)).collect();
    let gigabytes = memory.len() as f64 / 1e9;
    let mut table = Table::new(&["check", "s/GB", "GB/s", "of a fill"]);
    for (candidate, seconds) in CANDIDATES.iter().zip(&medians) {
        let base = CANDIDATES.iter().position(|base| base.unit == candidate.unit).unwrap_or_default();
        let own = if candidate.name.starts_with("copy") { *seconds } else { seconds - medians[base] };
        let cost = own / gigabytes;
        table.row(&[
            candidate.name.to_owned(),
            format!("{cost:.4}"),
            format!("{:.1}", 1.0 / cost),
            format!("{:.0} %", 100.0 * cost / FILL),
        ]);
    }
    print!("{table}");
    Ok(())
}

/// Memory like a program's: a third each of zeros, small numbers and random bytes, in pages.
fn memory(bytes: usize) -> Vec<u8> {
    let mut memory = vec![0; bytes];
    let mut random = Random::new(1);
    for (number, page) in memory.chunks_exact_mut(4096).enumerate() {
        for word in page.chunks_exact_mut(8) {
            let value = [0, random.number() & 0xffff, random.number()][number % 3];
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
    memory
}

/// Copies and checks all memory once. Returns the seconds that it took.
fn time(candidate: &Checksum, memory: &[u8]) -> f64 {
    let mut buffer = vec![0; candidate.unit];
    let start = Instant::now();
    for unit in memory.chunks_exact(candidate.unit) {
        buffer.copy_from_slice(unit);
        black_box((candidate.check)(black_box(&buffer)));
    }
    start.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_candidate_sees_one_flipped_bit_of_a_block() {
        let mut block = memory(BLOCK);
        for candidate in CANDIDATES.iter().filter(|candidate| !candidate.name.starts_with("copy")) {
            let before = (candidate.check)(&block);
            block[BLOCK - 1] ^= 1;
            assert_ne!((candidate.check)(&block), before, "{}", candidate.name);
        }
    }
}
