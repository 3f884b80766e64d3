// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sessions of a long-lived daemon: opened, followed, ended, and remembered for a while.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use prost::Message as _;
use tokio::sync::Notify;
use tracing::{error, info, warn};

use super::proto::{self, State};
use super::streamer_session::StreamerSession;
use rewake_streamer::ledger::{SessionSlot, SessionState};
use rewake_streamer::session::Session;
use rewake_streamer::session::daemon::Daemon;
use rewake_streamer::session::open::{Lost, OpenSession};
use rewake_streamer::supervise::launch;

/// Longest reason that is remembered, in bytes.
const MAX_REASON: usize = 1024;

/// All sessions of one worker. Lives on the control thread.
#[derive(Debug)]
pub struct Registry {
    daemon: Arc<Daemon>,
    live: RefCell<BTreeMap<u64, Served>>,
    any: Cell<bool>,
    /// Streamers that are being started.
    opening: Cell<usize>,
    /// A session ended.
    pub ended: Notify,
}

/// A session being served: by this daemon, or by a streamer.
#[derive(Debug)]
enum Served {
    Here(Rc<Live>),
    Streamed(Rc<StreamerSession>),
}

/// One that is served here.
#[derive(Debug)]
struct Live {
    session: Arc<Session>,
    slot: &'static SessionSlot,
    work: PathBuf,
}

/// What is known about a session.
#[derive(Debug)]
pub enum Known {
    /// It is being served.
    Live(proto::Session),
    /// It ended.
    Ended(proto::Ended),
}

/// The facts about the daemon that its worker does not know by itself.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// The supervisor.
    pub pid: i32,
    /// When the first worker was started.
    pub started: Instant,
}

impl Registry {
    /// The registry of a worker that has taken up no sessions yet.
    #[must_use]
    pub fn new(daemon: &Arc<Daemon>) -> Rc<Self> {
        let (live, any, opening) = (RefCell::default(), Cell::new(false), Cell::new(0));
        Rc::new(Self { daemon: Arc::clone(daemon), live, any, opening, ended: Notify::new() })
    }

    /// Takes up what a dead worker left.
    pub fn inherit(self: &Rc<Self>) {
        for inherited in self.daemon.inherit() {
            match inherited {
                Ok(open) => self.serve(open, super::CONNECT_LIMIT),
                Err(lost) => {
                    error!(
                        session = lost.number,
                        "{:#}; ended the restored processes of {}",
                        lost.error,
                        lost.images.display()
                    );
                    self.lost(&lost);
                }
            }
            self.any.set(true);
        }
        let streamed = |slot: &&SessionSlot| slot.state() == SessionState::Streaming;
        for slot in self.daemon.ledger.sessions().iter().filter(streamed) {
            match StreamerSession::inherit(slot) {
                Ok(stream) => self.follow(stream, super::CONNECT_LIMIT),
                Err(error) => {
                    error!(session = slot.number(), "{error:#}; it goes on by itself");
                    let (images, work) = slot.paths();
                    self.lost(&Lost { number: slot.number(), images, work, error });
                    slot.set_state(SessionState::Free);
                }
            }
            self.any.set(true);
        }
    }

    fn lost(&self, lost: &Lost) {
        let summary = proto::Session {
            session: lost.number,
            images_dir: lost.images.as_os_str().as_bytes().to_vec(),
            work_dir: lost.work.as_os_str().as_bytes().to_vec(),
            ..Default::default()
        };
        self.note(summary, Some(&format!("{:#}", lost.error)));
    }

    /// Checks an image, listens for its restore, and serves that from now on. Gives the session's number.
    ///
    /// # Errors
    /// The daemon is stopping, a path is not absolute, or [`Daemon::open`] fails.
    pub fn open(self: &Rc<Self>, images: &Path, work: &Path, limit: Duration) -> anyhow::Result<u64> {
        self.may_open(images, work)?;
        let open = self.daemon.open(images, work)?;
        let number = open.slot().number();
        self.any.set(true);
        self.serve(open, limit);
        Ok(number)
    }

