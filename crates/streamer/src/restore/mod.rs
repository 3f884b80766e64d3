// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore, from the start of its streamer to the last byte: CPU memory for `criu restore --lazy-pages`,
//! GPU memory that CRIU's plugin hands over, clients that follow it, and the record.

mod own_session;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use own_session::OwnSession;
use rewake_criu_images::ImageDir;
use rewake_image_io::io_budget::IoBudget;
use rewake_ioctl_filter::BlockList;
use rewake_plugin_protocol::{DUMP_BLOCKS, Listener, ProcessId, SOCKET};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::control::proto;
use crate::control::status_server::{Answers, StatusSocket, ended};
use crate::control::work_folder::LOG;
use crate::failure::Failure;
use crate::fetch_peer::FetchPeer;
use crate::gpu::fetched_files::{ArrivalLimit, FetchedGpuFiles, SessionGpuFiles};
use crate::gpu::{self, GpuLoad, StreamOptions};
use crate::ledger::{Ledger, SessionOutcome, SessionState};
use crate::record::model::State;
use crate::record::{Timeline, files, follow};
use crate::session::complete;
use crate::session::serve::Worker;
use crate::session::summary::report;
use crate::supervise::supervisor::{STOPPED, Start};
use crate::supervise::worker::{self, AskedToStop};
use crate::sys;
use crate::working_set::LoadingOptions;
use rewake_criu_images::amdgpu::image_has_gpu;

/// Why a restore has failed whose streamer has done nothing.
const NEVER_CONNECTED: &str = "CRIU had not connected when the streamer was asked to end";

/// The image of a restore, and its options.
#[derive(Debug)]
pub struct RestoreOptions {
    /// CPU memory is served from this directory; none: CRIU loads it itself.
    pub images: Option<PathBuf>,
    /// Without a directory: the image has no GPU state either.
    pub no_gpus: bool,
    /// CRIU's work directory (`-W`): the sockets and the record are here.
    pub work: PathBuf,
    /// What is wanted of the load.
    pub loading: LoadingOptions,
    /// Whether the record is left in the work directory. It always is if the image has GPU memory.
    pub keeps_record: bool,
    /// The host that has lazy pages; none: the image has them.
    pub server: Option<FetchPeer>,
    /// The streamer ends when no restore has connected within this time.
    pub connect_timeout: Option<Duration>,
    /// Who starts this streamer has CRIU load the memory if it cannot be restored lazily: the streamer ends
    /// then with [`NotLazy`](crate::session::image::NotLazy). Otherwise it serves what CRIU may be unable to
    /// map, with a warning.
    pub or_eagerly: bool,
    /// Files of signers that the image needs a signature of, in addition to the signers of this node.
    pub signers: Vec<PathBuf>,
}

/// State that all workers of a streamer share.
#[derive(Debug)]
pub struct StreamedRestore {
    options: RestoreOptions,
    /// The plugin connects here. `None` if the image has no GPU memory.
    plugin: Option<Listener>,
    /// `None` if a recovered session's work directory has none.
    status: Option<StatusSocket>,
    /// Set when no restore has connected in time.
    unconnected: OnceLock<String>,
}

impl StreamedRestore {
    /// Makes the restore of an image, and its sockets for clients and, with GPU state, for the plugin.
    ///
    /// # Errors
    /// The image cannot be read, or another streamer serves there already.
    pub fn new(options: RestoreOptions) -> anyhow::Result<Arc<Self>> {
        let has_gpus =
            |images: &PathBuf| image_has_gpu(images).with_context(|| format!("reading {}", images.display()));
        let gpus = options.images.as_ref().map_or(Ok(!options.no_gpus), has_gpus)?;
        if gpus {
            ProcessId::prepare().with_context(|| format!("make {DUMP_BLOCKS}, which delays dumps"))?;
        }
        let plugin = if gpus { Some(Listener::new(&options.work)?) } else { None };
        let status = Some(StatusSocket::bind(&options.work)?);
        let restore = Self { options, plugin, status, unconnected: OnceLock::new() };
        if restore.keeps_record() {
            files::clear(&restore.options.work)?;
        }
        Ok(Arc::new(restore))
    }

    /// Makes the restore of a session that is recovered. Its GPUs have been resumed. Memory matters more than
    /// clients, who can follow it if its work directory still exists.
    #[must_use]
    pub fn recovered(images: PathBuf, work: PathBuf) -> Arc<Self> {
        let status = StatusSocket::bind(&work);
        let options = RestoreOptions {
            images: Some(images),
            no_gpus: true,
            // An agent that has not connected by the end reads the record.
            keeps_record: work.join(LOG).exists(),
            work,
            loading: LoadingOptions::default(),
            server: None,
            connect_timeout: None,
            or_eagerly: false,
            signers: Vec::new(),
        };
        let status = status.inspect_err(|error| warn!("no client can follow this restore: {error:#}")).ok();
        Arc::new(Self { options, plugin: None, status, unconnected: OnceLock::new() })
    }

