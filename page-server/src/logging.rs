// SPDX-License-Identifier: MIT OR Apache-2.0
//! Logs to stderr or to a file, at CRIU's levels.

use std::path::Path;
use std::sync::Mutex;

use anyhow::Context as _;
use tracing::level_filters::LevelFilter;

/// Starts logging to `file`, or to stderr without one. `verbosity` is 0 to 4, as CRIU's `-v`.
///
/// # Errors
/// The log file cannot be created.
pub fn start(file: Option<&Path>, verbosity: u8) -> anyhow::Result<()> {
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
    match file {
        // A second start, as in tests, keeps the settings of the first.
        None => drop(builder.without_time().with_writer(std::io::stderr).try_init()),
        Some(path) => {
            let file = std::fs::File::create(path)
                .with_context(|| format!("creating the log file {}", path.display()))?;
            drop(builder.with_thread_names(true).with_writer(Mutex::new(file)).try_init());
        }
    }
    Ok(())
}