    /// The same for an image with memory of GPUs, which a streamer serves: its session, and whether that brings memory of CPUs, too.
    ///
    /// # Errors
    /// As of [`Registry::open`], or the streamer refuses.
    pub async fn stream(
        self: &Rc<Self>,
        images: &Path,
        work: &Path,
        limit: Duration,
        record: bool,
    ) -> anyhow::Result<(u64, bool)> {
        self.may_open(images, work)?;
        let looked_at = images.to_owned();
        let can = tokio::task::spawn_blocking(move || launch::can_bring_pages(&looked_at)).await?;
        if let Err(error) = &can {
            warn!("{}: all memory of CPUs comes before the processes run: {error:#}", images.display());
        }
        let (_, slot) = self.daemon.take_slot(images, work)?;
        let stream = self.start(slot, can.is_ok(), record).await?;
        let (number, pages) = (slot.number(), stream.brings_pages());
        info!(session = number, "a streamer waits for {}", images.display());
        self.any.set(true);
        self.follow(stream, limit);
        Ok((number, pages))
    }

    /// The daemon does not end meanwhile.
    async fn start(
        &self,
        slot: &'static SessionSlot,
        pages: bool,
        record: bool,
    ) -> anyhow::Result<StreamerSession> {
        self.opening.set(self.opening.get() + 1);
        let started = StreamerSession::start(slot, pages, record).await;
        self.opening.set(self.opening.get() - 1);
        if started.is_err() {
            slot.set_state(SessionState::Free);
            self.ended.notify_waiters();
        }
        started
    }

    fn may_open(&self, images: &Path, work: &Path) -> anyhow::Result<()> {
        if *self.daemon.stopping.borrow() {
            bail!("the daemon was asked to stop: start another");
        }
        for path in [images, work] {
            if !path.is_absolute() {
                bail!("{}: expected an absolute path", path.display());
            }
        }
        Ok(())
    }

    fn follow(self: &Rc<Self>, stream: StreamerSession, limit: Duration) {
        let stream = Rc::new(stream);
        let number = stream.report().session;
        self.live.borrow_mut().insert(number, Served::Streamed(Rc::clone(&stream)));
        let registry = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let ended = stream.run(limit).await;
            match &ended {
                Err(reason) => error!(session = number, "{reason}"),
                Ok(true) => info!(session = number, "all memory is back, and GPUs run"),
                Ok(false) => info!(session = number, "ended: there was nothing to bring behind the restore"),
            }
            registry.note(stream.report(), ended.err().as_deref());
            stream.close();
            registry.forget(number);
        });
    }

    fn forget(&self, number: u64) {
        self.live.borrow_mut().remove(&number);
        self.ended.notify_waiters();
    }

    fn serve(self: &Rc<Self>, mut open: OpenSession, limit: Duration) {
        let (number, slot) = (open.slot().number(), open.slot());
        let live = Rc::new(Live { session: Arc::clone(&open.session), slot, work: slot.paths().1 });
        self.live.borrow_mut().insert(number, Served::Here(Rc::clone(&live)));
        let registry = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let result = registry.daemon.run(&mut open, Some(limit)).await;
            // A failure was logged when it happened.
            if let Ok(summary) = &result {
                info!(
                    session = number,
                    faults = summary.faults,
                    pages = summary.pages_copied + summary.pages_zero,
                    seconds = format!("{:.3}", summary.elapsed.as_secs_f64()),
                    "all memory is back"
                );
            }
            let reason = result.err().map(|error| format!("{error:#}"));
            registry.note(live.report(), reason.as_deref());
            registry.daemon.close(open).await;
            registry.forget(number);
        });
    }

    /// Remembers how a session ended, beyond this worker's life.
    fn note(&self, summary: proto::Session, reason: Option<&str>) {
        let ok = reason.is_none();
        let mut reason = reason.unwrap_or_default().to_owned();
        if let Some((end, _)) = reason.char_indices().find(|(at, char)| at + char.len_utf8() > MAX_REASON) {
            reason.truncate(end);
        }
        let number = summary.session;
        let state = if ok { State::Complete } else { State::Failed } as i32;
        let ended = proto::Ended { ok, reason, summary: Some(proto::Session { state, ..summary }) };
        if !self.daemon.ledger.outcomes().note(number, ok, &ended.encode_to_vec()) {
            error!(session = number, "its outcome is too long to be remembered");
        }
    }

    /// Fails a session that no restore has connected to yet. It has ended a moment later. A streamer is asked to end when nothing is left to do.
    ///
    /// # Errors
    /// It is further than that, or not being served.
    pub fn end(&self, number: u64) -> anyhow::Result<()> {
        let live = self.live.borrow();
        let live = match live.get(&number).with_context(|| format!("session {number} is not being served"))? {
            Served::Here(live) => live,
            Served::Streamed(stream) => {
                stream.ask_to_end();
                return Ok(());
            }
        };
        if live.slot.state() != SessionState::Listening {
            bail!("session {number}: a restore has connected; it ends when the restored processes do");
        }
        live.session.fail("ended by request before a restore connected");
        Ok(())
    }

    /// What is known about a session; none when it ended long ago, or never was.
    #[must_use]
    pub fn find(&self, number: u64) -> Option<Known> {
        if let Some(live) = self.live.borrow().get(&number) {
            return Some(Known::Live(live.report()));
        }
        let record = self.daemon.ledger.outcomes().find(number)?;
        proto::Ended::decode(record.as_slice()).ok().map(Known::Ended)
    }

    /// True when no session is being served.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.live.borrow().is_empty() && self.opening.get() == 0
    }

    /// True once a session was opened or inherited.
    #[must_use]
    pub fn had_any(&self) -> bool {
        self.any.get()
    }

    /// Everything about the daemon.
    #[must_use]
    pub fn status(&self, facts: Facts) -> proto::Status {
        let outcomes = self.daemon.ledger.outcomes();
        let decoded = |(_, bytes): (u64, Vec<u8>)| proto::Ended::decode(bytes.as_slice()).ok();
        let mut recent: Vec<proto::Ended> = outcomes.all().filter_map(decoded).collect();
        recent.sort_by_key(|ended| ended.summary.as_ref().map(|summary| summary.session));
        let (served, failed) = outcomes.counts();
        let counters = self.daemon.cache.metrics().snapshot();
        let cache = proto::Cache {
            blocks: self.daemon.cache.capacity() as u64,
            hits: counters.hits,
            loads: counters.loads,
            shared_loads: counters.pending,
            full: counters.full,
            bytes_direct: counters.bytes_direct,
            bytes_buffered: counters.bytes_buffered,
            retries: counters.retries,
        };
        let daemon = proto::Daemon {
            pid: facts.pid,
            worker_pid: std::process::id().cast_signed(),
            generation: self.daemon.ledger.generation(),
            uptime_ns: nanos(facts.started.elapsed()),
            sessions_served: served,
            sessions_failed: failed,
            rss_bytes: resident_bytes(),
            cache: Some(cache),
        };
        let sessions = self.live.borrow().values().map(Served::report).collect();
        proto::Status { sessions, recent, daemon: Some(daemon) }
    }
}

