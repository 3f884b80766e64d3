// SPDX-License-Identifier: MIT OR Apache-2.0
//! Headers byte by byte, as CRIU 4.1.1 and 4.2.1 send them, and messages that are refused.

use rewake_criu_images::{PageFlags, PagemapId};
use rewake_page_protocol::{
    BadMessage, CompressedPage, HeaderLayout, MessageHeader, NARROW_LEN, PageMessage, PageRun, PagesEncoding,
    WIDE_LEN, answer_header, has_parent, opened,
};

const PRESENT_LAZY: PageFlags = PageFlags(6);

/// Bytes from hexadecimal digits; spaces are ignored.
fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u32> = hex.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).unwrap()).collect()
}

/// The layout and the message of the first header of a connection.
fn received(hex: &str) -> (HeaderLayout, Result<PageMessage, BadMessage>) {
    let bytes = bytes(hex);
    let layout = HeaderLayout::detect(bytes.first_chunk().unwrap());
    let mut header = [0; WIDE_LEN];
    header[..bytes.len()].copy_from_slice(&bytes);
    assert_eq!(bytes.len(), layout.len(), "{layout:?}");
    (layout, PageMessage::parse(&layout.decode(&header)))
}

fn run(vaddr: u64, pages: u64) -> PageRun {
    PageRun::new(vaddr, pages).unwrap()
}

fn parse(command: u32, pages: u64, vaddr: u64, id: u64) -> Result<PageMessage, BadMessage> {
    PageMessage::parse(&MessageHeader { command, pages, vaddr, id })
}

/// Messages with their bytes in both layouts: the first 24 bytes of a connection of 4.1.1, 32 of 4.2.1.
fn fixtures() -> Vec<(PageMessage, &'static str, &'static str)> {
    let task = PagemapId::Task(0x3b04);
    let shared = PagemapId::Shared(0x1_0203);
    let add = |flags, encoding| PageMessage::Add { id: task, run: run(0x7f00_0000_1000, 3), flags, encoding };
    vec![
        (
            PageMessage::Open { id: task, wants_answer: true },
            "04000000 00000000  0000000000000000  01043b0000000000",
            "04000000 00000000  0000000000000000  0000000000000000  01043b0000000000",
        ),
        (
            PageMessage::Open { id: shared, wants_answer: false },
            "03000000 00000000  0000000000000000  0203020100000000",
            "03000000 00000000  0000000000000000  0000000000000000  0203020100000000",
        ),
        (
            PageMessage::AskParent { id: task },
            "05000000 00000000  0000000000000000  01043b0000000000",
            "05000000 00000000  0000000000000000  0000000000000000  01043b0000000000",
        ),
        (
            add(PRESENT_LAZY, PagesEncoding::Raw),
            "06000600 03000000  00100000007f0000  01043b0000000000",
            "06000600 00000000  0300000000000000  00100000007f0000  01043b0000000000",
        ),
        (
            add(PageFlags::PARENT, PagesEncoding::Raw),
            "06000100 03000000  00100000007f0000  01043b0000000000",
            "06000100 00000000  0300000000000000  00100000007f0000  01043b0000000000",
        ),
        (
            add(PageFlags::PRESENT, PagesEncoding::Lz4),
            "08000400 03000000  00100000007f0000  01043b0000000000",
            "08000400 00000000  0300000000000000  00100000007f0000  01043b0000000000",
        ),
        (
            PageMessage::Get { pid: 0x3b04, run: run(0x7f00_0000_1000, 1024) },
            "07000000 00040000  00100000007f0000  043b000000000000",
            "07000000 00000000  0004000000000000  00100000007f0000  043b000000000000",
        ),
    ]
}

#[test]
fn messages_have_criu_s_bytes_in_both_layouts() {
    for (message, narrow, wide) in fixtures() {
        assert_eq!(received(narrow), (HeaderLayout::Narrow, Ok(message)), "{narrow}");
        assert_eq!(received(wide), (HeaderLayout::Wide, Ok(message)), "{wide}");
        assert_eq!(HeaderLayout::Narrow.encode(&message.header()).unwrap(), bytes(narrow));
        assert_eq!(HeaderLayout::Wide.encode(&message.header()).unwrap(), bytes(wide));
    }
}

#[test]
fn padding_that_criu_did_not_clear_changes_nothing() {
    let (layout, message) =
        received("07000000 00005555  0100000000000000  00100000007f0000  043b000000000000");
    assert_eq!(layout, HeaderLayout::Wide);
    assert_eq!(message, Ok(PageMessage::Get { pid: 0x3b04, run: run(0x7f00_0000_1000, 1) }));
}

#[test]
fn a_request_for_a_pid_that_looks_like_an_address_is_narrow() {
    let (layout, message) = received("07000000 01000000  0000400000000000  0010000000000000");
    assert_eq!(layout, HeaderLayout::Narrow);
    assert_eq!(message, Ok(PageMessage::Get { pid: 4096, run: run(0x40_0000, 1) }));
}

