// SPDX-License-Identifier: MIT OR Apache-2.0
//! The fetcher: one thread that waits for the streamer's requests and for the peer's answers.
//!
//! Standard input is the socket to the streamer. It connects to the peer when the first page is requested: a
//! CRIU that dumped its program serves one connection, and takes its end for success. To an image server it
//! has a connection for page faults, and one for the background, from its start on. Then it confines itself,
//! and makes no other connection: it ends when it has lost one, and the streamer starts another fetcher. It
//! also ends when the streamer has closed the socket, or after the last message.
//!
//! A fetcher of the node agent serves many streamers. The rest of the image is fetched while none of them is
//! connected.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use rewake_criu_tls::{HandshakeError, TlsClient};
use rewake_image_io::PresenceWriter;
use rewake_image_transfer::protocol::message::MessageError;
use rewake_process::{descriptors, oom_score};

use crate::answer_limits::{ANSWER_LIMIT, AnswerLimits};
use crate::channel::{self, FetchOrder};
use crate::client::{FetchClients, checked_readers};
use crate::confine::{confine, without_core};
use crate::ended::{LocalFailure, PeerEnded, WrongAnswer};
use crate::image_wire::ImageWire;
use crate::peer::PeerSocket;
use crate::peer_wire::PeerWire;
use crate::plan::{FetchExtent, FetchPlan, FetchedMemory, PagePeer, PeerTls, SparseFile, WritePlace};
use crate::queue::{FetchQueue, FlightPages, LANES, OF_IMAGE_SERVER, OF_PAGE_SERVER};
use crate::readers::{ClientNumber, OWNER};
use crate::stream::PageStream;
use crate::waiting::wait;
use crate::wire::PageWire;

/// The hidden command that is the fetcher.
pub const COMMAND: &str = "fetcher";

/// Time in which a streamer sends the first order. It sends that order at once, unless the machine is
/// overloaded.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Time in which the first streamer connects, because the rest of the image is requested after what it needs,
/// and not in front of it.
const CLIENT_LIMIT: Duration = Duration::from_secs(1);
/// Orders that are taken before the peer's answers are looked at.
const ORDERS: usize = 64;

/// Fetches pages until the streamer ends. Returns the exit code.
///
/// # Errors
/// The streamer sends no first order.
pub fn run() -> anyhow::Result<u8> {
    // SAFETY: this program has just started, and has opened nothing.
    unsafe { descriptors::close_inherited()? };
    oom_score::be_killed_as_usual();
    // A terminal or a service manager signals whole groups. This process ends with its streamer.
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None).context("blocking signals")?;
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let start = start(socket.as_fd())?;
    let ended = start.and_then(|mut fetcher| fetcher.serve(socket.as_fd()));
    match ended {
        Ok(()) => Ok(0),
        Err(FetchEnd::StreamerEnded) => Ok(0),
        Err(FetchEnd::Failed { again, error }) => {
            // Without a streamer no process needs the reason.
            let _ = channel::report_failed(socket.as_fd(), again, &format!("{error:#}"));
            Ok(1)
        }
    }
}

/// Why a fetcher ends early.
#[derive(Debug)]
enum FetchEnd {
    /// The streamer has closed the socket.
    StreamerEnded,
    /// Pages cannot be fetched.
    Failed {
        /// Whether a new connection may help.
        again: bool,
        error: anyhow::Error,
    },
}

/// What no new connection changes.
impl From<anyhow::Error> for FetchEnd {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed { again: false, error }
    }
}

/// What the peer has, shared by the connections.
#[derive(Debug)]
enum PeerMemory {
    Pages(Rc<[FetchExtent]>),
    Files(Rc<[SparseFile]>),
}

/// A connection to the peer.
#[derive(Debug)]
struct Connection {
    wire: PeerWire,
    limits: AnswerLimits,
}

/// The sockets of streamers that have orders.
struct ReadySockets {
    owner: bool,
    clients: Vec<ClientNumber>,
}

