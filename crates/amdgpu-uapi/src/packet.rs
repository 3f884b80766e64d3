// SPDX-License-Identifier: MIT OR Apache-2.0
//! Encodes work for copy engines: SDMA packets.

/// The encoding of byte counts in an engine's packets, by the version of its IP. Kernel: `emit_copy_buffer`
/// of `cik_sdma.c`, `sdma_v2_4.c`, `sdma_v3_0.c` (bytes), `sdma_v4_0.c` and newer (bytes minus one).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CountEncoding {
    /// The most bytes that one packet copies or fills.
    largest: u64,
    /// The difference between the bytes and the count field.
    less: u64,
}

impl CountEncoding {
    /// The encoding of GFX9 and newer: 4 MiB, though some engines take 1 GiB. Older headers define 22 bits of
    /// count.
    pub const GFX9: Self = Self { largest: 1 << 22, less: 1 };

    /// Returns the encoding of an engine's IP version from INFO, or None for an unsupported version.
    #[must_use]
    pub fn of(major: u32) -> Option<Self> {
        match major {
            2 => Some(Self { largest: 0x1f_ffff, less: 0 }),
            3 => Some(Self { largest: 0x3f_ffe0, less: 0 }),
            4..=7 => Some(Self::GFX9),
            _ => None,
        }
    }

    /// Returns the number of packets that copy `bytes` bytes.
    #[must_use]
    pub fn copies(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.largest)
    }

    /// Returns the number of packets that fill `bytes` bytes. Each packet fills whole words.
    #[must_use]
    pub fn fills(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.largest_fill())
    }

    fn largest_fill(self) -> u64 {
        self.largest & !3
    }

    fn count(self, bytes: u64) -> u32 {
        u32::try_from(bytes - self.less).unwrap_or(u32::MAX)
    }
}

/// Packets for copy engines (`sdma_v4_4_2.c`, `vega10_sdma_pkt_open.h`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sdma {
    bytes: Vec<u8>,
    encoding: CountEncoding,
}

impl Default for Sdma {
    fn default() -> Self {
        Self::by(CountEncoding::GFX9)
    }
}

impl Sdma {
    /// The most bytes that one packet copies or fills, on GFX9 and newer.
    pub const LARGEST: u64 = CountEncoding::GFX9.largest;
    /// Bytes of a copy packet, the longest here.
    pub const COPY: u64 = 28;

    /// Returns an empty list of packets, for GFX9 and newer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an empty list of packets, for engines with that encoding.
    #[must_use]
    pub fn by(encoding: CountEncoding) -> Self {
        Self { bytes: Vec::new(), encoding }
    }

    /// Removes all packets, and keeps the allocation.
    #[must_use]
    pub fn cleared(mut self) -> Self {
        self.bytes.clear();
        self
    }

    /// Copies bytes, with as many packets as needed.
    #[must_use]
    pub fn copy(mut self, to: u64, from: u64, bytes: u64) -> Self {
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(self.encoding.largest);
            let count = self.encoding.count(part);
            self = self.copy_with_count(to + done, from + done, count);
            done += part;
        }
        self
    }

    /// Adds one copy packet with this count field, for tests of wrong counts.
    #[must_use]
    pub fn copy_with_count(self, to: u64, from: u64, count: u32) -> Self {
        self.word(1).word(count).word(0).address(from).address(to)
    }

    /// Fills with a 32-bit word, with as many packets as needed. `bytes` is a multiple of 4.
    #[must_use]
    pub fn fill(mut self, to: u64, word: u32, bytes: u64) -> Self {
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(self.encoding.largest_fill());
            let count = self.encoding.count(part);
            self = self.word(11 | 2 << 30).address(to + done).word(word).word(count);
            done += part;
        }
        self
    }

    /// Writes a 32-bit word when all earlier packets are done.
    #[must_use]
    pub fn fence(self, to: u64, word: u32) -> Self {
        self.word(5).address(to).word(word)
    }

    /// Raises an interrupt.
    #[must_use]
    pub fn trap(self) -> Self {
        self.word(6).word(0)
    }

    /// Does nothing, in one word.
    #[must_use]
    pub fn nop(self) -> Self {
        self.word(0)
    }

    /// Adds any word, for tests of invalid packets.
    #[must_use]
    pub fn word(mut self, word: u32) -> Self {
        self.bytes.extend(word.to_le_bytes());
        self
    }

    fn address(self, address: u64) -> Self {
        let (low, high) = (address & 0xffff_ffff, address >> 32);
        self.word(u32::try_from(low).unwrap_or(0)).word(u32::try_from(high).unwrap_or(0))
    }

    /// Returns the bytes in memory.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(packets: &Sdma) -> Vec<u32> {
        packets.bytes().chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    #[test]
    fn a_copy_count_is_bytes_minus_one_and_long_copies_are_split() {
        let one = Sdma::new().copy(0x2_0000_1000, 0x1_0000_2000, 256);
        assert_eq!(words(&one), [1, 255, 0, 0x2000, 1, 0x1000, 2]);
        let two = words(&Sdma::new().copy(0x8000_0000, 0, Sdma::LARGEST + 4));
        assert_eq!((two.len(), two[1], two[8], two[12]), (14, 0x3f_ffff, 3, 0x8040_0000));
    }

    #[test]
    fn a_fill_is_counted_and_split_as_a_copy() {
        assert_eq!(words(&Sdma::new().fill(0x2_0000_1000, 7, 256)), [0x8000_000b, 0x1000, 2, 7, 255]);
        let two = words(&Sdma::new().fill(0x8000_0000, 7, Sdma::LARGEST + 8));
        assert_eq!((two.len(), two[4], two[6], two[9]), (10, 0x3f_ffff, 0x8040_0000, 7));
    }

    #[test]
    fn older_engines_count_bytes_and_unknown_ones_have_no_encoding() {
        let (two, three) = (CountEncoding::of(2).unwrap(), CountEncoding::of(3).unwrap());
        assert_eq!(words(&Sdma::by(three).copy(0, 0, 256))[1], 256);
        assert_eq!((two.copies(0x1f_ffff), two.copies(0x20_0000), two.fills(0x1f_ffff)), (1, 2, 2));
        assert_eq!(words(&Sdma::by(two).fill(0, 0, 0x20_0000))[4], 0x1f_fffc, "whole words");
        assert_eq!((three.copies(0x3f_ffe0), three.copies(0x3f_ffe1)), (1, 2));
        for (version, known) in
            [(0, false), (1, false), (4, true), (5, true), (6, true), (7, true), (8, false)]
        {
            assert_eq!(CountEncoding::of(version), known.then_some(CountEncoding::GFX9), "version {version}");
        }
    }

    #[test]
    fn cleared_packets_keep_their_allocation() {
        let packets = Sdma::new().copy(0, 0, 1);
        assert_eq!(packets.bytes().len() as u64, Sdma::COPY);
        let memory = packets.bytes().as_ptr();
        let again = packets.cleared().fill(0, 0, 4);
        assert_eq!((again.bytes().len(), again.bytes().as_ptr()), (20, memory));
    }
}
