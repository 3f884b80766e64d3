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
//! * `shortage`: how long memory is waited for that the kernel refuses.
//! * `condemn`: ending a session whose bytes cannot be had.
//!
//! How much of the disk the background may have says [`rewake_image_io::pace`].

mod abort;
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
