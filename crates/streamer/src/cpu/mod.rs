// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data plane: named threads ("reactors") that serve page faults and fill memory in the background.
//!
//! Every address space has one *home* reactor: it alone reads the userfaultfd, so events are seen in order.
//! Background blocks of any address space are filled by all reactors.
//!
//! * [`space`]: one address space and the pieces of filling it.
//! * `pool`: the threads. `reactor`: a thread's loop: events, completions, one bounded piece of background work, again.
//! * `events`: what a fork, mremap, munmap or madvise changes.
//! * `demand`: a page that a thread waits for.
//! * `background`: everything else, block by block.
//! * `enomem_retry`: how long memory is waited for that the kernel refuses.
//! * `abort`: ending a session whose bytes cannot be had.
//! * [`address_spaces`]: which address spaces a session has, and how they end.
//!
//! [`rewake_image_io::io_budget`] says how much of the disk the background load may have.

mod abort;
pub mod address_spaces;
mod background;
mod demand;
mod enomem_retry;
mod events;
mod pool;
mod reactor;
mod shared;
pub mod space;
pub mod stats;

pub use pool::{Pool, reactors};
pub use reactor::Task;
pub use space::AddressSpace;
