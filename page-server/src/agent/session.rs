// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sessions of the agent. A streamer serves each, in processes of its own: what happens to one affects no
//! other, nor the agent.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio::task::spawn_blocking;
use tracing::{error, info, warn};

use super::cache::AgentCache;
use super::counts::{EndedCounts, FailureKind};
use super::recovery;
use super::sessions_file::{self, SessionEntry, Sessions};
use crate::commands::verify::expect_as_sealed;
use rewake_criu_images::amdgpu::image_has_gpu;
use rewake_streamer::control::client::ClientError;
use rewake_streamer::control::proto::{self, Ended, MemorySource, State, Streaming};
use rewake_streamer::control::streamer::{self, ABANDONED, StartedNotLazily};
use rewake_streamer::control::work_folder::{self, LOG};
use rewake_streamer::failure::FailureCause;
use rewake_streamer::supervise::launch::{LaunchPlan, MemoryServer};
use rewake_streamer::working_set::LoadingOptions;

/// How often a session gets another streamer when all processes of its streamer were killed. What kills
/// streamers again and again (an out-of-memory killer) is to be looked at.
const MOST_RECOVERIES: u32 = 3;
/// Sessions that have ended and are remembered.
const REMEMBERED: usize = 64;

/// All sessions of the agent. Lives on its one thread.
#[derive(Debug)]
pub(super) struct Registry {
    file: PathBuf,
    /// The agent's control socket.
    socket: PathBuf,
    cache: AgentCache,
    started: Instant,
    last: Cell<u64>,
    live: RefCell<BTreeMap<u64, Live>>,
    recent: RefCell<VecDeque<proto::Session>>,
    served: Cell<u64>,
    failed: Cell<u64>,
    counts: RefCell<EndedCounts>,
}

/// A session that is being served.
#[derive(Debug)]
struct Live {
    entry: SessionEntry,
    since: Instant,
    /// Its image is in the cache.
    is_cached: bool,
    progress: Streaming,
}

impl Live {
    fn report(&self) -> proto::Session {
        proto::Session {
            session: self.entry.session,
            images_dir: self.entry.images().as_os_str().as_bytes().to_vec(),
            work_dir: self.entry.work().as_os_str().as_bytes().to_vec(),
            elapsed_ns: nanos(self.since.elapsed()),
            progress: Some(self.progress.clone()),
            reason: String::new(),
        }
    }
}

impl Registry {
    /// Makes the registry of an agent with this control socket, and follows the sessions that an earlier
    /// agent had.
    pub(super) fn start(socket: &Path, cache: AgentCache) -> Rc<Self> {
        let file = sessions_file::path(socket);
        let Sessions { last, sessions } = sessions_file::read(&file).unwrap_or_else(|error| {
            error!("{error:#}: sessions of an earlier agent are not shown");
            Sessions::default()
        });
        let registry = Rc::new(Self {
            file,
            socket: socket.to_owned(),
            cache,
            started: Instant::now(),
            last: Cell::new(last),
            live: RefCell::default(),
            recent: RefCell::default(),
            served: Cell::default(),
            failed: Cell::default(),
            counts: RefCell::default(),
        });
        for entry in sessions {
            info!(session = entry.session, "found the session of an earlier agent");
            registry.follow(entry);
        }
        registry.sweep();
        registry
    }

    /// Checks an image, starts a streamer for its restore, and follows that.
    ///
    /// # Errors
    /// A path is not absolute, the image cannot be served, or the streamer does not start: with its own
    /// words.
    pub(super) async fn open(self: &Rc<Self>, open: &proto::Open) -> anyhow::Result<proto::Opened> {
        let path = |bytes| PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
        let (images, work) = (path(&open.images_dir), path(&open.work_dir));
        for path in [&images, &work] {
            ensure!(path.is_absolute(), "{}: expected an absolute path", path.display());
        }
        // Several opens may find the same damage: it is compared once.
        let began = Instant::now();
        self.start_streamer(images.clone(), &work, open).await.inspect_err(|error| {
            if FailureCause::of(error) == FailureCause::DamagedImage {
                self.doubt(images, began);
            }
        })
    }

    async fn start_streamer(
        self: &Rc<Self>,
        images: PathBuf,
        work: &Path,
        open: &proto::Open,
    ) -> anyhow::Result<proto::Opened> {
        let loading = LoadingOptions {
            record: open.record,
            on_demand_only: (open.on_demand_only_s > 0).then(|| Duration::from_secs(open.on_demand_only_s)),
        };
        let signers: Vec<PathBuf> =
            open.signers.iter().map(|path| OsString::from_vec(path.clone()).into()).collect();
        let mut plan = self.plan(images.clone(), signers).await?;
        loading.check(plan.gpus)?;
        let session = self.last.get() + 1;
        self.last.set(session);
        let log = work.join(LOG);
        if plan.lazy_pages()
            && let Err(error) = streamer::start(&images, work, &plan, loading, Some(&log), false).await
        {
            let reason = error.downcast::<StartedNotLazily>()?;
            // CRIU cannot load memory that is on another host.
            ensure!(plan.from.is_none(), "{reason}: bring all of it first (`rewake cache warm`)");
            plan.eager = Some(reason.to_string());
        }
        if let Some(reason) = &plan.eager {
            ensure!(!open.by_plugin, "it cannot be restored lazily: {reason}");
            plan.check(loading)?;
            warn!("{}: all CPU memory is loaded before the processes run: {reason}", images.display());
            let image = images.clone();
            let signers = plan.signers.clone();
            spawn_blocking(move || expect_as_sealed(&image, &signers)).await??;
            streamer::start(&images, work, &plan, loading, Some(&log), false).await?;
        }
        info!(session, "a streamer waits for a restore of {}", images.display());
        self.follow(SessionEntry::new(session, &images, work));
        self.save();
        let lazy_pages = plan.lazy_pages();
        Ok(proto::Opened { session, lazy_pages, reason: plan.eager.unwrap_or_default() })
    }

