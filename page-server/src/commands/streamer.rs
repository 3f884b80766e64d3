// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake streamer`: the streamer of one restore. `rewake restore` and `rewake serve` start it.
//!
//! It serves CPU memory to `criu restore --lazy-pages` (with `-D`), and loads GPU memory that CRIU's plugin hands over
//! (where the image has some).

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid, getppid};
use rewake_image_io::io_budget::IoBudget;
use rewake_ioctl_filter::BlockList;
use rewake_plugin_protocol::{DUMP_BLOCKS, FileId, Listener, Phase, ProcessId, SOCKET, SessionNote};
use tokio::sync::watch;
use tracing::{error, info, warn};

use super::{directory, to_notify};
use crate::cli::Streamer;
use crate::control::proto;
use crate::control::status_server::{Answers, StatusSocket, streaming};
use crate::logging;
use rewake_streamer::gpu::{self, StreamOptions, plugin_folder};
use rewake_streamer::ledger::fd_store::FdStore;
use rewake_streamer::ledger::session_store;
use rewake_streamer::ledger::{Ledger, SessionSlot, SessionState, root};
use rewake_streamer::record::model::State;
use rewake_streamer::record::{Timeline, files, follow};
use rewake_streamer::session::daemon::{Daemon, Summary};
use rewake_streamer::supervise::parking;
use rewake_streamer::supervise::supervisor::{self, STOPPED, Start};
use rewake_streamer::supervise::worker::{self, AskedToStop};
use rewake_streamer::sys;

/// Runs the command; gives the exit code: 0 when all memory is resident, [`supervisor::STOPPED`] when it was asked to
/// stop and nothing depended on it.
///
/// # Errors
/// Options or directories are wrong, or another streamer serves there already.
pub fn run(options: &Streamer) -> anyhow::Result<u8> {
    let work = directory(&options.work_dir, "-W")?;
    let images = options.images_dir.as_deref().map(|images| directory(images, "-D")).transpose()?;
    logging::start(options.log_file.as_deref(), options.verbosity)?;
    let limit = options.connect_timeout.map(Duration::from_secs);
    let restore = Restore { record: options.record, is_kept: true, ..Restore::new(images, work, limit)? };
    files::clear(&restore.work)?;
    let restore = Arc::new(restore);
    supervisor::supervise(to_notify(options.status_fd), |start| restore.serve(start).unwrap_or(1))
}

/// What all workers of a streamer share.
#[derive(Debug)]
pub(super) struct Restore {
    /// CPU memory is served from here.
    images: Option<PathBuf>,
    work: PathBuf,
    /// The plugin connects here; none if the image has no GPU memory.
    plugin: Option<Listener>,
    status: StatusSocket,
    /// Whether the working set is recorded.
    record: bool,
    /// Whether the timeline is left in the work directory.
    is_kept: bool,
    connect_timeout: Option<Duration>,
    /// Set when no restore has connected in time.
    unconnected: OnceLock<String>,
}

impl Restore {
    /// Makes the restore of an image, and its sockets for clients and, with GPU state, for the plugin.
    ///
    /// # Errors
    /// The image cannot be read, or another streamer serves there already.
    pub(super) fn of_cpus(
        images: PathBuf,
        work: PathBuf,
        limit: Option<Duration>,
    ) -> anyhow::Result<Arc<Self>> {
        let restore = Self::new(Some(images), work, limit)?;
        Ok(Arc::new(Self { is_kept: restore.plugin.is_some(), ..restore }))
    }

    fn new(
        images: Option<PathBuf>,
        work: PathBuf,
        connect_timeout: Option<Duration>,
    ) -> anyhow::Result<Self> {
        let has_gpus = |images: &PathBuf| {
            plugin_folder::image_has_gpu(images).with_context(|| format!("reading {}", images.display()))
        };
        let gpus = images.as_ref().map_or(Ok(true), has_gpus)?;
        if gpus {
            ProcessId::prepare().with_context(|| format!("make {DUMP_BLOCKS}, which delays dumps"))?;
        }
        let plugin = if gpus { Some(Listener::new(&work)?) } else { None };
        let status = StatusSocket::bind(&work)?;
        let (record, is_kept, unconnected) = (false, false, OnceLock::new());
        Ok(Self { images, work, plugin, status, record, is_kept, connect_timeout, unconnected })
    }

