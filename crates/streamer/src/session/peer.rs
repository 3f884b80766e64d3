// SPDX-License-Identifier: MIT OR Apache-2.0
//! Watches the process that connected to `lazy-pages.socket`: `criu restore`, which lives until it has sent
//! its finish notice. The connection alone does not show its end, because its tasks have copies of it.

use std::future::{Future, pending};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use crate::sys;
use crate::watched;

/// How long CRIU may take from its connection to the first task. Before that it makes namespaces and runs
/// action scripts, but reads no memory.
const FIRST_LIMIT: Duration = Duration::from_secs(600);
/// How long the rest of a message may take, which CRIU sends at once. This is enough for a machine that is
/// suspended or short of memory.
const STEP_LIMIT: Duration = Duration::from_secs(120);

/// The restore's process, and the time of its last message.
#[derive(Debug)]
pub(crate) struct Peer {
    process: PeerProcess,
    /// When the last message was received.
    since: Instant,
}

#[derive(Debug)]
enum PeerProcess {
    Lives(AsyncFd<OwnedFd>),
    Ended,
    /// It is in another pid namespace, or the kernel does not report it.
    Unknown,
}

/// The step of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeStep {
    /// No task has reported.
    First,
    /// The rest of a message is outstanding.
    Midway,
    /// The next task or the finish notice is outstanding. CRIU reads memory that is not lazy meanwhile,
    /// without a limit.
    Between,
}

impl Peer {
    /// Watches the peer process of `connection`.
    pub(crate) fn of(connection: &AsyncFd<OwnedFd>) -> Self {
        let process = match sys::peer_process(connection.get_ref().as_fd()).and_then(watched::watch) {
            Ok(process) => PeerProcess::Lives(process),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => PeerProcess::Ended,
            Err(error) => {
                debug!(%error, "no process descriptor for the restore");
                PeerProcess::Unknown
            }
        };
        Self { process, since: Instant::now() }
    }

    /// Notes that a message was received.
    pub(crate) fn note_message(&mut self) {
        self.since = Instant::now();
    }

    /// Returns whether it has ended. All that it sent is then in the connection.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.process, PeerProcess::Ended)
    }

    /// Waits until the process ends. A second call waits for ever.
    pub(crate) async fn ended(&mut self) {
        if let PeerProcess::Lives(process) = &self.process
            && process.readable().await.is_ok()
        {
            self.process = PeerProcess::Ended;
            return;
        }
        pending::<()>().await;
    }

    /// Waits until the time limit of the step has passed.
    pub(crate) fn too_long(&self, step: HandshakeStep) -> impl Future<Output = ()> + use<> {
        let limit = match step {
            HandshakeStep::First => Some(FIRST_LIMIT),
            HandshakeStep::Midway => Some(STEP_LIMIT),
            HandshakeStep::Between => None,
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixListener;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
    use tokio::time::timeout;

    use super::*;

    const AT_ONCE: Duration = Duration::from_secs(10);

    fn block_on(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    /// Starts a child that connects and then sleeps. This process keeps a copy of its end, like the tasks of
    /// a restore.
    fn connect_child(client: &OwnedFd, address: &UnixAddr) -> i32 {
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            if connect(client.as_raw_fd(), address).is_ok() {
                crate::uffd_child::sleep(0);
            }
            // SAFETY: ends the child without running the test process's destructors.
            unsafe { libc::_exit(1) };
        }
        assert!(pid > 0);
        pid
    }

    #[test]
    fn the_end_of_criu_is_seen_though_its_tasks_keep_the_connection() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let client = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let pid = connect_child(&client, &UnixAddr::new(&path).unwrap());
        block_on(async {
            let connection = watched::watch(listener.accept().unwrap().0.into()).unwrap();
            let mut peer = Peer::of(&connection);
            assert!(timeout(Duration::from_millis(50), peer.ended()).await.is_err() && !peer.has_ended());
            crate::uffd_child::kill(pid);
            timeout(AT_ONCE, peer.ended()).await.unwrap();
            assert!(peer.has_ended() && !sys::has_hung_up(connection.get_ref().as_raw_fd()));
            // SAFETY: waits for a child of this process, and the kernel writes no status.
            assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
            let mut of_successor = Peer::of(&connection);
            assert!(of_successor.has_ended() || timeout(AT_ONCE, of_successor.ended()).await.is_ok());
        });
    }

    #[test]
    fn each_step_but_the_time_between_tasks_has_a_limit() {
        block_on(async {
            let long_ago = |limit| Peer { process: PeerProcess::Unknown, since: Instant::now() - limit };
            for (step, limit) in [(HandshakeStep::First, FIRST_LIMIT), (HandshakeStep::Midway, STEP_LIMIT)] {
                timeout(AT_ONCE, long_ago(limit).too_long(step)).await.unwrap();
                let not_yet = long_ago(limit.saturating_sub(Duration::from_secs(60)));
                assert!(
                    timeout(Duration::from_millis(20), not_yet.too_long(step)).await.is_err(),
                    "{step:?}"
                );
            }
            let between = long_ago(FIRST_LIMIT).too_long(HandshakeStep::Between);
            assert!(timeout(Duration::from_millis(20), between).await.is_err());
            let mut active = long_ago(STEP_LIMIT);
            active.note_message();
            assert!(
                timeout(Duration::from_millis(20), active.too_long(HandshakeStep::Midway)).await.is_err()
            );
        });
    }
}
