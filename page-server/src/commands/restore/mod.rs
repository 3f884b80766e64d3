// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore`: runs `criu restore` with a streamer, and shows how memory is loaded.
//!
//! The streamer and the restored processes do not depend on this command: it follows them, and may be killed.

mod cached;
mod generation;
mod place;
mod source;
mod timeline;
mod view;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum as _;
use nix::sys::signal::Signal;
use nix::unistd::{AccessFlags, access};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant as Deadline, interval, sleep_until, timeout};

use self::cached::CacheLease;
use self::place::WaitingStreamer;
use self::timeline::{Clock, RestoreTimeline};
use self::view::{View, write};
use super::criu::{self, Criu, CriuInvocation, CriuOptions};
use super::directory;
use crate::cli::{RestoreArgs, WaitFor};
use rewake_criu_images::{ImageDir, ImageLease};
use rewake_manifest::WORKING_SET_NAME;
use rewake_streamer::control::REPORT;
use rewake_streamer::control::client::ClientError;
use rewake_streamer::control::proto::{Ended, State, Streaming};
use rewake_streamer::control::streamer::{self, ABANDONED};
use rewake_streamer::gpu::plugin_folder;
use rewake_streamer::record::{files, text};
use rewake_streamer::supervise::launch::LaunchPlan;
use rewake_streamer::units;
use rewake_streamer::working_set::{LoadingOptions, WorkingSet, file};

/// Time limit for CRIU to notice that its streamer ended, and for a streamer to notice that its CRIU did.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Options that are for `rewake restore` itself, not for CRIU.
const OURS: [&str; 4] = ["-D", "--images-dir", "-W", "--work-dir"];
/// How a user gives CRIU's plugin.
const PLUGIN_REMEDY: &str = "name ours with --plugin-dir";

/// The image of a restore, and its options.
#[derive(Debug, Clone, Copy)]
struct RestoreRequest<'a> {
    options: &'a RestoreArgs,
    given: &'a CriuOptions,
    images: &'a Path,
    /// The image has GPU state.
    gpus: bool,
    plugins: Option<&'a Path>,
    /// How the image is served while its memory arrives from another host.
    from: Option<&'a LaunchPlan>,
    /// The working set that earlier restores recorded, where this one records, too.
    earlier: &'a WorkingSet,
}

impl RestoreRequest<'_> {
    /// Starts CRIU, with these options beside the user's.
    fn start(&self, work: &Path, ours: &[&str], generation: &str) -> anyhow::Result<Criu> {
        generation::write(work, generation)?;
        let act = CriuInvocation {
            name: "restore",
            images: self.images,
            work,
            ours,
            plugins: self.plugins,
            given: &self.options.criu_options,
            options: self.given,
            environment: &[(generation::VARIABLE, generation)],
        };
        Criu::start(&self.options.programs.criu(), &act, !self.options.json)
    }
}

/// Runs the command; gives the exit code: CRIU's own once the tree ran, 1 before.
///
/// # Errors
/// The image cannot be served, there is no agent or no CRIU: nothing was started. Or the restore failed.
pub fn run(options: &RestoreArgs) -> anyhow::Result<u8> {
    let given = CriuOptions::read(&options.criu_options, &OURS)?;
    check_wait(options, given.detached)?;
    let plugins = |gpus| options.programs.plugins(gpus, &given);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    ensure!(
        options.source.id.is_none() || options.source.from.is_some() || options.image.is_some(),
        "--id: it is for an image of another host (--from) or of a store"
    );
    let from = source::prepare(options, options.images_dir.as_deref(), plugins)?;
    let (images, _lease) = match (&options.image, &options.images_dir) {
        (Some(url), _) => {
            let CacheLease { directory, lease } = runtime.block_on(cached::acquire(options, url, plugins))?;
            (directory, Some(lease))
        }
        (None, given) => leased(given.as_deref().unwrap_or_else(|| Path::new(".")))?,
    };
    let gpus =
        plugin_folder::image_has_gpu(&images).with_context(|| format!("reading {}", images.display()))?;
    loading_options(options).check(gpus)?;
    if options.wait == WaitFor::WorkingSet {
        check_working_set(&images)?;
    }
    let earlier = if options.record { earlier_working_set(&images)? } else { WorkingSet::default() };
    let (plugins, earlier) = (plugins(gpus)?, &earlier);
    let (given, images, plugins) = (&given, &*images, plugins.as_deref());
    let request = RestoreRequest { options, given, images, gpus, plugins, from: from.as_ref(), earlier };
    runtime.block_on(restore(&request))
}

