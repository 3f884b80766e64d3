// SPDX-License-Identifier: MIT OR Apache-2.0
//! The control side of a worker: sessions from the first connection to the last page.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_image_io::{BlockCache, DEFAULT_BUDGET};
use rewake_plugin_protocol::{Phase, ProcessId, SessionNote};
use tracing::{info, warn};

use crate::cpu::{Pool, address_spaces};
use crate::ledger::fd_store::FdStore;
use crate::ledger::{self, Ledger, NO_FD, Received, SessionSlot, SessionState, session_store};
use crate::session::image::{Image, TaskPlan};
use crate::session::open::{self, Lost, OpenSession};
use crate::session::peer::Peer;
use crate::session::{Session, socket};
use crate::supervise::{launch, parking};
use crate::sys;

/// "ReSTore Finished" (criu/uffd.c), sent by the restore when all tasks are in place. No pid is this large.
const FINISHED: u32 = 0x5253_5446;

/// Between two looks whether a dump waits for a session's memory.
const URGENCY_LOOK: Duration = Duration::from_millis(50);

/// A worker's state: one for all sessions.
#[derive(Debug)]
pub struct Daemon {
    /// The ledger of this streamer.
    pub ledger: Ledger,
    /// The process that starts this worker again.
    starter: ProcessId,
    /// Where sessions' notes are.
    notes: PathBuf,
    /// The reactors.
    pub pool: Pool,
    /// The block cache, shared by all sessions.
    pub cache: Arc<BlockCache>,
    /// Whether the daemon was asked to stop: then it takes no new sessions.
    pub stopping: tokio::sync::watch::Sender<bool>,
    sessions: Mutex<Vec<Arc<Session>>>,
}

/// How a session ended well.
#[derive(Debug, Clone)]
pub struct Summary {
    /// Tasks restored, zombies included.
    pub tasks: usize,
    /// Pages brought back with bytes and as zero pages.
    pub pages_copied: u64,
    /// Zero pages.
    pub pages_zero: u64,
    /// Faults served.
    pub faults: u64,
    /// From the restore's connection to the last page.
    pub elapsed: Duration,
}

impl Daemon {
    /// Starts the reactors of a fresh worker.
    ///
    /// # Errors
    /// Memory, descriptors or threads are refused.
    pub fn start(ledger: Ledger, starter: ProcessId) -> anyhow::Result<Arc<Self>> {
        let notes = ledger::root()?;
        let cache = BlockCache::new(DEFAULT_BUDGET)?;
        let pool = Pool::start(&cache, ledger)?;
        let (stopping, _) = tokio::sync::watch::channel(false);
        Ok(Arc::new(Self { ledger, starter, notes, pool, cache, stopping, sessions: Mutex::default() }))
    }

