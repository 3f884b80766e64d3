// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores of images with GPU state: the processes run as soon as what the driver looks at is there, and the rest of their memory, of
//! CPUs and of GPUs, is loaded behind them by `rewake stream-gpu`. Where calls that register memory cannot be held (decision 11), all
//! memory of CPUs comes at once.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Instant, SystemTime};

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;
use tempfile::TempDir;
use tokio::time::timeout;

use super::bar::Bar;
use super::streamer::{OfDaemon, Own, Streamed, Streamer};
use super::timeline::Timeline;
use super::{END_LIMIT, RestoreRequest, directory, live, signals, workdir};
use crate::commands::criu::{self, Criu};
use crate::control::client::Client;
use rewake_streamer::supervise::launch;

/// Where a restore happens.
struct Setting {
    streamer: Streamer,
    /// It brings memory of CPUs, too.
    pages: bool,
    work: PathBuf,
    _own: Option<TempDir>,
}

impl Setting {
    /// With the streamer of a daemon that runs already, or one that is started for this restore alone.
    ///
    /// # Errors
    /// The daemon that was asked for is not there or refuses, or none can be started.
    async fn make(order: &RestoreRequest<'_>, bar: &Bar) -> anyhow::Result<Self> {
        let options = order.options;
        let given = options.work_dir.as_deref().map(|path| directory(path, "-W")).transpose()?;
        let named = options.socket.is_some();
        let daemon = async {
            let socket = workdir::socket(options)?;
            Ok::<_, anyhow::Error>((Client::connect(&socket).await?, socket))
        };
        match daemon.await {
            Ok((client, socket)) => match Self::of_daemon(order, given.clone(), client, &socket).await {
                Err(error) if !named => {
                    bar.say(&format!("{}: {error:#}: a streamer of its own, then\n", socket.display()));
                }
                made => return made,
            },
            Err(error) if named => return Err(error),
            // There is none, or none for this user.
            Err(_) => {}
        }
        Self::alone(order, given, bar).await
    }

    async fn of_daemon(
        order: &RestoreRequest<'_>,
        given: Option<PathBuf>,
        client: Client,
        socket: &Path,
    ) -> anyhow::Result<Self> {
        let (work, own) = workdir::work(given, workdir::beside(socket))?;
        let of = OfDaemon::ask(client, socket, order, &work).await?;
        Ok(Self { pages: of.pages, streamer: Streamer::OfDaemon(of), work, _own: own })
    }

    async fn alone(order: &RestoreRequest<'_>, given: Option<PathBuf>, bar: &Bar) -> anyhow::Result<Self> {
        let (work, own) = workdir::work(given, &std::env::temp_dir())?;
        let can = launch::can_bring_pages(order.images);
        if let Err(error) = &can {
            bar.say(&format!("all memory of CPUs comes before the processes run: {error:#}\n"));
        }
        let pages = can.is_ok();
        let streamer = Own::start(&work, pages.then_some(order.images), order.options.record).await?;
        Ok(Self { streamer: Streamer::Own(streamer), pages, work, _own: own })
    }
}

/// Runs `criu restore`; gives its exit code.
pub(super) async fn restore(order: &RestoreRequest<'_>) -> anyhow::Result<u8> {
    let options = order.options;
    let mut signals = signals()?;
    let bar = Bar::new(options.quiet);
    let Setting { mut streamer, pages, work, _own } = Setting::make(order, &bar).await?;
    let shown = tokio::spawn(live::follow(work.clone(), options.quiet, SystemTime::now()));
    let started = Instant::now();
    let mut criu = match order.start(&work, if pages { &["--lazy-pages"] } else { &[] }) {
        Ok(criu) => criu,
        Err(error) => {
            streamer.let_go().await;
            return Err(error);
        }
    };
    let exit = tokio::select! {
        exit = criu.ended() => exit?,
        Some(signal) = signals.recv() => {
            let code = interrupted(&mut criu, order.given.detached, signal).await;
            streamer.let_go().await;
            return Ok(code);
        }
    };
    let ended = started.elapsed().as_secs_f64() * 1e3;
    let alive = (exit.success() && order.given.detached).then_some(ended);
    if let Some(alive) = alive {
        bar.say(&format!("     0.0 ms  restore started\n{alive:8.1} ms  process is alive\n"));
    }
    // What it has taken over it brings to its end.
    let streamed = tokio::select! {
        streamed = streamer.end() => streamed,
        Some(signal) = signals.recv() => {
            bar.say("rewake stream-gpu goes on loading\n");
            return Ok(128 + u8::try_from(signal as i32).unwrap_or(0));
        }
    };
    // It tells what the streamer left, which may be removed after this.
    let _ = timeout(END_LIMIT, shown).await;
    let streamed = what_matters(streamed, exit, order.given.detached)?;
    let resident = alive.and_then(|alive| resident(&streamed, started, alive));
    let timeline = Timeline {
        session: streamer.session(),
        ok: exit.success() && streamed.reason.is_none(),
        reason: streamed.reason.clone(),
        criu_exit_code: exit.code(),
        criu_ended_ms: Some(ended),
        alive_ms: alive,
        all_resident_ms: resident,
        ..Timeline::default()
    };
    if options.json {
        let text = serde_json::to_string_pretty(&timeline)?;
        writeln!(std::io::stdout(), "{text}").context("writing the timeline")?;
    }
    if !exit.success() {
        criu.show_errors();
        let hint = if order.plugins.is_none() && !order.given.plugins { criu::NO_PLUGIN } else { "" };
        bail!("criu restore failed ({exit}){hint}");
    }
    if let Some(reason) = streamed.reason {
        bail!(reason);
    }
    if let Some(resident) = resident {
        bar.say(&format!("{resident:8.1} ms  GPUs run; all memory resident\n"));
    }
    Ok(criu::code(exit))
}

/// Of what was told of the streamer.
fn what_matters(
    streamed: anyhow::Result<Streamed>,
    exit: ExitStatus,
    detached: bool,
) -> anyhow::Result<Streamed> {
    match streamed {
        // Nothing that the streamer could tell is the reason why CRIU failed.
        _ if !exit.success() => Ok(Streamed::default()),
        // The tree has ended well.
        Err(_) if !detached => Ok(Streamed::default()),
        streamed => streamed,
    }
}

/// When all memory was there, in milliseconds like `alive`: then, if nothing came later.
fn resident(streamed: &Streamed, started: Instant, alive: f64) -> Option<f64> {
    let later = |there: Instant| there.saturating_duration_since(started).as_secs_f64() * 1e3;
    streamed.reason.is_none().then(|| streamed.there.map_or(alive, later))
}

/// We were asked to stop. Of a detached restore nothing runs yet; otherwise the tree is CRIU's, which gets the signal.
async fn interrupted(criu: &mut Criu, detached: bool, signal: Signal) -> u8 {
    if detached {
        criu.kill_tree();
    } else {
        criu.signal(signal);
    }
    // One that does not end takes no notice of us: neither do we.
    let _ = timeout(END_LIMIT, criu.ended()).await;
    128 + u8::try_from(signal as i32).unwrap_or(0)
}
