// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's page protocol on this host: requests of a lazy restore travel over the migration's connection.
//!
//! The client, `rewake lazy-pages --page-server`, never sees that the connection is cut. Its requests wait,
//! and are sent again on the next connection. It gives up after 30 s without an answer, and connects again:
//! one client is served at a time, the newest.
//!
//! Pages that are on this host by then are answered here. Others are answered by the source, with bytes or
//! with the digest of a block that was sent before the freeze.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context as _, bail, ensure};
use rewake_migration::blocks::BLOCK;
use rewake_page_protocol::{CLOSED, HeaderLayout, NARROW_LEN, PageMessage, PageRun, WIDE_LEN, answer_header};

use crate::candidates::CandidateStore;
use crate::frame::{Frame, FrameWriter, PagePart};

/// Requests without an answer: further ones wait in the client's socket. All of them fit into a TCP socket's
/// buffer, so that sending them never waits for the source.
const MAX_OUTSTANDING: usize = 1024;
/// Requests of [`PageRelay::fetch_all`] without an answer.
/// 64 MiB, or their digests: the link is never idle while the source compares blocks.
const MAX_FETCHES: usize = 256;
/// Pages of such a request.
const FETCH_PAGES: u64 = 64;
/// The client that requests all memory for this host.
const THIS_HOST: u64 = 0;
const PAGE: u64 = 4096;

/// The relay of one restore.
#[derive(Debug)]
pub(crate) struct PageRelay {
    store: Arc<CandidateStore>,
    state: Mutex<RelayState>,
    /// An answer has made room for a request.
    has_room: Condvar,
    /// The oldest request is answered on this host.
    has_local: Condvar,
    /// Where answers are written, without the state's lock: a client may read nothing while its requests are
    /// not taken. Locked before the state.
    client: Mutex<Option<RelayClient>>,
}

#[derive(Debug, Default)]
struct RelayState {
    link: Option<Arc<FrameWriter>>,
    /// The number of the newest client.
    client: u64,
    outstanding: VecDeque<RelayRequest>,
    /// The source has answered with a digest that is not a candidate's.
    wants_bytes: bool,
    /// Number of requests for this host.
    fetches: usize,
}

/// The source's digest is not that of the stored block.
#[derive(Debug)]
struct StaleDigest;

/// A client and its number.
#[derive(Debug)]
struct RelayClient {
    number: u64,
    stream: UnixStream,
}

/// A request without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RelayRequest {
    /// Of its client.
    number: u64,
    layout: HeaderLayout,
    pid: u32,
    run: PageRun,
    /// The pages are on this host.
    is_local: bool,
}

impl RelayRequest {
    fn for_this_host(pid: u32, run: PageRun) -> Self {
        Self { number: THIS_HOST, layout: HeaderLayout::Wide, pid, run, is_local: false }
    }
}

impl RelayState {
    /// Sends a request to the source, if that is to answer it. One that is lost with the connection is sent
    /// on the next.
    fn send(&self, request: &RelayRequest) {
        if let Some(link) = self.link.as_ref().filter(|_| !request.is_local) {
            let (pid, run, wants_bytes) = (request.pid, request.run, self.wants_bytes);
            let _ = link.send(&Frame::PageRequest { pid, run, wants_bytes });
        }
    }

    fn push(&mut self, request: RelayRequest) {
        self.send(&request);
        self.outstanding.push_back(request);
    }

    /// Forgets the requests of clients that have ended. No link must have them: its answers have their order.
    fn forget_ended(&mut self) {
        let newest = self.client;
        self.outstanding.retain(|request| [THIS_HOST, newest].contains(&request.number));
    }

    fn begins_local(&self) -> bool {
        self.outstanding.front().is_some_and(|oldest| oldest.is_local)
    }
}

impl PageRelay {
    pub(crate) fn new(store: Arc<CandidateStore>) -> Self {
        Self {
            store,
            state: Mutex::default(),
            has_room: Condvar::new(),
            has_local: Condvar::new(),
            client: Mutex::default(),
        }
    }

    /// Uses a new connection, or none.
    pub(crate) fn connect(&self, link: Option<Arc<FrameWriter>>) {
        let mut state = self.state();
        state.link = link;
        state.forget_ended();
        state.outstanding.iter().for_each(|request| state.send(request));
        self.has_room.notify_all();
        self.has_local.notify_one();
    }

    /// Notes that a client has taken the place of the one before.
    fn use_client(&self, client: RelayClient) {
        let mut state = self.state();
        state.client = client.number;
        if state.link.is_none() {
            state.forget_ended();
        }
        drop(state);
        *self.client() = Some(client);
    }

