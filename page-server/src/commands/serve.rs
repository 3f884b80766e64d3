// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve`: a daemon that serves many restores, one after another and at once.

use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, absolute};
use std::time::Instant;

use anyhow::Context as _;
use tracing::{error, info, warn};

use super::{detach, to_notify};
use crate::cli::Serve;
use crate::control::registry::Facts;
use crate::control::server::{self, Until};
use crate::logging;
use rewake_streamer::session::address;
use rewake_streamer::supervise::supervisor::{self, Start};
use rewake_streamer::supervise::worker;

/// Runs the command; gives the exit code.
///
/// # Errors
/// The socket cannot be bound, or the daemon cannot be started.
pub fn run(options: &Serve) -> anyhow::Result<u8> {
    let socket = match &options.socket {
        Some(path) => absolute(path)?,
        None => address::default_socket()?,
    };
    let pidfile = options.pidfile.as_deref().map(absolute).transpose()?;
    logging::start(options.log_file.as_deref(), options.verbosity)?;
    // Before the socket is bound: what serves those sessions must not hold it.
    if !options.until_idle {
        super::recover::start_all(options.status_fd);
    }
    // Bound before the first worker is forked: all workers share the one listener, and clients that come between the death
    // of a worker and its successor's start wait in its queue.
    let listener = address::bind(&socket)?;
    let mut notify = to_notify(options.status_fd);
    if options.daemon
        && let Some(code) = detach::background(pidfile.as_deref(), &mut notify)?
    {
        return Ok(code);
    }
    std::env::set_current_dir("/").context("entering /")?;
    let started = Instant::now();
    let until = if options.until_idle { Until::Idle } else { Until::Asked };
    let code = supervisor::supervise(notify, |start| {
        let facts = Facts { pid: start.supervisor, started };
        worker_main(start, &listener, facts, until, options.log_file.is_some())
    });
    remove(&socket);
    code.map(supervisor::asked_to_stop_is_well)
}

fn worker_main(start: &Start, listener: &UnixListener, facts: Facts, until: Until, logged: bool) -> u8 {
    let served = worker::block_on(start, async |daemon| {
        let listener = listener.try_clone().context("taking the control socket")?;
        server::run(daemon, listener, facts, until, || start.ready()).await
    });
    match served {
        Ok(()) => 0,
        Err(error) if error.is::<worker::AskedToStop>() => {
            info!("{error}");
            0
        }
        Err(error) => {
            error!("{error:#}");
            if logged {
                // One line for people too; nobody reads it when stderr is closed.
                let _ = writeln!(std::io::stderr(), "rewake: {error:#}");
            }
            1
        }
    }
}

fn remove(socket: &Path) {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            warn!(%error, "removing {}", socket.display());
        }
        _ => {}
    }
}
