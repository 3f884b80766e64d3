// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a worker process: its control thread, and its end on SIGTERM.

use std::time::Duration;

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};
use tokio::signal::unix::{self, SignalKind, signal};
use tracing::{error, info, warn};

use crate::ledger::Ledger;
use crate::session::serve::Worker;
use crate::supervise::supervisor::Start;

/// The time between two notes that a worker serves.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// SIGTERM ended [`block_on`], and no restored process depends on this worker.
#[derive(Debug, thiserror::Error)]
#[error("stopped by SIGTERM")]
pub struct AskedToStop;

/// Runs `work` on the control thread of a worker.
///
/// # Errors
/// `work` failed, or the worker cannot be set up, or it was stopped by SIGTERM: [`AskedToStop`].
pub fn block_on<T>(start: &Start, work: impl AsyncFnOnce(&Worker) -> anyhow::Result<T>) -> anyhow::Result<T> {
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
        // All other signals stay blocked, as in the supervisor. A terminal's SIGINT reaches the supervisor
        // too, which forwards it as SIGTERM.
        take_requests().context("unblocking SIGTERM")?;
        let worker = Worker::start(start.ledger, start.starter.clone())?;
        tokio::select! {
            result = work(&worker) => result,
            () = stop_requests(&worker, requests) => Err(AskedToStop.into()),
            error = watch_supervisor(start) => Err(error),
            () = beat(start.ledger) => unreachable!("it never returns"),
        }
    })
}

/// Aborts the worker when one of its threads panics: it cannot serve without the thread. The supervisor then
/// starts another.
fn crash_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        error!("{panic}");
        std::process::abort();
    }));
}

/// Unblocks SIGTERM, the one signal that a worker handles.
///
/// # Errors
/// The kernel's errno.
pub fn take_requests() -> nix::Result<()> {
    SigSet::from(Signal::SIGTERM).thread_unblock()
}

/// Returns after SIGTERM, when no restored process depends on this worker.
///
/// While some do, the worker serves them. SIGTERM may arrive several times: a service manager signals every
/// process of a group, and the supervisor forwards the signal, too.
async fn stop_requests(worker: &Worker, mut requests: unix::Signal) {
    while requests.recv().await.is_some() {
        if !worker.ledger.session().is_under_way() {
            break;
        }
        // A session that is on demand only loads the rest now: else its end might be a day away.
        if !worker.asked_to_stop.replace(true) {
            info!(
                "SIGTERM: this process ends when all memory of the restore is resident, which is loaded now"
            );
        }
    }
}

/// Notes every second that this worker serves. If it is killed, `rewake status` shows how long ago. Never
/// returns.
async fn beat(ledger: Ledger) {
    loop {
        ledger.beat();
        tokio::time::sleep(HEARTBEAT_INTERVAL).await;
    }
}

/// Logs a warning if the supervisor is killed. Returns only an error.
async fn watch_supervisor(start: &Start) -> anyhow::Error {
    match start.supervisor.ended().await {
        Ok(()) => {
            warn!(
                "supervisor {} was killed: if this process is killed too, targets wait for `rewake recover`",
                start.supervisor.pid
            );
            std::future::pending().await
        }
        Err(error) => error,
    }
}