    fn keeps_record(&self) -> bool {
        self.options.keeps_record || self.plugin.is_some()
    }

    /// Runs a worker; gives its exit code.
    ///
    /// # Errors
    /// Memory cannot be loaded, or the restore has failed. It is logged.
    pub fn serve(self: &Arc<Self>, start: &Start) -> anyhow::Result<u8> {
        self.serve_to_the_end(start).0
    }

    /// Runs a worker of a recovered session; gives its exit code, and how its program ended if it was killed
    /// or failed before all its memory was resident.
    ///
    /// # Errors
    /// As for [`StreamedRestore::serve`].
    pub fn serve_recovered(self: &Arc<Self>, start: &Start) -> anyhow::Result<(u8, Option<String>)> {
        let (loaded, ended) = self.serve_to_the_end(start);
        loaded.map(|code| (code, (!ended.ok).then_some(ended.reason)))
    }

    fn serve_to_the_end(self: &Arc<Self>, start: &Start) -> (anyhow::Result<u8>, proto::Ended) {
        let (timeline, mut answers) = (Timeline::default(), None);
        let loaded = self.load(start, &timeline, &mut answers);
        if let Err(error) = &loaded {
            let failure = Failure::from(error);
            error!("{failure}");
            timeline.failed(failure);
        }
        self.keep(&timeline);
        let ended = self.ended(&loaded, &timeline);
        if let Some(answers) = answers {
            answers.finish(ended.clone());
        }
        (loaded, ended)
    }

    /// Answers clients from now on. Loading matters more than status: a failure is logged.
    fn answers(self: &Arc<Self>, start: &Start, timeline: &Timeline) -> Option<Answers> {
        let status = self.status.as_ref()?;
        let (restore, ledger) = (Arc::clone(self), start.ledger);
        let connected = move || restore.is_connected(ledger);
        let supervisor = Arc::clone(&start.supervisor);
        // A client asks for the end of a streamer without work, when CRIU has ended. SIGTERM to one that
        // serves a session would end the time in which memory is loaded only when it is accessed.
        let stop = move || {
            let session = ledger.session();
            if session.state() != SessionState::Completing && !session.is_under_way() {
                supervisor.stop_worker();
            }
        };
        let answers = status.answer(timeline.clone(), connected, stop);
        answers.inspect_err(|error| warn!("no client can follow this restore: {error:#}")).ok()
    }

    fn ended(&self, loaded: &anyhow::Result<u8>, timeline: &Timeline) -> proto::Ended {
        let record = timeline.record();
        let failure = match loaded {
            Err(error) => Some(error.into()),
            Ok(code) if record.state == State::Waiting => self.unconnected(*code).map(Failure::from),
            Ok(_) => record.failure(),
        };
        ended(failure, &record)
    }