/// A fetcher that has its first order.
struct Fetcher {
    plan: FetchPlan,
    memory: PeerMemory,
    tls: Option<TlsClient>,
    /// Whether an earlier fetcher had a connection.
    again: bool,
    /// The files that are written.
    files: Vec<File>,
    presence: PresenceWriter,
    connected: Option<OwnedFd>,
    queue: FetchQueue,
    readers: Vec<OwnedFd>,
    /// Streamers that share this fetcher with its owner.
    clients: FetchClients,
    had_client: bool,
    started: Instant,
    connections: [Option<Connection>; LANES],
    finishing: bool,
    fetched: u64,
}

fn start(socket: BorrowedFd<'_>) -> anyhow::Result<Result<Fetcher, FetchEnd>> {
    wait(&[socket], Some(START_LIMIT))?;
    let order = channel::receive_order(socket).context("the first order")?;
    let Some(FetchOrder::Start { again, plan, presence, connected }) = order else {
        bail!("expected the first order, found {order:?}")
    };
    let make = || -> anyhow::Result<Fetcher> {
        let plan = FetchPlan::read(&File::from(plan)).context("the fetch plan")?;
        let presence = PresenceWriter::open(presence.as_fd(), plan.len).context("the presence map")?;
        let (memory, limits) = match &plan.memory {
            FetchedMemory::Pages { .. } => (PeerMemory::Pages(plan.page_extents().into()), OF_PAGE_SERVER),
            FetchedMemory::Files { files, .. } => {
                (PeerMemory::Files(files.as_slice().into()), OF_IMAGE_SERVER)
            }
        };
        let queue = FetchQueue::new(plan.runs(), limits);
        let files = files(socket, plan.files()).context("the files to write")?;
        without_core().context("without core dumps")?;
        let tls = plan.tls.as_ref().map(PeerTls::client).transpose()?;
        let (readers, clients) = (Vec::new(), FetchClients::default());
        let (connections, finishing, fetched) = ([None, None], false, 0);
        Ok(Fetcher {
            plan,
            memory,
            tls,
            again,
            files,
            presence,
            connected,
            queue,
            readers,
            clients,
            had_client: false,
            started: Instant::now(),
            connections,
            finishing,
            fetched,
        })
    };
    Ok(make().map_err(FetchEnd::from))
}

/// Receives `count` files.
fn files(socket: BorrowedFd<'_>, count: usize) -> anyhow::Result<Vec<File>> {
    let deadline = Instant::now() + START_LIMIT;
    let mut files: Vec<File> = Vec::new();
    while files.len() < count {
        match channel::receive_order(socket)? {
            Some(FetchOrder::Files(some)) => files.extend(some.into_iter().map(File::from)),
            None if Instant::now() < deadline => drop(wait(&[socket], Some(START_LIMIT))?),
            other => bail!("expected {count} files, found {} and {other:?}", files.len()),
        }
    }
    Ok(files)
}

impl Fetcher {
    /// Fetches pages until the end.
    fn serve(&mut self, socket: BorrowedFd<'_>) -> Result<(), FetchEnd> {
        if let PeerMemory::Files(_) = self.memory {
            // Now: an image that is replaced later is served to those that have opened it.
            self.connect(socket, 0)?;
        }
        let mut ready = ReadySockets { owner: true, clients: Vec::new() };
        loop {
            if ready.owner {
                self.take_orders(socket)?;
            }
            self.clients.take_orders(socket, &ready.clients, &mut self.queue);
            let mut requests: [Vec<FlightPages>; LANES] = Default::default();
            // Read once: if it were over only in the wait below, nothing would be requested, and nothing end
            // the wait.
            let (now, for_client) = (Instant::now(), self.time_for_client());
            let with_rest = self.clients.is_empty() && for_client.is_zero();
            while let Some(flight) = self.queue.next(self.presence.map(), now, with_rest)? {
                requests[self.queue.lane(flight.class)].push(flight);
            }
            self.wake();
            for (lane, requests) in requests.iter().enumerate().filter(|(_, of)| !of.is_empty()) {
                self.request(socket, lane, requests)?;
            }
            if self.finishing && with_rest && self.queue.is_idle() {
                return self.close(socket);
            }
            ready = self.wait(socket, for_client)?;
        }
    }