    /// Serves clients, one after the other. Whether one has all pages is its process's to say.
    ///
    /// # Errors
    /// A client violates the protocol.
    pub(crate) fn run(self: &Arc<Self>, listener: &UnixListener) -> anyhow::Result<()> {
        let shared = Arc::clone(self);
        thread::spawn(move || {
            if let Err(error) = shared.answer_local() {
                // A client without an answer gives up, and logs that.
                tracing::error!("{error:#}");
            }
        });
        for number in 1.. {
            let (stream, _) = listener.accept().context("waiting for a lazy-pages client")?;
            let writer = stream.try_clone().context("a lazy-pages client")?;
            self.use_client(RelayClient { number, stream: writer });
            self.serve(number, &stream)?;
            *self.client() = None;
        }
        Ok(())
    }

    fn serve(&self, number: u64, stream: &UnixStream) -> anyhow::Result<()> {
        let mut known = None;
        while let Some((layout, message)) = next(stream, known)? {
            known = layout;
            match (message, layout) {
                (PageMessage::Get { pid, run }, Some(layout)) => {
                    let is_local = self.store.has(pid, run);
                    self.request(RelayRequest { number, layout, pid, run, is_local });
                }
                (PageMessage::Close { .. }, _) => {
                    let client = self.client();
                    let stream = client.as_ref().map(|client| &client.stream);
                    // It may have ended: its process says how.
                    let _ = stream.map(|mut stream| stream.write_all(&CLOSED));
                }
                (other, _) => bail!("the lazy-pages client sent {other:?}, expected a request for pages"),
            }
        }
        Ok(())
    }

    fn request(&self, request: RelayRequest) {
        let state = self.state();
        let is_full = |state: &mut RelayState| state.outstanding.len() >= MAX_OUTSTANDING;
        let mut state = self.has_room.wait_while(state, is_full).unwrap_or_else(PoisonError::into_inner);
        state.push(request);
        if request.is_local {
            self.has_local.notify_one();
        }
    }

    /// Requests runs of pages for this host, and returns when all of them are stored.
    pub(crate) fn fetch_all(&self, runs: &[(u32, PageRun)]) -> anyhow::Result<()> {
        for (pid, run) in runs {
            let mut first = run.vaddr();
            while first < run.end() {
                let end = (first / BLOCK * BLOCK + FETCH_PAGES * PAGE).min(run.end());
                self.wait_for_fetches(MAX_FETCHES - 1);
                self.state().fetches += 1;
                self.request(RelayRequest::for_this_host(*pid, PageRun::new(first, (end - first) / PAGE)?));
                first = end;
            }
        }
        self.wait_for_fetches(0);
        Ok(())
    }

    fn wait_for_fetches(&self, most: usize) {
        let are_many = |state: &mut RelayState| state.fetches > most;
        drop(self.has_room.wait_while(self.state(), are_many).unwrap_or_else(PoisonError::into_inner));
    }

    /// Answers requests for pages that are on this host, in their turn.
    fn answer_local(&self) -> anyhow::Result<()> {
        loop {
            let others = |state: &mut RelayState| !state.begins_local();
            drop(self.has_local.wait_while(self.state(), others).unwrap_or_else(PoisonError::into_inner));
            let client = self.client();
            let Some(request) = self.take_local() else { continue };
            self.give_local(client.as_ref(), &request)?;
        }
    }

    fn give_local(&self, client: Option<&RelayClient>, request: &RelayRequest) -> anyhow::Result<()> {
        let bytes = self.store.resident(request.pid, request.run)?.context("pages that were stored")?;
        give(client, request, &bytes)
    }

    fn take_local(&self) -> Option<RelayRequest> {
        let mut state = self.state();
        let taken = if state.begins_local() { state.outstanding.pop_front() } else { None };
        self.has_room.notify_all();
        taken
    }

    /// Gives pages to the client that requested them. If that client has ended, the pages are dropped.
    ///
    /// # Errors
    /// The oldest request is for other pages.
    pub(crate) fn answer(&self, pid: u32, vaddr: u64, parts: Vec<PagePart>) -> anyhow::Result<()> {
        let client = self.client();
        while let Some(local) = self.take_local() {
            self.give_local(client.as_ref(), &local)?;
        }
        // The answers that were in flight when this side ended the connection.
        if self.state().link.is_none() {
            return Ok(());
        }
        let request = self.oldest(pid, vaddr, parts.iter().map(PagePart::pages).sum())?;
        let end = vaddr + parts.iter().map(PagePart::pages).sum::<u64>() * PAGE;
        let Ok(bytes) = self.bytes(&request, parts)? else {
            return self.begin_again();
        };
        self.answered(&request, end)?;
        if request.number == THIS_HOST { Ok(()) } else { give(client.as_ref(), &request, &bytes) }
    }