    /// Returns why no memory was loaded; `None` if the restore needs none, because its tree lacks none, or
    /// because another plugin loads it.
    fn unconnected(&self, code: u8) -> Option<String> {
        match self.unconnected.get() {
            Some(reason) => Some(reason.clone()),
            // CRIU always connects for CPU memory.
            None if code == STOPPED && self.options.images.is_some() => Some(NEVER_CONNECTED.to_owned()),
            None => None,
        }
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
            if let Err(error) = self.expect_gpu_memory(start.ledger) {
                // Without `block_on`, which closes what the dead worker had: the supervisor waits by these
                // descriptors.
                *answers = self.answers(start, timeline);
                return Err(error);
            }
        }
        let (mut gpus, mut own) = (None, None);
        let served = worker::block_on(start, async |worker| {
            *answers = self.answers(start, timeline);
            self.prepare(start, timeline)?;
            let mut over: Option<watch::Receiver<GpuLoad>> = None;
            let fetched = SessionGpuFiles::default();
            if !start.successor && self.plugin.is_some() {
                let (sender, receiver) = watch::channel(GpuLoad::Running);
                let budget = worker.pool.pace();
                gpus = Some(self.load_gpus(start, (budget, Arc::clone(&fetched)), timeline, sender)?);
                over = Some(receiver);
            }
            if self.options.images.is_none() {
                if start.successor {
                    return Ok(());
                }
                own = Some(OwnSession::open(start, &self.options.work)?);
                start.ready();
            }
            tokio::select! {
                done = self.serve_cpus(start, worker, timeline, (over.clone(), fetched)) => done,
                () = without_cpus(start.ledger, over) => Ok(()),
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

    /// Checks, in a successor, that no GPU memory is missing that a successor cannot load. An error before
    /// GRANT leaves a program at its source.
    fn expect_gpu_memory(&self, ledger: Ledger) -> anyhow::Result<()> {
        ensure!(
            !ledger.gates().any(),
            "the worker died while it loaded GPU memory: a successor cannot finish that"
        );
        match &self.options.images {
            Some(images) if self.plugin.is_some() => expect_loaded(images, ledger),
            _ => Ok(()),
        }
    }

    fn close(&self) {
        if let Some(plugin) = &self.plugin {
            plugin.close();
        }
    }

    /// Serves CPU memory, unless a worker that died has loaded all of it. The session ends when GPU memory is
    /// resident too, as `over` says: until then its fd store keeps the userfaultfds of placeholders.
    async fn serve_cpus(
        &self,
        start: &Start,
        worker: &Worker,
        timeline: &Timeline,
        (over, fetched): (Option<watch::Receiver<GpuLoad>>, SessionGpuFiles),
    ) -> anyhow::Result<()> {
        let Some(images) = &self.options.images else { return std::future::pending().await };
        if start.ledger.session().outcome() != SessionOutcome::Open {
            // The last worker died when the session had ended, and may not have kept the record.
            timeline.handed_over();
        }
        let RestoreOptions { work, server, loading, signers, .. } = &self.options;
        let opened = worker.open(images, work, server.as_ref(), *loading, signers).await?;
        let Some(mut session) = opened else {
            // A worker that died has served it.
            if server.as_ref().is_some_and(FetchPeer::has_own_copy) {
                complete::complete(images).await;
            }
            return Ok(());
        };
        match session.image.not_lazy() {
            Some(reason) if self.options.or_eagerly => return Err(reason.clone().into()),
            Some(reason) => warn!("{reason}: restore it without --lazy-pages"),
            None => {}
        }
        timeline.brings(&session.session);
        // Before a restore is started: its plugin finds the session open.
        let limit = ArrivalLimit::of(session.fetch.as_deref());
        let _ = fetched.set(FetchedGpuFiles::new(&session.image, worker.gpu_reader()?, limit));
        start.ready();
        let outcome = worker.serve(&mut session, over.clone()).await;
        if let Ok(summary) = &outcome {
            report(summary);
        }
        if let Some(mut over) = over {
            // An error means that the thread has ended, however it went.
            let ended = over.wait_for(|load| load.is_over()).await;
            if !ended.is_ok_and(|load| *load == GpuLoad::Done) {
                // Its processes with GPUs were killed. What others of the tree need is resident: the copy
                // stays partial.
                session.fetches_rest = false;
            }
        }
        worker.close(session).await;
        outcome.map(drop)
    }

    /// Loads GPU memory in a thread; `over` says when it has ended.
    fn load_gpus(
        self: &Arc<Self>,
        start: &Start,
        (budget, fetched): (Arc<IoBudget>, SessionGpuFiles),
        timeline: &Timeline,
        over: watch::Sender<GpuLoad>,
    ) -> anyhow::Result<JoinHandle<anyhow::Result<()>>> {
        let cpus = self.options.images.is_some().then_some(budget);
        let images = self.options.images.as_deref().map(ImageDir::open).transpose()?;
        let record = self.options.loading.record;
        let options = StreamOptions { cpus, images, marks: blocked_calls(start), record, fetched };
        let (restore, ledger, timeline) = (Arc::clone(self), start.ledger, timeline.clone());
        let load = move || {
            let done =
                restore.plugin.as_ref().map_or(Ok(()), |plugin| gpus(plugin, options, ledger, &timeline));
            if done.is_err() {
                // The processes whose gates are still closed.
                ledger.gates().end_all();
            }
            // No one listens any more when all CPU memory is resident.
            let _ = over.send(if done.is_ok() { GpuLoad::Done } else { GpuLoad::Failed });
            done
        };
        thread::Builder::new().name("gpus".to_owned()).spawn(load).context("starting a thread")
    }

    /// Whether a restore has connected: CRIU for CPU memory, or its plugin for GPU memory.
    fn is_connected(&self, ledger: Ledger) -> bool {
        // The plugin's socket is removed when the first plugin has connected.
        self.plugin.is_some() && self.options.work.is_dir() && !self.options.work.join(SOCKET).exists()
            || self.options.images.is_some() && ledger.session().is_connected()
    }

    fn end_unless_connected(self: &Arc<Self>, start: &Start) -> anyhow::Result<()> {
        let Some(limit) = self.options.connect_timeout else { return Ok(()) };
        let (restore, ledger) = (Arc::clone(self), start.ledger);
        let supervisor = Arc::clone(&start.supervisor);
        let wait = move || {
            thread::sleep(limit);
            if !restore.is_connected(ledger) {
                let reason = format!("no `criu restore` connected within {} s", limit.as_secs());
                warn!("{reason}");
                // It is set once: this is the only thread that sets it.
                let _ = restore.unconnected.set(reason);
                supervisor.stop_worker();
            }
        };
        sys::thread_without_signals("connect-limit", wait).context("starting a thread")
    }

    /// Leaves the record for users, if a restore has begun.
    fn keep(&self, timeline: &Timeline) {
        timeline.ended();
        let record = timeline.record();
        if !self.keeps_record() || record.state == State::Waiting {
            return;
        }
        if let Err(error) = files::write(&record, &self.options.work) {
            warn!("{error:#}");
        }
    }
}

/// Checks that GPU memory of a migration was loaded: the plugin has handed it to the worker that died, or
/// finds no listener.
fn expect_loaded(images: &Path, ledger: Ledger) -> anyhow::Result<()> {
    ensure!(
        ledger.has_loaded_gpus() || ImageDir::open(images)?.arriving_files()?.is_empty(),
        "the worker died before GPU memory of a migration had arrived: a successor cannot load it"
    );
    Ok(())
}

/// Returns when GPU memory is resident, and no restore has connected for CPU memory: the tree had none that
/// was missing, or CRIU has failed.
async fn without_cpus(ledger: Ledger, over: Option<watch::Receiver<GpuLoad>>) {
    if let Some(mut over) = over
        && over.wait_for(|load| load.is_over()).await.is_ok()
        && !ledger.session().is_under_way()
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// Attaches the filter that holds and refuses calls until all processes of this program have ended. None
/// where the kernel cannot.
fn blocked_calls(start: &Start) -> Option<BlockList> {
    match rewake_ioctl_filter::attach() {
        Ok((filter, list)) => {
            start.ledger.keep(filter.into_descriptors());
            Some(list)
        }
        Err(error) => {
            let error = anyhow::Error::from(error);
            warn!(
                "BPF LSM is not available: GPU processes start when all their CPU memory is resident, the \
                 queues of the whole restore resume together, and mprotect and export of missing buffers are \
                 not blocked: {error:#}"
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
        page_faults = done.page_faults,
        seconds = format!("{:.3}", done.took.as_secs_f64()),
        "{}",
        if done.held == 0 { "queues resumed" } else { "gates are open, and not all queues are resumed" }
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use rewake_criu_images::add_arriving_file;

    use super::*;

    #[test]
    fn a_restore_whose_criu_never_connected_has_failed() {
        let ended = |serves_cpus: bool, code: u8, is_handed_over: bool| {
            let work = tempfile::tempdir().unwrap();
            let options = RestoreOptions {
                images: serves_cpus.then(|| work.path().to_owned()),
                no_gpus: false,
                work: work.path().to_owned(),
                loading: LoadingOptions::default(),
                keeps_record: false,
                server: None,
                connect_timeout: None,
                or_eagerly: false,
                signers: Vec::new(),
            };
            let status = Some(StatusSocket::bind(work.path()).unwrap());
            let restore = StreamedRestore { options, plugin: None, status, unconnected: OnceLock::new() };
            let timeline = Timeline::default();
            if is_handed_over {
                timeline.handed_over();
            }
            let ended = restore.ended(&Ok(code), &timeline);
            (ended.ok, ended.reason)
        };
        assert_eq!(ended(true, STOPPED, false), (false, NEVER_CONNECTED.to_owned()));
        assert_eq!(ended(true, STOPPED, true), (true, String::new()));
        assert_eq!(ended(true, 0, false), (true, String::new()), "no memory was missing");
        assert_eq!(ended(false, STOPPED, false), (true, String::new()), "another plugin has loaded all");
    }

    #[test]
    fn a_successor_does_not_serve_without_gpu_memory_that_arrives() {
        let (folder, ledger) = (tempfile::tempdir().unwrap(), Ledger::new().unwrap());
        expect_loaded(folder.path(), ledger).unwrap();
        add_arriving_file(folder.path(), "amdgpu-pages-1-00ab.img").unwrap();
        let why = expect_loaded(folder.path(), ledger).unwrap_err().to_string();
        assert!(why.contains("a successor cannot load it"), "{why}");
        ledger.set_gpus_loaded();
        expect_loaded(folder.path(), ledger).unwrap();
    }
}