    fn request(
        &mut self,
        socket: BorrowedFd<'_>,
        lane: usize,
        requests: &[FlightPages],
    ) -> Result<(), FetchEnd> {
        let sent = self.connect(socket, lane)?.wire.request(requests);
        sent.map_err(|error| self.failed(error))
    }

    /// Takes the streamer's orders.
    fn take_orders(&mut self, socket: BorrowedFd<'_>) -> Result<(), FetchEnd> {
        for _ in 0..ORDERS {
            match channel::receive_order(socket) {
                Ok(None) => return Ok(()),
                Ok(Some(FetchOrder::Request(request))) => self.queue.add(OWNER, &request, Instant::now())?,
                Ok(Some(FetchOrder::Readers(readers))) => self.readers = checked_readers(readers)?,
                Ok(Some(FetchOrder::Client(client))) => self.add_client(socket, client)?,
                Ok(Some(FetchOrder::Finish)) => {
                    self.finishing = true;
                    if let PeerMemory::Files(_) = self.memory {
                        self.queue.add_all();
                    }
                }
                Ok(Some(FetchOrder::Start { .. } | FetchOrder::Files(_))) => {
                    return Err(anyhow::anyhow!("the streamer sent its start order twice").into());
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(anyhow::Error::from(error).into());
                }
                Err(_) => return Err(FetchEnd::StreamerEnded),
            }
        }
        Ok(())
    }

    /// The time that is left for the first streamer to connect.
    fn time_for_client(&self) -> Duration {
        // An owner that is a streamer reads by itself.
        if self.had_client || !self.readers.is_empty() {
            Duration::ZERO
        } else {
            CLIENT_LIMIT.saturating_sub(self.started.elapsed())
        }
    }

    /// Serves one more streamer. One that is refused sees the end of its socket.
    fn add_client(&mut self, owner: BorrowedFd<'_>, socket: OwnedFd) -> anyhow::Result<()> {
        ensure!(matches!(self.memory, PeerMemory::Files(_)), "a page server's memory is not shared");
        self.clients.add(owner, socket);
        self.had_client = true;
        Ok(())
    }

    /// Returns a connection. If there is none, all of them are made: the first is that of page faults.
    fn connect(&mut self, socket: BorrowedFd<'_>, lane: usize) -> Result<&mut Connection, FetchEnd> {
        if self.connections.iter().all(Option::is_none) {
            let lanes = if let PeerMemory::Pages(_) = self.memory { 1 } else { LANES };
            let peers = (0..lanes).map(|_| self.peer_socket(socket)).collect::<anyhow::Result<Vec<_>>>();
            let peers = peers.with_context(|| self.plan.peer_name())?;
            // Up to here this process has read orders of the streamer alone.
            confine(self.plan.len).context("confining the fetcher")?;
            for (lane, peer) in peers.into_iter().enumerate() {
                self.connections[lane] = Some(self.begin(peer)?);
            }
        }
        self.connections[lane].as_mut().context("a connection").map_err(FetchEnd::from)
    }

    /// Connects to the peer, and gives the streamer a duplicate.
    fn peer_socket(&mut self, socket: BorrowedFd<'_>) -> anyhow::Result<PeerSocket> {
        let peer = PeerSocket::connect(&self.plan.peer, self.connected.take(), self.again)?;
        channel::report_connected(socket, peer.as_fd()).context("reporting the connection")?;
        if let PagePeer::Tcp(addresses) = &mut self.plan.peer
            && let Some(reached) = peer.address()
        {
            // The next connection is made to the same address: another one may not answer for long.
            addresses.sort_by_key(|address| *address != reached);
        }
        Ok(peer)
    }

