// SPDX-License-Identifier: MIT OR Apache-2.0
//! userfaultfd for page servers: exact outcomes, every operation that lazy restore needs, decoded events.
//!
//! The `userfaultfd` crate is the field's usual wrapper. Three needs are outside it (see
//! `docs/decisions/0002-userfaultfd.md`): the kernel's signed `copy` count on EAGAIN, UFFDIO_POISON, and
//! reading messages into memory that survives the reader's death. Sources: `fs/userfaultfd.c`,
//! `mm/userfaultfd.c`, `include/uapi/linux/userfaultfd.h` of Linux 6.18.
//!
//! * [`abi`]: numbers and structs, asserted at compile time. No ioctl outside it.
//! * [`Uffd`]: one owned descriptor and its operations.
//! * [`Outcome`]: how far an operation got and why it stopped.
//! * [`Message`]: one decoded event.

pub mod abi;
mod message;
mod outcome;
mod port;

pub use message::{Message, RawMessage};
pub use outcome::{Outcome, Stop};
pub use port::{FillPort, Uffd, memory_is_gone, unready};

/// Bytes in a page. Rewake runs where CRIU's lazy pages do with 4 KiB pages (x86_64).
pub const PAGE_SIZE: u64 = 4096;
