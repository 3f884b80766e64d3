// SPDX-License-Identifier: MIT OR Apache-2.0
//! The missing memory of one image: the fetcher that brings it, which is started again when it ends, and the
//! sockets of the streamers that share it.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::process::Child;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, Shutdown, SockFlag, SockType, shutdown, socketpair};
use rewake_criu_images::Digest;
use rewake_fetcher::MAX_FETCH_CLIENTS;
use rewake_fetcher::channel::{self, FetchReport};
use rewake_fetcher::plan::PagePeer;
use rewake_fetcher::restarts::FetcherRestarts;
use rewake_streamer::fetch_peer::{FetchPeer, FetchedImage};
use rewake_streamer::shared_fetch::SharedFetch;
use tracing::{info, warn};

/// Time for a fetcher to be started. A restore that needs it waits for this long, and then fails.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Pause between two looks whether a fetcher was started.
const START_INTERVAL: Duration = Duration::from_millis(20);

/// What a streamer gets.
#[derive(Debug)]
pub struct SharedSockets {
    /// The presence map, for reading.
    pub presence: OwnedFd,
    /// The socket to the fetcher.
    pub socket: OwnedFd,
    /// Where the files are in the presence map.
    pub layout: u64,
}

/// Why no more memory of an image arrives. Restores that wait for it end: asking again does not help.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct MemoryLost(pub(crate) String);

/// The missing memory of an image.
#[derive(Debug)]
pub(crate) struct ArrivingMemory {
    id: Digest,
    fetch: SharedFetch,
    run: Mutex<FetcherRun>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The fetcher that runs.
#[derive(Debug, Default)]
struct FetcherRun {
    /// The socket to it; none while none runs.
    socket: Option<OwnedFd>,
    /// Its ends of the sockets of streamers, which it shuts down when it does not serve one any more.
    clients: Vec<OwnedFd>,
    /// Why no more memory arrives.
    failure: Option<String>,
    stopped: bool,
}

impl ArrivingMemory {
    /// Plans what a directory lacks, and starts the fetcher. The image server listens on `server`. `ended` is
    /// called, in a thread of its own, when all bytes have arrived, or no more of them do.
    ///
    /// # Errors
    /// The directory has no image, or a damaged one.
    pub(crate) fn start(
        id: Digest,
        directory: &Path,
        server: &Path,
        ended: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) -> anyhow::Result<Arc<Self>> {
        let image = Some(FetchedImage { name: id.to_string().into(), id: id.to_string() });
        let peer = FetchPeer { peer: PagePeer::Unix(server.to_owned()), tls: None, connected: None, image };
        let fetch = SharedFetch::prepare(directory, &peer)?;
        let (run, changed, thread) = (Mutex::default(), Condvar::new(), Mutex::default());
        let memory = Arc::new(Self { id, fetch, run, changed, thread });
        let own = Arc::clone(&memory);
        let serve = move || {
            own.run_fetchers();
            ended(&own);
        };
        let started = thread::Builder::new().name("fetch".to_owned()).spawn(serve);
        *memory.thread() = Some(started.context("starting a thread")?);
        Ok(memory)
    }

    fn run(&self) -> MutexGuard<'_, FetcherRun> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the bytes that have not arrived.
    pub(crate) fn missing(&self) -> u64 {
        self.fetch.missing()
    }

    /// Returns whether all bytes have arrived.
    pub(crate) fn has_arrived(&self) -> bool {
        self.fetch.is_closed()
    }

    /// Returns why no more memory arrives; none while it does.
    pub(crate) fn failure(&self) -> Option<String> {
        self.run().failure.clone()
    }

