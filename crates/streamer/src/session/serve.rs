// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves the session on a worker's control thread: from the first connection to the last page.

use std::cell::Cell;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context as _, bail};
use rewake_image_io::{BlockCache, DEFAULT_BUDGET, FetchReader};
use rewake_plugin_protocol::{Phase, SessionNote};
use rewake_process::wake_socket::WakeSocket;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::cpu::{ReactorPool, address_spaces};
use crate::fetch::Fetch;
use crate::fetch_peer::{FetchPeer, find_memory};
use crate::gpu::GpuLoad;
use crate::ledger::{
    self, Ledger, NO_FD, Received, SessionOutcome, SessionSlot, SessionState, Starter, session_store,
};
use crate::session::image::TaskPlan;
use crate::session::open::{self, OpenSession};
use crate::session::peer::Peer;
use crate::session::root::{ProgramState, RootProcess};
use crate::session::summary::SessionSummary;
use crate::session::{Session, complete, socket};
use crate::supervise::parking;
use crate::working_set::{LoadingOptions, on_demand};
use crate::{planner, sys, watched};

/// "ReSTore Finished" (criu/uffd.c), which the restore sends when all tasks are restored. No pid is this
/// large.
const FINISHED: u32 = 0x5253_5446;

/// The state of a worker.
#[derive(Debug)]
pub struct Worker {
    /// The ledger of this streamer.
    pub ledger: Ledger,
    /// The process that starts this worker again.
    starter: Starter,
    /// The folder of the sessions' notes.
    notes: PathBuf,
    /// The reactor threads.
    pub pool: ReactorPool,
    /// Wakes the thread that loads GPU memory, when some has arrived.
    gpu_waker: WakeSocket,
    /// Whether it received SIGTERM while processes depend on it.
    pub(crate) asked_to_stop: Cell<bool>,
}

impl Worker {
    /// Starts the reactors of a new worker.
    ///
    /// # Errors
    /// Fails when the kernel refuses memory, descriptors or threads.
    pub fn start(ledger: Ledger, starter: Starter) -> anyhow::Result<Self> {
        let notes = ledger::root()?;
        let pool = ReactorPool::start(&BlockCache::new(DEFAULT_BUDGET)?, ledger)?;
        let (gpu_waker, asked_to_stop) = (WakeSocket::new()?, Cell::new(false));
        Ok(Self { ledger, starter, notes, pool, gpu_waker, asked_to_stop })
    }

    /// Returns the sockets by which a fetcher wakes readers: the reactors, and the thread that loads GPU
    /// memory.
    fn readers(&self) -> std::io::Result<Vec<OwnedFd>> {
        let mut readers = self.pool.wakers()?;
        readers.push(self.gpu_waker.sender().try_clone_to_owned()?);
        Ok(readers)
    }

    /// Returns the reader that loads GPU memory.
    ///
    /// # Errors
    /// EMFILE.
    pub(crate) fn gpu_reader(&self) -> std::io::Result<FetchReader> {
        // There are MAX_REACTORS at most before it.
        let number = u8::try_from(self.pool.wakers()?.len()).unwrap_or(u8::MAX);
        Ok(FetchReader { number, waker: self.gpu_waker.clone() })
    }

    /// Opens the session: takes it over from a dead worker, or else checks the whole image and listens on the
    /// socket that the restore will connect to. `None` if a dead worker has served it.
    ///
    /// # Errors
    /// Fails when the image cannot be served, the socket cannot be bound, or the session has failed before.
    /// Where a session cannot be taken over, its processes are killed.
    pub async fn open(
        &self,
        images: &Path,
        work: &Path,
        server: Option<&FetchPeer>,
        options: LoadingOptions,
        signers: &[PathBuf],
    ) -> anyhow::Result<Option<OpenSession>> {
        address_spaces::reap_abandoned(self.ledger);
        if let Some(inherited) = self.inherit(options)? {
            return Ok(Some(inherited));
        }
        match self.ledger.session().outcome() {
            SessionOutcome::Open => self.listen(images, work, server, options, signers).await.map(Some),
            SessionOutcome::Served => Ok(None),
            SessionOutcome::Failed => bail!("the restore had failed already: see above"),
        }
    }

