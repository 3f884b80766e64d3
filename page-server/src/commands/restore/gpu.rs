// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores of images with GPU state: the processes run as soon as what the driver looks at is there, and the rest of their memory, of
//! CPUs and of GPUs, is loaded behind them by `rewake stream-gpu`. Where calls that register memory cannot be held (decision 11), all
//! memory of CPUs comes at once.

use std::io::Write as _;
use std::path::Path;
use std::time::{Instant, SystemTime};

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;
use rewake_kfd::held;
use tempfile::TempDir;
use tokio::time::timeout;

use super::bar::Bar;
use super::streamer::{Streamed, Streamer};
use super::timeline::Timeline;
use super::{END_LIMIT, Order, directory, live, place, signals};
use crate::commands::criu::{self, Criu};
use crate::image::Image;

/// For people, after the line in which the streamer said why.
const KILLED: &str =
    "memory could not be brought back: the restored processes whose GPUs stood still were killed (see above)";
/// For people: nobody has said anything.
const ABANDONED: &str = "rewake stream-gpu was killed, and all that watch over it: the restored processes that use GPUs run, \
     but their GPUs stand still for ever: kill them";

/// Runs `criu restore`; gives its exit code.
pub(super) async fn restore(order: &Order<'_>) -> anyhow::Result<u8> {
    let options = order.options;
    if options.socket.is_some() {
        bail!("--socket: this image has GPU state, which is restored without a page server");
    }
    let mut signals = signals()?;
    let given = options.work_dir.as_deref().map(|path| directory(path, "-W")).transpose()?;
    let own = if given.is_none() { Some(place::folder(&std::env::temp_dir())?) } else { None };
    let work = given.as_deref().or_else(|| own.as_ref().map(TempDir::path)).unwrap_or(order.images);
    let bar = Bar::new(options.quiet);
    let images = Some(order.images).filter(|images| lazily(images, &bar));
    let ours: &[&str] = if images.is_some() { &["--lazy-pages"] } else { &[] };
    let mut streamer = Streamer::start(work, images, options.record).await?;
    let shown = tokio::spawn(live::follow(work.to_owned(), options.quiet, SystemTime::now()));
    let started = Instant::now();
    let mut criu = order.start(work, ours)?;
    let exit = tokio::select! {
        exit = criu.ended() => exit?,
        Some(signal) = signals.recv() => return Ok(interrupted(&mut criu, order.given.detached, signal).await),
    };
    let ended = started.elapsed().as_secs_f64() * 1e3;
    let alive = (exit.success() && order.given.detached).then_some(ended);
    if let Some(alive) = alive {
        bar.say(&format!("     0.0 ms  restore started\n{alive:8.1} ms  process is alive\n"));
    }
    // What it has taken over it brings to its end.
    let streamed = tokio::select! {
        streamed = streamer.end() => streamed?,
        Some(signal) = signals.recv() => {
            bar.say("rewake stream-gpu goes on loading\n");
            return Ok(128 + u8::try_from(signal as i32).unwrap_or(0));
        }
    };
    // It tells what the streamer left, which may be removed after this.
    let _ = timeout(END_LIMIT, shown).await;
    let reason = match streamed {
        // Nothing that the streamer could tell is the reason.
        _ if !exit.success() => None,
        Streamed::Nothing | Streamed::Open(_) => None,
        Streamed::Killed => Some(KILLED),
        Streamed::Abandoned => Some(ABANDONED),
    };
    let resident = alive.and_then(|alive| resident(streamed, started, alive));
    let timeline = Timeline {
        ok: exit.success() && reason.is_none(),
        reason: reason.map(str::to_owned),
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
    if let Some(reason) = reason {
        bail!(reason);
    }
    if let Some(resident) = resident {
        bar.say(&format!("{resident:8.1} ms  GPUs run; all memory resident\n"));
    }
    Ok(criu::code(exit))
}

/// Whether memory of CPUs can come behind processes with GPUs.
fn lazily(images: &Path, bar: &Bar) -> bool {
    let can = held::attach().map_err(anyhow::Error::from).and_then(|_| Image::open(images).map(drop));
    if let Err(error) = &can {
        bar.say(&format!("all memory of CPUs comes before the processes run: {error:#}\n"));
    }
    can.is_ok()
}

/// When all memory was there, in milliseconds like `alive`.
fn resident(streamed: Streamed, started: Instant, alive: f64) -> Option<f64> {
    match streamed {
        Streamed::Nothing => Some(alive),
        Streamed::Open(since) => Some(since.duration_since(started).as_secs_f64() * 1e3),
        Streamed::Killed | Streamed::Abandoned => None,
    }
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
