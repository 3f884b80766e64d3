// SPDX-License-Identifier: MIT OR Apache-2.0
//! A fetcher and peers that are right, slow, cut short, or lie. Bytes that a peer did not send as an answer
//! never count as arrived.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;

use nix::sys::socket::{MsgFlags, send};
use nix::sys::wait::{WaitStatus, waitpid};
use rewake_criu_tls::{TlsOptions, TlsServer};
use rewake_fetcher::channel::{self, FetchReport};
use rewake_fetcher::plan::{FetchExtent, FetchPlan, FetchedMemory, PagePeer, PeerTls, SparseFile};
use rewake_image_io::{Class, FetchRequest, PresenceMap, presence_file};
use rewake_page_protocol::{
    HeaderLayout, MessageHeader, PageMessage, PageRun, WIDE_LEN, answer_header, file_task,
};
use rewake_process::wake_socket::WakeSocket;
use rewake_testkit::authority::Authority;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::server::TlsStream;

use crate::support::{FetcherProcess, LIMIT};

const PAGE: usize = 4096;
const PAGES: u64 = 256;
const PID: u32 = 77;
const BASE: u64 = 0x7000_0000;
/// The file that is fetched in addition to the cache file: two pages and some bytes.
const FILE_BYTES: u64 = 2 * PAGE as u64 + 8;
const FILE_NUMBER: u32 = 3;

/// A fetcher, and the peer that it connects to.
struct Scene {
    fetcher: FetcherProcess,
    presence: PresenceMap,
    cache: File,
    /// The file that is fetched in addition to it.
    file: File,
    reader: WakeSocket,
    listener: TcpListener,
    layout: HeaderLayout,
}

fn scene(layout: HeaderLayout) -> Scene {
    scene_with(layout, None)
}

fn scene_with(layout: HeaderLayout, tls: Option<PeerTls>) -> Scene {
    let cache = tempfile::tempfile().unwrap();
    cache.set_len(PAGES * PAGE as u64).unwrap();
    scene_in(cache, layout, tls)
}

fn scene_in(cache: File, layout: HeaderLayout, tls: Option<PeerTls>) -> Scene {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let plan = tempfile::tempfile().unwrap();
    let len = (PAGES + 16) * PAGE as u64;
    let file = tempfile::tempfile().unwrap();
    file.set_len(FILE_BYTES).unwrap();
    let files = vec![SparseFile { first: PAGES, len: FILE_BYTES, number: FILE_NUMBER }];
    let extents = vec![FetchExtent { first: 0, vaddr: BASE, pages: PAGES, pid: PID }];
    let peer = PagePeer::Tcp(vec![listener.local_addr().unwrap()]);
    let memory = FetchedMemory::Pages { layout, extents, files };
    FetchPlan { peer, tls, len, memory }.write(&plan).unwrap();
    let presence = presence_file(len).unwrap();
    let fetcher = FetcherProcess::start();
    let socket = fetcher.socket.as_fd();
    channel::send_start(socket, false, [plan.as_fd(), presence.as_fd()], None).unwrap();
    channel::send_files(socket, &[cache.as_fd(), file.as_fd()]).unwrap();
    let reader = crate::support::reader();
    channel::send_readers(socket, &[reader.sender()]).unwrap();
    let presence = PresenceMap::open(presence.as_fd(), len).unwrap();
    Scene { fetcher, presence, cache, file, reader, listener, layout }
}

impl Scene {
    fn request(&self, class: Class, first: u64, pages: u32) {
        let request = FetchRequest { class, reader: 0, pages, first };
        send(self.fetcher.socket.as_raw_fd(), &request.encode(), MsgFlags::empty()).unwrap();
    }

    fn peer(&self) -> Peer {
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        assert!(matches!(self.report(), FetchReport::Connected(_)));
        Peer { stream, layout: self.layout }
    }

    fn report(&self) -> FetchReport {
        self.fetcher.report()
    }

    /// Has the fetcher send the last message.
    fn finish(&self) {
        channel::send_finish(self.fetcher.socket.as_fd()).unwrap();
    }

    /// The reason why it failed, and whether another fetcher may succeed.
    fn failure(&self) -> (bool, String) {
        match self.report() {
            FetchReport::Failed { again, reason } => (again, reason),
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the reader is woken.
    fn woken(&self) {
        crate::support::woken(&self.reader);
    }

    fn arrived(&self) -> Vec<u64> {
        (0..PAGES).filter(|page| self.presence.has_page(*page)).collect()
    }

    fn bytes(&self, page: u64) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        self.cache.read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
        bytes
    }

    fn code(&self) -> i32 {
        self.fetcher.code()
    }
}

struct Peer {
    stream: TcpStream,
    layout: HeaderLayout,
}

impl Peer {
    fn next(&mut self) -> PageMessage {
        let mut bytes = [0; WIDE_LEN];
        self.stream.read_exact(&mut bytes[..self.layout.len()]).unwrap();
        PageMessage::parse(&self.layout.decode(&bytes)).unwrap()
    }

