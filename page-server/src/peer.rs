// SPDX-License-Identifier: MIT OR Apache-2.0
//! The process that connected to `lazy-pages.socket`: `criu restore` itself, which lives until it has said that it has
//! finished. Its tasks have copies of the connection, so that the connection alone does not tell when it ends.

use std::future::{Future, pending};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use crate::sys;

/// How long CRIU may take from its connection to the first task: it makes namespaces and runs action scripts, and
/// reads no memory before.
const FIRST_LIMIT: Duration = Duration::from_secs(600);
/// How long the rest of a message may take, which CRIU sends at once: long enough for a machine that is suspended or
/// short of memory.
const STEP_LIMIT: Duration = Duration::from_secs(120);

/// What is known of it.
#[derive(Debug)]
pub(crate) struct Peer {
    process: Process,
    /// When the last message came.
    since: Instant,
}

#[derive(Debug)]
enum Process {
    Lives(AsyncFd<OwnedFd>),
    Ended,
    /// Of another pid namespace, or the kernel does not say.
    Unknown,
}

/// How far a handshake is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// No task has reported.
    First,
    /// The rest of a message is awaited.
    Midway,
    /// The next task, or the finish: CRIU reads memory that is not lazy meanwhile, however long that takes.
    Between,
}

impl Peer {
    pub(crate) fn of(connection: &AsyncFd<OwnedFd>) -> Self {
        let process = match sys::peer_process(connection.get_ref().as_fd()).and_then(sys::watch) {
            Ok(process) => Process::Lives(process),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Process::Ended,
            Err(error) => {
                debug!(%error, "no process descriptor for the restore");
                Process::Unknown
            }
        };
        Self { process, since: Instant::now() }
    }

    /// A message came.
    pub(crate) fn heard(&mut self) {
        self.since = Instant::now();
    }

    /// Whether it has ended: what it sent before is in the connection by then.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.process, Process::Ended)
    }

    /// Waits until it has ended; after that for ever.
    pub(crate) async fn ended(&mut self) {
        if let Process::Lives(process) = &self.process
            && process.readable().await.is_ok()
        {
            self.process = Process::Ended;
            return;
        }
        pending().await
    }

    /// Waits as long as the step may take.
    pub(crate) fn too_long(&self, step: Step) -> impl Future<Output = ()> + use<> {
        let limit = match step {
            Step::First => Some(FIRST_LIMIT),
            Step::Midway => Some(STEP_LIMIT),
            Step::Between => None,
        };
        let end = limit.map(|limit| self.since + limit);
        async move {
            match end {
                Some(end) => sleep_until(end).await,
                None => pending().await,
            }
        }
    }
}