/// What is wanted of the load.
fn loading_options(options: &RestoreArgs) -> LoadingOptions {
    let RestoreArgs { record, on_demand_only, .. } = options;
    LoadingOptions { record: *record, on_demand_only: on_demand_only.map(Duration::from_secs) }
}

/// Checks that what this command waits for happens.
fn check_wait(options: &RestoreArgs, detached: bool) -> anyhow::Result<()> {
    let Some(wait) = options.wait.to_possible_value().filter(|_| options.wait != WaitFor::Resident) else {
        return Ok(());
    };
    ensure!(
        detached,
        "--wait={}: this command ends with the restored processes; add `-- -d` to restore them in the background",
        wait.get_name()
    );
    ensure!(
        options.wait != WaitFor::WorkingSet || !options.record && options.on_demand_only.is_none(),
        "--wait=working-set: nothing is loaded first with --record or --on-demand-only"
    );
    Ok(())
}

/// Checks that an image has a working set to wait for.
fn check_working_set(images: &Path) -> anyhow::Result<()> {
    let path = images.join(WORKING_SET_NAME);
    let found = file::of_image(&ImageDir::open(images)?).with_context(|| path.display().to_string())?;
    ensure!(
        found.is_some_and(|found| !found.is_empty()),
        "--wait=working-set: {}: no working set was recorded; record one with `rewake restore --record`",
        path.display()
    );
    Ok(())
}

/// Checks that a working set can be recorded. Returns the one that the image has; an unusable one is replaced.
fn earlier_working_set(images: &Path) -> anyhow::Result<WorkingSet> {
    access(images, AccessFlags::W_OK).with_context(|| {
        format!("--record: {}, where {WORKING_SET_NAME} is written; make it writable", images.display())
    })?;
    Ok(file::of_image(&ImageDir::open(images)?).ok().flatten().unwrap_or_default())
}

/// The images directory that was given, and a lease of it. A dump that replaces the image keeps the old one
/// for as long as its files are being opened. Remote file systems may have no such locks.
fn leased(given: &Path) -> anyhow::Result<(PathBuf, Option<ImageLease>)> {
    let images = directory(given, "-D")?;
    let lease = ImageLease::shared(&images);
    ensure!(
        !matches!(lease, Ok(None)),
        "-D {}: another image is taking its place; try again",
        images.display()
    );
    Ok((images, lease.ok().flatten()))
}

async fn restore(request: &RestoreRequest<'_>) -> anyhow::Result<u8> {
    let mut signals = signals()?;
    let view = View::new(request.options.quiet);
    let waiting = WaitingStreamer::make(request, &view).await?;
    if request.options.wait == WaitFor::WorkingSet && !waiting.lazy_pages {
        streamer::ask_to_end(&waiting.work).await;
        bail!(
            "--wait=working-set: all CPU memory of this image is loaded before its processes run, so nothing is loaded \
             first; use --wait=alive"
        );
    }
    // Followed from the beginning: a streamer that has ended answers no client.
    let (sender, latest) = watch::channel(Streaming::default());
    let work = waiting.work.clone();
    let mut followed =
        tokio::spawn(async move { streamer::follow(&work, |now| drop(sender.send_replace(now))).await });
    let generation_id = generation::generation_id()?;
    let started = Instant::now();
    let lazy: &[&str] = if waiting.lazy_pages { &["--lazy-pages"] } else { &[] };
    let criu = match request.start(&waiting.work, lazy, &generation_id) {
        Ok(criu) => criu,
        Err(error) => {
            streamer::ask_to_end(&waiting.work).await;
            return Err(error);
        }
    };
    let session = waiting.session;
    let timeline = RestoreTimeline { session, generation_id, ..RestoreTimeline::default() };
    let mut run =
        RestoreRun { request, waiting, started, criu, latest, view, timeline, exit: None, ended: None };
    loop {
        if let Some(signal) = run.step(&mut followed, &mut signals).await? {
            return run.interrupted(signal).await;
        }
        if run.exit.is_some() && (run.ended.is_some() || run.waits_no_longer()) {
            return run.conclude();
        }
    }
}

/// Receives SIGINT and SIGTERM.
fn signals() -> anyhow::Result<mpsc::Receiver<Signal>> {
    let (sender, receiver) = mpsc::channel(1);
    for (kind, number) in
        [(SignalKind::interrupt(), Signal::SIGINT), (SignalKind::terminate(), Signal::SIGTERM)]
    {
        let (mut requests, sender) = (signal(kind).context("watching signals")?, sender.clone());
        tokio::spawn(
            async move { while requests.recv().await.is_some() && sender.send(number).await.is_ok() {} },
        );
    }
    Ok(receiver)
}

