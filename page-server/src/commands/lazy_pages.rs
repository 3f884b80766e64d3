// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake lazy-pages`: serves one restore, in the place of `criu lazy-pages`.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::unistd::ForkResult;
use tracing::{error, info};

use crate::cli::LazyPages;
use crate::daemon::{Daemon, Summary};
use crate::supervisor::{self, Start};
use crate::{logging, worker};

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
    std::env::set_current_dir(&work).with_context(|| format!("entering work directory {}", work.display()))?;
    logging::start(options.log_file.as_deref(), options.verbosity)?;
    // SAFETY: the caller gave this descriptor to us, to write to and to close.
    let status = options.status_fd.map(|number| unsafe { OwnedFd::from_raw_fd(number) });
    let mut notify: Vec<OwnedFd> = status.into_iter().collect();
    if options.daemon
        && let Some(code) = background(options, &mut notify)?
    {
        return Ok(code);
    }
    let limit = options.connect_timeout.map(Duration::from_secs);
    supervisor::supervise(notify, |start| {
        match worker::block_on(start, async |daemon| session(start, daemon, &images, &work, limit).await) {
            Ok(summary) => {
                report(&summary);
                0
            }
            Err(error) => {
                error!("{error:#}");
                complain(options, &error);
                1
            }
        }
    })
}

async fn session(
    start: &Start,
    daemon: &Arc<Daemon>,
    images: &Path,
    work: &Path,
    limit: Option<Duration>,
) -> anyhow::Result<Summary> {
    let inherited = if start.successor { daemon.inherit()?.pop() } else { None };
    let open = match inherited {
        Some(open) => open,
        None => daemon.open(images, work)?,
    };
    start.ready();
    daemon.serve(open, limit).await
}

fn report(summary: &Summary) {
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

/// `-d`: goes to the background. In the parent gives the exit code, once the socket is ready or the child
/// has failed; in the child gives none.
fn background(options: &LazyPages, notify: &mut Vec<OwnedFd>) -> anyhow::Result<Option<u8>> {
    let (mut ready, told) = std::io::pipe().context("making a pipe")?;
    // SAFETY: this process has one thread.
    match unsafe { nix::unistd::fork() }.context("going to the background")? {
        ForkResult::Child => {
            nix::unistd::setsid().context("leaving the session")?;
            notify.push(told.into());
            Ok(None)
        }
        ForkResult::Parent { child } => {
            drop(told);
            if ready.read(&mut [1]).unwrap_or(0) != 1 {
                return Ok(Some(1)); // the child has said why
            }
            if let Some(path) = &options.pidfile {
                let file = File::create_new(path).and_then(|mut file| write!(file, "{child}"));
                file.with_context(|| format!("--pidfile {}", path.display()))?;
            }
            Ok(Some(0))
        }
    }
}

fn directory(path: &Path, option: &str) -> anyhow::Result<PathBuf> {
    let full = path.canonicalize().with_context(|| format!("{option} {}", path.display()))?;
    if !full.is_dir() {
        bail!("{option} {}: expected a directory", path.display());
    }
    Ok(full)
}
