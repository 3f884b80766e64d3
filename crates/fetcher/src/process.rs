// SPDX-License-Identifier: MIT OR Apache-2.0
//! The fetcher: one thread that waits for the streamer's requests and for the peer's answers.
//!
//! Standard input is the socket to the streamer. It connects to the peer when the first page is requested: a CRIU that
//! dumped its program serves one connection, and takes its end for success. It ends when the streamer has closed the
//! socket, or after the last message.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use rewake_criu_images::PAGE;
use rewake_criu_tls::{HandshakeError, TlsClient};
use rewake_image_io::PresenceWriter;
use rewake_process::descriptors;

use crate::channel::{self, FetchOrder, MAX_READERS};
use crate::confine::confine;
use crate::peer::PeerSocket;
use crate::plan::{FetchPlan, PagePeer, PeerTls};
use crate::queue::FetchQueue;
use crate::stream::PageStream;
use crate::wire::{PageWire, PeerEnded};

/// The hidden command that is the fetcher.
pub const COMMAND: &str = "fetcher";

/// Time in which a streamer sends the first order.
const START_TIME: Duration = Duration::from_secs(20);
/// Time in which a peer sends a byte of an answer that is due.
const ANSWER_TIME: Duration = Duration::from_secs(30);
/// Orders that are taken before the peer's answers are looked at.
const ORDERS: usize = 64;

