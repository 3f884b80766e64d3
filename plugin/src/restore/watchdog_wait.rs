// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes a task wait until the CRIU watchdog runs. CRIU reports a fork while the task runs already, and may
//! be killed before the watchdog starts. So the task waits, without GPU state, for the watchdog or for CRIU's
//! death.
//!
//! After five seconds it continues without a watchdog, with a warning. If CRIU is then killed before all
//! queues run, the task may wait without end or run without its GPUs. A later watchdog ends that risk when
//! all tasks are complete ([`super::resume`]).

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use rewake_criu_plugin::{Answer, Host};
use rewake_process::pidfd::pidfd_open;

use super::shared_state::SharedState;

/// Milliseconds between checks for the watchdog: it takes a few to start.
const POLL_INTERVAL_MS: u16 = 1;
/// How long a task waits for a watchdog. With CRIU 4.2 none starts if another plugin takes the POST_FORKING
/// call for itself.
const WATCHDOG_LIMIT: Duration = Duration::from_secs(5);

/// How tasks notice the death of CRIU's main process.
#[derive(Debug)]
pub(super) struct WatchdogWait {
    /// A pidfd of CRIU's main process, by its id in CRIU's store. None with CRIU 4.1, which does not report
    /// its forks.
    criu: Option<i32>,
}

#[derive(Debug, thiserror::Error)]
#[error("CRIU ended before its watchdog ran: this task ends, too")]
struct CriuEnded;

impl WatchdogWait {
    /// In the main process: called before it forks a task.
    pub(super) fn new(host: &Host) -> Answer<Self> {
        if !host.has_post_forking() {
            return Ok(Self { criu: None });
        }
        let own = pidfd_open(std::process::id().cast_signed())?;
        Ok(Self { criu: Some(host.store_fd(own.as_fd())?) })
    }

    /// In a task: waits until the watchdog runs.
    pub(super) fn wait(&self, host: &Host, state: &SharedState) -> Answer {
        let Some(criu) = self.criu.filter(|_| !state.has_watchdog()) else { return Ok(()) };
        if !wait_for_watchdog(&host.stored_fd(criu)?, || state.has_watchdog(), WATCHDOG_LIMIT)? {
            host.warn(format_args!(
                "no CRIU watchdog runs {WATCHDOG_LIMIT:?} after the fork of the restored tasks: does \
                 another plugin take POST_FORKING for itself? If CRIU is killed now, kill the tasks"
            ));
            // No other task has to wait.
            state.stop_watchdog_wait();
        }
        Ok(())
    }
}

/// Waits until a watchdog runs; returns false if none does within this time.
fn wait_for_watchdog(criu: &OwnedFd, has_watchdog: impl Fn() -> bool, timeout: Duration) -> Answer<bool> {
    let start = Instant::now();
    while start.elapsed() < timeout {
        let ended = has_ended(criu.as_fd())?;
        // CRIU may have started it just before its death.
        if has_watchdog() {
            return Ok(true);
        }
        if ended {
            return Err(CriuEnded.into());
        }
    }
    Ok(false)
}

/// Returns whether a process has ended or ends within the interval.
fn has_ended(process: BorrowedFd<'_>) -> Result<bool, Errno> {
    match poll(&mut [PollFd::new(process, PollFlags::POLLIN)], POLL_INTERVAL_MS) {
        Err(Errno::EINTR) => Ok(false),
        ended => Ok(ended? > 0),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::process::{Child, Command, Stdio};

    use rewake_criu_plugin::Refusal;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn criu() -> (Child, OwnedFd) {
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let file = pidfd_open(child.id().cast_signed()).unwrap();
        (child, file)
    }

    #[test]
    fn a_task_continues_when_a_watchdog_runs() {
        let (mut criu, file) = criu();
        let looks = Cell::new(0);
        let after_some = || looks.replace(looks.get() + 1) == 5;
        assert!(wait_for_watchdog(&file, after_some, LONG).unwrap());
        assert_eq!(looks.get(), 6);
        criu.kill().unwrap();
        criu.wait().unwrap();
        assert!(wait_for_watchdog(&file, || true, LONG).unwrap(), "started just before CRIU's death");
    }

    #[test]
    fn the_wait_is_bounded() {
        let (mut criu, file) = criu();
        assert!(!wait_for_watchdog(&file, || false, Duration::from_millis(50)).unwrap());
        criu.kill().unwrap();
        criu.wait().unwrap();
    }

    #[test]
    fn a_task_without_a_watchdog_does_not_outlive_criu() {
        let (mut criu, file) = criu();
        // While it waits.
        drop(criu.stdin.take());
        let Err(Refusal::Failed(why)) = wait_for_watchdog(&file, || false, LONG) else {
            panic!("it continues")
        };
        assert!(why.to_string().starts_with("CRIU ended"), "{why}");
        criu.wait().unwrap();
    }
}