    /// The sessions being served.
    pub fn sessions(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sessions that a restore has connected to.
    #[must_use]
    pub fn restores_under_way(&self) -> usize {
        let connected = |slot: &&SessionSlot| match slot.state() {
            SessionState::Free | SessionState::Listening => false,
            SessionState::Streaming => launch::is_met(&slot.paths().1),
            SessionState::Handshake
            | SessionState::Restoring
            | SessionState::Running
            | SessionState::Closing => true,
        };
        self.ledger.sessions().iter().filter(connected).count()
    }

    /// Opens a session: checks the whole image, then listens where the restore will look.
    ///
    /// # Errors
    /// The image cannot be served, the socket not be bound, or too many sessions are open.
    pub fn open(&self, images: &Path, work: &Path) -> anyhow::Result<OpenSession> {
        address_spaces::reap_parked(self.ledger);
        let image = Image::open(images)?;
        let listener = socket::listen(work)?;
        let (index, slot) = self.take_slot(images, work)?;
        let session = Session::new(index, slot.number(), images.to_owned());
        let session = match session_store::of_image(slot, &image) {
            Ok(store) => Arc::new(session.with_store(store)),
            Err(error) => {
                drop(slot.take_store());
                slot.set_state(SessionState::Free);
                return Err(error).context("making the session's fd store");
            }
        };
        slot.listener.store(listener.as_raw_fd(), Ordering::Release);
        let note = self.publish(slot, &session);
        info!(
            session = slot.number(),
            tasks = image.tasks(),
            lazy_pages = image.lazy_pages(),
            image = %image.digest(),
            "listening for {}",
            images.display()
        );
        Ok(self.track(OpenSession {
            image,
            slot,
            listener: Some(listener),
            connection: None,
            session,
            note,
            arrived: false,
        }))
    }

    /// A slot for one more session.
    ///
    /// # Errors
    /// Too many sessions are open, or a path is too long.
    pub fn take_slot(&self, images: &Path, work: &Path) -> anyhow::Result<(usize, &'static SessionSlot)> {
        let Some(index) = self.ledger.take_session() else {
            bail!("{} restores are being served: wait for one to end", crate::ledger::MAX_SESSIONS)
        };
        let slot = &self.ledger.sessions()[index];
        slot.inbox.reset();
        if let Err(error) = slot.set_paths(images, work) {
            slot.set_state(SessionState::Free);
            return Err(error.into());
        }
        Ok((index, slot))
    }

    /// Takes up the sessions that a dead worker left, but those that streamers serve. Those that cannot be, because an image cannot be read any
    /// more, are ended with their processes.
    pub fn inherit(&self) -> Vec<Result<OpenSession, Lost>> {
        self.ledger.reclaim();
        for slot in self.ledger.sessions() {
            // It died while it opened the session: nobody was told of it yet.
            if slot.state() == SessionState::Listening && slot.listener.load(Ordering::Acquire) == NO_FD {
                slot.free();
            }
            if slot.state() == SessionState::Closing {
                open::finish_closing(slot, self.notes.clone(), self.starter);
            }
        }
        let served = |slot: &SessionSlot| {
            !matches!(slot.state(), SessionState::Free | SessionState::Streaming | SessionState::Closing)
        };
        let taken = self.ledger.sessions().iter().enumerate().filter(|(_, slot)| served(slot));
        let inherit = |(index, slot): (usize, &'static SessionSlot)| {
            let session = self.inherit_one(index, slot);
            session.map(|session| self.track(session)).map_err(|error| {
                if !slot
                    .inbox
                    .descriptor()
                    .is_some_and(|number| address_spaces::is_known(self.ledger, number))
                {
                    self.turn_away(slot);
                }
                address_spaces::kill_session(self.ledger, index);
                let (images, work) = slot.paths();
                slot.free();
                Lost {
                    number: slot.number(),
                    images,
                    work,
                    error: error.context("taking over from a dead worker"),
                }
            })
        };
        taken.map(inherit).collect()
    }

    fn inherit_one(&self, index: usize, slot: &'static SessionSlot) -> anyhow::Result<OpenSession> {
        let (images, _work) = slot.paths();
        let [store, writer] = [&slot.store, &slot.writer].map(|number| number.load(Ordering::Acquire));
        let store = FdStore::of(store, writer).context("finding the session's fd store")?;
        let image = session_store::image(&store)?;
        let session = Arc::new(Session::new(index, slot.number(), images).with_store(store));
        if slot.state() == SessionState::Running {
            session.release();
        }
        let own = |number: i32| {
            // SAFETY: the dead worker left it open in the shared table for us; the ledger names it once.
            (number != NO_FD).then(|| unsafe { sys::take_over(number) })
        };
        let listener = own(slot.listener.load(Ordering::Acquire)).map(UnixListener::from);
        let connection = own(slot.connection.load(Ordering::Acquire));
        // Before any reactor may close a descriptor and free its number.
        let arrived =
            slot.inbox.descriptor().is_some_and(|number| address_spaces::is_known(self.ledger, number));
        for task in address_spaces::inherit(self.ledger, &image, &session, &self.pool) {
            self.pool.submit(task);
        }
        let note = self.publish(slot, &session);
        info!(session = session.number, "taken over in state {:?}", slot.state());
        Ok(OpenSession { image, slot, listener, connection, session, note, arrived })
    }

    /// Writes the session's note. None, with a warning, when it cannot be written.
    fn publish(&self, slot: &SessionSlot, session: &Session) -> Option<SessionNote> {
        let store = session.store()?;
        let write = || -> std::io::Result<SessionNote> {
            let phase = match slot.state() {
                SessionState::Free | SessionState::Listening => Phase::Listening,
                SessionState::Handshake | SessionState::Restoring => Phase::Restoring,
                SessionState::Running | SessionState::Streaming | SessionState::Closing => Phase::Running,
            };
            let note = session_store::note(slot, store, self.starter, &slot.paths().1, phase)?;
            note.write(&self.notes)?;
            Ok(note)
        };
        let warn = |error: &std::io::Error| {
            warn!(%error, session = session.number, "CRIU's plugins cannot find this session");
        };
        write().inspect_err(warn).ok()
    }

    /// Looks again and again whether a dump waits for the session. Never returns.
    async fn watch_urgency(&self, open: &OpenSession) {
        loop {
            let asked = open.note.as_ref().is_some_and(|note| note.is_urgent(&self.notes).unwrap_or(false));
            if asked && !open.session.is_urgent() {
                info!(
                    session = open.session.number,
                    "a dump waits for its memory: it is loaded before others'"
                );
                open.session.make_urgent();
                self.pool.look_again();
            }
            tokio::time::sleep(URGENCY_LOOK).await;
        }
    }

    fn track(&self, session: OpenSession) -> OpenSession {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.push(Arc::clone(&session.session));
        self.pool.set_sessions(sessions.len());
        session
    }

    fn forget(&self, session: &Arc<Session>) {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|other| !Arc::ptr_eq(other, session));
        self.pool.set_sessions(sessions.len());
    }

