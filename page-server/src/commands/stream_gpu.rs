// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake stream-gpu`: loads memory of GPUs behind the processes of one restore, and with `-D` brings memory of their CPUs back, too.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_amdgpu_uapi::call_filter::{self, BlockList};
use rewake_image_io::io_budget::IoBudget;
use rewake_plugin_protocol::{DUMP_BLOCKS, Listener, Phase, ProcessId, SessionNote};
use tokio::sync::watch;
use tracing::{error, info, warn};

use super::{directory, lazy_pages, to_notify};
use crate::cli::StreamGpu;
use crate::control::CONNECT_LIMIT;
use crate::control::status_server::Window;
use crate::logging;
use rewake_streamer::gpu;
use rewake_streamer::gpu::StreamOptions;
use rewake_streamer::ledger::fd_store::FdStore;
use rewake_streamer::ledger::session_store;
use rewake_streamer::ledger::{Ledger, SessionSlot, root};
use rewake_streamer::record::model::State;
use rewake_streamer::record::{Timeline, files, follow};
use rewake_streamer::session::daemon::Daemon;
use rewake_streamer::supervise::launch;
use rewake_streamer::supervise::parking;
use rewake_streamer::supervise::supervisor::{self, STOPPED, Start};
use rewake_streamer::supervise::worker::{self, AskedToStop};
use rewake_streamer::sys;

/// Where the plugin and people find it, and what it leaves.
#[derive(Debug)]
struct Doors {
    listener: Listener,
    window: Option<Window>,
    work: PathBuf,
    /// Whether what CPUs touch is recorded.
    record: bool,
    /// Who is told what becomes of the processes.
    words: Option<OwnedFd>,
}

/// Runs the command; gives the exit code: 0 when all is loaded, [`supervisor::STOPPED`] when it was asked to stop and had
/// taken nothing over.
///
/// # Errors
/// Options or directories are wrong, or somebody serves there already.
pub fn run(options: &StreamGpu) -> anyhow::Result<u8> {
    let work = directory(&options.work_dir, "-W")?;
    let images = options.images_dir.as_deref().map(|images| directory(images, "-D")).transpose()?;
    logging::start(options.log_file.as_deref(), options.verbosity)?;
    ProcessId::prepare()
        .with_context(|| format!("make {DUMP_BLOCKS}, which says who is not to be dumped yet"))?;
    let listener = Listener::new(&work)?;
    files::clear(&work)?;
    // Loading matters more than being seen.
    let window =
        Window::new(&work).inspect_err(|error| warn!("nobody can ask how far it is: {error:#}")).ok();
    let notify = to_notify(options.status_fd);
    // Until the end, and all processes that there will be have it.
    let words: Option<OwnedFd> = notify.first().map(OwnedFd::try_clone).transpose()?;
    let doors = Arc::new(Doors { listener, window, work, record: options.record, words });
    supervisor::supervise(notify, |start| {
        if let Some(words) = &doors.words {
            start.ledger.gates().tell(words.as_fd());
        }
        let done = match &images {
            Some(images) => both(start, &doors, images),
            None => gpus_alone(start, &doors).map(|()| 0),
        };
        done.unwrap_or_else(|error| {
            error!("{error:#}");
            1
        })
    })
}

