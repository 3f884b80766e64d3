// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a worker's sessions on its control thread: from the first connection to the last page.

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
use crate::supervise::parking;
use crate::sys;

/// "ReSTore Finished" (criu/uffd.c), which the restore sends when all tasks are restored. No pid is this
/// large.
const FINISHED: u32 = 0x5253_5446;

/// Time between two checks whether a dump waits for a session's memory.
const URGENCY_LOOK: Duration = Duration::from_millis(50);

/// The state of a worker: one for all its sessions.
#[derive(Debug)]
pub struct Daemon {
    /// The ledger of this streamer.
    pub ledger: Ledger,
    /// The process that starts this worker again.
    starter: ProcessId,
    /// The folder of the sessions' notes.
    notes: PathBuf,
    /// The reactor threads.
    pub pool: Pool,
    /// The block cache of all sessions.
    pub cache: Arc<BlockCache>,
    sessions: Mutex<Vec<Arc<Session>>>,
}

/// The result of a session that has ended well.
#[derive(Debug, Clone)]
pub struct Summary {
    /// Tasks restored, zombies included.
    pub tasks: usize,
    /// Pages that reactors filled with bytes.
    pub pages_copied: u64,
    /// Pages that reactors filled with the zero page.
    pub pages_zero: u64,
    /// Page faults served.
    pub faults: u64,
    /// The time from the opening of the session to the last page.
    pub elapsed: Duration,
}

impl Daemon {
    /// Starts the reactors of a new worker.
    ///
    /// # Errors
    /// Fails when the kernel refuses memory, descriptors or threads.
    pub fn start(ledger: Ledger, starter: ProcessId) -> anyhow::Result<Arc<Self>> {
        let notes = ledger::root()?;
        let cache = BlockCache::new(DEFAULT_BUDGET)?;
        let pool = Pool::start(&cache, ledger)?;
        Ok(Arc::new(Self { ledger, starter, notes, pool, cache, sessions: Mutex::default() }))
    }

