// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore`: runs `criu restore` with a daemon behind it, and shows how the memory comes back.

mod bar;
mod gpu;
mod live;
mod streamer;
mod timeline;
mod workdir;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant as Deadline, interval, sleep_until, timeout};

use self::bar::{Bar, resident, write};
use self::timeline::{Clock, Timeline};
use self::workdir::WorkDir;
use super::criu::{self, Criu, CriuInvocation, Options};
use super::directory;
use crate::cli::Restore;
use crate::control::client::{self, Client, ClientError};
use crate::control::proto::{Ended, Session};
use crate::control::{CONNECT_LIMIT, REPORT};
use rewake_streamer::gpu::plugin_folder;

/// Time that CRIU has to notice that its session ended, and a session that its CRIU did.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Options that are for `rewake restore` itself, not for CRIU.
const OURS: [&str; 4] = ["-D", "--images-dir", "-W", "--work-dir"];

/// What to restore, and how.
#[derive(Debug, Clone, Copy)]
struct RestoreRequest<'a> {
    options: &'a Restore,
    given: &'a Options,
    images: &'a Path,
    plugins: Option<&'a Path>,
}

impl RestoreRequest<'_> {
    /// Starts CRIU, with these options of ours.
    fn start(&self, work: &Path, ours: &[&str]) -> anyhow::Result<Criu> {
        let act = CriuInvocation {
            name: "restore",
            images: self.images,
            work,
            ours,
            plugins: self.plugins,
            given: &self.options.criu_options,
            options: self.given,
        };
        Criu::start(&self.options.programs.criu(), &act, !self.options.json)
    }
}

/// Runs the command; gives the exit code: CRIU's own once the tree ran, 1 before.
///
/// # Errors
/// The image cannot be served, there is no daemon or no CRIU: nothing was started.
pub fn run(options: &Restore) -> anyhow::Result<u8> {
    let images = directory(&options.images_dir, "-D")?;
    let given = Options::read(&options.criu_options, &OURS)?;
    let gpu =
        plugin_folder::image_has_gpu(&images).with_context(|| format!("reading {}", images.display()))?;
    ensure!(
        gpu || !options.record,
        "--record: this image has no GPU state, and it records what is touched of that only"
    );
    let plugins = options.programs.plugins(gpu, &given)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let order = RestoreRequest { options, given: &given, images: &images, plugins: plugins.as_deref() };
    if gpu { runtime.block_on(gpu::restore(&order)) } else { runtime.block_on(restore(&order)) }
}

async fn restore(order: &RestoreRequest<'_>) -> anyhow::Result<u8> {
    let RestoreRequest { options, given, images, .. } = *order;
    let mut signals = signals()?;
    let (place, mut client) = WorkDir::find(options, images).await?;
    let opened = client.open(images, &place.work, CONNECT_LIMIT, false).await;
    let session = opened.context("this image cannot be served; nothing was started")?.session;
    let started = Instant::now();
    let criu = match order.start(&place.work, &["--lazy-pages"]) {
        Ok(criu) => criu,
        Err(error) => {
            client.end(session).await.context("ending the session")?;
            return Err(error);
        }
    };
    drop(client);
    let (sender, latest) = watch::channel(Session::default());
    let timeline = Timeline { session, own_daemon: place.own_daemon, ..Default::default() };
    let detached = given.detached;
    let mut course = RestoreRun {
        socket: &place.socket,
        session,
        started,
        detached,
        criu,
        latest,
        timeline,
        exit: None,
        told: false,
    };
    let mut bar = Bar::new(options.quiet);
    let how = {
        let followed = client::follow(&place.socket, session, &sender);
        course.run(followed, &mut signals, &mut bar).await?
    };
    bar.clear();
    course.conclude(options.json, how, &mut bar)
}

/// SIGINT and SIGTERM, as they come.
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

/// A restore under way.
struct RestoreRun<'a> {
    socket: &'a Path,
    session: u64,
    started: Instant,
    detached: bool,
    criu: Criu,
    latest: watch::Receiver<Session>,
    timeline: Timeline,
    exit: Option<ExitStatus>,
    told: bool,
}

/// How it went.
enum RunEnd {
    /// The session ended, and CRIU too.
    Over(Box<Result<Ended, ClientError>>),
    /// We were asked to stop.
    Interrupted(Signal),
}

