// SPDX-License-Identifier: MIT OR Apache-2.0
//! Logs to stderr or to a file, at CRIU's levels.

use std::fs::File;
use std::path::Path;
use std::sync::Mutex;

use anyhow::Context as _;
use tracing::level_filters::LevelFilter;

/// Starts logging to `file`, or to stderr without one. `verbosity` is 0 to 4, as CRIU's `-v`. Returns the
/// file, for what a daemon says elsewhere than in its log.
///
/// # Errors
/// The log file cannot be created.
pub fn start(file: Option<&Path>, verbosity: u8) -> anyhow::Result<Option<File>> {
    let level = match verbosity {
        0 => LevelFilter::OFF,
        1 => LevelFilter::ERROR,
        2 => LevelFilter::WARN,
        3 => LevelFilter::INFO,
        _ => LevelFilter::DEBUG,
    };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_ansi(false);
    // A closed stderr must not end the process: the library would report a failed write there, too, and
    // panic.
    let builder = builder.log_internal_errors(false);
    // A second start, as in tests, keeps the settings of the first.
    let Some(path) = file else {
        drop(builder.without_time().with_writer(std::io::stderr).try_init());
        return Ok(None);
    };
    let create = || {
        let file = File::create(path)?;
        Ok::<_, std::io::Error>((file.try_clone()?, file))
    };
    let (log, file) = create().with_context(|| format!("creating the log file {}", path.display()))?;
    drop(builder.with_thread_names(true).with_writer(Mutex::new(log)).try_init());
    Ok(Some(file))
}
