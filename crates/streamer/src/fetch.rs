// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts the session's fetcher, and another one when it dies or loses its connection.
//!
//! A [fetcher](rewake_fetcher) is a process, and the agent's for an image in the node's cache
//! ([`agent_fetch`]). Its socket and a duplicate of its connection are in an fd store, so that it outlives a
//! worker: in the streamer's own, or for a page server in the one that targets have. A CRIU that dumped its
//! program resumes it when its one connection ends, which must not be while the targets run.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use nix::libc::linger;
use nix::sys::socket::{Shutdown, setsockopt, shutdown, sockopt};
use rewake_fetcher::channel::{self, FetchReport};
use rewake_fetcher::plan::{FetchPlan, FetchedMemory, PagePeer};
use rewake_fetcher::restarts::FetcherRestarts;
use rewake_fetcher::unread::leave_unread;
use rewake_image_io::{FetchSource, PresenceMap};
use rewake_process::wake_socket;
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::agent_fetch::{self, AgentFetch};
use crate::fetch_peer::FetchPeer;
use crate::fetcher_process::{self, FetchDescriptors, borrowed};
use crate::ledger::fd_store::{EntryKind, FdStore, StoreEntry, peek_all};
use crate::ledger::{Ledger, session_store, wants_room};
use crate::session::Session;
use crate::session::image::{Image, plan_file};
use crate::watched;

/// Time for the last message. It is longer than a fetcher needs for a new connection (10 s) and then for an
/// answer (30 s).
const FINISH_LIMIT: Duration = Duration::from_secs(60);
/// Time for a fetcher to end when its work is done. After that, the log has a warning.
const END_LIMIT: Duration = Duration::from_secs(1);
/// Time to find room in the fd store, because a reactor may be using it.
const STORE_LIMIT: Duration = Duration::from_secs(1);
/// Pause between two tries to find room.
const STORE_INTERVAL: Duration = Duration::from_millis(1);

/// The fetcher of a session.
#[derive(Debug)]
pub(crate) struct Fetch {
    session: Arc<Session>,
    files: FetchDescriptors,
    /// Bytes that the presence map is for.
    len: u64,
    /// The checksum of the files' places in it.
    layout: u64,
    /// The id of the image, for an agent.
    id: String,
    source: Arc<FetchSource>,
    /// The sockets that wake the reactors.
    readers: Vec<OwnedFd>,
    peer: PagePeer,
    /// The peer's name for messages.
    name: String,
    /// Whether it is an image server.
    is_image: bool,
    /// Whether it has bytes of files of the image.
    brings_files: bool,
    socket: RefCell<Arc<AsyncFd<OwnedFd>>>,
    /// This worker's child, if it started the fetcher.
    child: RefCell<Option<Child>>,
    /// The session is closed: it has no fd store any more.
    is_closed: Cell<bool>,
    /// Counts fetchers, over all workers.
    number: Cell<u32>,
    /// Whether a fetcher has had a connection, or what copied the first part of an image.
    connected: Cell<bool>,
    restarts: RefCell<FetcherRestarts>,
}

/// How a fetcher ended.
enum FetcherEnd {
    /// The peer has received the last message.
    Closed,
    /// Another one may succeed, or not.
    Failed { again: bool, reason: String },
}

