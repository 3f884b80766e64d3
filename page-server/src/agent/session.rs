// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sessions of the agent. A streamer serves each, in processes of its own: what happens to one affects no other, nor
//! the agent.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rewake_image_io::NOT_SEALED;
use tracing::{error, info, warn};

use super::cache::AgentCache;
use super::sessions_file::{self, SessionEntry, Sessions};
use rewake_streamer::control::client::ClientError;
use rewake_streamer::control::proto::{self, Ended, Streaming};
use rewake_streamer::control::streamer::{self, ABANDONED};
use rewake_streamer::gpu::plugin_folder;
use rewake_streamer::supervise::launch::{LaunchPlan, MemoryServer};
use rewake_streamer::working_set::LoadingOptions;

/// The streamer's log, in the work directory.
const LOG: &str = "rewake-streamer.log";
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
}

/// A session that is being served.
#[derive(Debug)]
struct Live {
    entry: SessionEntry,
    since: Instant,
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
    /// Makes the registry of an agent with this control socket, and follows the sessions that an earlier agent had.
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
        });
        for entry in sessions {
            info!(session = entry.session, "found the session of an earlier agent");
            registry.follow(entry);
        }
        registry
    }

    /// Checks an image, starts a streamer for its restore, and follows that.
    ///
    /// # Errors
    /// A path is not absolute, the image cannot be served, or the streamer does not start: with its own words.
    pub(super) async fn open(self: &Rc<Self>, open: &proto::Open) -> anyhow::Result<proto::Opened> {
        let path = |bytes| PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
        let (images, work) = (path(&open.images_dir), path(&open.work_dir));
        for path in [&images, &work] {
            ensure!(path.is_absolute(), "{}: expected an absolute path", path.display());
        }
        let loading = LoadingOptions {
            record: open.record,
            on_demand_only: (open.on_demand_only_s > 0).then(|| Duration::from_secs(open.on_demand_only_s)),
        };
        let plan = self.plan(images.clone()).await?;
        loading.check(plan.gpus)?;
        if let Some(reason) = &plan.eager {
            warn!("{}: all CPU memory is loaded before the processes run: {reason}", images.display());
        }
        let session = self.last.get() + 1;
        self.last.set(session);
        streamer::start(&images, &work, &plan, loading, Some(&work.join(LOG))).await?;
        info!(session, "a streamer waits for a restore of {}", images.display());
        self.follow(SessionEntry::new(session, &images, &work));
        self.save();
        Ok(proto::Opened { session, lazy_pages: plan.lazy_pages() })
    }

    /// Decides how an image is served. The agent brings what one of its cache lacks.
    async fn plan(&self, images: PathBuf) -> anyhow::Result<LaunchPlan> {
        let (cache, socket) = (self.cache.cache.clone(), self.socket.clone());
        let plan = move || {
            let Some(id) = cache.and_then(|cache| cache.partial_at(&images)) else {
                return LaunchPlan::of(&images);
            };
            let gpus = plugin_folder::image_has_gpu(&images)
                .with_context(|| format!("reading {}", images.display()))?;
            let eager = if gpus { LaunchPlan::cannot_hold_calls() } else { None };
            ensure!(
                eager.is_none(),
                "{}: all of its image must be in the cache before it is restored (`rewake cache warm`): {}",
                images.display(),
                eager.unwrap_or_default()
            );
            let server = MemoryServer::Agent { socket, id: id.to_string() };
            Ok(LaunchPlan::from_server(gpus, server))
        };
        tokio::task::spawn_blocking(plan).await?
    }

    fn follow(self: &Rc<Self>, entry: SessionEntry) {
        let (number, work) = (entry.session, entry.work());
        let live = Live { entry, since: Instant::now(), progress: Streaming::default() };
        self.live.borrow_mut().insert(number, live);
        let registry = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let report = |progress| {
                if let Some(live) = registry.live.borrow_mut().get_mut(&number) {
                    live.progress = progress;
                }
            };
            let ended = streamer::follow(&work, report).await;
            registry.ended(number, ended);
        });
    }

    fn ended(&self, number: u64, ended: Result<Ended, ClientError>) {
        let Some(live) = self.live.borrow_mut().remove(&number) else { return };
        let mut session = live.report();
        match ended {
            Ok(Ended { ok: true, last, .. }) => {
                info!(session = number, "all memory is resident");
                self.served.set(self.served.get() + 1);
                session.progress = last;
            }
            Ok(Ended { reason, last, .. }) => {
                session.progress = last;
                session.reason = reason;
            }
            Err(ClientError::NotServed(_)) if live.entry.work().is_dir() => {
                session.reason = ABANDONED.to_owned();
            }
            Err(ClientError::NotServed(_)) => {
                session.reason = "it ended while no agent ran, and its work directory was removed".to_owned();
            }
            Err(error) => session.reason = format!("following the streamer: {error}"),
        }
        if session.reason.contains(NOT_SEALED)
            && let Some(cache) = self.cache.cache.clone()
        {
            // It waits for the fetcher's end.
            let (images, began) = (live.entry.images(), live.since);
            drop(tokio::task::spawn_blocking(move || cache.doubt(&images, began)));
        }
        if !session.reason.is_empty() {
            error!(session = number, "{}", session.reason);
            self.failed.set(self.failed.get() + 1);
        }
        let mut recent = self.recent.borrow_mut();
        recent.push_back(session);
        if recent.len() > REMEMBERED {
            recent.pop_front();
        }
        drop(recent);
        self.save();
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
