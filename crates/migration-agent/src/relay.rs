// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's page protocol on this host: requests of a lazy restore travel over the migration's connection.
//!
//! The client, `rewake lazy-pages --page-server`, never sees that the connection is cut. Its requests wait, and are sent
//! again on the next connection. It gives up after 30 s without an answer, and connects again: one client is served at a
//! time, the newest.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, bail, ensure};
use rewake_page_protocol::{CLOSED, HeaderLayout, NARROW_LEN, PageMessage, PageRun, WIDE_LEN, answer_header};

use crate::frame::{Frame, FrameWriter};

/// Requests without an answer: further ones wait in the client's socket. All of them fit into a TCP socket's buffer, so
/// that sending them never waits for the source.
const MAX_OUTSTANDING: usize = 1024;
const PAGE: u64 = 4096;

/// The relay of one restore.
#[derive(Debug, Default)]
pub(crate) struct PageRelay {
    state: Mutex<RelayState>,
    /// An answer has made room for a request.
    has_room: Condvar,
    /// Where answers are written, without the state's lock: a client may read nothing while its requests are not taken.
    /// Locked before the state.
    client: Mutex<Option<RelayClient>>,
}

#[derive(Debug, Default)]
struct RelayState {
    link: Option<Arc<FrameWriter>>,
    outstanding: VecDeque<RelayRequest>,
}

/// A client and its number.
#[derive(Debug)]
struct RelayClient {
    number: u64,
    stream: UnixStream,
}

/// A request without an answer.
#[derive(Debug, Clone, Copy)]
struct RelayRequest {
    /// Of its client.
    number: u64,
    layout: HeaderLayout,
    pid: u32,
    run: PageRun,
}

impl RelayRequest {
    fn frame(&self) -> Frame {
        Frame::PageRequest { pid: self.pid, run: self.run }
    }
}

impl PageRelay {
    /// Uses a new connection, or none.
    pub(crate) fn connect(&self, link: Option<Arc<FrameWriter>>) {
        let mut state = self.state();
        if let Some(link) = &link {
            for request in &state.outstanding {
                // If the connection is cut again, they are sent on the next one.
                let _ = link.send(&request.frame());
            }
        }
        state.link = link;
    }

    /// Serves clients, one after the other. Whether one has all pages is its process's to say.
    ///
    /// # Errors
    /// A client violates the protocol.
    pub(crate) fn run(&self, listener: &UnixListener) -> anyhow::Result<()> {
        for number in 1.. {
            let (stream, _) = listener.accept().context("waiting for a lazy-pages client")?;
            let writer = stream.try_clone().context("a lazy-pages client")?;
            *self.client() = Some(RelayClient { number, stream: writer });
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
                    self.request(RelayRequest { number, layout, pid, run });
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
        state.outstanding.push_back(request);
        if let Some(link) = &state.link {
            // As above.
            let _ = link.send(&request.frame());
        }
    }

    /// Gives pages to the client that requested them; if it has ended, to none.
    ///
    /// # Errors
    /// They are not those of the oldest request.
    pub(crate) fn answer(&self, pid: u32, vaddr: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let client = self.client();
        let pages = bytes.len() as u64 / PAGE;
        let request = self.take(pid, vaddr, pages)?;
        let Some(client) = client.as_ref().filter(|client| client.number == request.number) else {
            return Ok(());
        };
        let header = request.layout.encode(&answer_header(pid, PageRun::new(vaddr, pages)?))?;
        let mut stream = &client.stream;
        // It may have ended: its process says how.
        let _ = stream.write_all(&header).and_then(|()| stream.write_all(bytes));
        Ok(())
    }

    /// Takes the oldest request, if these pages answer it.
    fn take(&self, pid: u32, vaddr: u64, pages: u64) -> anyhow::Result<RelayRequest> {
        let mut state = self.state();
        let oldest = *state.outstanding.front().context("the source sent pages without a request")?;
        let run = oldest.run;
        ensure!(
            (oldest.pid, run.vaddr()) == (pid, vaddr) && pages <= run.pages(),
            "the source sent {pages} pages at {vaddr:#x} of task {pid}, expected {} at {:#x} of task {}",
            run.pages(),
            run.vaddr(),
            oldest.pid
        );
        state.outstanding.pop_front();
        self.has_room.notify_one();
        Ok(oldest)
    }

    fn state(&self) -> MutexGuard<'_, RelayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self) -> MutexGuard<'_, Option<RelayClient>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a message, and finds out the client's layout with the first request; none if the client has ended.
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
            let relay = Arc::new(PageRelay::default());
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
                Some(Frame::PageRequest { pid: 7, run }) => run.vaddr(),
                other => panic!("{other:?}"),
            }
        }
    }

    fn get(number: u64) -> Vec<u8> {
        let run = PageRun::new(number * PAGE, 1).unwrap();
        LAYOUT.encode(&PageMessage::Get { pid: 7, run }.header()).unwrap()
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
        scene.relay.answer(7, PAGE, &[5; 4096]).unwrap();
        expect_page(&mut client, 1, 5);
    }

    #[test]
    fn a_new_client_gets_no_answer_of_the_one_before() {
        let mut scene = Scene::start();
        scene.client().write_all(&get(1)).unwrap();
        assert_eq!(scene.requested(), PAGE);
        let mut client = scene.client();
        client.write_all(&get(2)).unwrap();
        assert_eq!(scene.requested(), 2 * PAGE);
        scene.relay.answer(7, PAGE, &[1; 4096]).unwrap();
        scene.relay.answer(7, 2 * PAGE, &[2; 4096]).unwrap();
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
        // More than a limit, and more bytes of answers than a socket takes: the client reads nothing meanwhile.
        let sends =
            thread::spawn(move || (0..all).for_each(|number| sender.write_all(&get(number)).unwrap()));
        let relay = Arc::clone(&scene.relay);
        for number in 0..MAX_OUTSTANDING as u64 {
            assert_eq!(scene.requested(), number * PAGE);
        }
        let answers = thread::spawn(move || {
            for number in 0..all {
                let start = Instant::now();
                while relay.answer(7, number * PAGE, &[3; 4096]).is_err() {
                    assert!(start.elapsed() < LIMIT);
                    thread::yield_now();
                }
            }
        });
        sends.join().unwrap();
        (0..all).for_each(|number| expect_page(&mut client, number, 3));
        answers.join().unwrap();
    }
}
