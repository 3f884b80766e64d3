// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is wrong with a message.

/// A message that violates the protocol. The connection has no use afterwards: where the next message begins
/// is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadMessage {
    /// A command that this crate does not know.
    #[error("unknown command {0:#x}: expected a command of CRIU 4.1 to 4.3; is the peer CRIU?")]
    UnknownCommand(u32),
    /// Flags that the command does not have, or that contradict each other.
    #[error("command {command:#x} with flags {flags:#x}: expected {expected}")]
    Flags {
        /// The command.
        command: u32,
        /// Its flags.
        flags: u32,
        /// The flags that it may have.
        expected: &'static str,
    },
    /// A run without pages.
    #[error("0 pages at {0:#x}: expected at least 1")]
    NoPages(u64),
    /// An address inside a page.
    #[error("pages at {0:#x}: expected a multiple of 4096")]
    Unaligned(u64),
    /// A run that ends beyond the last address.
    #[error("{pages} pages at {vaddr:#x}: expected an end inside the address space")]
    Overflow {
        /// The first address.
        vaddr: u64,
        /// Number of pages.
        pages: u64,
    },
    /// The number of the memory that a message is about is neither a task's nor a shared memory object's.
    #[error("memory {0:#x}: expected a task (kind 1, with a pid) or a shared memory object (kind 2)")]
    UnknownMemory(u64),
    /// A page request for a number that is no pid.
    #[error("task {0}: expected a pid from 1 to 2^31-1")]
    Pid(u64),
    /// The length of a compressed page.
    #[error("a compressed page of {0} bytes: expected at most 4096")]
    PageLength(u32),
}
