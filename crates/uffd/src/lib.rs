// SPDX-License-Identifier: MIT OR Apache-2.0
//! userfaultfd for page servers, with exact outcomes, every operation that lazy restore needs, and decoded
//! events.
//!
//! The `userfaultfd` crate is the usual wrapper, but lacks three things (see
//! `docs/decisions/0002-userfaultfd.md`): the kernel's signed `copy` count on EAGAIN, UFFDIO_POISON, and
//! reading messages into memory that outlives the reader. Sources: `fs/userfaultfd.c`, `mm/userfaultfd.c`,
//! `include/uapi/linux/userfaultfd.h` of Linux 6.18.
//!
//! - [`abi`]: numbers, structs and all ioctls, asserted at compile time.
//! - [`Uffd`]: one owned descriptor and its operations.
//! - [`Outcome`]: how many bytes an operation filled and why it stopped.
//! - [`Message`]: one decoded event.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

pub mod abi;
mod message;
mod outcome;
mod port;

pub use message::{Message, RawMessage};
pub use outcome::{Outcome, Stop};
pub use port::{FillPort, Uffd, address_space_ended, negotiated_features, open_unnegotiated};

/// Bytes in a page. Rewake runs where CRIU's lazy pages work with 4 KiB pages (x86_64).
pub const PAGE_SIZE: u64 = 4096;