    /// Runs a worker; gives its exit code.
    ///
    /// # Errors
    /// Memory cannot be loaded, or the restore has failed. It is logged.
    pub(super) fn serve(self: &Arc<Self>, start: &Start) -> anyhow::Result<u8> {
        let (timeline, mut answers) = (Timeline::default(), None);
        let loaded = self.load(start, &timeline, &mut answers);
        if let Err(error) = &loaded {
            error!("{error:#}");
            timeline.failed(&format!("{error:#}"));
        }
        self.keep(&timeline);
        if let Some(answers) = answers {
            answers.finish(self.ended(&loaded, &timeline));
        }
        loaded
    }

    /// Answers clients from now on. Loading matters more than being seen: a failure is logged.
    fn answers(self: &Arc<Self>, start: &Start, timeline: &Timeline) -> Option<Answers> {
        let (restore, ledger) = (Arc::clone(self), start.ledger);
        let connected = move || restore.is_connected(ledger);
        let stop = stop(start.supervisor);
        let answers = self.status.answer(timeline.clone(), connected, stop);
        answers.inspect_err(|error| warn!("no client can follow this restore: {error:#}")).ok()
    }

    fn ended(&self, loaded: &anyhow::Result<u8>, timeline: &Timeline) -> proto::Ended {
        let record = timeline.record();
        let reason = match loaded {
            Err(error) => format!("{error:#}"),
            Ok(_) if record.state == State::Failed => record.reason.clone().unwrap_or_default(),
            Ok(_) if record.state == State::Waiting => self.unconnected.get().cloned().unwrap_or_default(),
            Ok(_) => String::new(),
        };
        proto::Ended { ok: reason.is_empty(), reason, last: Some(streaming(&record)) }
    }