/// Fetches pages until the streamer ends. Returns the exit code.
///
/// # Errors
/// The streamer sends no first order.
pub fn run() -> anyhow::Result<u8> {
    // SAFETY: this program has just started, and has opened nothing.
    unsafe { descriptors::close_inherited()? };
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

/// A fetcher that has its first order.
struct Fetcher {
    plan: FetchPlan,
    tls: Option<TlsClient>,
    /// Whether an earlier fetcher had a connection.
    again: bool,
    cache: File,
    presence: PresenceWriter,
    connected: Option<OwnedFd>,
    queue: FetchQueue,
    readers: Vec<File>,
    wire: Option<PageWire>,
    finishing: bool,
    /// When the last byte arrived, or the first request after it was sent.
    alive: Instant,
    fetched: u64,
}

fn start(socket: BorrowedFd<'_>) -> anyhow::Result<Result<Fetcher, FetchEnd>> {
    wait(&[socket], Some(START_TIME))?;
    let order = channel::receive_order(socket).context("the first order")?;
    let Some(FetchOrder::Start { again, plan, cache, presence, connected }) = order else {
        bail!("expected the first order, found {order:?}")
    };
    let make = || -> anyhow::Result<Fetcher> {
        let mut plan = FetchPlan::read(&File::from(plan)).context("the fetch plan")?;
        let presence = PresenceWriter::open(presence.as_fd(), plan.cache).context("the presence map")?;
        let queue = FetchQueue::new(std::mem::take(&mut plan.extents));
        let tls = plan.tls.as_ref().map(PeerTls::client).transpose()?;
        confine(&plan).context("confining the fetcher")?;
        let (readers, alive, fetched) = (Vec::new(), Instant::now(), 0);
        let (cache, wire, finishing) = (File::from(cache), None, false);
        Ok(Fetcher {
            plan,
            tls,
            again,
            cache,
            presence,
            connected,
            queue,
            readers,
            wire,
            finishing,
            alive,
            fetched,
        })
    };
    Ok(make().map_err(FetchEnd::from))
}

impl Fetcher {
    /// Fetches pages until the end.
    fn serve(&mut self, socket: BorrowedFd<'_>) -> Result<(), FetchEnd> {
        let mut has_orders = true;
        loop {
            if has_orders {
                self.take_orders(socket)?;
            }
            let mut requests = Vec::new();
            let now = Instant::now();
            while let Some(flight) = self.queue.next(self.presence.map(), now)? {
                requests.push(flight);
            }
            self.wake();
            if !requests.is_empty() || self.finishing {
                self.connect(socket)?;
            }
            let failed = |fetcher: &Self, error: anyhow::Error| fetcher.failed(error);
            if let Some(wire) = self.wire.as_mut().filter(|_| !requests.is_empty()) {
                let sent = wire.request(&requests);
                sent.map_err(|error| failed(self, error))?;
            }
            if self.finishing && self.queue.is_idle() {
                return self.close(socket);
            }
            has_orders = self.wait(socket)?;
        }
    }

    /// Takes the streamer's orders.
    fn take_orders(&mut self, socket: BorrowedFd<'_>) -> Result<(), FetchEnd> {
        for _ in 0..ORDERS {
            match channel::receive_order(socket) {
                Ok(None) => return Ok(()),
                Ok(Some(FetchOrder::Request(request))) => self.queue.add(&request, Instant::now())?,
                Ok(Some(FetchOrder::Readers(readers))) => {
                    self.readers = readers.into_iter().take(MAX_READERS).map(File::from).collect();
                }
                Ok(Some(FetchOrder::Finish)) => self.finishing = true,
                Ok(Some(FetchOrder::Start { .. })) => {
                    return Err(anyhow::anyhow!("a second first order of the streamer").into());
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(anyhow::Error::from(error).into());
                }
                Err(_) => return Err(FetchEnd::StreamerEnded),
            }
        }
        Ok(())
    }

    fn connect(&mut self, socket: BorrowedFd<'_>) -> Result<(), FetchEnd> {
        if self.wire.is_some() {
            return Ok(());
        }
        let mut connect = || -> anyhow::Result<PeerSocket> {
            let peer = PeerSocket::connect(&self.plan.peer, self.connected.take(), self.again)?;
            channel::report_connected(socket, peer.as_fd()).context("reporting the connection")?;
            Ok(peer)
        };
        let peer = connect().with_context(|| format!("page server {}", self.plan.peer))?;
        // The streamer has a duplicate by now: a peer that is refused sees an end only when the targets have ended.
        let stream = PageStream::begin(peer, self.tls.as_ref()).map_err(|error| self.failed(error.into()))?;
        self.wire = Some(PageWire::new(stream, self.plan.layout));
        self.alive = Instant::now();
        Ok(())
    }

    /// Waits for the streamer or the peer, and takes what the peer has sent. Returns whether the streamer has sent orders.
    fn wait(&mut self, socket: BorrowedFd<'_>) -> Result<bool, FetchEnd> {
        let due = !self.queue.is_idle();
        let limit = due.then(|| ANSWER_TIME.saturating_sub(self.alive.elapsed()));
        let ready = match &self.wire {
            Some(wire) => wait(&[socket, wire.stream.as_fd()], limit)?,
            None => wait(&[socket], limit)?,
        };
        let has_orders = ready.first().copied().unwrap_or(false);
        if ready.get(1).copied().unwrap_or(false) {
            self.receive().map_err(|error| self.failed(error))?;
            return Ok(has_orders);
        }
        if due && self.alive.elapsed() >= ANSWER_TIME {
            let error = anyhow::anyhow!("no byte of an answer for {} s", ANSWER_TIME.as_secs());
            return Err(self.failed(error));
        }
        if !due {
            self.alive = Instant::now();
        }
        Ok(has_orders)
    }

    /// Takes what the peer has sent.
    fn receive(&mut self) -> anyhow::Result<()> {
        while let Some(wire) = &mut self.wire {
            wire.receive()?;
            self.alive = Instant::now();
            self.take_answers()?;
            if !self.wire.as_mut().is_some_and(|wire| wire.stream.is_ready()) {
                break;
            }
        }
        Ok(())
    }

    /// Writes the whole answers that have arrived into the cache file.
    fn take_answers(&mut self) -> anyhow::Result<()> {
        let Some(wire) = &mut self.wire else { return Ok(()) };
        while let Some(expected) = self.queue.expected().copied() {
            let answer = wire.answer(&expected).map_err(|error| error.context(WrongAnswer))?;
            let Some((pages, bytes)) = answer else { break };
            self.cache
                .write_all_at(bytes, expected.first * PAGE)
                .context("writing the cache file")
                .context(LocalFailure)?;
            self.presence.set(expected.first, pages);
            wire.used(pages);
            self.queue.answered(pages, self.alive);
            self.fetched += pages;
            wake(&self.readers, std::mem::take(&mut self.queue.to_wake));
        }
        if self.queue.is_idle() && wire.has_more() {
            return Err(anyhow::anyhow!("bytes that answer no request").context(WrongAnswer));
        }
        Ok(())
    }

    /// Sends the last message, and waits for its answer.
    fn close(&mut self, socket: BorrowedFd<'_>) -> Result<(), FetchEnd> {
        let Some(mut wire) = self.wire.take() else { return Ok(()) };
        let mut close = || -> anyhow::Result<()> {
            wire.close(self.plan.peer == PagePeer::Connected)?;
            let deadline = Instant::now() + ANSWER_TIME;
            while !wire.is_closed()? {
                let left = deadline.saturating_duration_since(Instant::now());
                ensure!(!left.is_zero(), "no answer to the last message for {} s", ANSWER_TIME.as_secs());
                if wait(&[wire.stream.as_fd()], Some(left))? == [true] {
                    wire.receive()?;
                }
            }
            Ok(())
        };
        let closed = close();
        closed.map_err(|error| self.failed(error))?;
        self.presence.close();
        // The peer has received the last message: how the connection ends does not matter any more.
        let _ = wire.stream.end();
        // The streamer also sees it in the presence map.
        let _ = channel::report_closed(socket);
        Ok(())
    }

    fn wake(&mut self) {
        wake(&self.readers, std::mem::take(&mut self.queue.to_wake));
    }

    /// Says where it failed. Wrong answers, failures of this host and certificates that are not accepted are not tried
    /// again.
    fn failed(&self, error: anyhow::Error) -> FetchEnd {
        let again = !error.is::<WrongAnswer>() && !error.is::<LocalFailure>() && self.may_be_accepted(&error);
        let error = if !again && error.is::<PeerEnded>() {
            anyhow::anyhow!(
                "the peer ended the connection before its first answer: it may not accept this side's certificate, \
                 and its log says why"
            )
        } else {
            error
        };
        let text = format!("page server {}, after {} pages", self.plan.peer, self.fetched);
        FetchEnd::Failed { again, error: error.context(text) }
    }

    /// Returns whether both sides may accept each other's certificates over another connection. CRIU's server looks at
    /// a certificate after the handshake, and only closes the connection if it does not accept it.
    fn may_be_accepted(&self, error: &anyhow::Error) -> bool {
        let is_first = self.tls.is_some() && !self.again && self.fetched == 0;
        match error.downcast_ref::<HandshakeError>() {
            Some(HandshakeError::Timeout | HandshakeError::Closed | HandshakeError::Other(_)) => !is_first,
            Some(_) => false,
            None => !(is_first && error.is::<PeerEnded>()),
        }
    }
}

/// Marks an error: the peer violates the protocol.
#[derive(Debug, Clone, Copy)]
struct WrongAnswer;

impl std::fmt::Display for WrongAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a wrong answer")
    }
}

/// Marks an error of this host.
#[derive(Debug, Clone, Copy)]
struct LocalFailure;

impl std::fmt::Display for LocalFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "this host")
    }
}

fn wake(readers: &[File], which: u64) {
    for (_, reader) in readers.iter().enumerate().filter(|(number, _)| which & 1 << number != 0) {
        // An eventfd whose counter is full is readable all the same.
        let _ = nix::unistd::write(reader, &1u64.to_ne_bytes());
    }
}

/// Waits until one of the descriptors has something to read; which of them do.
fn wait(descriptors: &[BorrowedFd<'_>], limit: Option<Duration>) -> anyhow::Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> =
        descriptors.iter().map(|descriptor| PollFd::new(*descriptor, PollFlags::POLLIN)).collect();
    let limit =
        limit.map_or(PollTimeout::NONE, |limit| PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX));
    match poll(&mut polled, limit) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(error) => return Err(error).context("waiting"),
    }
    let ready = |polled: &PollFd<'_>| polled.revents().is_some_and(|events| !events.is_empty());
    Ok(polled.iter().map(ready).collect())
}