#[test]
fn the_answer_to_a_request_has_its_address_and_pid() {
    let answer = answer_header(0x3b04, run(0x7f00_0000_1000, 2));
    let narrow = "06000400 02000000  00100000007f0000  043b000000000000";
    let wide = "06000400 00000000  0200000000000000  00100000007f0000  043b000000000000";
    assert_eq!(HeaderLayout::Narrow.encode(&answer).unwrap(), bytes(narrow));
    assert_eq!(HeaderLayout::Wide.encode(&answer).unwrap(), bytes(wide));
}

#[test]
fn other_answers_have_the_lengths_that_criu_reads() {
    assert_eq!((opened(true), opened(false)), ([1], [0]));
    assert_eq!((has_parent(true), has_parent(false)), ([1, 0, 0, 0], [0; 4]));
    assert_eq!(rewake_page_protocol::CLOSED, [0; 4]);
}

#[test]
fn closing_messages_are_read_whatever_the_layout() {
    for (command, forced) in [(0x1023, false), (0x1024, true)] {
        assert_eq!(parse(command, 0, 0, 0), Ok(PageMessage::Close { forced }));
    }
    assert_eq!(HeaderLayout::detect(&[0; NARROW_LEN]), HeaderLayout::Wide);
}

#[test]
fn old_commands_for_pages_have_their_place() {
    let add = |flags| {
        let (id, run) = (PagemapId::Task(7), run(0x1000, 2));
        Ok(PageMessage::Add { id, run, flags, encoding: PagesEncoding::Raw })
    };
    assert_eq!(parse(1, 2, 0x1000, 0x701), add(PageFlags::PRESENT));
    assert_eq!(parse(2, 2, 0x1000, 0x701), add(PageFlags::PARENT));
}

#[test]
fn pages_of_no_memory_are_refused() {
    assert_eq!(parse(6 | 4 << 16, 0, 0x1000, 0x701), Err(BadMessage::NoPages(0x1000)));
    assert_eq!(parse(7, 0, 0x1000, 7), Err(BadMessage::NoPages(0x1000)));
    assert_eq!(parse(6 | 4 << 16, 1, 0x1001, 0x701), Err(BadMessage::Unaligned(0x1001)));
    assert_eq!(parse(7, 1, 0xfff, 7), Err(BadMessage::Unaligned(0xfff)));
    for (vaddr, pages) in [(0x1000, u64::MAX), (u64::MAX - 0xfff, 1), (0x1000, 1 << 52)] {
        assert_eq!(parse(6 | 1 << 16, pages, vaddr, 0x701), Err(BadMessage::Overflow { vaddr, pages }));
    }
    // Shared memory begins at 0.
    assert!(parse(6 | 4 << 16, 1, 0, 0x702).is_ok());
}

#[test]
fn unknown_commands_and_flags_are_refused() {
    for command in [0, 9, 0x1022, 0x1025, 0xffff] {
        assert_eq!(parse(command, 1, 0x1000, 0x701), Err(BadMessage::UnknownCommand(command)));
    }
    // None; parent and present; the alignment flag of files; a flag that does not exist.
    for flags in [0, 5, 7, 8, 12, 16] {
        let refused = parse(6 | flags << 16, 1, 0x1000, 0x701).unwrap_err();
        assert!(matches!(refused, BadMessage::Flags { command: 6, flags: found, .. } if found == flags));
    }
    for command in [1, 2, 3, 4, 5, 0x1023] {
        let refused = parse(command | 4 << 16, 1, 0x1000, 0x701).unwrap_err();
        assert!(matches!(refused, BadMessage::Flags { flags: 4, .. }), "{refused}");
    }
    let refused = parse(8 | 1 << 16, 1, 0x1000, 0x701).unwrap_err();
    assert!(matches!(refused, BadMessage::Flags { command: 8, flags: 1, .. }), "compressed pages elsewhere");
}

#[test]
fn numbers_of_no_memory_are_refused() {
    for id in [0, 0x700, 0x703, 0x001, 1 << 40 | 1, 0x8000_0000 << 8 | 1] {
        assert_eq!(parse(4, 0, 0, id), Err(BadMessage::UnknownMemory(id)));
    }
    for pid in [0, 0x8000_0000, u64::MAX] {
        assert_eq!(parse(7, 1, 0x1000, pid), Err(BadMessage::Pid(pid)));
    }
}

#[test]
fn a_compressed_page_is_never_longer_than_a_page() {
    let parse = |length: u32| CompressedPage::parse(length.to_ne_bytes());
    assert_eq!(parse(0), Ok(CompressedPage::Zero));
    assert_eq!(parse(1), Ok(CompressedPage::Lz4(1)));
    assert_eq!(parse(4095), Ok(CompressedPage::Lz4(4095)));
    assert_eq!(parse(4096), Ok(CompressedPage::Raw));
    assert_eq!(parse(4097), Err(BadMessage::PageLength(4097)));
}
