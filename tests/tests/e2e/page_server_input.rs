// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a page server is sent that no CRIU sends, and the options that it refuses.

use std::fs;

use rewake_tests::page_server::Peer::{New, Old};
use rewake_tests::page_server::{PageServer, command, header, memory_files, shared, task};
use rewake_tests::process::until;
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, need};

/// A client opens task 7 and sends one message more; the server must end with a line that contains `reason`,
/// and keep no file.
fn refused(command: u32, pages: u64, vaddr: u64, id: u64, reason: &str) {
    for kind in [Old, New] {
        let images = tempfile::tempdir().unwrap();
        let mut server = PageServer::ours(images.path(), &[]).unwrap();
        let mut client = server.connect(kind).unwrap();
        client.open(task(7)).unwrap();
        client.send(command, pages, vaddr, id, &[]).unwrap();
        assert!(client.is_closed(), "{reason}");
        assert_eq!(server.ended().unwrap().code(), Some(1));
        let text = server.text();
        let said = text.lines().filter(|line| line.starts_with("rewake: client 127.0.0.1:"));
        assert_eq!(said.filter(|line| line.contains(reason)).count(), 1, "{kind:?} {reason}: {text}");
        assert_eq!(fs::read_dir(images.path()).unwrap().count(), 0);
    }
}

#[test]
fn pages_that_cannot_be_are_refused() {
    refused(command::LAZY, 0, 0x10000, task(7), "0 pages at 0x10000");
    refused(command::LAZY, 1, 0x10001, task(7), "pages at 0x10001: expected a multiple of 4096");
    refused(command::HOLE, 1, u64::MAX - 4095, task(7), "expected an end inside the address space");
}

#[test]
fn unknown_commands_flags_and_memories_are_refused() {
    refused(9, 1, 0x10000, task(7), "unknown command 0x9");
    refused(6, 1, 0x10000, task(7), "command 0x6 with flags 0x0");
    refused(6 | 8 << 16, 1, 0x10000, task(7), "command 0x6 with flags 0x8");
    refused(6 | 5 << 16, 1, 0x10000, task(7), "command 0x6 with flags 0x5");
    refused(command::LAZY, 1, 0x10000, 7 << 8 | 3, "memory 0x703: expected a task");
}

#[test]
fn pages_of_another_memory_than_the_open_one_are_refused() {
    refused(command::LAZY, 1, 0x10000, task(8), "pages of task 8, which the client has not opened");
    refused(
        command::LAZY,
        1,
        0x10000,
        shared(7),
        "pages of shared memory 7, which the client has not opened",
    );
    refused(command::OPEN, 0, 0, task(7), "opens task 7 twice");
}

#[test]
fn pages_that_would_be_in_no_image_are_refused() {
    refused(command::LAZY_ALONE, 1, 0x10000, task(7), "are in no image");
    refused(command::HOLE, 1, 0x10000, task(7), "said to be in a parent image, and there is none");
}

#[test]
fn a_request_for_pages_names_the_other_role() {
    refused(command::GET, 1, 0x10000, 7, "`rewake page-server --lazy-pages` serves images");
}

#[test]
fn pages_out_of_order_are_refused() {
    need!(Criu::main());
    let images = tempfile::tempdir().unwrap();
    let mut server = PageServer::ours(images.path(), &[]).unwrap();
    let mut client = server.connect(New).unwrap();
    client.open(task(7)).unwrap();
    client.send(command::LAZY, 2, 0x10000, task(7), &[1; 8192]).unwrap();
    client.send(command::LAZY, 1, 0x11000, task(7), &[1; 4096]).unwrap();
    assert!(client.is_closed());
    assert_eq!(server.ended().unwrap().code(), Some(1));
    assert!(server.text().contains("at 0x11000: expected an address from 0x12000"), "{}", server.text());
}

#[test]
fn a_client_that_only_closes_is_answered() {
    need!(Criu::main());
    for kind in [Old, New] {
        let images = tempfile::tempdir().unwrap();
        let mut server = PageServer::ours(images.path(), &[]).unwrap();
        let mut client = server.connect(kind).unwrap();
        assert_eq!(client.close().unwrap(), 0);
        drop(client);
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
        assert!(!server.text().contains("sent more"), "{}", server.text());
        assert_eq!(memory_files(images.path()).unwrap(), []);
        let server = PageServer::ours(images.path(), &["--keep-listening"]).unwrap();
        assert_eq!(server.connect(kind).unwrap().close().unwrap(), 0);
        assert!(until(ACT, || fs::read_dir(images.path()).unwrap().next().is_none().then_some(())).is_some());
    }
}

