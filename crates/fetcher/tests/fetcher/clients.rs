// SPDX-License-Identifier: MIT OR Apache-2.0
//! A fetcher that several streamers share: the image server is asked once for all of them, and none can harm
//! another.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{MsgFlags, recv, send};
use rewake_criu_images::Digest;
use rewake_fetcher::MAX_FETCH_CLIENTS;
use rewake_fetcher::channel::{self as orders, FetchReport};
use rewake_fetcher::plan::{FetchPlan, FetchedMemory, PagePeer, SparseFile};
use rewake_image_io::{BLOCK, Class, FetchRequest, PresenceMap, presence_file};
use rewake_image_transfer::protocol::message;
use rewake_image_transfer::protocol::reply::What as Reply;
use rewake_image_transfer::protocol::request::What as Request;
use rewake_image_transfer::protocol::{Data, Opened, Read, hello, reply_of};
use rewake_process::wake_socket::WakeSocket;

use crate::support::{FetcherProcess, LIMIT, readable, socket_pair};

const BLOCKS: u64 = 64;
const BLOCK_PAGES: u64 = 16;
const LEN: u64 = BLOCKS * BLOCK as u64;
const ID: Digest = Digest([5; 32]);

/// A fetcher, and an image server whose reads are answered when the test permits it.
struct Scene {
    fetcher: FetcherProcess,
    presence: PresenceMap,
    cache: File,
    /// The blocks that were requested.
    requested: Receiver<std::ops::Range<u64>>,
    answers: Sender<()>,
    _dir: tempfile::TempDir,
}

/// A streamer.
struct Client {
    socket: OwnedFd,
    /// The agent's copy of the fetcher's end.
    _its: OwnedFd,
    reader: WakeSocket,
}

fn scene() -> Scene {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("server");
    let listener = UnixListener::bind(&path).unwrap();
    let (cache, plan) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    cache.set_len(LEN).unwrap();
    let files = vec![SparseFile { first: 0, len: LEN, number: 1 }];
    let memory = FetchedMemory::Files { image: "web".into(), id: ID, files };
    FetchPlan { peer: PagePeer::Unix(path), tls: None, len: LEN, memory }.write(&plan).unwrap();
    let presence = presence_file(LEN).unwrap();
    let fetcher = FetcherProcess::start();
    let owner = fetcher.socket.as_fd();
    orders::send_start(owner, false, [plan.as_fd(), presence.as_fd()], None).unwrap();
    orders::send_files(owner, &[cache.as_fd()]).unwrap();
    let presence = PresenceMap::open(presence.as_fd(), LEN).unwrap();
    let (requests, requested) = channel();
    let (answers, answered) = channel();
    thread::spawn(move || serve(&listener, &requests, &answered));
    let scene = Scene { fetcher, presence, cache, requested, answers, _dir: dir };
    assert!((0..2).all(|_| matches!(scene.report(), FetchReport::Connected(_))));
    scene
}

/// Serves two connections. A block has its number in every byte.
fn serve(listener: &UnixListener, requests: &Sender<std::ops::Range<u64>>, answered: &Receiver<()>) {
    let mut streams: Vec<UnixStream> = Vec::new();
    for _ in 0..2 {
        let (mut stream, _) = listener.accept().unwrap();
        assert!(matches!(next(&mut stream), Some(Request::Hello(_))));
        reply(&mut stream, Reply::Hello(hello()), &[]);
        assert!(matches!(next(&mut stream), Some(Request::Open(_))));
        let opened = Opened { image_id: ID.0.to_vec(), manifest_length: 1, ..Opened::default() };
        reply(&mut stream, Reply::Opened(opened), &[]);
        streams.push(stream);
    }
    loop {
        let mut polled: Vec<PollFd<'_>> =
            streams.iter().map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN)).collect();
        poll(&mut polled, PollTimeout::NONE).unwrap();
        let ready: Vec<bool> =
            polled.iter().map(|of| of.revents().is_some_and(|events| !events.is_empty())).collect();
        for (stream, _) in streams.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
            let Some(Request::Read(Read { offset, length, .. })) = next(stream) else { return };
            let blocks = offset / BLOCK as u64..(offset + u64::from(length)) / BLOCK as u64;
            if requests.send(blocks.clone()).is_err() || answered.recv().is_err() {
                return;
            }
            let bytes: Vec<u8> = blocks.flat_map(content).collect();
            reply(stream, Reply::Data(Data { length, form: 0 }), &bytes);
        }
    }
}

fn next(stream: &mut UnixStream) -> Option<Request> {
    let request: Option<rewake_image_transfer::protocol::Request> = message::receive(stream).ok()?;
    request?.what
}

fn reply(stream: &mut UnixStream, what: Reply, bytes: &[u8]) {
    message::send(stream, &reply_of(what), bytes).unwrap();
}

fn content(block: u64) -> Vec<u8> {
    vec![block.to_le_bytes()[0] + 1; BLOCK]
}

impl Scene {
    fn client(&self) -> Client {
        let (socket, its) = socket_pair();
        orders::send_client(self.fetcher.socket.as_fd(), its.as_fd()).unwrap();
        let reader = crate::support::reader();
        // One that is refused may be so by now.
        let _ = orders::send_readers(socket.as_fd(), &[reader.sender()]);
        Client { socket, _its: its, reader }
    }