    /// Gives the exit code; `answers` is set as soon as clients are answered.
    fn load(
        self: &Arc<Self>,
        start: &Start,
        timeline: &Timeline,
        answers: &mut Option<Answers>,
    ) -> anyhow::Result<u8> {
        if start.successor {
            // Before anything that takes time: a restore that connects until then would fail.
            self.close();
            if start.ledger.gates().any() {
                // Without `block_on`, which closes what the dead worker had: the supervisor waits by these descriptors.
                *answers = self.answers(start, timeline);
                bail!("the worker died while it loaded GPU memory: a successor cannot finish that");
            }
        }
        let (mut gpus, mut own) = (None, None);
        let served = worker::block_on(start, async |daemon| {
            *answers = self.answers(start, timeline);
            self.prepare(start, timeline)?;
            let mut over: Option<watch::Receiver<bool>> = None;
            if !start.successor && self.plugin.is_some() {
                let (sender, receiver) = watch::channel(false);
                gpus = Some(self.load_gpus(start, daemon.pool.pace(), timeline, sender)?);
                over = Some(receiver);
            }
            if self.images.is_none() {
                if start.successor {
                    return Ok(());
                }
                own = Some(OwnSession::open(start, &self.work)?);
                start.ready();
            }
            tokio::select! {
                done = self.serve_cpus(start, daemon, timeline, over.clone()) => done,
                () = without_cpus(daemon, over) => Ok(()),
            }
        });
        match served {
            Ok(()) => {}
            Err(error) if !error.is::<AskedToStop>() => return Err(error),
            // The streamer finishes what the plugin has handed over.
            Err(_) if start.ledger.gates().any() => {}
            Err(_) => return Ok(STOPPED),
        }
        // A restore that has not connected by now does not connect any more.
        self.close();
        let loaded =
            gpus.map_or(Ok(()), |gpus| gpus.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        if let Some(own) = own {
            own.close();
        }
        loaded.map(|()| 0)
    }

    /// Samples the progress, and limits the wait for a restore.
    fn prepare(self: &Arc<Self>, start: &Start, timeline: &Timeline) -> anyhow::Result<()> {
        if let Err(error) = follow(timeline.clone()) {
            warn!("the progress is sampled only when a client asks: {error}");
        }
        self.end_unless_connected(start)
    }

    fn close(&self) {
        if let Some(plugin) = &self.plugin {
            plugin.close();
        }
    }

    /// Serves CPU memory, unless a worker that died has loaded all of it. The session ends when GPU memory is resident
    /// too, as `over` says: until then its fd store keeps the userfaultfds of placeholders.
    async fn serve_cpus(
        &self,
        start: &Start,
        daemon: &Daemon,
        timeline: &Timeline,
        over: Option<watch::Receiver<bool>>,
    ) -> anyhow::Result<()> {
        let Some(images) = &self.images else { return std::future::pending().await };
        let (served, failed) = start.ledger.outcomes().counts();
        let inherited = if start.successor { daemon.inherit().pop() } else { None };
        let mut session = match inherited {
            Some(inherited) => inherited.map_err(|lost| lost.error)?,
            None if served + failed == 0 => daemon.open(images, &self.work).await?,
            // The last worker died when its work was done, and may not have kept the record.
            None => {
                timeline.handed_over();
                if failed > 0 {
                    bail!("the restore had failed already: see above");
                }
                return Ok(());
            }
        };
        timeline.brings(&session.session);
        start.ready();
        let outcome = daemon.run(&mut session, None).await;
        start.ledger.outcomes().note(outcome.is_ok());
        if let Ok(summary) = &outcome {
            report(summary);
        }
        if let Some(mut over) = over {
            // An error means that the thread has ended, however it went.
            let _ = over.wait_for(|over| *over).await;
        }
        daemon.close(session).await;
        outcome.map(drop)
    }

    /// Loads GPU memory in a thread; `over` gets true when it has ended.
    fn load_gpus(
        self: &Arc<Self>,
        start: &Start,
        budget: Arc<IoBudget>,
        timeline: &Timeline,
        over: watch::Sender<bool>,
    ) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
        let cpus = self.images.is_some().then_some(budget);
        let images =
            self.images.as_deref().map(FileId::of).transpose().context("stat of the image directory")?;
        let options = StreamOptions { cpus, images, marks: blocked_calls(start), record: self.record };
        let (restore, ledger, timeline) = (Arc::clone(self), start.ledger, timeline.clone());
        let load = move || {
            let done =
                restore.plugin.as_ref().map_or(Ok(()), |plugin| gpus(plugin, options, ledger, &timeline));
            if done.is_err() {
                // The processes whose gates are still closed.
                ledger.gates().end_all();
            }
            // No one listens any more when all CPU memory is resident.
            let _ = over.send(true);
            done
        };
        thread::Builder::new().name("gpus".to_owned()).spawn(load).context("starting a thread")
    }

    /// Whether a restore has connected: CRIU for CPU memory, or its plugin for GPU memory.
    fn is_connected(&self, ledger: Ledger) -> bool {
        let is_served = |slot: &SessionSlot| {
            matches!(slot.state(), SessionState::Handshake | SessionState::Restoring | SessionState::Running)
        };
        // The plugin's socket is removed when the first plugin has connected.
        self.plugin.is_some() && self.work.is_dir() && !self.work.join(SOCKET).exists()
            || self.images.is_some() && ledger.sessions().iter().any(is_served)
    }

    fn end_unless_connected(self: &Arc<Self>, start: &Start) -> anyhow::Result<()> {
        let Some(limit) = self.connect_timeout else { return Ok(()) };
        let (restore, ledger, stop) = (Arc::clone(self), start.ledger, stop(start.supervisor));
        let wait = move || {
            thread::sleep(limit);
            if !restore.is_connected(ledger) {
                let reason = format!("no `criu restore` connected within {} s", limit.as_secs());
                warn!("{reason}");
                // It is set once: this is the only thread that sets it.
                let _ = restore.unconnected.set(reason);
                stop();
            }
        };
        sys::thread_without_signals("connect-limit", wait).context("starting a thread")
    }