    /// Returns the sessions that this worker serves.
    pub fn sessions(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the number of sessions that a restore has connected to.
    #[must_use]
    pub fn restores_under_way(&self) -> usize {
        let connected = |slot: &&SessionSlot| match slot.state() {
            SessionState::Free | SessionState::Listening => false,
            SessionState::Handshake
            | SessionState::Restoring
            | SessionState::Running
            | SessionState::Closing => true,
        };
        self.ledger.sessions().iter().filter(connected).count()
    }

    /// Opens a session: checks the whole image, then listens on the socket that the restore will connect to.
    ///
    /// # Errors
    /// Fails when the image cannot be served, the socket cannot be bound, or too many sessions are open.
    pub async fn open(&self, images: &Path, work: &Path) -> anyhow::Result<OpenSession> {
        address_spaces::reap_parked(self.ledger);
        let image = Image::open_in_background(images.to_owned()).await?;
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

    /// Takes a slot of the ledger for a new session.
    ///
    /// # Errors
    /// Fails when too many sessions are open, or a path is too long.
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

    /// Takes over the sessions of a dead worker, except those that streamers serve. Where that fails, because
    /// an image cannot be read any more, it kills the session's processes.
    pub fn inherit(&self) -> Vec<Result<OpenSession, Lost>> {
        self.ledger.reclaim();
        for slot in self.ledger.sessions() {
            // The worker died while it opened the session: no user knows of it yet.
            if slot.state() == SessionState::Listening && slot.listener.load(Ordering::Acquire) == NO_FD {
                slot.free();
            }
            if slot.state() == SessionState::Closing {
                open::finish_closing(slot, self.notes.clone(), self.starter);
            }
        }
        let served = |slot: &SessionSlot| !matches!(slot.state(), SessionState::Free | SessionState::Closing);
        let taken = self.ledger.sessions().iter().enumerate().filter(|(_, slot)| served(slot));
        let inherit = |(index, slot): (usize, &'static SessionSlot)| {
            let session = self.inherit_one(index, slot);
            session.map(|session| self.track(session)).map_err(|error| {
                if !slot
                    .inbox
                    .descriptor()
                    .is_some_and(|number| address_spaces::is_known(self.ledger, number))
                {
                    self.reject_task(slot);
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
            // SAFETY: the dead worker left it open in the shared descriptor table; the ledger names it once.
            (number != NO_FD).then(|| unsafe { sys::take_over(number) })
        };
        let listener = own(slot.listener.load(Ordering::Acquire)).map(UnixListener::from);
        let connection = own(slot.connection.load(Ordering::Acquire));
        // Before a reactor can close a descriptor and free its number.
        let arrived =
            slot.inbox.descriptor().is_some_and(|number| address_spaces::is_known(self.ledger, number));
        for task in address_spaces::inherit(self.ledger, &image, &session, &self.pool) {
            self.pool.submit(task);
        }
        let note = self.publish(slot, &session);
        info!(session = session.number, "taken over in state {:?}", slot.state());
        Ok(OpenSession { image, slot, listener, connection, session, note, arrived })
    }

    /// Writes the session's note. Returns none, and logs a warning, when it cannot be written.
    fn publish(&self, slot: &SessionSlot, session: &Session) -> Option<SessionNote> {
        let store = session.store()?;
        let write = || -> std::io::Result<SessionNote> {
            let phase = match slot.state() {
                SessionState::Free | SessionState::Listening => Phase::Listening,
                SessionState::Handshake | SessionState::Restoring => Phase::Restoring,
                SessionState::Running | SessionState::Closing => Phase::Running,
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

    /// Checks at intervals whether a dump waits for the session. Never returns.
    async fn watch_urgency(&self, open: &OpenSession) {
        loop {
            let urgent = open.note.as_ref().is_some_and(|note| note.is_urgent(&self.notes).unwrap_or(false));
            if urgent && !open.session.is_urgent() {
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
    /// Fails when the restore or the image fails. The restored processes are then killed, or can never read a
    /// missing page.
    pub async fn serve(
        &self,
        mut open: OpenSession,
        connect_limit: Option<Duration>,
    ) -> anyhow::Result<Summary> {
        let outcome = self.run(&mut open, connect_limit).await;
        self.ledger.outcomes().note(outcome.is_ok());
        self.close(open).await;
        outcome
    }

    /// Serves a session to its end like [`Daemon::serve`], and keeps it in the ledger until
    /// [`Daemon::close`]. So the caller can note its outcome before.
    ///
    /// # Errors
    /// Fails like [`Daemon::serve`].
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
        // The first reason is the cause: later ones, such as the end of a restore whose tasks were killed,
        // follow from it.
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

    /// Closes a session that has ended.
    pub async fn close(&self, open: OpenSession) {
        self.forget(&open.session);
        let note = open.note.clone();
        open.close().await;
        // Last: as long as a process has the store, a plugin must be able to identify it.
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
                // Only a failure is possible before a restore connects.
                () = session.changed() => return Ok(()),
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

    /// Receives every task's userfaultfd and then the finish notice. It serves each task's faults at once.
    async fn handshake(&self, open: &mut OpenSession) -> anyhow::Result<()> {
        let Some(connection) = open.connection.as_ref() else {
            bail!("the connection with the restore is lost")
        };
        let readable = sys::watch(connection.try_clone()?).context("watching the restore")?;
        let mut peer = Peer::of(&readable);
        loop {
            let next = open.slot.inbox.next(readable.get_ref().as_fd()).context("receiving from the restore");
            let next = next.inspect_err(|_| self.reject_task(open.slot))?;
            if next != Received::Empty {
                peer.note_message();
            }
            match next {
                // All that the restore sent before its end was received above.
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
                Received::Word(word) => self.expect_task(open, i32::from_ne_bytes(word.to_ne_bytes()))?,
                Received::Descriptor { image_pid, uffd, host_pid } => {
                    self.task_arrived(open, image_pid, uffd, host_pid)?;
                }
            }
        }
    }

    fn expect_task(&self, open: &OpenSession, pid: i32) -> anyhow::Result<()> {
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
                // SAFETY: it was received and is in no slot, so it has no owner. No memory depends on it.
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
                    self.reject_task(open.slot);
                    return Err(error);
                }
            }
        }
        open.slot.tasks.fetch_add(1, Ordering::AcqRel);
        open.slot.inbox.done();
        Ok(())
    }

    /// Kills the task whose userfaultfd is in the inbox and in no slot, if one is.
    fn reject_task(&self, slot: &SessionSlot) {
        let Some((number, host_pid)) = slot.inbox.undelivered() else { return };
        let ended =
            !sys::is_userfaultfd(number) || address_spaces::kill_rejected(self.ledger, number, host_pid);
        // After the kill and before the close: a successor must neither lose the descriptor of a living task
        // nor expect a closed one.
        slot.inbox.done();
        if ended {
            // SAFETY: it was received, is in no slot and not in the inbox any more: it has no owner.
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
