// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a header means, checked.

use rewake_criu_images::{PAGE, PageFlags, PagemapId};

use crate::error::BadMessage;
use crate::header::MessageHeader;

/// The commands, in the low [`COMMAND_BITS`] bits.
mod command {
    pub(super) const ADD: u32 = 1;
    pub(super) const HOLE: u32 = 2;
    pub(super) const OPEN: u32 = 3;
    pub(super) const OPEN_ANSWERED: u32 = 4;
    pub(super) const PARENT: u32 = 5;
    pub(super) const ADD_FLAGS: u32 = 6;
    pub(super) const GET: u32 = 7;
    pub(super) const ADD_COMPRESSED: u32 = 8;
    pub(super) const CLOSE: u32 = 0x1023;
    pub(super) const FORCE_CLOSE: u32 = 0x1024;
}

const COMMAND_BITS: u32 = 16;
/// The kinds in the lowest byte of an id.
const TASK: u64 = 1;
const SHARED: u64 = 2;
const KIND_BITS: u32 = 8;

/// Pages at consecutive addresses: at least one, inside the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    vaddr: u64,
    pages: u64,
}

impl PageRun {
    /// Checks a run.
    ///
    /// # Errors
    /// It has no pages, begins inside a page, or ends beyond the last address.
    pub fn new(vaddr: u64, pages: u64) -> Result<Self, BadMessage> {
        if pages == 0 {
            return Err(BadMessage::NoPages(vaddr));
        }
        if !vaddr.is_multiple_of(PAGE) {
            return Err(BadMessage::Unaligned(vaddr));
        }
        let end = pages.checked_mul(PAGE).and_then(|bytes| vaddr.checked_add(bytes));
        end.map(|_| Self { vaddr, pages }).ok_or(BadMessage::Overflow { vaddr, pages })
    }

    /// Returns the address of the first page.
    #[must_use]
    pub fn vaddr(self) -> u64 {
        self.vaddr
    }

    /// Returns the number of pages.
    #[must_use]
    pub fn pages(self) -> u64 {
        self.pages
    }

    /// Returns the first address after the run.
    #[must_use]
    pub fn end(self) -> u64 {
        self.vaddr + self.pages * PAGE
    }
}

/// How the present pages of a [`PageMessage::Add`] follow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagesEncoding {
    /// Their bytes, 4096 for each.
    Raw,
    /// Each page alone, compressed by LZ4: a length, then the bytes ([`crate::CompressedPage`]). CRIU 4.3.
    Lz4,
}

/// A message of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageMessage {
    /// The next pages are of this memory.
    Open {
        /// The memory.
        id: PagemapId,
        /// Whether the client waits for [`crate::opened`]; it does since CRIU 1.8.
        wants_answer: bool,
    },
    /// Does the parent image have pages of this memory? The answer is [`crate::has_parent`].
    AskParent {
        /// The memory.
        id: PagemapId,
    },
    /// Pages of the memory that was opened. Those that are present follow the message.
    Add {
        /// The memory.
        id: PagemapId,
        /// The pages.
        run: PageRun,
        /// Their place, as in a pagemap: never none, and never both in the parent and present.
        flags: PageFlags,
        /// How they follow.
        encoding: PagesEncoding,
    },
    /// Requests pages. The answer has the first page, and as many of the next ones as the server gives at
    /// once.
    Get {
        /// The task.
        pid: u32,
        /// The pages.
        run: PageRun,
    },
    /// The client has sent all, or needs nothing more. The answer is [`crate::CLOSED`].
    Close {
        /// The client keeps its connection open.
        forced: bool,
    },
}

