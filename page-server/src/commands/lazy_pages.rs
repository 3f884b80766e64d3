// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake lazy-pages`: the streamer with the options of `criu lazy-pages`, for one restore.

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::{detach, directory, to_notify};
use crate::cli::LazyPagesArgs;
use crate::logging;
use rewake_streamer::restore::{RestoreOptions, StreamedRestore};
use rewake_streamer::supervise::supervisor::{self, asked_to_stop_is_well};

/// Runs the command; gives the exit code.
///
/// # Errors
/// Options or directories are wrong, the image cannot be served, or another streamer serves there already.
pub fn run(options: &LazyPagesArgs) -> anyhow::Result<u8> {
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
    let restore = StreamedRestore::new(RestoreOptions {
        images: Some(images),
        work,
        records_working_set: false,
        keeps_record: false,
        connect_timeout: options.connect_timeout.map(Duration::from_secs),
    })?;
    let code = supervisor::supervise(notify, |start| {
        restore.serve(start).unwrap_or_else(|error| {
            complain(options, &error);
            1
        })
    })?;
    Ok(asked_to_stop_is_well(code))
}

/// Writes an error for users too, unless the log is on their terminal already.
fn complain(options: &LazyPagesArgs, error: &anyhow::Error) {
    if options.log_file.is_some() || options.verbosity == 0 {
        // The exit code says the rest if stderr is closed.
        let _ = writeln!(std::io::stderr(), "rewake: {error:#}");
    }
}
