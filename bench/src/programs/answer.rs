// SPDX-License-Identifier: MIT OR Apache-2.0
//! The right answers, computed here and not by the programs: bench/programs has the same arithmetic in each
//! language.

use super::program::{Program, Question};

/// Elements in a row and in a column of one matrix of the Python program, which has 8 MiB.
const MATRIX_ROWS: u64 = 1024;
const MATRIX_PRIME: u64 = 1_000_003;
/// 32-bit words of one value of the Node program, which has 64 KiB.
const VALUE_WORDS: u32 = 16384;
const VALUE_STRIDE: u64 = 7919;
/// 64-bit words of one array of the Java program, which has 4 KiB.
const ARRAY_LONGS: u32 = 512;
/// Values of the redis program in one MiB.
const REDIS_VALUES: u64 = 256;
/// 64-bit words of one child of the prefork program, which has 6 MiB.
const CHILD_WORDS: u64 = 786_432;
/// Most MiB of a program.
pub(crate) const MAX_MIB: u64 = 4096;
// The stride is a prime and no factor of the number of values, so a question for all values reads each of
// them once.
const _: () = assert!(MAX_MIB < VALUE_STRIDE);
/// 2^64 divided by the golden ratio, an odd number: multiples of it spread over all 64 bits.
pub(crate) const SPREAD_64: u64 = 0x9E37_79B9_7F4A_7C15;
const SPREAD_32: u32 = 0x9E37_79B1;

impl Program {
    /// Units (matrices, values, arrays, children, keys) that the program holds when it fills `mib` MiB.
    pub(crate) fn units(self, mib: u64) -> u64 {
        match self {
            Self::Python | Self::PythonQuarter | Self::PythonNoise | Self::PythonNoiseQuarter => mib / 8,
            Self::Node => mib * 16,
            Self::Java => mib * 256,
            Self::Prefork => mib / 6,
            Self::Redis => mib * REDIS_VALUES,
        }
    }

    /// The line that a program of `mib` MiB must answer; none for redis, which answers with values.
    pub(crate) fn right_answer(self, mib: u64, question: Question) -> Option<String> {
        let units = self.units(mib);
        match self {
            Self::Python | Self::PythonQuarter => Some(matrix_answer(units, question, small).to_string()),
            Self::PythonNoise | Self::PythonNoiseQuarter => {
                Some(matrix_answer(units, question, noise).to_string())
            }
            Self::Node => Some(value_answer(units, question).to_string()),
            Self::Java => Some(array_answer(units, question).to_string()),
            Self::Prefork => Some(tree_answer(units, question).to_string()),
            Self::Redis => None,
        }
    }
}

/// Of small elements all products are below 2^8 * 2^20 and all sums below 2^38: whole numbers give what the
/// program's floats give.
fn matrix_answer(units: u64, Question { seed, count }: Question, element: fn(u64) -> u64) -> u64 {
    let mut vector: Vec<u64> = (0..MATRIX_ROWS).map(|row| (u64::from(seed) + row) % MATRIX_PRIME).collect();
    for step in 0..count {
        let first = (u64::from(seed) + step) % units * MATRIX_ROWS * MATRIX_ROWS;
        let product = |row: u64| {
            let columns = vector.iter().zip(first + row * MATRIX_ROWS..);
            let products = columns.map(|(factor, index)| factor.wrapping_mul(element(index)));
            products.fold(0, u64::wrapping_add) % MATRIX_PRIME
        };
        vector = (0..MATRIX_ROWS).map(product).collect();
    }
    vector.iter().fold(seed.into(), |checksum: u64, element| checksum.wrapping_mul(31).wrapping_add(*element))
}

/// An element from 0 to 255.
fn small(index: u64) -> u64 {
    index.wrapping_mul(SPREAD_64) >> 56
}

/// An element that does not compress.
fn noise(index: u64) -> u64 {
    let hashed = index.wrapping_mul(SPREAD_64);
    (hashed ^ hashed >> 32).wrapping_mul(SPREAD_64)
}

fn value_answer(units: u64, Question { seed, count }: Question) -> u32 {
    let mut checksum = seed;
    for step in 0..count {
        let number = (u64::from(seed) + step * VALUE_STRIDE) % units;
        let number = u32::try_from(number).expect("at most MAX_MIB * 16 values");
        let mut state = (number + 1).wrapping_mul(SPREAD_32);
        for _ in 0..VALUE_WORDS {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            checksum = checksum.wrapping_mul(31).wrapping_add(state);
        }
    }
    checksum
}

fn array_answer(units: u64, Question { seed, count }: Question) -> u64 {
    let mut checksum = u64::from(seed);
    for step in 0..count {
        let number = (u64::from(seed) + step) % units;
        let mut state = (number + 1).wrapping_mul(SPREAD_64);
        for _ in 0..ARRAY_LONGS {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            checksum = checksum.wrapping_mul(31).wrapping_add(state);
        }
    }
    checksum
}

fn tree_answer(units: u64, Question { seed, count }: Question) -> u64 {
    (0..count).fold(seed.into(), |checksum: u64, step| {
        let first = (u64::from(seed) + step) % units * CHILD_WORDS + 1;
        let words = first..first + CHILD_WORDS;
        checksum.wrapping_mul(31).wrapping_add(adler32(words.flat_map(u64::to_le_bytes)).into())
    })
}

/// The checksum of zlib (RFC 1950, section 9).
fn adler32(bytes: impl Iterator<Item = u8>) -> u32 {
    const PRIME: u32 = 65521;
    let add = |(sum, sums): (u32, u32), byte| {
        let sum = (sum + u32::from(byte)) % PRIME;
        (sum, (sums + sum) % PRIME)
    };
    let (sum, sums) = bytes.fold((1, 0), add);
    sums << 16 | sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that the programs themselves gave, started by hand with 32 MiB on 2026-11-24 and 26.
    #[test]
    fn right_answers_are_those_that_running_programs_gave() {
        let expected = [
            (Program::Python, ["13097940399195196703", "2419542225988692001", "495456643708847142"]),
            (Program::PythonNoise, ["1069983177723904247", "11365708152942482724", "13311588437023028153"]),
            (Program::Node, ["924526795", "3729726833", "4018503507"]),
            (Program::Java, ["7552685740735618517", "1560788171790124050", "5528501666300982893"]),
            (Program::Prefork, ["3301740741806", "2456779928445", "106454493945"]),
        ];
        for (program, answers) in expected {
            for ((seed, count), answer) in [(1001, 3), (1002, 3), (1001, 2)].into_iter().zip(answers) {
                let right = program.right_answer(32, Question { seed, count });
                assert_eq!(right.as_deref(), Some(answer), "{program}");
            }
        }
    }
}