    async fn listen(
        &self,
        images: &Path,
        work: &Path,
        server: Option<&FetchPeer>,
        options: LoadingOptions,
        signers: &[PathBuf],
    ) -> anyhow::Result<OpenSession> {
        let (memory, given) = find_memory(server, work).await?;
        let image = planner::open_in_background(images.to_owned(), memory, signers.to_owned()).await?;
        let (listener, slot) = (socket::listen(work)?, self.ledger.session());
        slot.set_paths(images, work)?;
        let store = session_store::of_image(self.ledger, &image).context("keeping what a successor needs");
        let session = store.and_then(|store| Ok(Session::of(&image, images.to_owned(), store, slot)?));
        let session = on_demand::prepare(session.inspect_err(|_| slot.free())?, &image, options);
        let session = Arc::new(session);
        let fetch = Fetch::start(self.ledger, &session, &image, server, given, self.readers()?).await;
        let fetch = fetch.inspect_err(|_| slot.free())?.map(Rc::new);
        slot.listener.store(listener.as_raw_fd(), Ordering::Release);
        slot.set_state(SessionState::Listening);
        let note = self.publish();
        info!(
            tasks = image.tasks(),
            lazy_pages = image.lazy_pages(),
            image = %image.digest(),
            "listening for {}",
            images.display()
        );
        let (listener, connection, arrived, fetches_rest) = (Some(listener), None, false, false);
        Ok(OpenSession { image, slot, listener, connection, session, fetch, note, arrived, fetches_rest })
    }

    /// Takes over the session of a dead worker, or `None` if there is nothing to serve.
    ///
    /// # Errors
    /// Fails when the image cannot be read any more. The session's processes are then killed.
    pub fn inherit(&self, options: LoadingOptions) -> anyhow::Result<Option<OpenSession>> {
        self.ledger.reclaim();
        let slot = self.ledger.session();
        match slot.state() {
            SessionState::Free => return Ok(None),
            SessionState::Closing => {
                open::finish_closing(slot, self.notes.clone(), self.starter.folder.clone());
                return Ok(None);
            }
            SessionState::Completing => {
                slot.free();
                return Ok(None);
            }
            SessionState::Listening
            | SessionState::Handshake
            | SessionState::Restoring
            | SessionState::Running => {}
        }
        let inherited = self.take_over(slot, options).inspect_err(|_| {
            let is_known = |number| address_spaces::is_known(self.ledger, number);
            if !slot.inbox.descriptor().is_some_and(is_known) {
                self.reject_task(slot);
            }
            slot.set_outcome(SessionOutcome::Failed);
            address_spaces::kill_session(self.ledger);
            slot.free();
        });
        inherited.map(Some).context("taking over from a dead worker")
    }

    fn take_over(&self, slot: &'static SessionSlot, options: LoadingOptions) -> anyhow::Result<OpenSession> {
        let (images, _work) = slot.paths();
        let own = slot.own_store().context("finding the streamer's own fd store")?;
        let image = session_store::image(slot, &own)?;
        let session = Session::of(&image, images, own, slot)?;
        let session = Arc::new(on_demand::prepare_successor(session, &image, slot.state(), options));
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
        for request in address_spaces::inherit(self.ledger, &image, &session, &self.pool) {
            self.pool.submit(request);
        }
        let fetch = Fetch::inherit(self.ledger, &session, &image, self.readers()?)?.map(Rc::new);
        let note = self.publish();
        info!("taken over in state {:?}", slot.state());
        let fetches_rest = false;
        Ok(OpenSession { image, slot, listener, connection, session, fetch, note, arrived, fetches_rest })
    }

    /// Writes the session's note. Returns none, and logs a warning, when it cannot be written.
    fn publish(&self) -> Option<SessionNote> {
        let slot = self.ledger.session();
        let write = || -> std::io::Result<SessionNote> {
            let phase = match slot.state() {
                SessionState::Free | SessionState::Listening => Phase::Listening,
                SessionState::Handshake | SessionState::Restoring => Phase::Restoring,
                SessionState::Running | SessionState::Closing | SessionState::Completing => Phase::Running,
            };
            let note = session_store::note(slot, &self.starter, &slot.paths().1, phase)?;
            note.write(&self.notes)?;
            Ok(note)
        };
        write().inspect_err(|error| warn!(%error, "CRIU's plugins cannot find this session")).ok()
    }

    /// Serves the session until its memory is resident, and notes the outcome. It stays in the ledger until
    /// [`Worker::close`]. If GPU memory comes from another host, its load must have ended too, as `gpus`
    /// says.
    ///
    /// # Errors
    /// Fails when the restore or the image fails. The restored processes are then killed, or can never read a
    /// missing page.
    pub async fn serve(
        &self,
        open: &mut OpenSession,
        gpus: Option<watch::Receiver<GpuLoad>>,
    ) -> anyhow::Result<SessionSummary> {
        let outcome = self.run(open, gpus).await;
        open.slot.set_outcome(if outcome.is_ok() { SessionOutcome::Served } else { SessionOutcome::Failed });
        outcome
    }

