// SPDX-License-Identifier: MIT OR Apache-2.0
//! A worker process: reactors, the control thread, and what it does when it is asked to stop.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;

use anyhow::Context as _;
use tokio::signal::unix::{self, SignalKind, signal};
use tracing::{error, info, warn};

use crate::daemon::Daemon;
use crate::guardian::{self, Whom};
use crate::supervisor::Start;
use crate::sys;

/// Why [`block_on`] ended: SIGTERM, and no restored process depends on this worker.
#[derive(Debug, thiserror::Error)]
#[error("asked to stop")]
pub struct AskedToStop;

/// What a second request to stop is, while sessions are finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Again {
    /// To end them now.
    EndsThem,
    /// The same: who asks a group of processes asks the worker, and its supervisor, which asks it again.
    IsTheSame,
}

/// Runs `work` on the control thread of a worker.
///
/// # Errors
/// What `work` gives, or the worker cannot be set up, or it was asked to stop.
pub fn block_on<T>(
    start: &Start,
    again: Again,
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
        // Before anybody is told that it is ready: another thread's runtime may be the one that takes a signal, and one that nobody
        // listens for yet would be lost there.
        let requests = signal(SignalKind::terminate()).context("watching SIGTERM")?;
        let interrupts = signal(SignalKind::interrupt()).context("watching SIGINT")?;
        let daemon = Daemon::start(start.ledger)?;
        tokio::select! {
            result = work(&daemon) => result,
            () = stop_requests(&daemon, again, requests, interrupts) => Err(AskedToStop.into()),
            error = keep_guarded(start) => Err(error),
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

/// Ends at once when no restored process depends on this worker. Otherwise the first request lets the
/// sessions finish, and the second ends them.
async fn stop_requests(
    daemon: &Daemon,
    again: Again,
    mut requests: unix::Signal,
    mut interrupts: unix::Signal,
) {
    // The terminal sends SIGINT to the supervisor too, which passes it on as SIGTERM.
    tokio::spawn(async move { while interrupts.recv().await.is_some() {} });
    let mut asked = false;
    while requests.recv().await.is_some() {
        let depending = daemon.restores_under_way();
        if depending == 0 {
            break;
        }
        if asked && again == Again::IsTheSame {
            continue;
        }
        daemon.stopping.send_modify(|asked| *asked += 1);
        if asked {
            for session in daemon.sessions() {
                session.fail("asked twice to stop");
            }
            daemon.pool.look_again();
        } else {
            asked = true;
            let way = if again == Again::EndsThem { "; ask again to end the processes now" } else { "" };
            info!(sessions = depending, "asked to stop: once all memory is back{way}");
        }
    }
}

/// Watches the supervisor; when it is killed, a guardian takes its place. Never returns while all is well.
async fn keep_guarded(start: &Start) -> anyhow::Error {
    match supervisor_ended(start.supervisor).await {
        Ok(()) => {
            if let Some(pid) = guardian::start(start.ledger, Whom::All) {
                warn!("the supervisor is gone; guardian {pid} took its place");
            }
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