    /// Serves a session to its end.
    ///
    /// # Errors
    /// The restore or the image failed. The restored processes were killed, or can never read a page that
    /// was not brought back.
    pub async fn serve(
        &self,
        mut open: OpenSession,
        connect_limit: Option<Duration>,
    ) -> anyhow::Result<Summary> {
        let outcome = self.run(&mut open, connect_limit).await;
        self.ledger.outcomes().note(open.session.number, outcome.is_ok(), &[]);
        self.close(open).await;
        outcome
    }

    /// As [`Daemon::serve`]; the session stays in the ledger until [`Daemon::close`], so that its outcome can
    /// be noted before.
    ///
    /// # Errors
    /// As [`Daemon::serve`].
    pub async fn run(
        &self,
        open: &mut OpenSession,
        connect_limit: Option<Duration>,
    ) -> anyhow::Result<Summary> {
        let session = Arc::clone(&open.session);
        let outcome = self.follow(open, connect_limit).await;
        if let Err(error) = &outcome {
            session.fail(&format!("{error:#}"));
            self.pool.look_again();
        }
        if session.has_failed() {
            self.pool.look_again();
        }
        while !session.is_empty() {
            session.changed().await;
        }
        // The first reason: what followed, such as the end of a restore whose tasks were killed, is its doing.
        if let Some(reason) = session.failure() {
            bail!("{reason}");
        }
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Ok(Summary {
            tasks: open.tasks() as usize,
            pages_copied: count(&session.stats.pages_copied),
            pages_zero: count(&session.stats.pages_zero),
            faults: count(&session.stats.faults),
            elapsed: session.since.elapsed(),
        })
    }

    /// Lets go of a session that has ended.
    pub async fn close(&self, open: OpenSession) {
        self.forget(&open.session);
        let note = open.note.clone();
        open.close().await;
        // Not before: as long as a process has the store, a plugin must know what it is.
        if let Some(Err(error)) = note.map(|note| note.remove(&self.notes)) {
            warn!(%error, "removing a session's note");
        }
    }