    /// Leaves the record for users, if a restore has begun.
    fn keep(&self, timeline: &Timeline) {
        timeline.ended();
        let record = timeline.record();
        if !self.is_kept || record.state == State::Waiting {
            return;
        }
        if let Err(error) = files::write(&record, &self.work) {
            warn!("{error:#}");
        }
    }
}

/// Logs that all CPU memory of a session is resident.
pub(super) fn report(summary: &Summary) {
    let pages = summary.pages_copied + summary.pages_zero;
    info!(
        tasks = summary.tasks,
        pages,
        zero_pages = summary.pages_zero,
        faults = summary.faults,
        seconds = format!("{:.3}", summary.elapsed.as_secs_f64()),
        "all memory is back"
    );
}

/// Ends this worker when nothing depends on it. The supervisor forwards the signal, so that it starts no successor.
fn stop(supervisor: i32) -> impl Fn() + Send + Sync + 'static {
    move || {
        // While it is this process's parent, no other process has its number.
        let supervised = getppid().as_raw() == supervisor;
        let _ = kill(if supervised { Pid::from_raw(supervisor) } else { getpid() }, Signal::SIGTERM);
    }
}

/// The session of a restore whose CPU memory CRIU loads itself: an fd store for the userfaultfds of placeholders.
#[derive(Debug)]
struct OwnSession {
    slot: &'static SessionSlot,
    note: SessionNote,
}

impl OwnSession {
    fn open(start: &Start, work: &Path) -> anyhow::Result<Self> {
        let index = start.ledger.take_session().context("taking a session of the ledger")?;
        let slot = &start.ledger.sessions()[index];
        let store = session_store::make(slot).context("making the session's fd store")?;
        let note = session_store::note(slot, &store, start.starter, work, Phase::Running)?;
        note.write(&root()?).context("writing the session's note")?;
        Ok(Self { slot, note })
    }

    /// Nothing is missing any more: the targets lose the store.
    fn close(self) {
        use std::os::fd::AsRawFd as _;
        let inode = self.note.store.inode;
        if let Some((store, writer)) = self.slot.take_store() {
            let of = FdStore::of(store.as_raw_fd(), writer.as_raw_fd());
            if let Err(error) = of.and_then(|of| of.empty()) {
                warn!(%error, "emptying the fd store");
            }
            parking::unpark_now(self.note.number, inode, store, &writer);
        }
        self.slot.free();
        if let Err(error) = root().and_then(|root| Ok(self.note.remove(&root)?)) {
            warn!("removing the session's note: {error:#}");
        }
    }
}

/// Returns when GPU memory is resident, and no restore has connected for CPU memory: the tree had none that was
/// missing, or CRIU has failed.
async fn without_cpus(daemon: &Daemon, over: Option<watch::Receiver<bool>>) {
    if let Some(mut over) = over
        && over.wait_for(|over| *over).await.is_ok()
        && daemon.restores_under_way() == 0
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// Attaches the filter that holds and refuses calls until all processes of this program have ended. None where the
/// kernel cannot.
fn blocked_calls(start: &Start) -> Option<BlockList> {
    match rewake_ioctl_filter::attach() {
        Ok((filter, list)) => {
            start.ledger.keep(filter.into_descriptors());
            Some(list)
        }
        Err(error) => {
            let error = anyhow::Error::from(error);
            warn!(
                "BPF LSM is not available: GPU processes start when all their CPU memory is resident, the queues of the \
                 whole restore resume together, and mprotect and export of missing buffers are not blocked: {error:#}"
            );
            None
        }
    }
}

fn gpus(
    plugin: &Listener,
    options: StreamOptions,
    ledger: Ledger,
    timeline: &Timeline,
) -> anyhow::Result<()> {
    let Some(done) = gpu::serve(plugin, options, ledger, timeline)? else { return Ok(()) };
    if let Some(report) = &done.loaded {
        report.paths.iter().for_each(|path| info!("{path}"));
        info!("{report}");
    }
    info!(
        processes = done.processes,
        touches = done.touches,
        seconds = format!("{:.3}", done.took.as_secs_f64()),
        "{}",
        if done.held == 0 { "GPUs go on" } else { "gates are open, and not all GPUs go on" }
    );
    Ok(())
}
