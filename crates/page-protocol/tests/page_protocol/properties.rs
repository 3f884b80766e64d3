// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every message survives the wire, and no bytes are read as a message that has other bytes.

use proptest::prelude::*;
use rewake_criu_images::{PAGE, PageFlags, PagemapId};
use rewake_page_protocol::{HeaderLayout, MessageHeader, PageMessage, PageRun, PagesEncoding, WIDE_LEN};

fn pid() -> impl Strategy<Value = u32> {
    1..=i32::MAX.cast_unsigned()
}

fn id() -> impl Strategy<Value = PagemapId> {
    prop_oneof![pid().prop_map(PagemapId::Task), (0..1u64 << 56).prop_map(PagemapId::Shared)]
}

/// Pages of a process, as many as CRIU sends at once.
fn run() -> impl Strategy<Value = PageRun> {
    ((1u64..1 << 35), 1u64..=1024).prop_map(|(page, pages)| PageRun::new(page * PAGE, pages).unwrap())
}

fn message() -> impl Strategy<Value = PageMessage> {
    let raw = prop_oneof![Just(1), Just(2), Just(3), Just(4), Just(6)];
    let raw = raw.prop_map(|flags| (PageFlags(flags), PagesEncoding::Raw));
    let compressed = prop_oneof![Just(4), Just(6)].prop_map(|flags| (PageFlags(flags), PagesEncoding::Lz4));
    prop_oneof![
        (id(), any::<bool>()).prop_map(|(id, wants_answer)| PageMessage::Open { id, wants_answer }),
        id().prop_map(|id| PageMessage::AskParent { id }),
        (id(), run(), prop_oneof![raw, compressed])
            .prop_map(|(id, run, (flags, encoding))| PageMessage::Add { id, run, flags, encoding }),
        (pid(), run()).prop_map(|(pid, run)| PageMessage::Get { pid, run }),
        any::<bool>().prop_map(|forced| PageMessage::Close { forced }),
    ]
}

fn layout() -> impl Strategy<Value = HeaderLayout> {
    prop_oneof![Just(HeaderLayout::Narrow), Just(HeaderLayout::Wide)]
}

fn padded(bytes: &[u8]) -> [u8; WIDE_LEN] {
    let mut header = [0xa5; WIDE_LEN];
    header[..bytes.len()].copy_from_slice(bytes);
    header
}

proptest! {
    #[test]
    fn a_message_is_read_as_it_was_written(message in message(), layout in layout()) {
        let bytes = layout.encode(&message.header()).unwrap();
        prop_assert_eq!(bytes.len(), layout.len());
        prop_assert_eq!(PageMessage::parse(&layout.decode(&padded(&bytes))), Ok(message));
    }

    #[test]
    fn the_layout_is_found_from_any_first_message(message in message(), layout in layout(), garbage: u32) {
        prop_assume!(!matches!(message, PageMessage::Close { .. }));
        let mut bytes = layout.encode(&message.header()).unwrap();
        if layout == HeaderLayout::Wide {
            bytes[4..8].copy_from_slice(&garbage.to_ne_bytes());
        }
        prop_assert_eq!(HeaderLayout::detect(bytes.first_chunk().unwrap()), layout);
    }

    #[test]
    fn what_is_read_from_any_bytes_is_written_to_the_same(bytes: [u8; WIDE_LEN], layout in layout()) {
        let header = layout.decode(&bytes);
        if let Ok(message) = PageMessage::parse(&header) {
            prop_assert_eq!(PageMessage::parse(&message.header()), Ok(message));
        }
        // Headers keep all their numbers.
        let again = layout.decode(&padded(&layout.encode(&header).unwrap()));
        prop_assert_eq!(again, header);
    }

    #[test]
    fn a_run_ends_where_its_pages_end(page in 0u64..1 << 52, pages: u64) {
        let header = MessageHeader { command: 7, pages, vaddr: page * PAGE, id: 1 };
        match PageMessage::parse(&header) {
            Ok(PageMessage::Get { run, .. }) => {
                prop_assert_eq!(u128::from(run.end()), u128::from(page + pages) * u128::from(PAGE));
            }
            Ok(other) => prop_assert!(false, "{:?}", other),
            Err(_) => prop_assert!(pages == 0 || u128::from(page) + u128::from(pages) >= 1 << 52),
        }
    }
}