    /// Removes the oldest request, whose pages up to `end` have arrived.
    fn answered(&self, request: &RelayRequest, end: u64) -> anyhow::Result<()> {
        let mut state = self.state();
        // Its client and the link may have ended meanwhile.
        let _ = state.outstanding.pop_front_if(|oldest| oldest == request);
        if request.number == THIS_HOST {
            match request.run.end() - end {
                0 => state.fetches -= 1,
                rest => state.push(RelayRequest::for_this_host(request.pid, PageRun::new(end, rest / PAGE)?)),
            }
        }
        self.has_room.notify_all();
        self.has_local.notify_one();
        Ok(())
    }

    /// Puts the bytes of an answer together; those for this host are stored, and not read.
    fn bytes(
        &self,
        request: &RelayRequest,
        parts: Vec<PagePart>,
    ) -> anyhow::Result<Result<Vec<u8>, StaleDigest>> {
        let (mut all, mut next) = (Vec::new(), request.run.vaddr());
        for part in parts {
            let run = PageRun::new(next, part.pages())?;
            next = run.end();
            match part {
                PagePart::Bytes(bytes) => {
                    if request.number == THIS_HOST {
                        self.store.keep(request.pid, run.vaddr(), &bytes)?;
                    } else {
                        all.extend(bytes);
                    }
                }
                PagePart::Zeros(pages) => {
                    let zeros = vec![0; usize::try_from(pages * PAGE)?];
                    match request.number {
                        THIS_HOST => self.store.keep(request.pid, run.vaddr(), &zeros)?,
                        _ => all.extend(zeros),
                    }
                }
                PagePart::Unchanged { digest, .. } => {
                    if !self.store.confirm(request.pid, run, digest)? {
                        return Ok(Err(StaleDigest));
                    }
                    if request.number != THIS_HOST {
                        all.extend(
                            self.store.resident(request.pid, run)?.context("pages that are resident")?,
                        );
                    }
                }
            }
        }
        Ok(Ok(all))
    }

    /// Ends the connection: on the next one all requests are sent again, for bytes.
    fn begin_again(&self) -> anyhow::Result<()> {
        let mut state = self.state();
        ensure!(!state.wants_bytes, "the source sent a digest of a block whose bytes were requested");
        tracing::warn!(
            "a block differs from its digest at the source: all further pages are requested as bytes"
        );
        state.wants_bytes = true;
        state.link.take().inspect(|link| link.close());
        Ok(())
    }

    /// The oldest request, if these pages answer it.
    fn oldest(&self, pid: u32, vaddr: u64, pages: u64) -> anyhow::Result<RelayRequest> {
        let state = self.state();
        let oldest = state.outstanding.front().filter(|oldest| !oldest.is_local);
        let oldest = *oldest.context("the source sent pages without a request")?;
        let run = oldest.run;
        ensure!(
            (oldest.pid, run.vaddr()) == (pid, vaddr) && pages <= run.pages(),
            "the source sent {pages} pages at {vaddr:#x} of task {pid}, expected {} at {:#x} of task {}",
            run.pages(),
            run.vaddr(),
            oldest.pid
        );
        Ok(oldest)
    }

