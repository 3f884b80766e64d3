// SPDX-License-Identifier: MIT OR Apache-2.0
//! A worker process: reactors, the control thread, and what it does when it is asked to stop.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};
use tokio::signal::unix::{self, SignalKind, signal};
use tracing::{error, info, warn};

use crate::ledger::Ledger;
use crate::session::daemon::Daemon;
use crate::supervise::supervisor::Start;
use crate::sys;

/// Between two notes that a worker serves.
const BEAT: Duration = Duration::from_secs(1);

/// Why [`block_on`] ended: SIGTERM, and no restored process depends on this worker.
#[derive(Debug, thiserror::Error)]
#[error("asked to stop")]
pub struct AskedToStop;

/// Runs `work` on the control thread of a worker.
///
/// # Errors
/// What `work` gives, or the worker cannot be set up, or it was asked to stop.
pub fn block_on<T>(
    start: &Start,
    work: impl AsyncFnOnce(&Arc<Daemon>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    start.close_leftovers().context("closing what the last worker left open")?;
    let generation = start.ledger.next_generation();
    if generation > 1 {
        warn!(generation, "taking over");
    }
    crash_on_panic();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("making a runtime")?;
    runtime.block_on(async {
        let requests = signal(SignalKind::terminate()).context("watching SIGTERM")?;
        // All others stay blocked, as the supervisor left them. SIGINT of a terminal reaches the supervisor too,
        // which passes it on as SIGTERM.
        take_requests().context("unblocking SIGTERM")?;
        let daemon = Daemon::start(start.ledger, start.starter)?;
        tokio::select! {
            result = work(&daemon) => result,
            () = stop_requests(&daemon, requests) => Err(AskedToStop.into()),
            error = watch_supervisor(start) => Err(error),
            () = beat(start.ledger) => unreachable!("it never returns"),
        }
    })
}

/// A worker that lost a thread keeps no promise: the supervisor starts another.
fn crash_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        error!("{panic}");
        std::process::abort();
    }));
}

/// Lets SIGTERM in, the one signal that a worker takes.
///
/// # Errors
/// The kernel's.
pub fn take_requests() -> nix::Result<()> {
    SigSet::from(Signal::SIGTERM).thread_unblock()
}

/// Ends at once when no restored process depends on this worker, else when none does any more. However often it
/// is asked: a service manager asks every process of a group, and the supervisor passes on what it is asked.
async fn stop_requests(daemon: &Daemon, mut requests: unix::Signal) {
    while requests.recv().await.is_some() {
        let depending = daemon.restores_under_way();
        if depending == 0 {
            break;
        }
        if !daemon.stopping.send_replace(true) {
            info!(sessions = depending, "asked to stop: this process ends when all their memory is resident");
        }
    }
}

/// Says again and again that this worker serves: if it is killed, `rewake status` says how long ago. Never returns.
async fn beat(ledger: Ledger) {
    loop {
        ledger.beat();
        tokio::time::sleep(BEAT).await;
    }
}

/// Says when the supervisor has been killed. Never returns while all is well.
async fn watch_supervisor(start: &Start) -> anyhow::Error {
    match supervisor_ended(start.supervisor).await {
        Ok(()) => {
            warn!(
                "supervisor {} was killed: if this process is killed too, targets wait for `rewake recover`",
                start.supervisor
            );
            std::future::pending().await
        }
        Err(error) => error,
    }
}

async fn supervisor_ended(pid: i32) -> anyhow::Result<()> {
    let pidfd: OwnedFd = match sys::pidfd_open(pid) {
        Ok(pidfd) => pidfd,
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(()),
        Err(error) => return Err(error).context("watching the supervisor"),
    };
    let watched = sys::watch(pidfd).context("watching the supervisor")?;
    while !sys::has_ended(watched.as_raw_fd()) {
        watched.readable().await?.clear_ready();
    }
    Ok(())
}
