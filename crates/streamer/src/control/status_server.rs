// SPDX-License-Identifier: MIT OR Apache-2.0
//! A streamer answers its clients on a socket in CRIU's work directory: `rewake restore`, `rewake serve` and
//! `rewake status -W` follow a restore there, whichever of them started the streamer.
//!
//! All processes of the streamer share the listening socket. So a client that is refused knows that the
//! streamer has ended, and one whose worker dies connects to the successor.

use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, watch};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};

use super::frame::{FrameError, receive, send};
use super::proto::{self, Ended, MemorySource, Reply, Request, State, reply, request};
use super::{MESSAGE_LIMIT, REPORT_INTERVAL, accept};
use crate::failure::{Failure, FailureCause};
use crate::fault_latencies::LatencyCounts;
use crate::record::Timeline;
use crate::record::model::{self, MemoryOrigin, ProcessMemory, Record};
use crate::session::socket;
use crate::sys;
use rewake_process::private_socket;

/// The socket's name in the work directory.
pub(super) const SOCKET: &str = "rewake.status";
/// Clients at once. More wait.
const CLIENTS: usize = 16;
/// Time that followers have to take the last message.
const LAST_LIMIT: Duration = Duration::from_secs(2);
/// Pause between two looks whether all followers have the last message.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// Time that the streamer of an earlier restore has to end. It is longer than [`LAST_LIMIT`], which that
/// streamer may use up.
const ENDING_LIMIT: Duration = Duration::from_secs(3);
const _: () = assert!(ENDING_LIMIT.as_millis() > LAST_LIMIT.as_millis());
/// Pause between two attempts to take the socket of that streamer.
const ENDING_INTERVAL: Duration = Duration::from_millis(20);

/// The listening socket, for this user only. Its file is removed with it.
#[derive(Debug)]
pub struct StatusSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl StatusSocket {
    /// Listens in a work directory.
    ///
    /// # Errors
    /// Another streamer answers there, or the socket cannot be made: see [`private_socket::bind`].
    pub fn bind(work: &Path) -> anyhow::Result<Self> {
        let directory = File::open(work).with_context(|| format!("opening {}", work.display()))?;
        let path = private_socket::within(&directory, SOCKET);
        let until = Instant::now() + ENDING_LIMIT;
        let listener = loop {
            match private_socket::bind(&path) {
                // The streamer of the last restore in this directory may be ending.
                Err(error) if error.is::<private_socket::SocketInUse>() && Instant::now() < until => {
                    std::thread::sleep(ENDING_INTERVAL);
                }
                Err(error) if error.is::<private_socket::SocketInUse>() => bail!(
                    "{}: another streamer listens here: end it, or give another -W directory",
                    work.join(socket::NAME).display()
                ),
                bound => break bound.with_context(|| format!("making {SOCKET} in {}", work.display()))?,
            }
        };
        Ok(Self { listener, path: work.join(SOCKET) })
    }

    /// Answers clients in a thread of its own: with the record of `timeline`; RESTORING once `connected`;
    /// `stop` is called when a client knows that no restore will connect any more.
    ///
    /// # Errors
    /// There is no descriptor or no thread left.
    pub fn answer(
        &self,
        timeline: Timeline,
        connected: impl Fn() -> bool + Send + Sync + 'static,
        stop: impl Fn() + Send + Sync + 'static,
    ) -> anyhow::Result<Answers> {
        let listener = self.listener.try_clone().context("sharing the socket")?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (last, followed) = (watch::channel(None).0, Arc::new(Semaphore::new(CLIENTS)));
        let restore = Arc::new(Followed {
            timeline,
            connected: Box::new(connected),
            stop: Box::new(stop),
            last: last.clone(),
            followers: Arc::clone(&followed),
        });
        let answer = move || {
            runtime.block_on(async {
                match tokio::net::UnixListener::from_std(listener) {
                    Ok(listener) => restore.answer(&listener).await,
                    Err(error) => warn!(%error, "no client can follow this restore"),
                }
            });
        };
        sys::thread_without_signals("status", answer).context("starting a thread")?;
        Ok(Answers { last, followers: followed })
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        // It may have been removed with its directory.
        let _ = fs::remove_file(&self.path);
    }
}

/// A thread that answers clients.
#[derive(Debug)]
pub struct Answers {
    last: watch::Sender<Option<Ended>>,
    /// Followers have a permit each.
    followers: Arc<Semaphore>,
}

