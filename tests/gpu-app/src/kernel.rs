// SPDX-License-Identifier: MIT OR Apache-2.0
//! The soft GPU's built-in kernels: how a dispatch names one, what its arguments are, and what it computes.
//! All numbers are little-endian; arithmetic wraps.

/// First word of a kernel's descriptor.
const MAGIC: [u8; 8] = *b"SGKERN01";
/// Bytes between descriptors.
pub const STRIDE: u64 = 64;
/// Bytes of the code buffer: one descriptor for every kernel, by number.
pub const CODE: u64 = 4096;
/// Bytes of one kernel's arguments.
pub const ARGUMENTS: u64 = 64;

/// One dispatch, with addresses in the GPU's address space.
#[expect(missing_docs, reason = "fields are the kernel's arguments, by name")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Words of a value.
    Fill { to: u64, words: u64, value: u32 },
    /// Bytes.
    Copy { to: u64, from: u64, bytes: u64 },
    /// `y[i] += a * x[i]`, 32-bit.
    Axpy { y: u64, x: u64, words: u64, a: u32 },
    /// `out[r]` = sum of `weights[r][c] * (input[c] | 1)`, 32-bit.
    MatVec { out: u64, weights: u64, input: u64, rows: u64, columns: u64 },
    /// A 64-bit hash of bytes, a multiple of 8.
    Hash { out: u64, from: u64, bytes: u64, seed: u64 },
    /// Follows pointers, and writes where it ends.
    Chase { out: u64, start: u64, steps: u64 },
    /// Keeps a lane busy.
    Spin { microseconds: u64 },
}

impl Kernel {
    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        match self {
            Self::Fill { .. } => 1,
            Self::Copy { .. } => 2,
            Self::Axpy { .. } => 3,
            Self::MatVec { .. } => 4,
            Self::Hash { .. } => 5,
            Self::Chase { .. } => 6,
            Self::Spin { .. } => 7,
        }
    }

    /// Where its descriptor is in the code buffer.
    #[must_use]
    pub fn code_offset(&self) -> u64 {
        u64::from(self.number()) * STRIDE
    }

    /// Its arguments in memory.
    #[must_use]
    pub fn arguments(&self) -> [u8; 40] {
        let words = match *self {
            Self::Fill { to, words, value } => [to, words, u64::from(value), 0, 0],
            Self::Copy { to, from, bytes } => [to, from, bytes, 0, 0],
            Self::Axpy { y, x, words, a } => [y, x, words, u64::from(a), 0],
            Self::MatVec { out, weights, input, rows, columns } => [out, weights, input, rows, columns],
            Self::Hash { out, from, bytes, seed } => [out, from, bytes, seed, 0],
            Self::Chase { out, start, steps } => [out, start, steps, 0, 0],
            Self::Spin { microseconds } => [microseconds, 0, 0, 0, 0],
        };
        let mut bytes = [0; 40];
        for (chunk, word) in bytes.chunks_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// The code buffer's bytes.
#[must_use]
pub fn code() -> Vec<u8> {
    let mut code = vec![0; usize::try_from(CODE).unwrap_or(0)];
    let stride = usize::try_from(STRIDE).unwrap_or(1);
    for (number, descriptor) in (0_u32..).zip(code.chunks_mut(stride)).take(8).skip(1) {
        descriptor[..8].copy_from_slice(&MAGIC);
        descriptor[8..12].copy_from_slice(&number.to_le_bytes());
    }
    code
}

/// What [`Kernel::Axpy`] computes.
pub fn axpy(y: &mut [u32], x: &[u32], a: u32) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = y.wrapping_add(a.wrapping_mul(*x));
    }
}

/// One row of what [`Kernel::MatVec`] computes.
#[must_use]
pub fn dot(row: &[u32], input: &[u32]) -> u32 {
    row.iter().zip(input).fold(0, |sum: u32, (w, x)| sum.wrapping_add(w.wrapping_mul(x | 1)))
}

/// What [`Kernel::Hash`] computes.
#[must_use]
pub fn hash(words: impl IntoIterator<Item = u64>, seed: u64) -> u64 {
    words.into_iter().fold(seed, |h, word| (h ^ word).rotate_left(29).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Bytes as 32-bit words.
pub fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap_or_default()))
}

/// Bytes as 64-bit words.
pub fn longs(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
}

/// 32-bit words as 64-bit words; an odd last one is followed by zero.
pub fn pairs(words: &[u32]) -> impl Iterator<Item = u64> {
    words.chunks(2).map(|pair| u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_lie_where_dispatches_look() {
        let code = code();
        let chase = Kernel::Chase { out: 1, start: 2, steps: 3 };
        let at = usize::try_from(chase.code_offset()).unwrap();
        assert_eq!(&code[at..at + 12], b"SGKERN01\x06\0\0\0");
        assert_eq!(longs(&chase.arguments()).collect::<Vec<_>>(), [1, 2, 3, 0, 0]);
    }

    #[test]
    fn a_hash_of_two_parts_is_the_hash_of_the_whole() {
        assert_eq!(hash([1, 2, 3], 9), hash([3], hash([1, 2], 9)));
        assert_eq!(hash([1], 0), 1_u64.rotate_left(29).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
}
