// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake lazy-pages`: serves one restore, in the place of `criu lazy-pages`.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tracing::{error, info};

use super::{detach, directory, to_notify};
use crate::cli::LazyPages;
use crate::logging;
use rewake_streamer::session::daemon::{Daemon, Summary};
use rewake_streamer::session::open::OpenSession;
use rewake_streamer::supervise::supervisor::{self, Start};
use rewake_streamer::supervise::worker;

/// Runs the command; gives the exit code.
///
/// # Errors
/// Options or directories are wrong.
pub fn run(options: &LazyPages) -> anyhow::Result<u8> {
    if let Some(option) = options.remote.refused() {
        bail!("{option}: not supported yet: `rewake lazy-pages` serves images of a local directory");
    }
    let images = directory(&options.images_dir, "-D")?;
    let work = match &options.work_dir {
        Some(path) => directory(path, "-W")?,
        None => images.clone(),
    };
    std::env::set_current_dir(&work)
        .with_context(|| format!("entering work directory {}", work.display()))?;
    logging::start(options.log_file.as_deref(), options.verbosity)?;
    let mut notify = to_notify(options.status_fd);
    if options.daemon
        && let Some(code) = detach::background(options.pidfile.as_deref(), &mut notify)?
    {
        return Ok(code);
    }
    let limit = options.connect_timeout.map(Duration::from_secs);
    let code = supervisor::supervise(notify, |start| {
        match worker::block_on(start, async |daemon| {
            let Some(session) = session(start, daemon, &images, &work)? else { return Ok(None) };
            start.ready();
            daemon.serve(session, limit).await.map(Some)
        }) {
            Ok(summary) => {
                summary.iter().for_each(report);
                0
            }
            Err(error) if error.is::<worker::AskedToStop>() => {
                info!("{error}: no restore depends on this process");
                0
            }
            Err(error) => {
                error!("{error:#}");
                complain(options, &error);
                1
            }
        }
    })?;
    Ok(supervisor::asked_to_stop_is_well(code))
}

/// The one restore that there is to serve; none if a worker that died had.
pub(super) fn session(
    start: &Start,
    daemon: &Daemon,
    images: &Path,
    work: &Path,
) -> anyhow::Result<Option<OpenSession>> {
    let inherited = if start.successor { daemon.inherit().pop() } else { None };
    match (inherited, start.ledger.outcomes().counts()) {
        (Some(inherited), _) => inherited.map(Some).map_err(|lost| lost.error),
        (None, (0, 0)) => daemon.open(images, work).map(Some),
        // The last worker died with its work done: there is one restore to serve, and it was.
        (None, (_, 0)) => Ok(None),
        (None, _) => bail!("the restore had failed already: see above"),
    }
}

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

/// One line for people, unless the log already went to where they look.
fn complain(options: &LazyPages, error: &anyhow::Error) {
    if options.log_file.is_some() || options.verbosity == 0 {
        // Nobody reads it: the exit code says the rest.
        let _ = writeln!(std::io::stderr(), "rewake: {error:#}");
    }
}