    /// The first page and the number of pages of the next request.
    fn get(&mut self) -> (u64, u64) {
        match self.next() {
            PageMessage::Get { pid: PID, run } => ((run.vaddr() - BASE) / PAGE as u64, run.pages()),
            other => panic!("{other:?}"),
        }
    }

    fn send(&mut self, header: MessageHeader, bytes: &[u8]) {
        let message = [&self.layout.encode(&header).unwrap()[..], bytes].concat();
        self.stream.write_all(&message).unwrap();
    }

    /// Answers with the first `pages` pages of a request: each has its number in every byte.
    fn answer(&mut self, first: u64, pages: u64) {
        self.stream.write_all(&answer(self.layout, first, pages)).unwrap();
    }

    fn ended(&mut self) -> io::Result<usize> {
        self.stream.read(&mut [0])
    }
}

/// The bytes of an answer.
fn answer(layout: HeaderLayout, first: u64, pages: u64) -> Vec<u8> {
    let run = PageRun::new(BASE + first * PAGE as u64, pages).unwrap();
    let header = layout.encode(&answer_header(PID, run)).unwrap();
    header.into_iter().chain((first..first + pages).flat_map(content)).collect()
}

fn content(page: u64) -> Vec<u8> {
    vec![u8::try_from(page % 251 + 1).unwrap(); PAGE]
}

const BOTH: [HeaderLayout; 2] = [HeaderLayout::Narrow, HeaderLayout::Wide];

#[test]
fn pages_arrive_and_the_last_message_ends_the_session() {
    for layout in BOTH {
        let scene = scene(layout);
        scene.request(Class::Background, 16, 16);
        let mut peer = scene.peer();
        assert_eq!(peer.get(), (16, 16));
        scene.request(Class::Demand, 3, 1);
        assert_eq!(peer.get(), (3, 1));
        peer.answer(16, 16);
        peer.answer(3, 1);
        while scene.arrived().len() < 17 {
            scene.woken();
        }
        assert_eq!(scene.arrived(), [3].into_iter().chain(16..32).collect::<Vec<_>>());
        for page in scene.arrived() {
            assert_eq!(scene.bytes(page), content(page));
        }
        scene.finish();
        assert_eq!(peer.next(), PageMessage::Close { forced: false });
        assert!(!scene.presence.is_closed());
        peer.stream.write_all(&[0; 4]).unwrap();
        assert!(matches!(scene.report(), FetchReport::Closed));
        assert!(scene.presence.is_closed());
        assert_eq!(peer.ended().unwrap(), 0, "no reset: CRIU would take it for a failure");
        assert_eq!(scene.code(), 0);
    }
}

/// A page counts as arrived after its bytes are in the cache file, and never if they are not: a reader that
/// sees its bit reads the file.
#[test]
fn pages_that_the_cache_file_does_not_take_have_not_arrived() {
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    let scene = scene_in(full, BOTH[0], None);
    scene.request(Class::Demand, 3, 2);
    let mut peer = scene.peer();
    assert_eq!(peer.get(), (3, 2));
    peer.answer(3, 2);
    let (_, reason) = scene.failure();
    assert!(reason.contains("No space left") || reason.contains("no storage space"), "{reason}");
    assert_eq!(scene.arrived(), [0; 0]);
}

/// A field of `/proc/PID/status`.
fn status(pid: nix::unistd::Pid, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_fetcher_is_confined_when_its_peer_gets_the_first_byte() {
    let scene = scene(HeaderLayout::Wide);
    let pid = scene.fetcher.pid;
    scene.request(Class::Background, 0, 1);
    let mut peer = scene.peer();
    peer.get();
    assert_eq!(status(pid, "Seccomp:"), "2", "a filter");
    assert_eq!(status(pid, "NoNewPrivs:"), "1");
    if !nix::unistd::Uid::effective().is_root() {
        rewake_skip::skip!("another user takes root");
    }
    let own = 0x7000_0000 + pid.as_raw();
    assert_eq!(status(pid, "Uid:"), format!("{own} {own} {own} {own}"));
    assert_eq!(status(pid, "Gid:"), format!("{own} {own} {own} {own}"));
    assert_eq!(status(pid, "Groups:"), "");
    assert_eq!(status(pid, "CapPrm:"), "0000000000000000");
}

#[test]
fn a_file_of_a_migration_arrives_up_to_its_end() {
    let scene = scene(HeaderLayout::Wide);
    scene.request(Class::Demand, PAGES, 3);
    let mut peer = scene.peer();
    let (pid, run) = (file_task(FILE_NUMBER).unwrap(), PageRun::new(0, 3).unwrap());
    assert_eq!(peer.next(), PageMessage::Get { pid, run });
    peer.send(answer_header(pid, run), &[7; 3 * PAGE]);
    while !scene.presence.has_page(PAGES + 2) {
        scene.woken();
    }
    let mut bytes = Vec::new();
    (&scene.file).read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, [7; 2 * PAGE + 8]);
    assert_eq!(scene.arrived(), [0u64; 0]);
}

#[test]
fn without_a_request_the_peer_still_gets_the_last_message() {
    let scene = scene(HeaderLayout::Wide);
    scene.finish();
    let mut peer = scene.peer();
    assert_eq!(peer.next(), PageMessage::Close { forced: false });
    peer.stream.write_all(&[0; 4]).unwrap();
    assert_eq!(scene.code(), 0);
}

#[test]
fn the_rest_of_a_short_answer_is_requested() {
    for layout in BOTH {
        let scene = scene(layout);
        scene.request(Class::Demand, 0, 16);
        let mut peer = scene.peer();
        assert_eq!(peer.get(), (0, 16));
        peer.answer(0, 5);
        assert_eq!(peer.get(), (5, 11));
        peer.answer(5, 11);
        while scene.arrived().len() < 16 {
            scene.woken();
        }
        assert_eq!(scene.bytes(15), content(15));
    }
}

/// A peer that answers the request for pages 8 to 11 with this must not add a page; another fetcher does not
/// help.
fn refused(layout: HeaderLayout, header: MessageHeader, bytes: usize) {
    let scene = scene(layout);
    scene.request(Class::Background, 8, 4);
    let mut peer = scene.peer();
    assert_eq!(peer.get(), (8, 4));
    peer.send(header, &vec![0xee; bytes]);
    let (again, reason) = scene.failure();
    assert!(!again && reason.contains("no page of this answer is used"), "{header:?}: {reason}");
    assert!(reason.contains("page server 127.0.0.1:") && reason.contains("after 0 pages"), "{reason}");
    assert_eq!(scene.arrived(), [0u64; 0]);
    assert_eq!(scene.code(), 1);
}

#[test]
fn an_answer_that_is_not_the_requested_one_is_refused() {
    let at = |page: u64, pages| PageRun::new(BASE + page * PAGE as u64, pages).unwrap();
    let right = answer_header(PID, at(8, 4));
    for layout in BOTH {
        refused(layout, answer_header(PID, at(8, 5)), 5 * PAGE);
        refused(layout, answer_header(PID, at(9, 3)), 3 * PAGE);
        refused(layout, answer_header(PID + 1, at(8, 4)), 4 * PAGE);
        refused(layout, MessageHeader { pages: 0, ..right }, 0);
        refused(layout, MessageHeader { pages: u32::MAX.into(), ..right }, PAGE);
        refused(layout, MessageHeader { command: right.command & 0xffff, ..right }, 4 * PAGE);
        refused(layout, MessageHeader { command: right.command | 1 << 16, ..right }, 4 * PAGE);
        refused(layout, MessageHeader { command: 7, ..right }, 4 * PAGE);
    }
    refused(HeaderLayout::Wide, MessageHeader { pages: 1 << 52 | 4, ..right }, 4 * PAGE);
}

#[test]
fn a_peer_of_the_other_age_is_refused() {
    for layout in BOTH {
        let scene = scene(layout);
        scene.request(Class::Background, 8, 4);
        let mut peer = scene.peer();
        peer.get();
        peer.layout = if layout == HeaderLayout::Wide { HeaderLayout::Narrow } else { HeaderLayout::Wide };
        peer.answer(8, 4);
        let (again, reason) = scene.failure();
        assert!(!again && reason.contains("of the version that made the image"), "{reason}");
        assert_eq!(scene.arrived(), [0u64; 0]);
    }
}

#[test]
fn bytes_that_answer_no_request_end_the_fetcher() {
    let scene = scene(HeaderLayout::Wide);
    scene.request(Class::Background, 8, 4);
    let mut peer = scene.peer();
    peer.get();
    peer.answer(8, 4);
    scene.woken();
    // More than a fetcher has memory for: it does not read all of them.
    let _ = peer.stream.write_all(&vec![0; 64 << 20]);
    let (again, reason) = scene.failure();
    assert!(!again && reason.contains("bytes that answer no request"), "{reason}");
    assert_eq!(scene.arrived(), [8, 9, 10, 11]);
}

#[test]
fn a_cut_answer_adds_no_page_and_another_fetcher_may_help() {
    let run = PageRun::new(BASE + 8 * PAGE as u64, 4).unwrap();
    for bytes in [0, 1, 3 * PAGE, 4 * PAGE - 1] {
        let scene = scene(HeaderLayout::Wide);
        scene.request(Class::Background, 8, 4);
        let mut peer = scene.peer();
        peer.get();
        peer.send(answer_header(PID, run), &vec![1; bytes]);
        drop(peer);
        let (again, reason) = scene.failure();
        assert!(again, "{reason}");
        assert_eq!(scene.arrived(), [0u64; 0]);
        assert_eq!(scene.code(), 1);
    }
}

#[test]
fn another_answer_to_the_last_message_is_a_failure() {
    let scene = scene(HeaderLayout::Wide);
    scene.finish();
    let mut peer = scene.peer();
    peer.next();
    peer.stream.write_all(&[0xff; 4]).unwrap();
    let (_, reason) = scene.failure();
    assert!(reason.contains("in answer to the last message"), "{reason}");
    assert!(!scene.presence.is_closed());
}

#[test]
fn without_the_last_message_the_connection_is_reset() {
    let scene = scene(HeaderLayout::Wide);
    scene.request(Class::Background, 8, 4);
    let mut peer = scene.peer();
    peer.get();
    let FetcherProcess { pid, socket } = scene.fetcher;
    drop(socket);
    assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 0));
    assert_eq!(peer.ended().unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn a_peer_that_does_not_listen_is_named() {
    let mut scene = scene(HeaderLayout::Wide);
    let address = scene.listener.local_addr().unwrap();
    // The fetcher connects when a page is requested.
    scene.listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    scene.request(Class::Demand, 0, 1);
    let (again, reason) = scene.failure();
    assert!(!again && reason.contains(&format!("page server {address}: connecting")), "{reason}");
    assert!(reason.contains("refused"), "{reason}");
}

/// A peer with TLS, which a fetcher has requested 65 pages of.
struct EncryptedPeer {
    _authority: Authority,
    runtime: tokio::runtime::Runtime,
    stream: TlsStream<tokio::net::TcpStream>,
}

fn encrypted() -> (Scene, EncryptedPeer) {
    let (authority, host) = (Authority::new(), "127.0.0.1");
    let own = authority.issue(|request| request.address(host));
    let options = TlsOptions {
        ca: Some(authority.ca()),
        certificate: Some(own.certificate),
        key: Some(own.key),
        ..TlsOptions::default()
    };
    let server = TlsServer::new(&options, Some(host)).unwrap();
    let scene = scene_with(HeaderLayout::Wide, Some(PeerTls { options, host: Some(host.to_owned()) }));
    scene.request(Class::Background, 0, 65);
    let peer = scene.peer();
    peer.stream.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut stream = runtime
        .block_on(async { server.accept(tokio::net::TcpStream::from_std(peer.stream).unwrap()).await })
        .unwrap();
    runtime.block_on(stream.read_exact(&mut [0; 2 * WIDE_LEN])).unwrap();
    (scene, EncryptedPeer { _authority: authority, runtime, stream })
}

#[test]
fn encrypted_pages_that_have_arrived_are_taken_at_once() {
    let (scene, EncryptedPeer { runtime, mut stream, .. }) = encrypted();
    // The last record has the end of the first answer and all of the second.
    let answers = [answer(HeaderLayout::Wide, 0, 64), answer(HeaderLayout::Wide, 64, 1)].concat();
    runtime.block_on(async {
        stream.write_all(&answers).await.unwrap();
        stream.flush().await.unwrap();
    });
    while scene.arrived().len() < 65 {
        scene.woken();
    }
    assert!((0..65).all(|page| scene.bytes(page) == content(page)));
    scene.finish();
    runtime.block_on(async {
        stream.read_exact(&mut [0; WIDE_LEN]).await.unwrap();
        stream.write_all(&[0; 4]).await.unwrap();
        stream.flush().await.unwrap();
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0, "an announced end, which a cut is not");
        stream.shutdown().await.unwrap();
    });
    assert!(matches!(scene.report(), FetchReport::Closed));
    assert_eq!(scene.code(), 0);
}

#[test]
fn an_encrypted_peer_that_ends_at_once_is_not_retried() {
    let (scene, peer) = encrypted();
    drop(peer);
    let (again, reason) = scene.failure();
    assert!(!again && reason.contains("it may not accept this side's certificate"), "{reason}");
    let (scene, EncryptedPeer { runtime, mut stream, .. }) = encrypted();
    runtime.block_on(async {
        stream.write_all(&answer(HeaderLayout::Wide, 0, 64)).await.unwrap();
        stream.flush().await.unwrap();
    });
    scene.woken();
    drop(stream);
    let (again, reason) = scene.failure();
    assert!(again && reason.contains("after 64 pages: the peer ended the connection"), "{reason}");
}
