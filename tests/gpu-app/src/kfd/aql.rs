// SPDX-License-Identifier: MIT OR Apache-2.0
//! Encodes work for compute queues: AQL packets of the HSA standard.

/// An AQL packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aql([u8; 64]);

/// Waits for all earlier packets, with acquire and release fences of system scope.
const ORDERED: u16 = 1 << 8 | 2 << 9 | 2 << 11;
const DISPATCH: u16 = 2;
const BARRIER_AND: u16 = 3;
const BARRIER_OR: u16 = 5;

impl Aql {
    /// Bytes of a packet.
    pub const SIZE: u64 = 64;
    /// The header of a slot that holds no packet yet.
    pub const INVALID: u32 = 1;

    /// Runs a kernel after all earlier packets. `kernel` is the address of its code object's descriptor, and
    /// `arguments` that of its arguments. `signal` is the address of the signal that is decremented at the
    /// end (0: none).
    #[must_use]
    pub fn dispatch(kernel: u64, arguments: u64, signal: u64) -> Self {
        let mut packet = Self::header(DISPATCH | ORDERED);
        packet.put16(2, 1); // dimensions
        packet.put16(4, 1);
        packet.put16(6, 1);
        packet.put16(8, 1);
        packet.put32(12, 1);
        packet.put32(16, 1);
        packet.put32(20, 1);
        packet.put64(32, kernel);
        packet.put64(40, arguments);
        packet.put64(56, signal);
        packet
    }

    /// Waits until all of up to five signals are 0, or until one of them is.
    #[must_use]
    pub fn barrier(signals: &[u64; 5], any: bool, signal: u64) -> Self {
        let mut packet = Self::header(ORDERED | if any { BARRIER_OR } else { BARRIER_AND });
        for (index, dependency) in signals.iter().enumerate() {
            packet.put64(8 + index * 8, *dependency);
        }
        packet.put64(56, signal);
        packet
    }

    /// Makes a packet of an invalid kind, for tests.
    #[must_use]
    pub fn of_kind(kind: u16) -> Self {
        Self::header(kind)
    }

    fn header(header: u16) -> Self {
        let mut packet = Self([0; 64]);
        packet.put16(0, header);
        packet
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.0[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn put64(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// Returns the bytes in memory.
    #[must_use]
    pub fn bytes(&self) -> &[u8; 64] {
        &self.0
    }
}

/// A signal in memory, as ROCr lays it out (`amd_signal_t`). A packet decrements it at its end.
#[derive(Debug, Clone, Copy)]
pub struct Signal;

impl Signal {
    /// Its size in bytes, and its alignment.
    pub const SIZE: u64 = 64;
    /// The offset of its value.
    pub const VALUE: u64 = 8;

    /// Returns the bytes of a signal with that value. When it ends, a GPU writes `event` to `mailbox` and
    /// interrupts (0, 0: neither).
    #[must_use]
    pub fn bytes(value: i64, mailbox: u64, event: u32) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&1_i64.to_le_bytes()); // a user signal
        bytes[8..16].copy_from_slice(&value.to_le_bytes());
        bytes[16..24].copy_from_slice(&mailbox.to_le_bytes());
        bytes[24..28].copy_from_slice(&event.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dispatch_has_its_addresses_at_the_hsa_offsets() {
        let packet = *Aql::dispatch(0x11, 0x22, 0x33).bytes();
        let at = |at: usize| u64::from_le_bytes(packet[at..at + 8].try_into().unwrap());
        assert_eq!((packet[0], at(32), at(40), at(56)), (2, 0x11, 0x22, 0x33));
        assert_eq!(u16::from_le_bytes([packet[0], packet[1]]) >> 8 & 1, 1, "the barrier bit");
    }

    #[test]
    fn a_barrier_names_five_signals() {
        let packet = *Aql::barrier(&[1, 2, 3, 4, 5], false, 6).bytes();
        let at = |at: usize| u64::from_le_bytes(packet[at..at + 8].try_into().unwrap());
        assert_eq!((packet[0], at(8), at(40), at(56)), (3, 1, 5, 6));
        assert_eq!(Aql::barrier(&[0; 5], true, 0).bytes()[0], 5);
    }
}