impl Fetch {
    /// Starts the fetcher of a new session, or uses the one that the agent has `given`. Returns `None` if all
    /// bytes of the session's image are local.
    ///
    /// # Errors
    /// It cannot be started, or the fd store has no room.
    pub(crate) async fn start(
        ledger: Ledger,
        session: &Arc<Session>,
        image: &Image,
        server: Option<&FetchPeer>,
        given: Option<AgentFetch>,
        readers: Vec<OwnedFd>,
    ) -> anyhow::Result<Option<Self>> {
        let (Some(remote), Some(server)) = (image.remote(), server) else { return Ok(None) };
        let memory = plan_file::memory_file().context("making a memory file for the fetcher")?;
        let plan = image.fetch_plan(remote, server)?;
        plan.write(&memory).context("writing the fetch plan")?;
        let is_image = server.image.is_some();
        if is_image {
            session_store::keep_fetch_plan(ledger, &memory)?;
        }
        let store = store_of(session, is_image).context("a session without an fd store")?;
        put(store, EntryKind::Remote, 0, &remote.numbers(&memory)).await?;
        let files = FetchDescriptors::of(image, remote, memory, &plan)?;
        let connected = server.connected.as_ref();
        if let Some(connection) = connected {
            put(store, EntryKind::Peer, 0, &[connection.as_raw_fd()]).await?;
        }
        let (child, socket) = match given {
            Some(AgentFetch::Partial { socket, layout, .. }) => {
                agent_fetch::check_layout(layout, plan.layout())?;
                // If the fetcher has ended, that is found by its socket.
                let _ = channel::send_readers(socket.as_fd(), &borrowed(&readers));
                (None, socket)
            }
            _ => {
                let connected = connected.map(|socket| socket.as_fd());
                // An image server serves several connections, and the copy of what CRIU reads was one: it may
                // be started again at any time.
                let (child, socket) = fetcher_process::start(is_image, &files, connected, &readers)?;
                (Some(child), socket)
            }
        };
        let fetch = Self::of(session, &remote.source, files, readers, plan, socket, 0)?;
        *fetch.child.borrow_mut() = child;
        fetch.use_it().await?;
        Ok(Some(fetch))
    }

    /// Takes over the fetcher of a dead worker, or `None` if all bytes of its image are local. If every
    /// process was killed, a fetcher of an image server or of the agent is started again.
    ///
    /// # Errors
    /// The fd stores lack its descriptors.
    pub(crate) fn inherit(
        ledger: Ledger,
        session: &Arc<Session>,
        image: &Image,
        readers: Vec<OwnedFd>,
    ) -> anyhow::Result<Option<Self>> {
        let Some(remote) = image.remote() else { return Ok(None) };
        let store = store_of(session, remote.cache().is_none()).context("a session without an fd store")?;
        let (mut plan, mut fetcher, mut connected) = (None, None, false);
        for (entry, descriptors) in peek_all(store.descriptor())? {
            match entry.kind {
                EntryKind::Remote => plan = descriptors.into_iter().next(),
                EntryKind::Fetcher => {
                    fetcher = descriptors.into_iter().next().map(|socket| (entry.index, socket));
                }
                EntryKind::Peer => connected = true,
                _ => {}
            }
        }
        let is_recovered = plan.is_none();
        let memory = match plan {
            Some(plan) => File::from(plan),
            None => session_store::fetch_plan(ledger).context("the fetch plan")?,
        };
        let plan = FetchPlan::read(&memory).context("the fetch plan")?;
        if is_recovered {
            if !matches!(plan.peer, PagePeer::Agent(_)) {
                image.note_arrived()?;
            }
            // For the next worker: the fetcher notes in this map what arrives.
            let numbers = remote.numbers(&memory);
            store.put(StoreEntry { kind: EntryKind::Remote, index: 0, life: 0 }, &numbers)?;
        }
        let (number, socket) = match fetcher {
            Some(fetcher) => fetcher,
            // It has ended, as is found by its socket.
            None => (0, UnixStream::pair().context("a socket of a fetcher")?.0.into()),
        };
        let files = FetchDescriptors::of(image, remote, memory, &plan)?;
        // If it has ended, that is found by its socket.
        let _ = channel::send_readers(socket.as_fd(), &borrowed(&readers));
        remote.source.use_fetcher(socket.try_clone()?);
        let fetch = Self::of(session, &remote.source, files, readers, plan, socket, number)?;
        fetch.connected.set(connected || fetch.is_image);
        Ok(Some(fetch))
    }