impl RestoreRun<'_> {
    async fn run(
        &mut self,
        followed: impl Future<Output = Result<Ended, ClientError>>,
        signals: &mut mpsc::Receiver<Signal>,
        bar: &mut Bar,
    ) -> anyhow::Result<RunEnd> {
        let mut followed = std::pin::pin!(followed);
        let mut ended: Option<Result<Ended, ClientError>> = None;
        // For the one that has not ended yet, when the other's end leaves it nothing to do.
        let mut deadline: Option<Deadline> = None;
        let mut redraw = interval(REPORT);
        loop {
            tokio::select! {
                result = &mut followed, if ended.is_none() => {
                    let lost = result.as_ref().is_ok_and(|ended| !ended.ok) || result.is_err();
                    deadline = lost.then(|| Deadline::now() + END_LIMIT);
                    self.ended(&result);
                    ended = Some(result);
                    if self.exit.is_none() && self.timeline.ok {
                        self.tell(bar);
                    }
                }
                exit = self.criu.ended(), if self.exit.is_none() => {
                    self.criu_ended(exit?).await?;
                    if !exit_is_good(self.exit) {
                        deadline = Some(Deadline::now() + END_LIMIT);
                    }
                }
                _ = redraw.tick(), if ended.is_none() => {
                    self.look();
                    bar.show(&self.latest.borrow());
                }
                Some(signal) = signals.recv() => return self.interrupted(signal).await,
                () = until(deadline) => {
                    deadline = None;
                    self.look();
                    if self.exit.is_none() {
                        self.criu.kill_tree();
                    } else if self.timeline.alive_ms.is_none() {
                        bail!("criu ended, and session {} did not: see `rewake status`", self.session);
                    }
                }
            }
            if self.exit.is_some()
                && let Some(result) = ended.take()
            {
                return Ok(RunEnd::Over(Box::new(result)));
            }
        }
    }

    /// Notes when the tree ran, from the session's reports.
    fn look(&mut self) {
        let latest = self.latest.borrow();
        if !self.detached && self.timeline.alive_ms.is_none() && latest.running_ns != 0 {
            self.timeline.alive_ms = Clock::new(self.started, &latest).at(latest.running_ns);
            self.timeline.alive_resident_bytes = resident(&latest);
        }
    }

    async fn criu_ended(&mut self, exit: ExitStatus) -> anyhow::Result<()> {
        let now = self.started.elapsed().as_secs_f64() * 1e3;
        self.exit = Some(exit);
        self.timeline.criu_exit_code = exit.code();
        self.timeline.criu_ended_ms = Some(now);
        if !exit.success() {
            self.end_session().await;
        } else if self.detached {
            self.timeline.alive_ms = Some(now);
            // A daemon that has just lost its worker answers a moment later: the last report has to do.
            let status = async { Client::connect(self.socket).await?.status().await };
            let status = timeout(REPORT, status).await.ok().and_then(Result::ok).unwrap_or_default();
            let sessions =
                status.sessions.iter().chain(status.recent.iter().filter_map(|ended| ended.summary.as_ref()));
            let found = sessions.into_iter().find(|session| session.session == self.session).cloned();
            self.timeline.alive_resident_bytes =
                resident(&found.unwrap_or_else(|| self.latest.borrow().clone()));
        }
        Ok(())
    }

    /// Ends a session that no restore connected to. One that was connected to ends by itself.
    async fn end_session(&self) {
        let end = async { Client::connect(self.socket).await?.end(self.session).await };
        // Refused, or the daemon is gone: following the session tells.
        let _ = timeout(END_LIMIT, end).await;
    }

    fn ended(&mut self, result: &Result<Ended, ClientError>) {
        if let Ok(ended) = result {
            let session = ended.summary.clone().unwrap_or_default();
            self.timeline.end(ended, Clock::new(self.started, &session));
        }
    }

    /// Shows the timeline, once. CRIU may stay for as long as the tree does: it is shown before.
    fn tell(&mut self, bar: &mut Bar) {
        if !std::mem::replace(&mut self.told, true) {
            bar.clear();
            bar.say(&self.timeline.text());
        }
    }

    async fn interrupted(&mut self, signal: Signal) -> anyhow::Result<RunEnd> {
        if self.exit.is_none() {
            if self.latest.borrow().running_ns == 0 {
                self.criu.kill_tree();
                self.end_session().await;
            } else {
                self.criu.signal(signal);
            }
            // One that does not end takes no notice of us: neither do we.
            let _ = timeout(END_LIMIT, self.criu.ended()).await;
        }
        Ok(RunEnd::Interrupted(signal))
    }

    /// The last words and the exit code.
    fn conclude(&mut self, json: bool, how: RunEnd, bar: &mut Bar) -> anyhow::Result<u8> {
        let result = match how {
            RunEnd::Interrupted(signal) => return Ok(self.stopped(signal)),
            RunEnd::Over(result) => *result,
        };
        let exit = self.exit.unwrap_or_default();
        let ran = self.timeline.alive_ms.is_some() && (exit.success() || !self.detached);
        if !exit.success() {
            self.criu.show_errors();
        }
        if let Err(error) = &result {
            self.timeline.reason = Some(error.to_string());
        }
        if json {
            let text = serde_json::to_string_pretty(&self.timeline)?;
            writeln!(std::io::stdout(), "{text}").context("writing the timeline")?;
        }
        match &self.timeline.reason {
            Some(reason) if exit.success() || ran => bail!("the restored processes were ended: {reason}"),
            Some(reason) if !ran => {
                bail!("criu restore failed ({exit}); nothing was restored; the page server: {reason}")
            }
            None if !ran => bail!("criu restore failed ({exit}); nothing was restored"),
            _ => {}
        }
        self.tell(bar);
        Ok(criu::code(exit))
    }

    fn stopped(&self, signal: Signal) -> u8 {
        let fate =
            if self.latest.borrow().running_ns == 0 { "ended" } else { "go on; so does their page server" };
        write(&format!("rewake: {signal}: the restored processes {fate}\n"));
        128 + u8::try_from(signal as i32).unwrap_or(0)
    }
}

fn exit_is_good(exit: Option<ExitStatus>) -> bool {
    exit.is_some_and(|exit| exit.success())
}

async fn until(deadline: Option<Deadline>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