    async fn follow(&self, open: &mut OpenSession, connect_limit: Option<Duration>) -> anyhow::Result<()> {
        if open.slot.state() == SessionState::Listening {
            let session = Arc::clone(&open.session);
            let limit = async {
                match connect_limit {
                    Some(limit) => tokio::time::sleep(limit).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                accepted = open.accept() => {
                    accepted?;
                    open.note = self.publish(open.slot, &open.session);
                }
                () = session.changed() => return Ok(()), // failed: nothing else happens before a restore connects
                () = limit => bail!(
                    "no `criu restore` connected within {} s: start one, or this again",
                    connect_limit.unwrap_or_default().as_secs_f32()
                ),
            }
        }
        if open.slot.state() != SessionState::Running {
            self.handshake(open).await?;
        }
        open.session.release();
        self.pool.look_again();
        let session = &open.session;
        let park = async {
            if let Err(error) = parking::park(self.ledger, session).await {
                session.fail(&format!("{error:#}"));
            }
        };
        let load = async {
            while !session.is_empty() && !session.has_failed() {
                session.changed().await;
            }
        };
        tokio::select! {
            _ = async { tokio::join!(park, load) } => {}
            () = self.watch_urgency(open) => {}
        }
        Ok(())
    }

    /// Receives every task's userfaultfd, serving their faults from the first on, then the finish notice.
    async fn handshake(&self, open: &mut OpenSession) -> anyhow::Result<()> {
        let Some(connection) = open.connection.as_ref() else {
            bail!("the connection with the restore is lost")
        };
        let readable = sys::watch(connection.try_clone()?).context("watching the restore")?;
        let mut peer = Peer::of(&readable);
        loop {
            let next = open.slot.inbox.next(readable.get_ref().as_fd()).context("receiving from the restore");
            let next = next.inspect_err(|_| self.turn_away(open.slot))?;
            if next != Received::Empty {
                peer.heard();
            }
            match next {
                // What it sent before it ended was received above.
                Received::Empty if peer.has_ended() => bail!("{}", open.cut_short()),
                Received::Empty => {
                    let too_long = peer.too_long(open.step());
                    tokio::select! {
                        biased;
                        () = open.session.changed() => if open.session.has_failed() { return Ok(()) },
                        ready = readable.readable() => ready?.clear_ready(),
                        () = peer.ended() => {}
                        () = too_long => bail!(
                            "{} of {} tasks have reported and nothing more comes: is it `criu restore` that connected?",
                            open.tasks(),
                            open.image.tasks()
                        ),
                    }
                }
                Received::Closed => bail!("{}", open.cut_short()),
                Received::Word(FINISHED) => {
                    let tasks = open.slot.tasks.load(Ordering::Relaxed) as usize;
                    if tasks < open.image.tasks() {
                        bail!(
                            "`criu restore` finished with {tasks} of {} tasks reported",
                            open.image.tasks()
                        );
                    }
                    open.slot.set_state(SessionState::Running);
                    open.slot.inbox.done();
                    open.note = self.publish(open.slot, &open.session);
                    return Ok(());
                }
                Received::Word(word) => self.announced(open, i32::from_ne_bytes(word.to_ne_bytes()))?,
                Received::Descriptor { image_pid, uffd, host_pid } => {
                    self.task_arrived(open, image_pid, uffd, host_pid)?;
                }
            }
        }
    }

    fn announced(&self, open: &OpenSession, pid: i32) -> anyhow::Result<()> {
        let known = |pid: i32| u32::try_from(pid).is_ok_and(|pid| open.image.has_task(pid));
        if pid < 0 && known(-pid) {
            open.slot.tasks.fetch_add(1, Ordering::AcqRel);
            open.slot.inbox.done();
            return Ok(());
        }
        if !known(pid) {
            bail!(
                "the restore announced task {pid}, which is not in {}: wrong images directory?",
                open.session.images.display()
            );
        }
        open.slot.inbox.expect_descriptor(pid);
        Ok(())
    }

    fn task_arrived(
        &self,
        open: &mut OpenSession,
        image_pid: i32,
        number: i32,
        host_pid: i32,
    ) -> anyhow::Result<()> {
        if !std::mem::take(&mut open.arrived) {
            if !sys::is_userfaultfd(number) {
                open.slot.inbox.done();
                // SAFETY: received, and in no slot: owned by nobody. No memory depends on it.
                drop(unsafe { sys::take_over(number) });
                bail!(
                    "task {image_pid} sent a descriptor that is no userfaultfd: not `criu restore --lazy-pages`"
                );
            }
            let arrived =
                address_spaces::Arrival { image_pid, host_pid, uffd: number, home: self.pool.choose_home() };
            let plan = self.plan(open, image_pid);
            match plan.and_then(|plan| address_spaces::open(self.ledger, plan, &open.session, &arrived)) {
                Ok(task) => self.pool.submit(task),
                Err(error) => {
                    self.turn_away(open.slot);
                    return Err(error);
                }
            }
        }
        open.slot.tasks.fetch_add(1, Ordering::AcqRel);
        open.slot.inbox.done();
        Ok(())
    }

    /// Ends the task whose userfaultfd is in the inbox and in no slot, if there is one.
    fn turn_away(&self, slot: &SessionSlot) {
        let Some((number, host_pid)) = slot.inbox.undelivered() else { return };
        let ended =
            !sys::is_userfaultfd(number) || address_spaces::kill_rejected(self.ledger, number, host_pid);
        // Between the two: a successor must neither lose the descriptor of a living task nor look for one that
        // is closed.
        slot.inbox.done();
        if ended {
            // SAFETY: received, in no slot, and out of the inbox now: owned by nobody.
            drop(unsafe { sys::take_over(number) });
        }
    }

    fn plan<'a>(&self, open: &'a OpenSession, image_pid: i32) -> anyhow::Result<&'a TaskPlan> {
        let plan = u32::try_from(image_pid).ok().and_then(|pid| open.image.plan(pid));
        plan.with_context(|| format!("task {image_pid} has no memory in {}", open.session.images.display()))
    }
}

#[cfg(test)]
mod tests;