    fn report(&self) -> FetchReport {
        self.fetcher.report()
    }

    fn requested(&self) -> std::ops::Range<u64> {
        self.requested.recv_timeout(LIMIT).unwrap()
    }

    /// Answers the request that waits.
    fn answer(&self) {
        self.answers.send(()).unwrap();
    }

    fn has(&self, block: u64) -> bool {
        let mut bytes = vec![0; BLOCK];
        self.cache.read_exact_at(&mut bytes, block * BLOCK as u64).unwrap();
        self.presence.has(block * BLOCK as u64, BLOCK) && bytes == content(block)
    }
}

impl Client {
    fn request(&self, class: Class, block: u64) {
        let request = FetchRequest { class, reader: 0, pages: 16, first: block * BLOCK_PAGES };
        send(self.socket.as_raw_fd(), &request.encode(), MsgFlags::empty()).unwrap();
    }

    fn woken(&self) {
        crate::support::woken(&self.reader);
    }

    /// Whether the fetcher has closed its socket.
    fn is_refused(&self) -> bool {
        readable(&self.socket);
        // A reset: it has not read what was sent.
        let received = recv(self.socket.as_raw_fd(), &mut [0; 64], MsgFlags::empty());
        matches!(received, Ok(0) | Err(Errno::ECONNRESET))
    }
}

#[test]
fn two_streamers_get_a_block_that_is_requested_once() {
    let scene = scene();
    let [one, two] = [(); 2].map(|()| scene.client());
    one.request(Class::Demand, 3);
    assert_eq!(scene.requested(), 3..4);
    two.request(Class::Demand, 3);
    two.request(Class::Demand, 9);
    scene.answer();
    [&one, &two].into_iter().for_each(Client::woken);
    assert!(scene.has(3));
    assert_eq!(scene.requested(), 9..10, "and not block 3 again");
    scene.answer();
    while !scene.has(9) {
        two.woken();
    }
}

#[test]
fn a_streamer_that_breaks_the_protocol_harms_itself_alone() {
    let scene = scene();
    let [good, bad, far] = [(); 3].map(|()| scene.client());
    orders::send_finish(bad.socket.as_fd()).unwrap();
    assert!(bad.is_refused());
    assert!(
        matches!(scene.report(), FetchReport::Refused(reason) if reason.contains("an order of the owner"))
    );
    far.request(Class::Demand, BLOCKS + 7);
    assert!(far.is_refused());
    assert!(matches!(scene.report(), FetchReport::Refused(reason) if reason.contains("does not have")));
    good.request(Class::Background, 5);
    assert_eq!(scene.requested(), 5..6);
    scene.answer();
    good.woken();
    assert!(scene.has(5));
}

#[test]
fn a_reader_that_could_hold_up_the_others_is_refused() {
    let scene = scene();
    let (_reader, writer) = nix::unistd::pipe().unwrap();
    for reader in [writer, EventFd::new().unwrap().into()] {
        let client = scene.client();
        orders::send_readers(client.socket.as_fd(), &[reader.as_fd()]).unwrap();
        assert!(client.is_refused());
        let report = scene.report();
        assert!(
            matches!(&report, FetchReport::Refused(reason) if reason.contains("stream socket")),
            "{report:?}"
        );
    }
}

/// It has a copy of what the fetcher wakes it by, and takes no wake-up.
#[test]
fn a_streamer_that_does_all_it_can_holds_up_no_other() {
    let scene = scene();
    let (hostile, honest) = (scene.client(), scene.client());
    let sender = hostile.reader.sender();
    fcntl(sender, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    while send(sender.as_raw_fd(), &[0; 4096], MsgFlags::MSG_DONTWAIT).is_ok() {}
    (0..4).for_each(|number| hostile.request(Class::Demand, 2 * number));
    honest.request(Class::Demand, 9);
    for _ in 0..5 {
        scene.requested();
        scene.answer();
    }
    honest.woken();
    assert!(scene.has(9));
}

#[test]
fn one_streamer_too_many_is_refused() {
    let scene = scene();
    let clients: Vec<Client> = (0..MAX_FETCH_CLIENTS).map(|_| scene.client()).collect();
    assert!(scene.client().is_refused());
    assert!(matches!(scene.report(), FetchReport::Refused(reason) if reason.contains("MAX_FETCH_CLIENTS")));
    clients[MAX_FETCH_CLIENTS - 1].request(Class::Demand, 1);
    assert_eq!(scene.requested(), 1..2);
}

#[test]
fn the_rest_is_fetched_when_no_streamer_is_connected() {
    let scene = scene();
    let client = scene.client();
    client.request(Class::Demand, 3);
    assert_eq!(scene.requested(), 3..4);
    orders::send_finish(scene.fetcher.socket.as_fd()).unwrap();
    scene.answer();
    client.woken();
    assert!(scene.requested.recv_timeout(Duration::from_millis(200)).is_err(), "a streamer is connected");
    drop(client);
    let mut left: u64 = BLOCKS - 1;
    while left > 0 {
        let blocks = scene.requested();
        left -= blocks.end - blocks.start;
        scene.answer();
    }
    assert!(matches!(scene.report(), FetchReport::Closed));
    assert!(scene.presence.is_closed() && (0..BLOCKS).all(|block| scene.has(block)));
    assert_eq!(scene.fetcher.code(), 0);
}