    fn of(
        session: &Arc<Session>,
        source: &Arc<FetchSource>,
        files: FetchDescriptors,
        readers: Vec<OwnedFd>,
        plan: FetchPlan,
        socket: OwnedFd,
        number: u32,
    ) -> anyhow::Result<Self> {
        let socket = Arc::new(watched::watch(socket).context("watching the fetcher")?);
        let id = match &plan.memory {
            FetchedMemory::Files { id, .. } => Some(id.to_string()),
            FetchedMemory::Pages { .. } => None,
        };
        let is_image = id.is_some();
        let (FetchedMemory::Pages { files: sparse, .. } | FetchedMemory::Files { files: sparse, .. }) =
            &plan.memory;
        session.set_peer(&plan.peer);
        Ok(Self {
            session: Arc::clone(session),
            files,
            len: plan.len,
            layout: plan.layout(),
            id: id.unwrap_or_default(),
            source: Arc::clone(source),
            readers,
            name: plan.peer_name(),
            // The fetcher needs its extents, and this process does not.
            is_image,
            brings_files: !sparse.is_empty(),
            peer: plan.peer,
            socket: RefCell::new(socket),
            child: RefCell::default(),
            is_closed: Cell::new(false),
            number: Cell::new(number),
            connected: Cell::new(is_image),
            restarts: RefCell::default(),
        })
    }

    /// Puts the fetcher's socket into the fd store, in the place of an earlier one's, and sends requests to
    /// it.
    async fn use_it(&self) -> anyhow::Result<()> {
        let (socket, number) = (Arc::clone(&self.socket.borrow()), self.number.get());
        if let Some(store) = self.store() {
            put(store, EntryKind::Fetcher, number, &[socket.as_raw_fd()]).await?;
        }
        self.source.use_fetcher(socket.get_ref().try_clone()?);
        for reader in &self.readers {
            // What was requested from the fetcher before is requested from this one.
            wake_socket::wake(reader.as_fd());
        }
        self.forget(EntryKind::Fetcher);
        Ok(())
    }

    /// Returns the fd store that has the fetcher's descriptors; none when the session is closed.
    fn store(&self) -> Option<&FdStore> {
        store_of(&self.session, self.is_image).filter(|_| !self.is_closed.get())
    }

    /// Removes what earlier fetchers have left in the fd store.
    fn forget(&self, kind: EntryKind) {
        let number = self.number.get();
        // Without room they stay until the session ends.
        let _ = self.store().map(|store| store.retain(|entry| entry.kind != kind || entry.index >= number));
    }

    /// Has readers that wait for more bytes fail, as the session has failed.
    pub(crate) fn give_up(&self) {
        self.source.end();
        self.readers.iter().for_each(|reader| wake_socket::wake(reader.as_fd()));
    }

    /// Whether GPU memory may come from the peer.
    pub(crate) fn brings_files(&self) -> bool {
        self.brings_files
    }

    /// Whether the peer is an image server.
    pub(crate) fn is_image(&self) -> bool {
        self.is_image
    }