impl Answers {
    /// Gives followers the last message, and waits up to [`LAST_LIMIT`] until all have received it.
    pub fn finish(self, ended: Ended) {
        self.last.send_replace(Some(ended));
        let until = Instant::now() + LAST_LIMIT;
        while self.followers.available_permits() < CLIENTS && Instant::now() < until {
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// What clients of a streamer may read and request.
struct Followed {
    timeline: Timeline,
    connected: Box<dyn Fn() -> bool + Send + Sync>,
    stop: Box<dyn Fn() + Send + Sync>,
    last: watch::Sender<Option<Ended>>,
    followers: Arc<Semaphore>,
}

impl Followed {
    async fn answer(self: Arc<Self>, listener: &tokio::net::UnixListener) {
        let room = Arc::new(Semaphore::new(CLIENTS));
        // An error means that the semaphore was closed, and no code closes it.
        while let Ok(place) = Arc::clone(&room).acquire_owned().await {
            let (stream, restore) = (accept::next(listener).await, Arc::clone(&self));
            tokio::spawn(async move {
                if let Err(error) = restore.client(stream).await {
                    debug!(%error, "a client was dropped");
                }
                drop(place);
            });
        }
    }

    async fn client(&self, mut stream: UnixStream) -> Result<(), FrameError> {
        if !accept::greet(&mut stream).await? {
            return Ok(());
        }
        while let Some(request) = receive::<Request>(&mut stream, MESSAGE_LIMIT).await? {
            let answer = match request.kind {
                Some(request::Kind::Streaming(_)) => reply::Kind::Streaming(self.now()),
                Some(request::Kind::Follow(_)) => return self.follow(&mut stream).await,
                Some(request::Kind::End(_)) => {
                    (self.stop)();
                    return self.follow(&mut stream).await;
                }
                _ => {
                    let reason = "this is a streamer, which only reports on its own restore".to_owned();
                    reply::Kind::Failure(proto::Failure { reason, lasting: false })
                }
            };
            send(&mut stream, &Reply { kind: Some(answer) }).await?;
        }
        Ok(())
    }

    async fn follow(&self, stream: &mut UnixStream) -> Result<(), FrameError> {
        // At most as many as clients: there is a permit.
        let Ok(_following) = Arc::clone(&self.followers).acquire_owned().await else { return Ok(()) };
        let mut last = self.last.subscribe();
        let mut reports = interval(REPORT_INTERVAL);
        reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let ended = last.borrow_and_update().clone();
            let is_last = ended.is_some();
            let kind = ended.map_or_else(|| reply::Kind::Streaming(self.now()), reply::Kind::Ended);
            send(stream, &Reply { kind: Some(kind) }).await?;
            if is_last {
                return Ok(());
            }
            tokio::select! {
                // An error is impossible: this value has the sender.
                _ = last.changed() => {}
                _ = reports.tick() => {}
            }
        }
    }

    fn now(&self) -> proto::Streaming {
        self.timeline.look();
        let mut now = streaming(&self.timeline.record());
        if now.state() == State::Listening && (self.connected)() {
            now.set_state(State::Restoring);
        }
        now
    }
}

/// Describes a record for clients.
#[must_use]
pub fn streaming(record: &Record) -> proto::Streaming {
    let state = match record.state {
        model::State::Waiting => State::Listening,
        model::State::Loading => State::Running,
        model::State::Complete => State::Complete,
        model::State::Failed => State::Failed,
        model::State::Ended => State::Ended,
    };
    proto::Streaming {
        state: state.into(),
        elapsed_us: record.elapsed_us,
        rate: record.rate(),
        processes: (0..record.processes.len()).map(|place| process(record, place)).collect(),
        page_fault_p50_ns: record.page_fault_stats.p50_ns,
        page_fault_p99_ns: record.page_fault_stats.p99_ns,
        // An event at 0 is reported at 1: 0 means not yet.
        working_set_us: record.working_set_us.map_or(0, |at| at.max(1)),
        counts: Some(counts(record)),
        worker: record.worker.cast_signed(),
        source: source(record.source).into(),
    }
}

/// The last message of a streamer.
pub(crate) fn ended(failure: Option<Failure>, record: &Record) -> proto::Ended {
    let ok = failure.is_none();
    let Failure { cause, reason } = failure.unwrap_or_default();
    let cause = match cause {
        FailureCause::Other => proto::FailureCause::Other,
        FailureCause::DamagedImage => proto::FailureCause::DamagedImage,
        FailureCause::WrongBlock => proto::FailureCause::WrongBlock,
    };
    proto::Ended { ok, reason, last: Some(streaming(record)), cause: cause.into() }
}

fn source(source: MemoryOrigin) -> MemorySource {
    match source {
        MemoryOrigin::Image => MemorySource::Image,
        MemoryOrigin::Cache => MemorySource::Cache,
        MemoryOrigin::Peer => MemorySource::Peer,
    }
}

fn counts(record: &Record) -> proto::LoadCounts {
    let latencies =
        |of: &LatencyCounts| Some(proto::FaultLatencies { counts: of.counts.clone(), sum_ns: of.sum_ns });
    let gpus = record.memory.iter().filter(|of| of.minor.is_some());
    // The gates of killed processes never opened.
    let opened = record.processes.iter().filter(|of| of.gate && of.gate_open_us.is_some());
    proto::LoadCounts {
        fault_bytes: record.loaded.fault,
        working_set_bytes: record.loaded.working_set,
        background_bytes: record.loaded.background,
        gpu_bytes: gpus.map(|of| of.resident).sum(),
        gates_opened: opened.count() as u64,
        page_faults: latencies(&record.page_fault_latencies),
        gpu_faults: latencies(&record.gpu_fault_latencies),
    }
}

fn process(record: &Record, place: usize) -> proto::StreamedProcess {
    let of = &record.processes[place];
    // An event at 0 is reported at 1: 0 means not yet.
    let when = |at: Option<u64>| at.map_or(0, |at| at.max(1));
    let to_proto = |of: &ProcessMemory| proto::StreamedMemory {
        minor: of.minor.unwrap_or_default(),
        bytes: of.bytes,
        resident: of.resident,
        rate: record.rate_of(of),
    };
    let memory = || record.memory.iter().filter(|of| of.process == place);
    proto::StreamedProcess {
        pid: of.pid,
        name: of.name.clone(),
        runs_us: when(of.runs_us),
        gate_open_us: when(if of.gate { of.gate_open_us.or(of.gone_us) } else { of.runs_us }),
        faults: of.faults,
        longest_fault_us: of.longest_fault_us,
        swaps: of.swaps,
        memory: memory().filter(|of| of.minor.is_some()).map(to_proto).collect(),
        of_cpus: memory().find(|of| of.minor.is_none()).map(to_proto),
        without_gate: !of.gate,
        page_faults: of.page_faults,
        longest_page_fault_us: of.longest_page_fault_us,
        missing_at_end: memory().map(|of| of.missing_at_end).sum(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use tempfile::TempDir;

    use super::super::client::ClientError;
    use super::super::streamer;
    use super::*;
    use crate::record::{example, files};
    use crate::session::Session;

    /// A streamer's socket in a directory, and the thread that answers there.
    fn answers(
        timeline: &Timeline,
        stop: impl Fn() + Send + Sync + 'static,
    ) -> (TempDir, StatusSocket, Answers) {
        let work = tempfile::tempdir().unwrap();
        let socket = StatusSocket::bind(work.path()).unwrap();
        let answers = socket.answer(timeline.clone(), || false, stop).unwrap();
        (work, socket, answers)
    }

    #[test]
    fn gates_of_killed_processes_are_not_counted_as_opened() {
        let timeline = Timeline::default();
        timeline.handed_over();
        [11, 12].into_iter().enumerate().for_each(|(place, pid)| timeline.runs(place, pid));
        let mut record = timeline.record();
        record.processes.iter_mut().for_each(|of| of.gate = true);
        (record.processes[0].gate_open_us, record.processes[1].gone_us) = (Some(5), Some(6));
        assert_eq!(streaming(&record).counts.unwrap().gates_opened, 1);
    }

    #[tokio::test]
    async fn a_client_asks_how_far_a_restore_is_again_and_again() {
        let timeline = Timeline::default();
        let (work, socket, _answers) = answers(&timeline, || ());
        let mode = fs::metadata(work.path().join(SOCKET)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut client = streamer::connect(work.path()).await.unwrap();
        assert_eq!(client.streaming().await.unwrap().state(), State::Listening);
        timeline.handed_over();
        timeline.runs(0, nix::unistd::getpid().as_raw());
        let session = Arc::new(Session::new(PathBuf::new()));
        session.task_arrived(nix::unistd::getpid().as_raw(), 1);
        session.release();
        timeline.brings(&session);
        timeline.look();
        timeline.gate_opened(0);
        let now = client.streaming().await.unwrap();
        let process = &now.processes[0];
        assert_eq!((now.state(), process.pid), (State::Running, nix::unistd::getpid().as_raw()));
        assert!(process.runs_us > 0 && process.gate_open_us > 0);
        assert_eq!(process.of_cpus, Some(proto::StreamedMemory { bytes: 4096, ..Default::default() }));
        drop(socket);
        assert!(matches!(streamer::connect(work.path()).await, Err(ClientError::NotServed(_))));
    }

    #[tokio::test]
    async fn a_follower_gets_the_last_message() {
        let timeline = Timeline::default();
        let (work, _socket, answers) = answers(&timeline, || ());
        let (path, (sender, reports)) = (work.path().to_owned(), std::sync::mpsc::channel());
        let following = tokio::spawn(async move {
            streamer::follow(&path, Duration::ZERO, |now| sender.send(now.state()).unwrap()).await
        });
        // The receiver is kept: there may be more reports.
        let first = tokio::task::spawn_blocking(move || (reports.recv().unwrap(), reports));
        let (state, _reports) = first.await.unwrap();
        assert_eq!(state, State::Listening);
        let ended = Ended { reason: "a disk".to_owned(), ..Ended::default() };
        tokio::task::spawn_blocking({
            let ended = ended.clone();
            move || answers.finish(ended)
        })
        .await
        .unwrap();
        assert_eq!(following.await.unwrap().unwrap(), ended);
    }

    #[tokio::test]
    async fn a_streamer_without_a_restore_is_stopped() {
        let (sender, stopped) = std::sync::mpsc::channel();
        let (work, _socket, _answers) = answers(&Timeline::default(), move || sender.send(()).unwrap());
        streamer::ask_to_end(work.path()).await;
        stopped.try_recv().unwrap();
    }

    #[tokio::test]
    async fn the_end_of_a_restore_that_no_client_saw_is_in_its_record() {
        let work = tempfile::tempdir().unwrap();
        let followed = streamer::follow(work.path(), Duration::ZERO, |_| ()).await;
        assert!(matches!(followed, Err(ClientError::NotServed(_))), "{followed:?}");
        files::write(&example::record(), work.path()).unwrap();
        let ended = streamer::follow(work.path(), Duration::ZERO, |_| ()).await.unwrap();
        assert_eq!((ended.ok, ended.last.unwrap().state()), (true, State::Complete));
    }

    #[test]
    fn both_kinds_of_memory_are_reported() {
        let status = streaming(&example::record());
        let [first, second, third] = &status.processes[..] else { panic!("{status:?}") };
        let minors = |of: &proto::StreamedProcess| of.memory.iter().map(|of| of.minor).collect::<Vec<_>>();
        assert_eq!([first, second, third].map(minors), [vec![128], vec![128, 129], vec![]]);
        let of_cpus = |of: &proto::StreamedProcess| of.of_cpus.map(|of| of.bytes >> 20);
        assert_eq!([first, second, third].map(of_cpus), [None, Some(512), Some(256)]);
        assert_eq!([first, second, third].map(|of| of.without_gate), [false, false, true]);
        assert_eq!((second.page_faults, second.longest_page_fault_us, third.gate_open_us), (250, 85, 3500));
    }

    #[tokio::test]
    async fn other_requests_are_refused_and_the_connection_stays() {
        let (work, _socket, _answers) = answers(&Timeline::default(), || ());
        let mut client = streamer::connect(work.path()).await.unwrap();
        let refused = client.status().await.unwrap_err().to_string();
        assert!(refused.contains("only reports on its own restore"), "{refused}");
        client.streaming().await.unwrap();
    }

    #[tokio::test]
    async fn clients_beyond_the_limit_wait() {
        let (work, _socket, _answers) = answers(&Timeline::default(), || ());
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            clients.push(streamer::connect(work.path()).await.unwrap());
        }
        let mut late = std::pin::pin!(streamer::connect(work.path()));
        let soon = Duration::from_millis(100);
        assert!(tokio::time::timeout(soon, &mut late).await.is_err());
        clients.pop();
        late.await.unwrap().streaming().await.unwrap();
    }
}
