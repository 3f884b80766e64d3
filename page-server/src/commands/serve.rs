// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve`: the node agent, which starts a streamer for each restore.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::path::{Path, absolute};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use tracing::{info, warn};

use super::detach::{self, Pidfile, PidfileRule};
use super::{control_socket, print, ready};
use crate::agent;
use crate::cli::ServeArgs;
use crate::logging;
use rewake_node_cache::{CacheFolder, NodeCache};
use rewake_process::{private_socket, service_manager};

/// Runs the command; gives the exit code.
///
/// # Errors
/// The socket cannot be bound, or the agent cannot be started.
pub fn run(options: &ServeArgs) -> anyhow::Result<u8> {
    let socket = control_socket(options.socket.as_deref())?;
    let path = options.pidfile.as_deref().filter(|_| options.daemon).map(absolute).transpose()?;
    let pidfile = path.map(|path| Pidfile::claim(&path, PidfileRule::Agent)).transpose()?;
    let log = logging::start(options.log_file.as_deref(), options.verbosity)?;
    let mut ready = ready(options.status_fd)?;
    let own = options.daemon.then_some(log.as_ref());
    // It is closed on exec from here on, and no other socket is bound before the sessions of other agents are
    // served again: the processes that serve those must not hold it.
    let given = service_manager::take_listener(&socket)?;
    super::recover::start_all(ready.waiting.first().map(AsRawFd::as_raw_fd), own);
    if options.cache.is_some() {
        rewake_image_store::need_stores("--cache")?;
    }
    let folder =
        options.cache.as_deref().map(|path| CacheFolder::open(path, options.cache_size)).transpose()?;
    let metrics = options.metrics.map(listen).transpose()?;
    let is_given = given.is_some();
    let listener = given.map_or_else(|| private_socket::bind(&socket), Ok)?;
    if options.daemon
        && let Some(code) = detach::background(pidfile.as_ref(), log, &mut ready)?
    {
        return Ok(code);
    }
    std::env::set_current_dir("/").context("entering /")?;
    // A terminal or a script sends SIGHUP or SIGUSR1 to whole groups: these must not end the agent.
    let mut unused = SigSet::all();
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCHLD].into_iter().for_each(|used| unused.remove(used));
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&unused), None).context("blocking signals")?;
    // It has threads, and a process that goes to the background loses its threads.
    let cache = folder.map(NodeCache::start).transpose()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(agent::run(listener, &socket, cache.clone(), metrics, || {
        // Whatever the log level; with -d, before the command returns.
        print::say(format!("listening on {}", socket.display()));
        if let Err(error) = ready.report_once().and_then(|()| service_manager::report_ready()) {
            warn!(%error, "reporting that the agent is ready");
        }
    }));
    if !is_given {
        remove(&socket);
    }
    if let Some(pidfile) = pidfile {
        pidfile.release();
    }
    // Threads that wait for a store or compare an image end with the process: an agent may be killed at any
    // moment.
    runtime.shutdown_background();
    std::mem::forget(cache);
    served.map(|()| 0)
}

/// Listens for clients of the metrics.
fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listen = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        info!("metrics are served on http://{}/metrics", listener.local_addr()?);
        Ok::<_, std::io::Error>(listener)
    };
    let listener = listen().with_context(|| format!("--metrics {address}"))?;
    if !address.ip().is_loopback() {
        warn!("--metrics {address}: every host that reaches this address may read the metrics");
    }
    Ok(listener)
}

fn remove(socket: &Path) {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            warn!(%error, "removing {}", socket.display());
        }
        _ => {}
    }
}
