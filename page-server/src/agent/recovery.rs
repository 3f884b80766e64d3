// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves sessions again all of whose streamer's processes were killed, without being asked: their programs
//! wait for memory, and a child that was forked at that moment may read zeros until it is killed.
//!
//! `rewake recover` does that, in a process of its own, because the agent has threads and cannot fork.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use rewake_streamer::control::streamer;
use rewake_streamer::supervise::{launch, recover};
use tokio::process::{Child, Command};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, error};

/// Pause between two looks whether a session is served.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Time in which a session is served. Image files are compared before that, and all of /proc is read.
const SERVED_LIMIT: Duration = Duration::from_secs(60);
/// Time for another `rewake recover`, which has locked the session, to serve it.
const OTHER_LIMIT: Duration = Duration::from_secs(5);

/// Has the session of a work directory served again. Returns whether it is.
pub(super) async fn recover(work: &Path) -> bool {
    let mut child = match start() {
        Ok(child) => child,
        Err(error) => {
            error!("{error:#}");
            return false;
        }
    };
    let (mut deadline, mut runs) = (Instant::now() + SERVED_LIMIT, true);
    while Instant::now() < deadline {
        if streamer::connect(work).await.is_ok() {
            return true;
        }
        if !runs {
            sleep(LOOK_INTERVAL).await;
        } else if timeout_at(Instant::now() + LOOK_INTERVAL, child.wait()).await.is_ok() {
            runs = false;
            deadline = deadline.min(Instant::now() + OTHER_LIMIT);
        }
    }
    false
}

/// Looks for sessions of other starters (`rewake lazy-pages`), and has them served again.
pub(super) async fn recover_others() {
    match spawn_blocking(recover::orphans).await {
        Ok(Ok(orphans)) if orphans.is_empty() => {}
        // The runtime takes the status of the child.
        Ok(Ok(_)) => drop(start().inspect_err(|error| error!("{error:#}"))),
        Ok(Err(error)) => debug!("{error:#}"),
        // The agent ends.
        Err(_) => {}
    }
}

/// Starts `rewake recover`, which ends when all memory is resident. It writes to the agent's standard error.
fn start() -> anyhow::Result<Child> {
    Command::from(launch::recover_command()?).spawn().context("starting `rewake recover`")
}
