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
use tracing::{error, info};

use super::proto::{self, State};
use crate::daemon::{Daemon, Lost, OpenSession};
use crate::ledger::{SessionSlot, SessionState};
use crate::session::Session;

/// Longest reason that is remembered, in bytes.
const MAX_REASON: usize = 1024;

/// All sessions of one worker. Lives on the control thread.
#[derive(Debug)]
pub struct Registry {
    daemon: Arc<Daemon>,
    live: RefCell<BTreeMap<u64, Rc<Live>>>,
    any: Cell<bool>,
    /// A session ended.
    pub ended: Notify,
}

/// A session being served.
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
        let (live, any) = (RefCell::default(), Cell::new(false));
        Rc::new(Self { daemon: Arc::clone(daemon), live, any, ended: Notify::new() })
    }

    /// Takes up what a dead worker left.
    pub fn inherit(self: &Rc<Self>) {
        for inherited in self.daemon.inherit() {
            match inherited {
                Ok(open) => self.serve(open, super::CONNECT_LIMIT),
                Err(lost) => self.lost(&lost),
            }
            self.any.set(true);
        }
    }

    fn lost(&self, lost: &Lost) {
        error!(
            session = lost.number,
            "{:#}; ended the restored processes of {}",
            lost.error,
            lost.images.display()
        );
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
        if *self.daemon.stopping.borrow() {
            bail!("the daemon was asked to stop: start another");
        }
        for path in [images, work] {
            if !path.is_absolute() {
                bail!("{}: expected an absolute path", path.display());
            }
        }
        let open = self.daemon.open(images, work)?;
        let number = open.slot().number();
        self.any.set(true);
        self.serve(open, limit);
        Ok(number)
    }

    fn serve(self: &Rc<Self>, mut open: OpenSession, limit: Duration) {
        let (number, slot) = (open.slot().number(), open.slot());
        let live = Rc::new(Live { session: Arc::clone(&open.session), slot, work: slot.paths().1 });
        self.live.borrow_mut().insert(number, Rc::clone(&live));
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
            registry.daemon.close(open);
            registry.live.borrow_mut().remove(&number);
            registry.ended.notify_waiters();
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

    /// Fails a session that no restore has connected to yet. It has ended a moment later.
    ///
    /// # Errors
    /// It is further than that, or not being served.
    pub fn end(&self, number: u64) -> anyhow::Result<()> {
        let live = self.live.borrow();
        let live = live.get(&number).with_context(|| format!("session {number} is not being served"))?;
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
        self.live.borrow().is_empty()
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
        let sessions = self.live.borrow().values().map(|live| live.report()).collect();
        proto::Status { sessions, recent, daemon: Some(daemon) }
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
            SessionState::Free => State::Unknown,
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
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Of this process; 0 when /proc does not say.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split_whitespace().nth(1).and_then(|field| field.parse().ok()).unwrap_or(0);
    pages * rewake_uffd::PAGE_SIZE
}
