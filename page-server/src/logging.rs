// SPDX-License-Identifier: MIT OR Apache-2.0
//! Logs: to stderr or a file, at CRIU's levels.

use std::path::Path;
use std::sync::Mutex;

use anyhow::Context as _;
use tracing::level_filters::LevelFilter;

/// Starts logging. `file` none: stderr. Level 0 to 4 as CRIU's `-v`.
///
/// # Errors
/// The log file cannot be made.
pub fn start(file: Option<&Path>, verbosity: u8) -> anyhow::Result<()> {
    let level = match verbosity {
        0 => LevelFilter::OFF,
        1 => LevelFilter::ERROR,
        2 => LevelFilter::WARN,
        3 => LevelFilter::INFO,
        _ => LevelFilter::DEBUG,
    };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_ansi(false);
    // Nobody who reads stderr is no reason to end: the library's own complaint would go there, too, and panic.
    let builder = builder.log_internal_errors(false);
    match file {
        // A second start, as in tests, keeps the first's settings.
        None => drop(builder.without_time().with_writer(std::io::stderr).try_init()),
        Some(path) => {
            let file =
                std::fs::File::create(path).with_context(|| format!("making log file {}", path.display()))?;
            drop(builder.with_thread_names(true).with_writer(Mutex::new(file)).try_init());
        }
    }
    Ok(())
}
