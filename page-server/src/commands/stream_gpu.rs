// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake stream-gpu`: loads memory of GPUs behind the processes of one restore.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use anyhow::{Context as _, ensure};
use rewake_handover::{FOLDER, Gated, Listener};
use tracing::{error, info, warn};

use super::{directory, to_notify};
use crate::cli::StreamGpu;
use crate::control::streaming::Window;
use crate::gpu_stream::Summary;
use crate::supervisor::{self, Start};
use crate::timeline::record::State;
use crate::timeline::{Timeline, files};
use crate::{gpu_stream, guardian, logging};

/// Runs the command; gives the exit code: 0 when all is loaded, [`supervisor::STOPPED`] when it was asked to stop and had
/// taken nothing over.
///
/// # Errors
/// Options or directories are wrong, or somebody serves there already.
pub fn run(options: &StreamGpu) -> anyhow::Result<u8> {
    let work = directory(&options.work_dir, "-W")?;
    logging::start(options.log_file.as_deref(), options.verbosity)?;
    Gated::prepare().with_context(|| format!("make {FOLDER}, which says who is not to be dumped yet"))?;
    let listener = Listener::new(&work)?;
    files::clear(&work)?;
    // Loading matters more than being seen.
    let window =
        Window::new(&work).inspect_err(|error| warn!("nobody can ask how far it is: {error:#}")).ok();
    let notify = to_notify(options.status_fd);
    // Until the end, and all processes that there will be have it.
    let words: Option<OwnedFd> = notify.first().map(OwnedFd::try_clone).transpose()?;
    supervisor::supervise(notify, |start| {
        if let Some(words) = &words {
            start.ledger.gates().tell(words.as_fd());
        }
        match one(start, &listener, window.as_ref(), &work) {
            Ok(()) => 0,
            Err(error) => {
                error!("{error:#}");
                1
            }
        }
    })
}

fn one(start: &Start, listener: &Listener, window: Option<&Window>, work: &Path) -> anyhow::Result<()> {
    if start.successor {
        // What was half loaded cannot be gone on with: what stands before a gate is killed.
        ensure!(!start.ledger.gates().any(), "the worker died while it loaded memory of GPUs");
        return Ok(());
    }
    // From the beginning: placeholders read as zeros when the last of these processes dies, even if all do at once but one.
    guardian::start(start.ledger);
    let timeline = Timeline::default();
    if let Some(window) = window {
        window.show(timeline.clone())?;
    }
    start.ready();
    let done = gpu_stream::serve(listener, start.ledger, &timeline);
    keep(&timeline, &done, work);
    let done = done?;
    if let Some(report) = &done.loaded {
        report.ways.iter().for_each(|way| info!("{way}"));
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

/// Leaves what there was to see, if there was anything.
fn keep(timeline: &Timeline, done: &anyhow::Result<Summary>, work: &Path) {
    if timeline.record().state == State::Waiting {
        return;
    }
    match done {
        Ok(_) => timeline.ended(),
        Err(error) => timeline.failed(&format!("{error:#}")),
    }
    if let Err(error) = files::write(&timeline.record(), work) {
        warn!("{error:#}");
    }
}