/// A running restore.
struct RestoreRun<'a> {
    request: &'a RestoreRequest<'a>,
    waiting: WaitingStreamer,
    started: Instant,
    criu: Criu,
    latest: watch::Receiver<Streaming>,
    view: View,
    timeline: RestoreTimeline,
    /// How CRIU ended.
    exit: Option<ExitStatus>,
    /// How the streamer ended.
    ended: Option<Result<Ended, ClientError>>,
}

type Followed = tokio::task::JoinHandle<Result<Ended, ClientError>>;

impl RestoreRun<'_> {
    /// Waits for the end of the streamer or of CRIU, and shows the progress meanwhile. Returns a signal that ends this
    /// command.
    async fn step(
        &mut self,
        followed: &mut Followed,
        signals: &mut mpsc::Receiver<Signal>,
    ) -> anyhow::Result<Option<Signal>> {
        let mut redraw = interval(REPORT);
        let deadline = self.deadline();
        loop {
            tokio::select! {
                ended = &mut *followed, if self.ended.is_none() => {
                    self.streamer_ended(ended.context("following the streamer")?);
                    return Ok(None);
                }
                exit = self.criu.ended(), if self.exit.is_none() => {
                    self.criu_ended(exit?).await;
                    return Ok(None);
                }
                _ = redraw.tick(), if self.ended.is_none() => {
                    self.view.show(&self.latest.borrow());
                    if self.waits_no_longer() {
                        return Ok(None);
                    }
                }
                Some(signal) = signals.recv() => return Ok(Some(signal)),
                () = until(deadline) => {
                    if self.exit.is_some() {
                        bail!("criu ended, and its streamer did not: see `rewake status`");
                    }
                    self.criu.kill_tree();
                    self.exit = Some(self.criu.ended().await?);
                    return Ok(None);
                }
            }
        }
    }

    /// The time that CRIU or the streamer has left when the other's end leaves it no work.
    fn deadline(&self) -> Option<Deadline> {
        let is_idle = match (&self.exit, &self.ended) {
            (None, Some(Ok(ended))) => !ended.ok,
            // Processes that run wait for `rewake recover`.
            (None, Some(Err(_))) => !self.runs(),
            (Some(exit), None) => !exit.success() && !self.runs(),
            _ => false,
        };
        is_idle.then(|| Deadline::now() + END_LIMIT)
    }

    /// Whether the restored processes were seen to run.
    fn runs(&self) -> bool {
        matches!(self.latest.borrow().state(), State::Running | State::Complete)
    }

    /// The processes run, and the user waits for nothing else.
    fn waits_no_longer(&self) -> bool {
        let has_waited = match self.request.options.wait {
            WaitFor::Alive => true,
            WaitFor::WorkingSet => self.latest.borrow().working_set_us > 0,
            WaitFor::Resident => false,
        };
        has_waited && self.timeline.alive_ms.is_some()
    }

    fn streamer_ended(&mut self, ended: Result<Ended, ClientError>) {
        let last = ended.as_ref().ok().and_then(|ended| ended.last.as_ref());
        let clock = last.map(|last| Clock::new(self.started, last));
        self.timeline.ok = ended.as_ref().is_ok_and(|ended| ended.ok);
        self.timeline.reason = match &ended {
            Ok(ended) => (!ended.ok).then(|| ended.reason.clone()),
            Err(ClientError::NotServed(_)) => Some(ABANDONED.to_owned()),
            Err(error) => Some(format!("following the streamer: {error}")),
        };
        self.view.clear();
        match files::read(&self.waiting.work) {
            Ok(Some(record)) => {
                if let Some(clock) = clock {
                    self.timeline.add(&record, clock);
                    self.view.say(&text::text(&record, Duration::from_micros(clock.before_us())));
                }
            }
            // It had nothing to load, or was killed.
            Ok(None) => {}
            Err(error) => self.view.say(&format!("rewake: {error:#}\n")),
        }
        if self.request.options.record && self.timeline.ok {
            self.show_working_set();
        }
        self.ended = Some(ended);
    }

    /// Shows what was recorded. The streamer logs it when it could not be written.
    fn show_working_set(&self) {
        let images = ImageDir::open(self.request.images).map_err(anyhow::Error::from);
        let recorded = images.and_then(|images| file::of_image(&images)).ok().flatten().unwrap_or_default();
        let earlier = self.request.earlier;
        if recorded == *earlier {
            self.view.say(&format!("{WORKING_SET_NAME}: this restore added nothing\n"));
            return;
        }
        let parts =
            |bytes, buffers| format!("{} of CPU memory, {buffers} buffers of GPUs", units::bytes(bytes));
        let all = parts(recorded.bytes(), recorded.buffers.len());
        let added = parts(
            recorded.bytes().saturating_sub(earlier.bytes()),
            recorded.buffers.len().saturating_sub(earlier.buffers.len()),
        );
        self.view.say(&format!("{WORKING_SET_NAME}: {all}; this restore added {added}\n"));
    }

    async fn criu_ended(&mut self, exit: ExitStatus) {
        let now = self.started.elapsed().as_secs_f64() * 1e3;
        self.exit = Some(exit);
        self.timeline.criu_exit_code = exit.code();
        self.timeline.criu_ended_ms = Some(now);
        if exit.success() && self.request.given.detached {
            self.timeline.alive_ms = Some(now);
            self.view.say(&format!("     0.0 ms  restore started\n{now:8.1} ms  process is alive\n"));
        }
        // A streamer that nothing depends on ends now.
        streamer::ask_to_end(&self.waiting.work).await;
    }

    /// Passes the signal on to CRIU, or kills the tree before it runs. Gives the exit code.
    async fn interrupted(&mut self, signal: Signal) -> anyhow::Result<u8> {
        let runs = self.runs() || self.exit.is_some_and(|exit| exit.success());
        if self.exit.is_none() {
            if runs {
                self.criu.signal(signal);
            } else {
                self.criu.kill_tree();
            }
            // One that does not end takes no notice of this command.
            let _ = timeout(END_LIMIT, self.criu.ended()).await;
            streamer::ask_to_end(&self.waiting.work).await;
        }
        let fate = if runs { "continue; so does their streamer" } else { "were killed" };
        write(&format!("rewake: {signal}: the restored processes {fate}\n"));
        Ok(128 + u8::try_from(signal as i32).unwrap_or(0))
    }

    /// Writes the timeline; gives the exit code, or the error that the command ends with.
    fn conclude(&mut self) -> anyhow::Result<u8> {
        let exit = self.exit.unwrap_or_default();
        if self.ended.is_none() {
            self.waiting.keep_work();
            let latest = self.latest.borrow();
            let clock = Clock::new(self.started, &latest);
            self.timeline.working_set_ms =
                Some(latest.working_set_us).filter(|at| *at > 0).map(|at| clock.at(at));
        }
        let (detached, succeeded) = (self.request.given.detached, exit.success());
        if succeeded && !detached && matches!(self.ended, Some(Err(_))) {
            // The tree has ended, and needs no memory any more.
            self.timeline.reason = None;
        }
        if self.timeline.ok && self.timeline.all_resident_ms.is_none() {
            // Nothing was missing.
            self.timeline.all_resident_ms = self.timeline.alive_ms;
        }
        let ran = succeeded || !detached && self.timeline.alive_ms.is_some();
        self.timeline.ok = ran && (self.timeline.ok || self.ended.is_none());
        if self.request.options.json {
            let text = serde_json::to_string_pretty(&self.timeline)?;
            writeln!(std::io::stdout(), "{text}").context("writing the timeline")?;
        }
        if !succeeded {
            self.criu.show_errors();
        }
        let reason = self.timeline.reason.as_deref();
        if !ran {
            let reason = reason.map(|reason| format!("; the streamer: {reason}")).unwrap_or_default();
            let RestoreRequest { gpus, plugins, given, .. } = *self.request;
            let hint = if gpus && plugins.is_none() && !given.plugins { criu::NO_PLUGIN } else { "" };
            bail!("criu restore failed ({exit}); nothing was restored{reason}{hint}");
        }
        match reason {
            Some(reason) if reason == ABANDONED => bail!("{reason}"),
            Some(reason) => bail!("the restored processes were killed: {reason}"),
            None => {}
        }
        if let Some(resident) = self.timeline.all_resident_ms {
            let last = self.ended.as_ref().and_then(|ended| ended.as_ref().ok()?.last.as_ref());
            let any_gate = last.is_some_and(|last| last.processes.iter().any(|of| !of.without_gate));
            let gpus = if any_gate { "GPUs run; " } else { "" };
            self.view.say(&format!("{resident:8.1} ms  {gpus}all memory resident\n"));
        }
        Ok(criu::code(exit))
    }
}

async fn until(deadline: Option<Deadline>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
