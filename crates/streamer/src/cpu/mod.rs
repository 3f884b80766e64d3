// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves page faults and loads memory in the background, on named threads ("reactors").
//!
//! Every address space has one *home* reactor. It alone reads the userfaultfd, so it sees events in order.
//! All reactors fill background blocks of all address spaces.
//!
//! * [`space`]: fills one address space. `kept_space`: what it has in its fd store.
//! * `pool`: starts the threads and assigns address spaces to them.
//! * `reactor`: a thread's loop: events, completions, one bounded piece of background work.
//! * `events`: applies what a fork, mremap, munmap or madvise changes.
//! * `reactor::demand`: loads the pages that page faults wait for.
//! * `reactor::background`: loads all other pages, block by block.
//! * `enomem_retry`: limits how long refused fills (ENOMEM) are tried again.
//! * `huge_pages`: collapses small pages of resident memory.
//! * `abort`: ends the address spaces of a failed session.
//! * [`address_spaces`]: opens, takes over and ends a session's address spaces.
//!
//! [`rewake_image_io::io_budget`] limits the background reads in flight.

mod abort;
pub mod address_spaces;
mod enomem_retry;
mod events;
mod huge_pages;
mod kept_space;
mod pool;
mod reactor;
mod shared;
pub mod space;
pub mod stats;
mod zero_pages;

pub use pool::ReactorPool;
pub use shared::ReactorRequest;
pub use space::AddressSpace;