impl Served {
    fn report(&self) -> proto::Session {
        match self {
            Self::Here(live) => live.report(),
            Self::Streamed(stream) => stream.report(),
        }
    }
}

impl Live {
    fn report(&self) -> proto::Session {
        let stats = &self.session.stats;
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let quantile = |share: f64| stats.fault_quantile(share).map_or(0, nanos);
        let (first_fault_ns, last_fault_ns) = stats.fault_times();
        let state = match self.slot.state() {
            SessionState::Listening => State::Listening,
            SessionState::Handshake | SessionState::Restoring => State::Restoring,
            SessionState::Running => State::Running,
            SessionState::Free | SessionState::Streaming | SessionState::Closing => State::Unknown,
        };
        proto::Session {
            session: self.slot.number(),
            images_dir: self.session.images.as_os_str().as_bytes().to_vec(),
            work_dir: self.work.as_os_str().as_bytes().to_vec(),
            state: state as i32,
            elapsed_ns: stats.elapsed(),
            running_ns: self.session.running_ns(),
            tasks: self.slot.tasks.load(Ordering::Relaxed),
            pages_total: get(&stats.pages_total),
            pages_copied: get(&stats.pages_copied),
            pages_zero: get(&stats.pages_zero),
            pages_dropped: get(&stats.pages_dropped),
            faults: get(&stats.faults),
            fault_p50_ns: quantile(0.5),
            fault_p99_ns: quantile(0.99),
            first_fault_ns,
            last_fault_ns,
            gpus: false,
            there_ns: 0,
        }
    }
}

pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Of this process; 0 when /proc does not say.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split_whitespace().nth(1).and_then(|field| field.parse().ok()).unwrap_or(0);
    pages * rewake_uffd::PAGE_SIZE
}
