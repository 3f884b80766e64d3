// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events: `struct uffd_msg`, 32 bytes each.

use crate::abi;

/// `struct uffd_msg` as read. A zeroed one is an empty slot: no event has number 0.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RawMessage {
    /// `UFFD_EVENT_*`; 0 when the slot is empty.
    pub event: u8,
    reserved: [u8; 7],
    args: [u64; 3],
}

const _: () = assert!(size_of::<RawMessage>() == 32);

/// A decoded event. Addresses are the target's; lengths are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// A thread waits for the page at `address`.
    Fault {
        /// Start of the page.
        address: u64,
    },
    /// The process forked. `uffd` is a new descriptor in this process for the child's address space.
    Fork {
        /// Descriptor number, opened by the read that gave this message.
        uffd: i32,
    },
    /// `mremap` moved `len` bytes.
    Remap {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Bytes moved.
        len: u64,
    },
    /// MADV_DONTNEED, MADV_FREE or MADV_REMOVE on `start..end`: missing pages there are zero from now on.
    Remove {
        /// First byte.
        start: u64,
        /// End, exclusive.
        end: u64,
    },
    /// `munmap`, or a mapping put over `start..end`.
    Unmap {
        /// First byte.
        start: u64,
        /// End, exclusive.
        end: u64,
    },
    /// An event of this kernel that Rewake does not know.
    Unknown(u8),
}

impl RawMessage {
    /// Decodes a message; returns None for an empty slot.
    #[must_use]
    pub fn decode(&self) -> Option<Message> {
        let [a, b, c] = self.args;
        Some(match self.event {
            0 => return None,
            abi::EVENT_PAGEFAULT => Message::Fault { address: b & !(crate::PAGE_SIZE - 1) },
            abi::EVENT_FORK => {
                // `arg.fork.ufd` is a u32 in the first argument word; CRIU's lazy-pages hosts are little
                // endian.
                let [b0, b1, b2, b3, ..] = a.to_ne_bytes();
                Message::Fork { uffd: i32::from_ne_bytes([b0, b1, b2, b3]) }
            }
            abi::EVENT_REMAP => Message::Remap { from: a, to: b, len: c },
            abi::EVENT_REMOVE => Message::Remove { start: a, end: b },
            abi::EVENT_UNMAP => Message::Unmap { start: a, end: b },
            other => Message::Unknown(other),
        })
    }

    /// Makes a message as the kernel would write it, for tests and simulations.
    #[must_use]
    pub fn encode(event: u8, args: [u64; 3]) -> Self {
        Self { event, reserved: [0; 7], args }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_slot_is_no_message() {
        assert_eq!(RawMessage::default().decode(), None);
    }

    #[test]
    fn a_fault_names_its_page() {
        let raw = RawMessage::encode(abi::EVENT_PAGEFAULT, [0, 0x7000_1234, 0]);
        assert_eq!(raw.decode(), Some(Message::Fault { address: 0x7000_1000 }));
    }

    #[test]
    fn a_fork_carries_a_descriptor() {
        let raw = RawMessage::encode(abi::EVENT_FORK, [7, 0, 0]);
        assert_eq!(raw.decode(), Some(Message::Fork { uffd: 7 }));
    }

    #[test]
    fn an_unmap_of_more_than_two_gib_keeps_its_length() {
        let raw = RawMessage::encode(abi::EVENT_UNMAP, [0x1000, 0x1000 + (3 << 30), 0]);
        assert_eq!(raw.decode(), Some(Message::Unmap { start: 0x1000, end: 0x1000 + (3 << 30) }));
    }

    #[test]
    fn an_unknown_event_is_kept() {
        assert_eq!(RawMessage::encode(0x77, [0; 3]).decode(), Some(Message::Unknown(0x77)));
    }
}