    /// Whether the image is in the node's cache: the agent completes it.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.peer, PagePeer::Agent(_))
    }

    /// Serves the fetcher until pages cannot be fetched any more. Returns why.
    pub(crate) async fn watch(&self) -> anyhow::Error {
        match self.run(false).await {
            Ok(()) if self.is_shared() => {
                // All bytes are here. What was requested last may not have been answered.
                self.readers.iter().for_each(|reader| wake_socket::wake(reader.as_fd()));
                std::future::pending().await
            }
            Ok(()) => anyhow!("{}: the fetcher ended before the restore did", self.name),
            Err(error) => error,
        }
    }

    /// Has the fetcher end, as all memory is resident. It sends a page server the last message. Or it fetches
    /// what an image still lacks: the session is closed then.
    ///
    /// # Errors
    /// The page server has not confirmed it, or not all of the image has arrived.
    pub(crate) async fn finish(&self) -> anyhow::Result<()> {
        if self.source.presence().is_closed() {
            return Ok(());
        }
        if self.is_image {
            self.is_closed.set(true);
            // If it has ended, that is found by its socket. The time is limited by that of each answer.
            let _ = channel::send_finish(self.socket.borrow().as_fd());
            return self.run(true).await;
        }
        // If it has ended, that is found by its socket.
        let _ = channel::send_finish(self.socket.borrow().as_fd());
        let done = timeout(FINISH_LIMIT, self.run(true)).await;
        let done = done.unwrap_or_else(|_| bail!("{}: no end for {FINISH_LIMIT:?}", self.name));
        if done.is_err() {
            self.end_plainly();
        }
        done.context(
            "all memory is resident, but the page server has not confirmed the last message: if `criu dump \
             --lazy-pages` waits there, check that its program has ended",
        )
    }

    /// Makes the connection end plainly when the fd store is emptied: CRIU takes that for success, and kills
    /// the program that it dumped. A reset would resume it while the targets run.
    fn end_plainly(&self) {
        for connection in self.connections() {
            // A unix socket has no such setting, and ends plainly.
            let _ = setsockopt(&connection, sockopt::Linger, &linger { l_onoff: 0, l_linger: 0 });
        }
    }

    /// Makes the connection end as a failure when the fd store is emptied: the targets have been killed, and
    /// a CRIU that dumped their program resumes it.
    pub(crate) async fn end_as_failure(&self) {
        if self.is_shared() {
            return;
        }
        let socket = Arc::clone(&self.socket.borrow());
        // The fetcher ends, and reads no more from the connection.
        let _ = shutdown(socket.as_raw_fd(), Shutdown::Write);
        let ended = timeout(END_LIMIT, async {
            while let Ok(report) = channel::receive_report(socket.as_fd()) {
                if report.is_none() {
                    socket.readable().await?.clear_ready();
                }
            }
            io::Result::Ok(())
        });
        let Ok(Ok(())) = ended.await else {
            return warn!("{}: the fetcher does not end within {END_LIMIT:?}", self.name);
        };
        let Ok(plan) = self.files.plan.try_clone().map(File::from) else { return };
        for connection in self.connections() {
            // The peer may have ended: then it knows.
            if let Err(error) = leave_unread(connection.as_fd(), &plan) {
                info!("{}: {error:#}", self.name);
            }
        }
    }

    /// Returns the connections in the fd store.
    fn connections(&self) -> Vec<OwnedFd> {
        let stored = store_of(&self.session, self.is_image).map(|store| peek_all(store.descriptor()));
        let entries = stored.and_then(Result::ok).unwrap_or_default();
        let peers = entries.into_iter().filter(|(entry, _)| entry.kind == EntryKind::Peer);
        peers.flat_map(|(_, connections)| connections).collect()
    }

    /// Serves fetchers until one has sent the last message.
    async fn run(&self, finishing: bool) -> anyhow::Result<()> {
        loop {
            let (again, reason) = match self.follow().await? {
                FetcherEnd::Closed => return Ok(()),
                FetcherEnd::Failed { again, reason } => (again, reason),
            };
            if self.has_all() {
                return Ok(());
            }
            if !again {
                bail!("{reason}");
            }
            if self.peer == PagePeer::Connected && self.connected.get() {
                bail!("{reason}: the connection of --ps-socket cannot be made again");
            }
            let arrived = self.source.presence().arrived();
            let pause = self.restarts.borrow_mut().note_end(arrived);
            let pause = pause.map_err(|limit| anyhow!("{reason}: {limit}"))?;
            warn!("{reason}: starting another fetcher");
            sleep(pause).await;
            self.start_another(finishing).await?;
            if self.has_all() {
                return Ok(());
            }
        }
    }

    /// Whether nothing more is needed of the peer.
    fn has_all(&self) -> bool {
        self.source.is_complete() || self.source.presence().is_closed()
    }

    /// Returns how the fetcher ended.
    async fn follow(&self) -> anyhow::Result<FetcherEnd> {
        let socket = Arc::clone(&self.socket.borrow());
        loop {
            match channel::receive_report(socket.as_fd()) {
                Ok(None) => socket.readable().await?.clear_ready(),
                Ok(Some(FetchReport::Connected(connection))) => {
                    info!("connected to {}", self.name);
                    self.connected.set(true);
                    if let Some(store) = self.store() {
                        put(store, EntryKind::Peer, self.number.get(), &[connection.as_raw_fd()]).await?;
                    }
                    // Not before: `criu dump --lazy-pages` takes the end of its connection for a failed
                    // restore, and resumes the program, while the targets run.
                    self.forget(EntryKind::Peer);
                }
                Ok(Some(FetchReport::Closed)) => return Ok(FetcherEnd::Closed),
                // It is for the agent.
                Ok(Some(FetchReport::Refused(_))) => {}
                Ok(Some(FetchReport::Failed { again, reason })) => {
                    return Ok(FetcherEnd::Failed { again, reason });
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    bail!("the fetcher of {}: {error}", self.name);
                }
                Err(_) => {
                    let reason = format!("the fetcher of {} has ended{}", self.name, self.files.words.take());
                    return Ok(FetcherEnd::Failed { again: true, reason });
                }
            }
        }
    }

    async fn start_another(&self, finishing: bool) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.borrow_mut().take() {
            // It has closed its socket, so it has ended, or a thread of it hangs in the kernel.
            let _ = child.kill();
            let _ = child.try_wait();
        }
        if let PagePeer::Agent(agent) = &self.peer {
            return match agent_fetch::ask_again(agent, &self.id).await? {
                AgentFetch::Complete => {
                    self.source.complete();
                    Ok(())
                }
                AgentFetch::Partial { presence, socket, layout } => {
                    agent_fetch::check_layout(layout, self.layout)?;
                    self.use_shared(presence, socket).await
                }
            };
        }
        let (child, socket) = fetcher_process::start(self.connected.get(), &self.files, None, &self.readers)?;
        *self.child.borrow_mut() = Some(child);
        *self.socket.borrow_mut() = Arc::new(watched::watch(socket).context("watching the fetcher")?);
        self.number.set(self.number.get() + 1);
        self.use_it().await?;
        if finishing {
            let _ = channel::send_finish(self.socket.borrow().as_fd());
        }
        Ok(())
    }

    /// Uses another socket and presence map of the agent.
    async fn use_shared(&self, presence: OwnedFd, socket: OwnedFd) -> anyhow::Result<()> {
        let map = PresenceMap::open(presence.as_fd(), self.len).context("the agent's presence map")?;
        let number = self.number.get() + 1;
        if let Some(store) = self.store() {
            let numbers = [self.files.plan.as_raw_fd(), presence.as_raw_fd()];
            put(store, EntryKind::Remote, number, &numbers).await?;
        }
        self.source.use_presence(map);
        self.number.set(number);
        self.forget(EntryKind::Remote);
        // If the fetcher has ended, that is found by its socket.
        let _ = channel::send_readers(socket.as_fd(), &borrowed(&self.readers));
        *self.socket.borrow_mut() = Arc::new(watched::watch(socket).context("watching the fetcher")?);
        self.use_it().await
    }
}

/// Returns the fd store that has the descriptors of a fetcher.
fn store_of(session: &Session, is_image: bool) -> Option<&FdStore> {
    if is_image { session.own_store() } else { session.root_store() }
}

/// Puts descriptors into the fd store, which a reactor may use at the moment.
async fn put(store: &FdStore, kind: EntryKind, index: u32, numbers: &[i32]) -> anyhow::Result<()> {
    let deadline = Instant::now() + STORE_LIMIT;
    loop {
        match store.put(StoreEntry { kind, index, life: 0 }, numbers) {
            Err(error) if wants_room(&error) && Instant::now() < deadline => sleep(STORE_INTERVAL).await,
            put => return put.context("putting the fetcher's descriptors into the fd store"),
        }
    }
}