    fn state(&self) -> MutexGuard<'_, RelayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self) -> MutexGuard<'_, Option<RelayClient>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives pages to the client of a request. It may have ended: its process says how.
fn give(client: Option<&RelayClient>, request: &RelayRequest, bytes: &[u8]) -> anyhow::Result<()> {
    let Some(client) = client.filter(|client| client.number == request.number) else { return Ok(()) };
    let run = PageRun::new(request.run.vaddr(), bytes.len() as u64 / PAGE)?;
    let header = request.layout.encode(&answer_header(request.pid, run))?;
    let mut stream = &client.stream;
    let _ = stream.write_all(&header).and_then(|()| stream.write_all(bytes));
    Ok(())
}

/// Reads a message, and finds out the client's layout with the first request, or `None` if the client has
/// ended.
fn next(
    mut stream: &UnixStream,
    known: Option<HeaderLayout>,
) -> anyhow::Result<Option<(Option<HeaderLayout>, PageMessage)>> {
    let mut bytes = [0; WIDE_LEN];
    let first = known.map_or(NARROW_LEN, HeaderLayout::len);
    if stream.read_exact(&mut bytes[..first]).is_err() {
        return Ok(None);
    }
    if let Some(layout) = known {
        return Ok(Some((known, PageMessage::parse(&layout.decode(&bytes))?)));
    }
    if let Ok(close @ PageMessage::Close { .. }) = PageMessage::parse(&HeaderLayout::Narrow.decode(&bytes)) {
        return Ok(Some((None, close)));
    }
    let (start, rest) = bytes.split_first_chunk_mut::<NARROW_LEN>().context("a header")?;
    let layout = HeaderLayout::detect(start);
    if layout == HeaderLayout::Wide && stream.read_exact(rest).is_err() {
        return Ok(None);
    }
    Ok(Some((Some(layout), PageMessage::parse(&layout.decode(&bytes))?)))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    const LAYOUT: HeaderLayout = HeaderLayout::Wide;
    const LIMIT: Duration = Duration::from_secs(20);

    struct Scene {
        relay: Arc<PageRelay>,
        folder: tempfile::TempDir,
        /// The source's end of the connection.
        source: TcpStream,
    }

    impl Scene {
        fn start() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let store = Arc::new(CandidateStore::make(folder.path()).unwrap());
            let relay = Arc::new(PageRelay::new(store));
            let listener = UnixListener::bind(folder.path().join("pages.sock")).unwrap();
            let shared = Arc::clone(&relay);
            // It ends with the test's process.
            thread::spawn(move || shared.run(&listener));
            let source = Self::link(&relay);
            Self { relay, folder, source }
        }

        /// Connects a source.
        fn link(relay: &PageRelay) -> TcpStream {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let source = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            source.set_read_timeout(Some(LIMIT)).unwrap();
            let (stream, _) = listener.accept().unwrap();
            relay.connect(Some(Arc::new(FrameWriter::new(stream.into()))));
            source
        }

        fn client(&self) -> UnixStream {
            let client = UnixStream::connect(self.folder.path().join("pages.sock")).unwrap();
            client.set_read_timeout(Some(LIMIT)).unwrap();
            client
        }

        fn requested(&mut self) -> u64 {
            match Frame::read(&mut self.source).unwrap() {
                Some(Frame::PageRequest { pid: 7, run, wants_bytes: false }) => run.vaddr(),
                other => panic!("{other:?}"),
            }
        }
    }

    fn get(number: u64) -> Vec<u8> {
        let run = PageRun::new(number * PAGE, 1).unwrap();
        LAYOUT.encode(&PageMessage::Get { pid: 7, run }.header()).unwrap()
    }

    fn page(byte: u8) -> Vec<PagePart> {
        vec![PagePart::Bytes(vec![byte; 4096])]
    }

    fn expect_page(client: &mut UnixStream, number: u64, byte: u8) {
        let mut bytes = vec![0; LAYOUT.len() + 4096];
        client.read_exact(&mut bytes).unwrap();
        let header = answer_header(7, PageRun::new(number * PAGE, 1).unwrap());
        assert_eq!(bytes[..LAYOUT.len()], LAYOUT.encode(&header).unwrap());
        assert!(bytes[LAYOUT.len()..].iter().all(|found| *found == byte));
    }

    #[test]
    fn requests_are_sent_again_on_the_next_connection() {
        let mut scene = Scene::start();
        let mut client = scene.client();
        client.write_all(&get(1)).unwrap();
        assert_eq!(scene.requested(), PAGE);
        scene.relay.connect(None);
        scene.source = Scene::link(&scene.relay);
        assert_eq!(scene.requested(), PAGE);
        scene.relay.answer(7, PAGE, page(5)).unwrap();
        expect_page(&mut client, 1, 5);
    }

    #[test]
    fn requests_of_an_ended_client_are_not_sent_again() {
        let mut scene = Scene::start();
        scene.client().write_all(&get(1)).unwrap();
        assert_eq!(scene.requested(), PAGE);
        scene.relay.connect(None);
        let mut client = scene.client();
        client.write_all(&get(2)).unwrap();
        let newest = |scene: &Scene| scene.relay.state().outstanding.back().map(|last| last.run.vaddr());
        let began = Instant::now();
        while newest(&scene) != Some(2 * PAGE) {
            assert!(began.elapsed() < LIMIT);
            thread::yield_now();
        }
        assert_eq!(scene.relay.state().outstanding.len(), 1);
        scene.source = Scene::link(&scene.relay);
        assert_eq!(scene.requested(), 2 * PAGE);
        scene.relay.answer(7, 2 * PAGE, page(5)).unwrap();
        expect_page(&mut client, 2, 5);
    }