#[test]
fn compressed_pages_are_received_as_their_bytes() {
    need!(Criu::main());
    let packed = lz4_flex::block::compress(&[5; 4096]);
    let page = |bytes: &[u8]| [&u32::try_from(bytes.len()).unwrap().to_le_bytes()[..], bytes].concat();
    let images = tempfile::tempdir().unwrap();
    let server = PageServer::ours(images.path(), &[]).unwrap();
    let mut client = server.connect(New).unwrap();
    client.open(task(7)).unwrap();
    let bytes = [page(&[]), page(&[3; 4096]), page(&packed), page(&[])].concat();
    client.send(command::COMPRESSED, 4, 0x10000, task(7), &bytes).unwrap();
    client.send(command::LAZY, 1, 0x20000, task(7), &[4; 4096]).unwrap();
    assert_eq!(client.close().unwrap(), 0);
    let pages = fs::read(images.path().join("pages-65537.img")).unwrap();
    let expected = [[0; 4096], [3; 4096], [5; 4096], [0; 4096], [4; 4096]].concat();
    assert!(pages == expected, "{} bytes", pages.len());
}

#[test]
fn a_compressed_page_that_is_damaged_is_refused() {
    need!(Criu::main());
    let short = lz4_flex::block::compress(&[5; 4095]);
    let long = lz4_flex::block::compress(&[5; 4097]);
    for (bytes, reason) in
        [(&[0xff; 9][..], "0x10000 of task 7"), (&short, "expected 4096 bytes"), (&long, "0x10000")]
    {
        let images = tempfile::tempdir().unwrap();
        let mut server = PageServer::ours(images.path(), &[]).unwrap();
        let mut client = server.connect(New).unwrap();
        client.open(task(7)).unwrap();
        let page = [&u32::try_from(bytes.len()).unwrap().to_le_bytes()[..], bytes].concat();
        client.send(command::COMPRESSED, 1, 0x10000, task(7), &page).unwrap();
        assert!(client.is_closed());
        assert_eq!(server.ended().unwrap().code(), Some(1));
        assert!(
            server.text().contains("the compressed page") && server.text().contains(reason),
            "{}",
            server.text()
        );
    }
}

#[test]
fn many_clients_at_once_are_received() {
    need!(Criu::main());
    const CLIENTS: u8 = 24;
    let inbox = tempfile::tempdir().unwrap();
    let server = PageServer::ours(inbox.path(), &["--keep-listening"]).unwrap();
    let kind = |number: u8| if number.is_multiple_of(2) { Old } else { New };
    let mut clients: Vec<_> =
        (1..=CLIENTS).map(|number| (number, server.connect(kind(number)).unwrap())).collect();
    for (number, client) in &mut clients {
        client.open(task(u64::from(*number))).unwrap();
    }
    for address in 1..=16 {
        for (number, client) in &mut clients {
            let id = task(u64::from(*number));
            client.send(command::LAZY, 8, address << 16, id, &[*number; 8 * 4096]).unwrap();
        }
    }
    for (number, mut client) in clients {
        assert_eq!(client.close().unwrap(), 0);
        let pages = fs::read(inbox.path().join(format!("{number}/pages-65537.img"))).unwrap();
        assert!(pages.len() == 16 * 8 * 4096 && pages.iter().all(|byte| *byte == number));
    }
}

#[test]
fn other_hosts_are_refused_without_insecure() {
    need!(Criu::main());
    let images = tempfile::tempdir().unwrap();
    for address in ["0.0.0.0", "::"] {
        let refused = PageServer::try_ours(images.path(), &["--address", address]).unwrap().unwrap_err();
        assert_eq!(refused.code, Some(1));
        assert!(
            refused.text.contains("add --insecure if the network is trusted, or --tls"),
            "{}",
            refused.text
        );
    }
    let server = PageServer::ours(images.path(), &["--address", "0.0.0.0", "--insecure"]).unwrap();
    assert!(server.text().contains("rewake: listening on 0.0.0.0:"), "{}", server.text());
    drop(server);
    for address in ["127.0.0.1", "localhost", "::1"] {
        PageServer::ours(images.path(), &["--address", address]).unwrap();
    }
}

#[test]
fn options_that_exclude_each_other_are_named() {
    need!(Criu::main());
    let images = tempfile::tempdir().unwrap();
    let pairs = [
        ["--keep-listening", "--auto-dedup"].as_slice(),
        &["--keep-listening", "--prev-images-dir", "x"],
        // With an address, the test gives no port of its own, which would count because it comes later.
        &["--port", "0", "--address", "127.0.0.1"],
    ];
    for options in pairs {
        let refused = PageServer::try_ours(images.path(), options).unwrap().unwrap_err();
        assert_eq!(refused.code, Some(2), "{}", refused.text);
        assert!(options.iter().any(|option| refused.text.contains(*option)), "{}", refused.text);
    }
}

#[test]
fn a_unix_socket_is_for_its_user_and_is_removed() {
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::PermissionsExt as _;
    need!(Criu::main());
    let images = tempfile::tempdir().unwrap();
    let socket = images.path().join("socket");
    let mut server = PageServer::ours(images.path(), &["--address", socket.to_str().unwrap()]).unwrap();
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let mut client = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    client.write_all(&header(New, command::CLOSE, 0, 0, 0)).unwrap();
    client.read_exact(&mut [0; 4]).unwrap();
    drop(client);
    assert_eq!(server.ended().unwrap().code(), Some(0));
    assert!(until(ACT, || (!socket.exists()).then_some(())).is_some());
}