fn gpus_alone(start: &Start, doors: &Doors) -> anyhow::Result<()> {
    if start.successor {
        // Now, not when the supervisor has ended: a restore that connects until then would fail.
        doors.listener.close();
        return nothing_was_half_loaded(start);
    }
    worker::take_requests().context("unblocking SIGTERM")?;
    let timeline = Timeline::default();
    let session = OwnSession::open(start, &doors.work)?;
    begin(start, doors, &timeline)?;
    start.ready();
    let beside = StreamOptions { cpus: None, marks: marks(start), record: doors.record };
    let done = gpus(doors, beside, start.ledger, &timeline);
    keep(&timeline, &doors.work);
    session.close();
    done
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

/// What cannot be gone on with: what stands before a gate is killed.
fn nothing_was_half_loaded(start: &Start) -> anyhow::Result<()> {
    ensure!(!start.ledger.gates().any(), "the worker died while it loaded memory of GPUs");
    Ok(())
}

fn begin(start: &Start, doors: &Doors, timeline: &Timeline) -> anyhow::Result<()> {
    if let Some(window) = &doors.window {
        window.show(timeline.clone())?;
    }
    if let Some(words) = &doors.words {
        ends_when_abandoned(words.try_clone()?, doors.work.clone(), start.supervisor)?;
    }
    if let Err(error) = follow(timeline.clone()) {
        warn!("how far it is will be seen when somebody asks: {error}");
    }
    Ok(())
}

/// When whoever started this has gone, a restore that has not come by [`CONNECT_LIMIT`] afterwards does not come: nobody else would end it.
fn ends_when_abandoned(words: OwnedFd, work: PathBuf, supervisor: i32) -> anyhow::Result<()> {
    // Opened now, while it is this process's parent: after the wait the number may be another process's. Where the
    // starter has ended there is no process to ask.
    let Ok(starter) = sys::pidfd_open(supervisor) else { return Ok(()) };
    if nix::unistd::getppid().as_raw() != supervisor {
        return Ok(());
    }
    let wait = move || {
        let mut gone = [PollFd::new(words.as_fd(), PollFlags::empty())];
        while !matches!(poll(&mut gone, PollTimeout::NONE), Ok(1..)) {}
        thread::sleep(CONNECT_LIMIT);
        if !launch::is_met(&work) {
            // It asks the worker to stop, which has nothing to do, or has, and goes on.
            let _ = sys::pidfd_signal(starter.as_raw_fd(), libc::SIGTERM);
        }
    };
    sys::thread_without_signals("abandoned", wait).context("starting a thread")
}

/// Memory of CPUs, by reactors of its own, and of GPUs, in a thread of its own.
fn both(start: &Start, doors: &Arc<Doors>, images: &Path) -> anyhow::Result<u8> {
    if start.successor {
        nothing_was_half_loaded(start)?;
        doors.listener.close();
    }
    let timeline = Timeline::default();
    let mut gpus = None;
    let pages = worker::block_on(start, async |daemon| {
        let mut over: Option<watch::Receiver<bool>> = None;
        if !start.successor {
            let (tell, heard) = watch::channel(false);
            gpus = Some(in_a_thread(start, doors, daemon.pool.pace(), &timeline, tell)?);
            over = Some(heard);
        }
        tokio::select! {
            done = cpus(start, daemon, images, doors, &timeline, over.clone()) => done,
            () = without_cpus(daemon, over) => Ok(()),
        }
    });
    match pages {
        Ok(()) => {}
        Err(error) if !error.is::<AskedToStop>() => {
            timeline.failed(&format!("{error:#}"));
            keep(&timeline, &doors.work);
            return Err(error);
        }
        // What was taken over is brought to its end.
        Err(_) if start.ledger.gates().any() => {}
        Err(_) => return Ok(STOPPED),
    }
    // Whoever has not come by now does not come any more.
    doors.listener.close();
    let Some(gpus) = gpus else { return Ok(0) };
    let well = gpus.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    // Both are over.
    keep(&timeline, &doors.work);
    Ok(u8::from(!well))
}

/// Memory of CPUs, unless a worker that died has loaded it. The session ends when the memory of GPUs is resident
/// too, as `over` says: until then its fd store keeps the userfaultfds of placeholders.
async fn cpus(
    start: &Start,
    daemon: &Daemon,
    images: &Path,
    doors: &Doors,
    timeline: &Timeline,
    over: Option<watch::Receiver<bool>>,
) -> anyhow::Result<()> {
    let session = lazy_pages::session(start, daemon, images, &doors.work)?;
    let Some(mut session) = session else { return Ok(()) };
    // What a worker that died has seen is lost.
    if !start.successor {
        timeline.brings(&session.session);
    }
    start.ready();
    let outcome = daemon.run(&mut session, None).await;
    start.ledger.outcomes().note(session.session.number, outcome.is_ok(), &[]);
    if let Ok(summary) = &outcome {
        start.ledger.gates().back();
        lazy_pages::report(summary);
    }
    if let Some(mut over) = over {
        // An error means that the thread has ended, however it went.
        let _ = over.wait_for(|over| *over).await;
    }
    daemon.close(session).await;
    outcome.map(drop)
}

/// Memory of GPUs is done with, and no restore has come for that of CPUs: it had none to come, or has failed.
async fn without_cpus(daemon: &Daemon, over: Option<watch::Receiver<bool>>) {
    if let Some(mut over) = over
        && over.wait_for(|over| *over).await.is_ok()
        && daemon.restores_under_way() == 0
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// Has calls held and kept away, until all processes of this program have ended. None where the kernel does not.
fn marks(start: &Start) -> Option<BlockList> {
    match call_filter::attach() {
        Ok((hold, marks)) => {
            start.ledger.keep(hold.into_descriptors());
            Some(marks)
        }
        Err(error) => {
            let error = anyhow::Error::from(error);
            warn!(
                "memory of CPUs of processes with GPUs comes before they run, their gates are opened together, and memory that is not there is \
                 kept from nobody who asks for it (mprotect, export): {error:#}"
            );
            None
        }
    }
}

/// Gives whether it went well; `tell` hears when it has ended.
fn in_a_thread(
    start: &Start,
    doors: &Arc<Doors>,
    pace: Arc<IoBudget>,
    timeline: &Timeline,
    tell: watch::Sender<bool>,
) -> anyhow::Result<JoinHandle<bool>> {
    begin(start, doors, timeline)?;
    let beside = StreamOptions { cpus: Some(pace), marks: marks(start), record: doors.record };
    let (doors, ledger, timeline) = (Arc::clone(doors), start.ledger, timeline.clone());
    let load = move || {
        let done = gpus(&doors, beside, ledger, &timeline);
        if let Err(error) = &done {
            error!("{error:#}");
            // Those that it has not opened.
            ledger.gates().end_all();
        }
        // Nobody listens any more when memory of CPUs is back.
        let _ = tell.send(true);
        done.is_ok()
    };
    thread::Builder::new().name("gpus".to_owned()).spawn(load).context("starting a thread")
}

fn gpus(doors: &Doors, beside: StreamOptions, ledger: Ledger, timeline: &Timeline) -> anyhow::Result<()> {
    let done = gpu::serve(&doors.listener, beside, ledger, timeline);
    // Whoever asks hears it from now on.
    let done = done.inspect_err(|error| timeline.failed(&format!("{error:#}")))?;
    let Some(done) = done else { return Ok(()) };
    if let Some(report) = &done.loaded {
        report.paths.iter().for_each(|way| info!("{way}"));
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

/// Leaves what there was to see, if there was anything: all that there was to load is there, or it has failed.
fn keep(timeline: &Timeline, work: &Path) {
    timeline.ended();
    let record = timeline.record();
    if record.state == State::Waiting {
        return;
    }
    if let Err(error) = files::write(&record, work) {
        warn!("{error:#}");
    }
}