    async fn run(
        &self,
        open: &mut OpenSession,
        gpus: Option<watch::Receiver<GpuLoad>>,
    ) -> anyhow::Result<SessionSummary> {
        let session = Arc::clone(&open.session);
        let fetch = open.fetch.clone();
        let outcome = tokio::select! {
            outcome = async {
                self.follow(open).await?;
                // A local load needs no fetcher.
                if let Some(over) = gpus.filter(|_| fetch.as_deref().is_some_and(Fetch::brings_files)) {
                    wait_for_gpus(&session, over).await;
                }
                Ok(())
            } => outcome,
            error = lost_pages(fetch.as_deref()) => Err(error),
        };
        if let Err(error) = &outcome {
            session.fail(error);
        }
        if session.has_failed() {
            self.pool.look_again();
            if let Some(fetch) = &fetch {
                fetch.give_up();
            }
        }
        while !session.is_empty() {
            session.changed().await;
        }
        // The first reason is the cause: later ones, such as the end of a restore whose tasks were killed,
        // follow from it.
        if let Some(failure) = session.failure() {
            if let Some(fetch) = fetch {
                fetch.end_as_failure().await;
            }
            return Err(failure.clone().into());
        }
        match fetch {
            Some(fetch) if !fetch.is_image() => fetch.finish().await?,
            Some(fetch) if fetch.is_shared() => {}
            // Of a program that has ended early, no process waits for the rest.
            Some(_) if !open.slot.any_resident() => {
                let images = session.images.display();
                info!(
                    "{images}: the program has ended, and the image is not complete: `rewake pull` completes \
                     it"
                );
            }
            fetch => open.fetches_rest = fetch.is_some(),
        }
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let pages_ended = session.tasks().iter().map(|task| count(&task.pages_ended)).sum();
        let program =
            session.root().filter(|_| pages_ended > 0).map_or(ProgramState::Runs, RootProcess::state);
        Ok(SessionSummary {
            tasks: open.tasks() as usize,
            pages_copied: count(&session.stats.pages_copied),
            pages_zero: count(&session.stats.pages_zero),
            pages_ended,
            faults: count(&session.stats.faults),
            elapsed: session.since.elapsed(),
            program,
        })
    }

    /// Closes the session when it has ended. What the image of another host still lacks is fetched after
    /// that.
    pub async fn close(&self, mut open: OpenSession) {
        open.close().await;
        // As long as a process has the store, a plugin must be able to identify it.
        if let Some(Err(error)) = open.note.take().map(|note| note.remove(&self.notes)) {
            warn!(%error, "removing the session's note");
        }
        self.pool.collapse_huge_pages();
        if open.fetches_rest {
            complete::fetch_rest(open).await;
        }
    }

    async fn follow(&self, open: &mut OpenSession) -> anyhow::Result<()> {
        if open.slot.state() == SessionState::Listening {
            let session = Arc::clone(&open.session);
            tokio::select! {
                accepted = open.accept() => {
                    accepted?;
                    open.note = self.publish();
                }
                // Only a failure is possible before a restore connects.
                () = session.changed() => return Ok(()),
            }
        }
        if open.slot.state() != SessionState::Running {
            self.handshake(open).await?;
        }
        open.session.find_root();
        open.session.release();
        self.pool.look_again();
        let session = &open.session;
        let park = async {
            if let Err(error) = parking::park(self.ledger, session).await {
                session.fail(&error);
            }
        };
        let load = async {
            while !session.is_empty() && !session.has_failed() {
                session.changed().await;
            }
        };
        let first = on_demand::load_first(&open.image, session, &self.pool, &self.asked_to_stop);
        tokio::join!(park, load, first);
        Ok(())
    }

    /// Receives every task's userfaultfd and then the finish notice. It serves each task's faults at once.
    async fn handshake(&self, open: &mut OpenSession) -> anyhow::Result<()> {
        let Some(connection) = open.connection.as_ref() else {
            bail!("the connection with the restore is lost")
        };
        let readable = watched::watch(connection.try_clone()?).context("watching the restore")?;
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
                            "{} of {} tasks have reported, and no other does: is it `criu restore` that \
                             connected?",
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
                    open.note = self.publish();
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
                    "task {image_pid} sent a descriptor that is no userfaultfd: not `criu restore \
                     --lazy-pages`"
                );
            }
            let arrived =
                address_spaces::Arrival { image_pid, host_pid, uffd: number, home: self.pool.choose_home() };
            let plan = self.plan(open, image_pid);
            match plan.and_then(|plan| address_spaces::open(self.ledger, plan, &open.session, &arrived)) {
                Ok(request) => self.pool.submit(request),
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

/// Waits until the load of GPU memory has ended, or the session has failed: the load fails then.
async fn wait_for_gpus(session: &Session, mut over: watch::Receiver<GpuLoad>) {
    let failed = async {
        // The last address space may have left a notice that no task has taken.
        while !session.has_failed() {
            session.changed().await;
        }
    };
    tokio::select! {
        // An error means that the thread has ended, however it went.
        _ = over.wait_for(|load| load.is_over()) => {}
        () = failed => {}
    }
}

/// Returns when pages cannot be fetched from a page server.
async fn lost_pages(fetch: Option<&Fetch>) -> anyhow::Error {
    match fetch {
        Some(fetch) => fetch.watch().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