    #[test]
    fn a_new_client_gets_no_answer_of_the_one_before() {
        let mut scene = Scene::start();
        scene.client().write_all(&get(1)).unwrap();
        assert_eq!(scene.requested(), PAGE);
        let mut client = scene.client();
        client.write_all(&get(2)).unwrap();
        assert_eq!(scene.requested(), 2 * PAGE);
        scene.relay.answer(7, PAGE, page(1)).unwrap();
        scene.relay.answer(7, 2 * PAGE, page(2)).unwrap();
        expect_page(&mut client, 2, 2);
        let close = LAYOUT.encode(&PageMessage::Close { forced: false }.header()).unwrap();
        client.write_all(&close).unwrap();
        let mut closed = CLOSED;
        closed.fill(0xff);
        client.read_exact(&mut closed).unwrap();
        assert_eq!(closed, CLOSED);
    }

    #[test]
    fn answers_wait_for_a_client_and_requests_do_not() {
        let mut scene = Scene::start();
        let mut client = scene.client();
        let all = MAX_OUTSTANDING as u64 + 100;
        let mut sender = client.try_clone().unwrap();
        // More than a limit, and more bytes of answers than a socket takes: the client reads nothing
        // meanwhile.
        let sends =
            thread::spawn(move || (0..all).for_each(|number| sender.write_all(&get(number)).unwrap()));
        let relay = Arc::clone(&scene.relay);
        for number in 0..MAX_OUTSTANDING as u64 {
            assert_eq!(scene.requested(), number * PAGE);
        }
        let answers = thread::spawn(move || {
            for number in 0..all {
                let start = Instant::now();
                while relay.answer(7, number * PAGE, page(3)).is_err() {
                    assert!(start.elapsed() < LIMIT);
                    thread::yield_now();
                }
            }
        });
        sends.join().unwrap();
        (0..all).for_each(|number| expect_page(&mut client, number, 3));
        answers.join().unwrap();
    }

    #[test]
    fn a_digest_is_answered_from_the_store_or_asked_for_as_bytes() {
        let mut scene = Scene::start();
        let block = vec![4; 65536];
        scene.relay.store.candidate(7, 0, 0xffff, &block).unwrap();
        let mut client = scene.client();
        client.write_all(&get(1)).unwrap();
        assert_eq!(scene.requested(), PAGE);
        let digest = crate::tree_memory::digest(&block);
        let unchanged = |digest| vec![PagePart::Unchanged { pages: 1, digest }];
        scene.relay.answer(7, PAGE, unchanged(digest)).unwrap();
        expect_page(&mut client, 1, 4);
        // It is on this host now: the source is not asked again.
        client.write_all(&get(1)).unwrap();
        expect_page(&mut client, 1, 4);
        // A digest of bytes that are not stored ends the connection, and bytes are requested.
        client.write_all(&get(16)).unwrap();
        assert_eq!(scene.requested(), 16 * PAGE);
        scene.relay.answer(7, 16 * PAGE, unchanged(digest)).unwrap();
        assert_eq!(Frame::read(&mut scene.source).unwrap(), None);
        scene.source = Scene::link(&scene.relay);
        let run = PageRun::new(16 * PAGE, 1).unwrap();
        let again = Frame::PageRequest { pid: 7, run, wants_bytes: true };
        assert_eq!(Frame::read(&mut scene.source).unwrap(), Some(again));
        assert!(scene.relay.answer(7, 16 * PAGE, unchanged(digest)).is_err());
        scene.relay.answer(7, 16 * PAGE, page(9)).unwrap();
        expect_page(&mut client, 16, 9);
    }

    #[test]
    fn all_memory_is_fetched_before_a_client_exists() {
        let mut scene = Scene::start();
        let (relay, runs) = (Arc::clone(&scene.relay), [(7, PageRun::new(8 * PAGE, 100).unwrap())]);
        let fetched = thread::spawn(move || relay.fetch_all(&runs));
        let mut expected = 8;
        while expected < 108 {
            let Some(Frame::PageRequest { run, .. }) = Frame::read(&mut scene.source).unwrap() else {
                panic!()
            };
            // The first page only: the rest is requested again.
            let parts = if expected == 8 {
                page(6)
            } else {
                vec![PagePart::Bytes([6; 4096].repeat(usize::try_from(run.pages()).unwrap()))]
            };
            expected += if expected == 8 { 1 } else { run.pages() };
            scene.relay.answer(7, run.vaddr(), parts).unwrap();
        }
        fetched.join().unwrap().unwrap();
        let mut client = scene.client();
        for number in [8, 9, 107] {
            client.write_all(&get(number)).unwrap();
            expect_page(&mut client, number, 6);
        }
    }
}