    /// Begins the protocol on a connection.
    fn begin(&self, peer: PeerSocket) -> Result<Connection, FetchEnd> {
        // The streamer has a duplicate by now: a peer that is refused sees an end only when the targets have
        // ended.
        let stream = PageStream::begin(peer, self.tls.as_ref()).map_err(|error| self.failed(error.into()))?;
        let wire = match (&self.plan.memory, &self.memory) {
            (FetchedMemory::Files { image, id, .. }, PeerMemory::Files(files)) => {
                let opened = ImageWire::open(stream, image, *id, Rc::clone(files));
                PeerWire::Image(opened.map_err(|error| self.failed(error))?)
            }
            (FetchedMemory::Pages { layout, .. }, PeerMemory::Pages(extents)) => {
                PeerWire::Pages(PageWire::new(stream, *layout, Rc::clone(extents)))
            }
            _ => return Err(anyhow::anyhow!("the plan and its memory are of two kinds").into()),
        };
        Ok(Connection { wire, limits: AnswerLimits::new(Instant::now()) })
    }

    /// Waits for streamers and the peer, and takes what the peer has sent. `for_client` is left for the first
    /// streamer to connect. Returns which streamers have sent orders.
    fn wait(&mut self, socket: BorrowedFd<'_>, for_client: Duration) -> Result<ReadySockets, FetchEnd> {
        let mut limit = Some(for_client).filter(|left| self.finishing && !left.is_zero());
        let (mut descriptors, mut lanes) = (vec![socket], Vec::new());
        let now = Instant::now();
        for (lane, connection) in self.connections.iter_mut().enumerate() {
            let Some(connection) = connection else { continue };
            connection.limits.expects(self.queue.expected(lane), now);
            limit = limit.into_iter().chain(connection.limits.left(now)).min();
            descriptors.push(connection.wire.as_fd());
            lanes.push(lane);
        }
        let first_client = descriptors.len();
        descriptors.extend(self.clients.sockets());
        let ready = wait(&descriptors, limit)?;
        let clients = self.clients.ready(&ready[first_client..]);
        for (lane, _) in lanes.into_iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            self.receive(lane).map_err(|error| self.failed(error))?;
        }
        let now = Instant::now();
        for (lane, connection) in self.connections.iter_mut().enumerate() {
            let Some(connection) = connection else { continue };
            connection.limits.expects(self.queue.expected(lane), now);
            if let Err(late) = connection.limits.check(now) {
                return Err(self.failed(late.into()));
            }
        }
        Ok(ReadySockets { owner: ready[0], clients })
    }

    /// Takes what the peer has sent on a connection.
    fn receive(&mut self, lane: usize) -> anyhow::Result<()> {
        loop {
            let Some(connection) = &mut self.connections[lane] else { return Ok(()) };
            connection.wire.receive()?;
            connection.limits.heard(Instant::now());
            self.take_answers(lane)?;
            if !self.connections[lane].as_mut().is_some_and(|connection| connection.wire.stream().is_ready())
            {
                return Ok(());
            }
        }
    }

    /// Writes the answers that have arrived into the files.
    fn take_answers(&mut self, lane: usize) -> anyhow::Result<()> {
        let Some(Connection { wire, limits }) = &mut self.connections[lane] else { return Ok(()) };
        if !wire.is_opened().map_err(|error| error.context(WrongAnswer))? {
            return Ok(());
        }
        while let Some(expected) = self.queue.expected(lane).cloned() {
            let answer = wire.answer(&expected).map_err(|error| {
                // A store may have sent other bytes once.
                let is_damaged = matches!(error.downcast_ref(), Some(MessageError::Damaged(_)));
                if is_damaged { error } else { error.context(WrongAnswer) }
            })?;
            let Some((pages, bytes)) = answer else { break };
            let WritePlace { file, offset, room } = self.plan.place(expected.first);
            let bytes = &bytes[..bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX))];
            let file = self.files.get(file).context("pages of no file").context(LocalFailure)?;
            // The other connection may have brought them.
            if !(expected.first..expected.first + pages).all(|page| self.presence.map().has_page(page)) {
                file.write_all_at(bytes, offset).context("writing what has arrived").context(LocalFailure)?;
                self.presence.arrived(expected.first, pages, bytes);
            }
            match wire {
                PeerWire::Pages(wire) => {
                    wire.used(pages);
                    self.queue.answered(lane, pages, limits.alive());
                }
                PeerWire::Image(wire) => {
                    wire.used(pages);
                    self.queue.arrived(lane, pages);
                }
            }
            self.fetched += pages;
            self.clients.wake_all(&self.readers, &mut self.queue);
        }
        if self.queue.expected(lane).is_none() && wire.has_more() {
            return Err(anyhow::anyhow!("bytes that answer no request").context(WrongAnswer));
        }
        Ok(())
    }

    /// Sends the last message to a page server, and waits for its answer. All that was requested has arrived.
    fn close(&mut self, socket: BorrowedFd<'_>) -> Result<(), FetchEnd> {
        if let PeerMemory::Pages(_) = self.memory {
            self.connect(socket, 0)?;
        }
        let mut ended = Vec::new();
        for lane in 0..LANES {
            let Some(connection) = self.connections[lane].take() else { continue };
            let mut wire = connection.wire;
            if let PeerWire::Pages(wire) = &mut wire {
                let closed = end_session(wire, self.plan.peer == PagePeer::Connected);
                closed.map_err(|error| self.failed(error))?;
            }
            ended.push(wire.into_stream());
        }
        self.presence.close();
        // The peer has received the last message: how the connections end does not matter any more.
        ended.into_iter().for_each(|stream| drop(stream.end()));
        // The streamer also sees it in the presence map.
        let _ = channel::report_closed(socket);
        Ok(())
    }

    fn wake(&mut self) {
        self.clients.wake_all(&self.readers, &mut self.queue);
    }

    /// Says where it failed. Wrong answers, failures of this host and certificates that are not accepted are
    /// not tried again.
    fn failed(&self, error: anyhow::Error) -> FetchEnd {
        let again = !error.is::<WrongAnswer>() && !error.is::<LocalFailure>() && self.may_be_accepted(&error);
        let error = if !again && error.is::<PeerEnded>() {
            anyhow::anyhow!(
                "the peer ended the connection before its first answer: it may not accept this side's \
                 certificate, and its log says why"
            )
        } else {
            error
        };
        let text = format!("{}, after {} pages", self.plan.peer_name(), self.fetched);
        FetchEnd::Failed { again, error: error.context(text) }
    }

    /// Returns whether both sides may accept each other's certificates over another connection. CRIU's server
    /// looks at a certificate after the handshake, and only closes the connection if it does not accept it.
    fn may_be_accepted(&self, error: &anyhow::Error) -> bool {
        let is_first = self.tls.is_some() && !self.again && self.fetched == 0;
        match error.downcast_ref::<HandshakeError>() {
            Some(HandshakeError::Timeout | HandshakeError::Closed | HandshakeError::Other(_)) => !is_first,
            Some(_) => false,
            None => !(is_first && error.is::<PeerEnded>()),
        }
    }
}

/// Sends the last message to a page server, and waits for its answer.
fn end_session(wire: &mut PageWire, forced: bool) -> anyhow::Result<()> {
    wire.close(forced)?;
    let deadline = Instant::now() + ANSWER_LIMIT;
    while !wire.is_closed()? {
        let left = deadline.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), "no answer to the last message for {} s", ANSWER_LIMIT.as_secs());
        if wait(&[wire.stream.as_fd()], Some(left))? == [true] {
            wire.receive()?;
        }
    }
    Ok(())
}
