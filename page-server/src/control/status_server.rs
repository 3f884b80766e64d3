// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake stream-gpu` answers who asks how far it is, on a socket in CRIU's work directory.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tracing::{debug, warn};

use super::frame::{FrameError, receive, send};
use super::proto::{self, Reply, Request, State, reply, request};
use super::{MESSAGE_LIMIT, accept};
use rewake_streamer::record::Timeline;
use rewake_streamer::record::model::{self, Memory, Record};
use rewake_streamer::session::address;
use rewake_streamer::sys;

/// The socket's name in the work directory. As long as that of the plugin's: where one fits the other does.
const SOCKET: &str = "rewake-gpu.status";
/// Clients at once. More wait.
const CLIENTS: usize = 16;

/// Where it is, by the restore's work directory.
#[must_use]
pub fn socket(work: &Path) -> PathBuf {
    work.join(SOCKET)
}

/// The socket, for this user only. It goes with this.
#[derive(Debug)]
pub struct Window {
    listener: UnixListener,
    path: PathBuf,
}

impl Window {
    /// Listens.
    ///
    /// # Errors
    /// Another streamer answers there, or it cannot be made: see [`address::bind`].
    pub fn new(work: &Path) -> anyhow::Result<Self> {
        let path = socket(work);
        Ok(Self { listener: address::bind(&path)?, path })
    }

    /// Answers with what `timeline` says, in a thread of its own, as long as this process lives.
    ///
    /// # Errors
    /// There is no descriptor or no thread left.
    pub fn show(&self, timeline: Timeline) -> anyhow::Result<()> {
        let listener = self.listener.try_clone().context("sharing the socket")?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let answer = move || {
            runtime.block_on(async {
                match tokio::net::UnixListener::from_std(listener) {
                    Ok(listener) => answer(&listener, timeline).await,
                    Err(error) => warn!(%error, "nobody can ask how far it is"),
                }
            });
        };
        sys::thread_without_signals("status", answer).context("starting a thread")
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Whoever removed it has done no harm.
        let _ = fs::remove_file(&self.path);
    }
}

async fn answer(listener: &tokio::net::UnixListener, timeline: Timeline) {
    let room = Arc::new(Semaphore::new(CLIENTS));
    // An error means that it was closed, which nobody does.
    while let Ok(place) = Arc::clone(&room).acquire_owned().await {
        let (stream, timeline) = (accept::next(listener).await, timeline.clone());
        tokio::spawn(async move {
            if let Err(error) = client(stream, &timeline).await {
                debug!(%error, "a client was given up");
            }
            drop(place);
        });
    }
}

async fn client(mut stream: UnixStream, timeline: &Timeline) -> Result<(), FrameError> {
    if !accept::greet(&mut stream).await? {
        return Ok(());
    }
    while let Some(request) = receive::<Request>(&mut stream, MESSAGE_LIMIT).await? {
        let answer = match request.kind {
            Some(request::Kind::Streaming(_)) => {
                timeline.look();
                reply::Kind::Streaming(picture(&timeline.record()))
            }
            _ => {
                let reason = "this is `rewake stream-gpu`, which only says how far it is".to_owned();
                reply::Kind::Failure(proto::Failure { reason })
            }
        };
        send(&mut stream, &Reply { kind: Some(answer) }).await?;
    }
    Ok(())
}

pub(super) fn picture(record: &Record) -> proto::Streaming {
    let state = match record.state {
        model::State::Waiting => State::Listening,
        model::State::Loading => State::Running,
        model::State::Complete => State::Complete,
        model::State::Failed => State::Failed,
    };
    proto::Streaming {
        state: state.into(),
        elapsed_us: record.elapsed_us,
        rate: record.rate(),
        processes: (0..record.processes.len()).map(|place| process(record, place)).collect(),
    }
}

