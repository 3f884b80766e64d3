// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the commands in the place of CRIU's servers share: directories, log, and the last words.

use std::fs::File;
use std::path::PathBuf;

use anyhow::Context as _;
use tracing::warn;

use super::detach::{Pidfile, PidfileRule};
use super::{directory, print};
use crate::cli::CriuServerArgs;
use crate::logging;

/// The directories of a server.
pub(super) struct Directories {
    /// That of the images.
    pub(super) images: PathBuf,
    /// The work directory, which this process is in.
    pub(super) work: PathBuf,
    /// The log file.
    pub(super) log: Option<File>,
}

/// Enters the work directory, and starts the log.
///
/// # Errors
/// A directory does not exist, or the log file cannot be made.
pub(super) fn enter(options: &CriuServerArgs) -> anyhow::Result<Directories> {
    let images = directory(&options.images_dir, "-D")?;
    let work = match &options.work_dir {
        Some(path) => directory(path, "-W")?,
        None => images.clone(),
    };
    std::env::set_current_dir(&work)
        .with_context(|| format!("entering work directory {}", work.display()))?;
    let log = logging::start(options.log_file.as_deref(), options.verbosity)?;
    if let Some(file) = &options.config {
        warn!("--config {}: not read: only options of the command line are used", file.display());
    }
    Ok(Directories { images, work, log })
}

/// Takes the pidfile of a daemon by CRIU's rule: a file that exists is refused before anything is started.
///
/// # Errors
/// The file exists.
pub(super) fn pidfile(options: &CriuServerArgs) -> anyhow::Result<Option<Pidfile>> {
    let path = options.pidfile.as_deref().filter(|_| options.daemon);
    path.map(|path| Pidfile::claim(path, PidfileRule::Criu)).transpose()
}

/// Writes a logged error for users too, unless the log is on their terminal already.
pub(super) fn complain(options: &CriuServerArgs, error: &anyhow::Error) {
    if options.log_file.is_some() || options.verbosity == 0 {
        // The exit code says the rest if stderr is closed.
        print::say(rewake_streamer::limits::explained(error));
    }
}
