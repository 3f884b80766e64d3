// SPDX-License-Identifier: MIT OR Apache-2.0
//! From a task's fork until a guard looks after it. CRIU says that it has forked beside what the task does already, and may be
//! killed in between: the task waits for the guard, without GPU state that nobody would let go on, or for CRIU's end. After five
//! seconds it goes on unguarded, with a warning: until all queues run, or a guard is there when all tasks are whole
//! ([`super::resume`]), CRIU's death would leave it waiting, or running without its GPUs.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use rewake_criu_plugin::{Answer, Host};

use super::shared_state::SharedState;
use crate::abi;

/// Milliseconds between looks for the guard: it takes a few to start.
const LOOK: u16 = 1;
/// How long a task waits for one. With CRIU 4.2 there is none if a plugin that was asked before this one takes the call for itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// What tasks know CRIU's main process by.
#[derive(Debug)]
pub(super) struct Forked {
    /// In CRIU's store. None with CRIU 4.1, which does not say when it forks.
    criu: Option<i32>,
}

#[derive(Debug, thiserror::Error)]
#[error("CRIU ended before a process was there that looks after what it restores: this task ends, too")]
struct Alone;

impl Forked {
    /// In the main process, before it forks a task.
    pub(super) fn new(host: &Host) -> Answer<Self> {
        if !host.has_post_forking() {
            return Ok(Self { criu: None });
        }
        let own = abi::task(std::process::id().cast_signed())?;
        Ok(Self { criu: Some(host.store_fd(own.as_fd())?) })
    }

    /// In a task: waits until it is looked after.
    pub(super) fn until_guarded(&self, host: &Host, board: &SharedState) -> Answer {
        let Some(criu) = self.criu.filter(|_| !board.is_guarded()) else { return Ok(()) };
        if !guarded(&host.stored_fd(criu)?, || board.is_guarded(), PATIENCE)? {
            host.warn(format_args!(
                "nothing looks after the restored tasks {PATIENCE:?} after they were forked: does another plugin take \
                 POST_FORKING for itself? Should CRIU be killed now, kill them"
            ));
            // Nobody else need wait.
            board.put_guarded();
        }
        Ok(())
    }
}

/// False if it is not within this time.
fn guarded(criu: &OwnedFd, is_guarded: impl Fn() -> bool, patience: Duration) -> Answer<bool> {
    let start = Instant::now();
    while start.elapsed() < patience {
        let ended = has_ended(criu.as_fd())?;
        // It may have been its last deed.
        if is_guarded() {
            return Ok(true);
        }
        if ended {
            return Err(Alone.into());
        }
    }
    Ok(false)
}

/// Whether a process has ended, or does so soon.
fn has_ended(process: BorrowedFd<'_>) -> Result<bool, Errno> {
    match poll(&mut [PollFd::new(process, PollFlags::POLLIN)], LOOK) {
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
        let file = abi::task(child.id().cast_signed()).unwrap();
        (child, file)
    }

    #[test]
    fn a_task_goes_on_when_it_is_guarded() {
        let (mut criu, file) = criu();
        let looks = Cell::new(0);
        let after_some = || looks.replace(looks.get() + 1) == 5;
        assert!(guarded(&file, after_some, LONG).unwrap());
        assert_eq!(looks.get(), 6);
        criu.kill().unwrap();
        criu.wait().unwrap();
        assert!(guarded(&file, || true, LONG).unwrap(), "that was its last deed");
    }

    #[test]
    fn it_does_not_wait_for_ever() {
        let (mut criu, file) = criu();
        assert!(!guarded(&file, || false, Duration::from_millis(50)).unwrap());
        criu.kill().unwrap();
        criu.wait().unwrap();
    }

    #[test]
    fn a_task_without_a_guard_does_not_outlive_criu() {
        let (mut criu, file) = criu();
        // While it waits.
        drop(criu.stdin.take());
        let Err(Refusal::Failed(why)) = guarded(&file, || false, LONG) else { panic!("it goes on") };
        assert!(why.to_string().starts_with("CRIU ended"), "{why}");
        criu.wait().unwrap();
    }
}