fn process(record: &Record, place: usize) -> proto::StreamedProcess {
    let of = &record.processes[place];
    // What happened at 0 is told as at 1: 0 is not yet.
    let when = |at: Option<u64>| at.map_or(0, |at| at.max(1));
    let told = |of: &Memory| proto::StreamedMemory {
        minor: of.minor.unwrap_or_default(),
        bytes: of.bytes,
        resident: of.resident,
        rate: record.rate_of(of),
        goes_on_us: when(of.goes_on_us),
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
        memory: memory().filter(|of| of.minor.is_some()).map(told).collect(),
        of_cpus: memory().find(|of| of.minor.is_none()).map(told),
        without_gate: !of.gate,
        page_faults: of.page_faults,
        longest_page_fault_us: of.longest_page_fault_us,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::client::{Client, ClientError};
    use super::*;
    use rewake_streamer::record::example;
    use rewake_streamer::session::Session;

    #[tokio::test]
    async fn who_asks_is_told_how_far_it_is_again_and_again() {
        let work = tempfile::tempdir().unwrap();
        let window = Window::new(work.path()).unwrap();
        let timeline = Timeline::default();
        window.show(timeline.clone()).unwrap();
        let mode = fs::metadata(socket(work.path())).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut client = Client::connect(&socket(work.path())).await.unwrap();
        assert_eq!(client.streaming().await.unwrap().state(), State::Listening);
        timeline.handed_over();
        timeline.runs(0, nix::unistd::getpid().as_raw());
        let session = Arc::new(Session::new(0, 1, PathBuf::new()));
        session.task_arrived(nix::unistd::getpid().as_raw(), 1);
        session.release();
        timeline.brings(&session);
        timeline.look();
        timeline.gate_opened(0);
        let told = client.streaming().await.unwrap();
        let process = &told.processes[0];
        assert_eq!((told.state(), process.pid), (State::Running, nix::unistd::getpid().as_raw()));
        assert!(process.runs_us > 0 && process.gate_open_us > 0);
        assert_eq!(process.of_cpus, Some(proto::StreamedMemory { bytes: 4096, ..Default::default() }));
        drop(window);
        assert!(matches!(Client::connect(&socket(work.path())).await, Err(ClientError::NoDaemon(_))));
    }

    #[test]
    fn both_kinds_of_memory_are_told_and_who_has_no_gate_stands_before_none() {
        let told = picture(&example::record());
        let [first, second, third] = &told.processes[..] else { panic!("{told:?}") };
        let minors = |of: &proto::StreamedProcess| of.memory.iter().map(|of| of.minor).collect::<Vec<_>>();
        assert_eq!([first, second, third].map(minors), [vec![128], vec![128, 129], vec![]]);
        let go_on =
            |of: &proto::StreamedProcess| of.memory.iter().map(|of| of.goes_on_us).collect::<Vec<_>>();
        assert_eq!([first, second].map(go_on), [vec![2_951_000], vec![1_410_000, 2_951_900]]);
        let of_cpus = |of: &proto::StreamedProcess| of.of_cpus.map(|of| of.bytes >> 20);
        assert_eq!([first, second, third].map(of_cpus), [None, Some(512), Some(256)]);
        assert_eq!([first, second, third].map(|of| of.without_gate), [false, false, true]);
        assert_eq!((second.page_faults, second.longest_page_fault_us, third.gate_open_us), (250, 85, 3500));
    }

    #[tokio::test]
    async fn other_requests_are_refused_and_the_connection_stays() {
        let work = tempfile::tempdir().unwrap();
        let window = Window::new(work.path()).unwrap();
        window.show(Timeline::default()).unwrap();
        let mut client = Client::connect(&socket(work.path())).await.unwrap();
        let refused = client.status().await.unwrap_err().to_string();
        assert!(refused.contains("only says how far it is"), "{refused}");
        client.streaming().await.unwrap();
    }

    #[tokio::test]
    async fn more_clients_than_there_is_room_for_wait_for_their_turn() {
        let work = tempfile::tempdir().unwrap();
        let window = Window::new(work.path()).unwrap();
        window.show(Timeline::default()).unwrap();
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            clients.push(Client::connect(&socket(work.path())).await.unwrap());
        }
        let path = socket(work.path());
        let late = Client::connect(&path);
        let mut late = std::pin::pin!(late);
        let soon = std::time::Duration::from_millis(100);
        assert!(tokio::time::timeout(soon, &mut late).await.is_err());
        clients.pop();
        late.await.unwrap().streaming().await.unwrap();
    }
}
