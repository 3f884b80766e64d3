// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake lazy-pages`: the streamer with the options of `criu lazy-pages`, for one restore.

use std::time::Duration;

use anyhow::bail;

use super::criu_server::{Directories, complain, enter};
use super::{detach, to_notify};
use crate::cli::LazyPagesArgs;
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
    let server = &options.server;
    let Directories { images, work } = enter(server)?;
    let mut notify = to_notify(server.status_fd);
    if server.daemon
        && let Some(code) = detach::background(server.pidfile.as_deref(), &mut notify)?
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
            complain(server, &error);
            1
        })
    })?;
    Ok(asked_to_stop_is_well(code))
}