    /// Decides how an image is served. The agent brings what one of its cache lacks.
    async fn plan(&self, images: PathBuf, signers: Vec<PathBuf>) -> anyhow::Result<LaunchPlan> {
        let (cache, socket) = (self.cache.cache.clone(), self.socket.clone());
        let plan = move || {
            let Some(id) = cache.and_then(|cache| cache.partial_at(&images)) else {
                return LaunchPlan::with_log(&images, signers);
            };
            let gpus = image_has_gpu(&images).with_context(|| format!("reading {}", images.display()))?;
            let eager = if gpus { LaunchPlan::cannot_hold_calls() } else { None };
            ensure!(
                eager.is_none(),
                "{}: all of its image must be in the cache before it is restored (`rewake cache warm`): {}",
                images.display(),
                eager.unwrap_or_default()
            );
            let server = MemoryServer::Agent { socket, id: id.to_string() };
            Ok(LaunchPlan::from_server(gpus, server, signers))
        };
        tokio::task::spawn_blocking(plan).await?
    }

    fn follow(self: &Rc<Self>, entry: SessionEntry) {
        let (number, work) = (entry.session, entry.work());
        let is_cached = self.cache.cache.as_ref().is_some_and(|cache| cache.has_place(&entry.images()));
        let live = Live { entry, since: Instant::now(), is_cached, progress: Streaming::default() };
        self.live.borrow_mut().insert(number, live);
        let registry = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let mut recoveries = 0;
            let ended = loop {
                let report = |progress| registry.report(number, progress);
                let ended = streamer::follow(&work, Duration::ZERO, report).await;
                let was_killed = matches!(ended, Err(ClientError::NotServed(_))) && work.is_dir();
                if !was_killed || recoveries == MOST_RECOVERIES || !recovery::recover(&work).await {
                    break ended;
                }
                recoveries += 1;
                warn!(session = number, "its streamer was killed, and another one serves it now");
            };
            registry.ended(number, ended);
        });
    }

    /// Removes work directories of ended restores that no command has removed.
    fn sweep(&self) {
        let live: Vec<PathBuf> = self.live.borrow().values().map(|live| live.entry.work()).collect();
        work_folder::sweep_own(self.folder(), &live);
    }

    /// The folder of the control socket, in which commands make work directories.
    fn folder(&self) -> &Path {
        self.socket.parent().unwrap_or_else(|| Path::new("/"))
    }

    /// Notes how far a session is.
    fn report(&self, number: u64, mut progress: Streaming) {
        let mut sessions = self.live.borrow_mut();
        let Some(live) = sessions.get_mut(&number) else { return };
        if live.is_cached {
            progress.set_source(MemorySource::Cache);
        }
        if live.progress.worker != progress.worker {
            // A successor counts from zero.
            self.counts.borrow_mut().add(&live.progress);
        }
        live.progress = progress;
    }

    /// Counts a request for a streamer that failed.
    pub(super) fn refused(&self) {
        self.counts.borrow_mut().failed(FailureKind::Refused);
    }

    fn ended(&self, number: u64, ended: Result<Ended, ClientError>) {
        if let Ok(Ended { last: Some(last), .. }) = &ended {
            self.report(number, last.clone());
        }
        let Some(live) = self.live.borrow_mut().remove(&number) else { return };
        self.counts.borrow_mut().add(&live.progress);
        let mut session = live.report();
        let work = live.entry.work();
        let (mut lost, mut cause) = (None, proto::FailureCause::Other);
        match ended {
            Ok(Ended { ok: true, last, .. }) => {
                info!(session = number, "all memory is resident");
                self.served.set(self.served.get() + 1);
                session.progress = last;
                if let Some(progress) = &mut session.progress
                    && progress.state() == State::Listening
                {
                    // CRIU loaded all memory itself, and asked for none.
                    progress.set_state(State::Complete);
                }
            }
            Ok(ended) => {
                cause = ended.cause();
                session.progress = ended.last;
                session.reason = ended.reason;
            }
            Err(ClientError::NotServed(_)) if work.is_dir() => {
                session.reason = ABANDONED.to_owned();
                lost = Some(FailureKind::StreamerKilled);
            }
            Err(ClientError::NotServed(_)) => {
                lost = Some(FailureKind::Lost);
                session.reason = "it ended while no agent ran, and its work directory was removed".to_owned();
            }
            Err(error) => {
                session.reason = format!("following the streamer: {error}");
                lost = Some(FailureKind::Lost);
            }
        }
        if cause == proto::FailureCause::WrongBlock {
            self.doubt(live.entry.images(), live.since);
        }
        if !session.reason.is_empty() {
            error!(session = number, "{}", session.reason);
            self.failed.set(self.failed.get() + 1);
            let kind = lost.unwrap_or_else(|| FailureKind::of(cause, live.progress.state()));
            self.counts.borrow_mut().failed(kind);
        }
        let memory_is_lost = !session.reason.is_empty() && live.progress.state() != State::Ended;
        if memory_is_lost {
            // Its log stays, and the logs of some earlier restores.
            self.sweep();
        } else if work_folder::is_of_agent(&work, self.folder()) {
            work_folder::remove_unused(&work);
        }
        let mut recent = self.recent.borrow_mut();
        recent.push_back(session);
        if recent.len() > REMEMBERED {
            recent.pop_front();
        }
        drop(recent);
        self.save();
    }

    /// Notes that a restore, which began at `began`, cannot use an image of the cache in its present state.
    fn doubt(&self, images: PathBuf, began: Instant) {
        if let Some(cache) = self.cache.cache.clone() {
            // It waits for the fetcher's end.
            drop(tokio::task::spawn_blocking(move || cache.doubt(&images, began)));
        }
    }

    fn save(&self) {
        let sessions = self.live.borrow().values().map(|live| live.entry.clone()).collect();
        if let Err(error) = sessions_file::write(&self.file, &Sessions { last: self.last.get(), sessions }) {
            error!("{error:#}: an agent that is started later does not show these sessions");
        }
    }

    pub(super) fn status(&self) -> proto::Status {
        proto::Status {
            sessions: self.live.borrow().values().map(Live::report).collect(),
            recent: self.recent.borrow().iter().cloned().collect(),
            agent: Some(proto::Agent {
                pid: std::process::id().cast_signed(),
                uptime_ns: nanos(self.started.elapsed()),
                sessions_served: self.served.get(),
                sessions_failed: self.failed.get(),
                rss_bytes: resident_bytes(),
                ended: self.counts.borrow().by_source(),
                failures: self.counts.borrow().failures(),
            }),
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Of this process; 0 when /proc does not have it.
fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split_whitespace().nth(1).and_then(|field| field.parse().ok()).unwrap_or(0);
    pages * rewake_uffd::PAGE_SIZE
}

#[cfg(test)]
mod tests {
    use rewake_streamer::control::proto::LoadCounts;

    use super::super::counts::totals;
    use super::*;

    /// What a worker reports that has filled `fault_bytes` bytes for page faults.
    fn report(worker: i32, fault_bytes: u64) -> Streaming {
        let counts = Some(LoadCounts { fault_bytes, ..LoadCounts::default() });
        let source = MemorySource::Image.into();
        Streaming { state: State::Running.into(), worker, source, counts, ..Streaming::default() }
    }

    #[test]
    fn only_a_streamer_that_left_its_directory_was_killed() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::start(&dir.path().join("socket"), AgentCache::new(None));
        let ends = |number: u64, work: &Path, error: ClientError| {
            let entry = SessionEntry::new(number, Path::new("/images"), work);
            let progress = Streaming::default();
            let live = Live { entry, since: Instant::now(), is_cached: false, progress };
            registry.live.borrow_mut().insert(number, live);
            registry.ended(number, Err(error));
        };
        ends(1, dir.path(), ClientError::NotServed(PathBuf::new()));
        ends(2, &dir.path().join("removed"), ClientError::NotServed(PathBuf::new()));
        ends(3, dir.path(), ClientError::Unexpected);
        let failures = registry.counts.borrow().failures();
        let counts = failures.iter().filter(|of| of.count > 0).map(|of| (&*of.kind, of.count));
        assert_eq!(counts.collect::<Vec<_>>(), [("streamer_killed", 1), ("lost", 2)]);
    }

    #[test]
    fn counts_grow_through_a_worker_s_death_and_the_session_s_end() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::start(&dir.path().join("socket"), AgentCache::new(None));
        let entry = SessionEntry::new(1, Path::new("/images"), dir.path());
        let progress = Streaming::default();
        let live = Live { entry, since: Instant::now(), is_cached: false, progress };
        registry.live.borrow_mut().insert(1, live);
        let total = || totals(&registry.status()).get(&MemorySource::Image).map_or(0, |of| of.fault_bytes);
        let reports = [report(5, 100), report(5, 300), report(6, 0), report(6, 20)].map(|now| {
            registry.report(1, now);
            total()
        });
        assert_eq!(reports, [100, 300, 300, 320]);
        let ended = Ended { ok: true, last: Some(report(6, 50)), ..Ended::default() };
        registry.ended(1, Ok(ended));
        assert_eq!((total(), registry.status().sessions.len()), (350, 0));
        registry.report(1, report(7, 1000));
        assert_eq!(total(), 350, "it has ended");
    }
}