impl PageMessage {
    /// Reads a client's header.
    ///
    /// # Errors
    /// It violates the protocol.
    pub fn parse(header: &MessageHeader) -> Result<Self, BadMessage> {
        let command = header.command & ((1 << COMMAND_BITS) - 1);
        let flags = header.command >> COMMAND_BITS;
        let plain = |message: Self| {
            let expected = "none";
            if flags == 0 { Ok(message) } else { Err(BadMessage::Flags { command, flags, expected }) }
        };
        let add = |flags, encoding| {
            let (id, run) = (memory(header.id)?, PageRun::new(header.vaddr, header.pages)?);
            Ok(Self::Add { id, run, flags, encoding })
        };
        match command {
            command::OPEN => plain(Self::Open { id: memory(header.id)?, wants_answer: false }),
            command::OPEN_ANSWERED => plain(Self::Open { id: memory(header.id)?, wants_answer: true }),
            command::PARENT => plain(Self::AskParent { id: memory(header.id)? }),
            command::ADD => plain(add(PageFlags::PRESENT, PagesEncoding::Raw)?),
            command::HOLE => plain(add(PageFlags::PARENT, PagesEncoding::Raw)?),
            command::ADD_FLAGS => add(place(command, flags)?, PagesEncoding::Raw),
            command::ADD_COMPRESSED => {
                let place = place(command, flags)?;
                let expected = "present pages";
                let present = place.has(PageFlags::PRESENT);
                present.then_some(()).ok_or(BadMessage::Flags { command, flags, expected })?;
                add(place, PagesEncoding::Lz4)
            }
            command::GET => {
                let pid = u32::try_from(header.id).ok().filter(|pid| is_pid(*pid));
                let pid = pid.ok_or(BadMessage::Pid(header.id))?;
                plain(Self::Get { pid, run: PageRun::new(header.vaddr, header.pages)? })
            }
            command::CLOSE => plain(Self::Close { forced: false }),
            command::FORCE_CLOSE => plain(Self::Close { forced: true }),
            _ => Err(BadMessage::UnknownCommand(command)),
        }
    }

    /// Returns the header of a message, as CRIU of this age writes it.
    #[must_use]
    pub fn header(&self) -> MessageHeader {
        let about = |command, id| MessageHeader { command, id: number(id), ..MessageHeader::default() };
        match *self {
            Self::Open { id, wants_answer: false } => about(command::OPEN, id),
            Self::Open { id, wants_answer: true } => about(command::OPEN_ANSWERED, id),
            Self::AskParent { id } => about(command::PARENT, id),
            Self::Add { id, run, flags, encoding } => {
                let command = match encoding {
                    PagesEncoding::Raw => command::ADD_FLAGS,
                    PagesEncoding::Lz4 => command::ADD_COMPRESSED,
                };
                MessageHeader {
                    command: command | flags.0 << COMMAND_BITS,
                    pages: run.pages,
                    vaddr: run.vaddr,
                    id: number(id),
                }
            }
            Self::Get { pid, run } => {
                MessageHeader { command: command::GET, pages: run.pages, vaddr: run.vaddr, id: pid.into() }
            }
            Self::Close { forced } => {
                let command = if forced { command::FORCE_CLOSE } else { command::CLOSE };
                MessageHeader { command, ..MessageHeader::default() }
            }
        }
    }
}

/// Returns the header of an answer to [`PageMessage::Get`]: the pages of `run` follow it.
#[must_use]
pub fn answer_header(pid: u32, run: PageRun) -> MessageHeader {
    MessageHeader {
        command: command::ADD_FLAGS | PageFlags::PRESENT.0 << COMMAND_BITS,
        pages: run.pages,
        vaddr: run.vaddr,
        id: pid.into(),
    }
}

/// Checks the place that the flags of a command give to its pages.
fn place(command: u32, flags: u32) -> Result<PageFlags, BadMessage> {
    let known = PageFlags::PARENT | PageFlags::LAZY | PageFlags::PRESENT;
    let place = PageFlags(flags);
    let twice = place.has(PageFlags::PARENT | PageFlags::PRESENT);
    if flags == 0 || flags & !known.0 != 0 || twice {
        let expected = "one of parent (1) and present (4), or lazy (2) alone or with one of them";
        return Err(BadMessage::Flags { command, flags, expected });
    }
    Ok(place)
}

/// Reads the number of a memory: its kind in the lowest byte, its id above.
fn memory(number: u64) -> Result<PagemapId, BadMessage> {
    let (kind, id) = (number & ((1 << KIND_BITS) - 1), number >> KIND_BITS);
    match kind {
        TASK => u32::try_from(id).ok().filter(|pid| is_pid(*pid)).map(PagemapId::Task),
        SHARED => Some(PagemapId::Shared(id)),
        _ => None,
    }
    .ok_or(BadMessage::UnknownMemory(number))
}

/// Writes the number of a memory. CRIU cuts ids of 2^56 and more, too.
fn number(id: PagemapId) -> u64 {
    match id {
        PagemapId::Task(pid) => u64::from(pid) << KIND_BITS | TASK,
        PagemapId::Shared(id) => id << KIND_BITS | SHARED,
    }
}

fn is_pid(number: u32) -> bool {
    number > 0 && i32::try_from(number).is_ok()
}