    /// Gives a streamer a part in the fetcher.
    ///
    /// # Errors
    /// No more memory arrives, or too many streamers share the fetcher.
    pub(crate) fn join(&self) -> anyhow::Result<SharedSockets> {
        let (socket, its) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .context("making a socket for a streamer")?;
        let presence = self.fetch.presence().try_clone_to_owned().context("the presence map")?;
        let sockets = SharedSockets { presence, socket, layout: self.fetch.layout() };
        let deadline = Instant::now() + START_LIMIT;
        let mut run = self.run();
        loop {
            // Nothing is missing: no fetcher is needed, and a streamer sees that in the map.
            if self.fetch.is_closed() {
                return Ok(sockets);
            }
            if let Some(reason) = &run.failure {
                // After a stop it may be brought again.
                ensure!(!run.stopped, "{reason}");
                return Err(MemoryLost(reason.clone()).into());
            }
            run.clients.retain(is_served);
            let served = run.clients.len();
            ensure!(
                served < MAX_FETCH_CLIENTS,
                "{served} restores of this image wait for its memory: try again"
            );
            if let Some(socket) = &run.socket
                && channel::send_client(socket.as_fd(), its.as_fd()).is_ok()
            {
                run.clients.push(its);
                return Ok(sockets);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("no fetcher was started in {} s", START_LIMIT.as_secs());
            }
            // The thread of the fetchers may not have seen yet that one has ended.
            let pause = left.min(START_INTERVAL);
            run = self.changed.wait_timeout(run, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the fetcher: no byte is written after that.
    pub(crate) fn stop(&self) {
        let mut run = self.run();
        run.stopped = true;
        run.failure.get_or_insert_with(|| "the agent has ended the fetcher of this image".to_owned());
        if let Some(socket) = &run.socket {
            // The thread of the fetchers sees the end of the socket, and kills it.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
        drop(run);
        self.changed.notify_all();
        if let Some(thread) = self.thread().take() {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
    }

    /// Starts fetchers until all bytes have arrived, or no more of them do.
    fn run_fetchers(&self) {
        let (mut restarts, mut again) = (FetcherRestarts::default(), false);
        loop {
            let Some((may_help, reason)) = end_of(self.run_one(again)) else { return };
            if self.run().stopped {
                return;
            }
            let pause = if may_help {
                restarts.note_end(self.fetch.arrived()).map_err(|limit| format!("{reason}: {limit}"))
            } else {
                Err(reason.clone())
            };
            let pause = match pause {
                Ok(pause) => pause,
                Err(reason) => {
                    warn!("image {}: {reason}: no more of its memory arrives", self.id);
                    self.run().failure = Some(reason);
                    self.changed.notify_all();
                    return;
                }
            };
            warn!("image {}: {reason}: starting another fetcher", self.id);
            thread::sleep(pause);
            again = true;
        }
    }

    /// Runs a fetcher to its end. Returns its last report: none but [`FetchReport::Closed`] and
    /// [`FetchReport::Failed`] if it was killed.
    fn run_one(&self, again: bool) -> anyhow::Result<FetchReport> {
        let (mut child, socket) = self.fetch.start(again)?;
        // If it has ended, that is found by its socket.
        let _ = channel::send_finish(socket.as_fd());
        let shared = socket.try_clone().context("the fetcher's socket");
        let followed = shared.and_then(|shared| {
            let mut run = self.run();
            if run.stopped {
                bail!("stopped");
            }
            run.socket = Some(shared);
            drop(run);
            self.changed.notify_all();
            self.follow(&socket)
        });
        {
            let mut run = self.run();
            run.socket = None;
            // Streamers see the ends of their sockets.
            run.clients.clear();
        }
        drop(socket);
        reap(&mut child);
        followed
    }

    fn follow(&self, socket: &OwnedFd) -> anyhow::Result<FetchReport> {
        let mut last = FetchReport::Refused(String::new());
        loop {
            match channel::receive_report(socket.as_fd()) {
                Ok(None) => {
                    match poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE) {
                        Ok(_) | Err(Errno::EINTR) => {}
                        Err(errno) => return Err(errno).context("waiting for the fetcher"),
                    }
                }
                Ok(Some(FetchReport::Connected(_))) => {
                    info!("image {}: the fetcher is connected", self.id);
                }
                Ok(Some(FetchReport::Refused(reason))) => {
                    warn!("image {}: the fetcher does not serve a streamer any more: {reason}", self.id);
                }
                Ok(Some(report)) => last = report,
                // It has ended.
                Err(_) => return Ok(last),
            }
        }
    }
}

/// Returns why a fetcher has ended before all bytes have arrived, and whether another one may bring them.
/// None: they have arrived. One that could not be started may be so later: processes or memory may be short.
fn end_of(ran: anyhow::Result<FetchReport>) -> Option<(bool, String)> {
    match ran {
        Ok(FetchReport::Closed) => None,
        Ok(FetchReport::Failed { again, reason }) => Some((again, reason)),
        Ok(_) => Some((true, "the fetcher has ended".to_owned())),
        Err(error) => Some((true, format!("{error:#}"))),
    }
}

/// Whether a streamer and the fetcher have both ends of a socket: this process has a copy of the fetcher's.
fn is_served(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let ended = PollFlags::POLLHUP | PollFlags::POLLERR;
    poll(&mut polled, PollTimeout::ZERO).is_ok()
        && !polled[0].revents().is_some_and(|events| events.intersects(ended))
}

/// Takes the status of a fetcher, which has closed its socket: it has ended, or hangs in the kernel.
fn reap(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fetcher_that_could_not_be_started_is_started_again() {
        let short = anyhow::Error::from(Errno::EAGAIN).context("starting the fetcher");
        let (again, reason) = end_of(Err(short)).unwrap();
        assert!(again && reason.starts_with("starting the fetcher: EAGAIN"), "{reason}");
        let wrong = FetchReport::Failed { again: false, reason: "a wrong answer".to_owned() };
        assert_eq!(end_of(Ok(wrong)), Some((false, "a wrong answer".to_owned())));
        assert_eq!(end_of(Ok(FetchReport::Closed)), None);
    }

    #[test]
    fn a_streamer_is_served_until_it_or_the_fetcher_ends_its_socket() {
        let pair =
            || socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let (streamer, fetcher) = pair();
        assert!(is_served(&fetcher));
        drop(streamer);
        assert!(!is_served(&fetcher));
        let (_streamer, fetcher) = pair();
        let its = fetcher.try_clone().unwrap();
        shutdown(its.as_raw_fd(), Shutdown::Both).unwrap();
        assert!(!is_served(&fetcher));
    }
}
