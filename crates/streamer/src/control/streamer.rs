// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts the streamer of a restore, and follows it by its socket in CRIU's work directory. A client needs
//! only the directory for that: neither the program that started the streamer nor the agent.

use std::fs::{self, File};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use super::client::{Client, ClientError};
use super::proto::{self, Ended, Streaming, reply, request};
use super::status_server::{SOCKET, ended};
use crate::failure::{Failure, FailureCause};
use crate::record::files;
use crate::record::model::State;
use crate::supervise::launch::{self, LaunchPlan};
use crate::working_set::LoadingOptions;
use rewake_process::private_socket;

/// Time until a streamer listens, on a machine that has much else to do. A client of the agent waits longer:
/// [`super::OPEN_LIMIT`].
const START_LIMIT: Duration = Duration::from_secs(120);
const _: () = assert!(super::OPEN_LIMIT.as_millis() > START_LIMIT.as_millis());
/// Time without an answer after which a client gives a streamer up. A worker's successor answers within
/// milliseconds.
const SILENCE_LIMIT: Duration = Duration::from_secs(15);
/// Pause before a client connects again, so that a dead worker's successor has taken over the socket.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// The exit code of a streamer whose image cannot be restored lazily on this machine.
pub const NOT_LAZY: u8 = 4;
/// The exit code of a streamer whose image is damaged.
pub const DAMAGED_IMAGE: u8 = 5;

/// What a user can do when all processes of a streamer were killed.
pub const ABANDONED: &str = "every process of the streamer was killed: the restored processes wait for their \
     memory; run `rewake recover`, which kills those whose GPUs were not resumed";

/// A streamer has ended because its image cannot be restored lazily on this machine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StartedNotLazily(pub String);

/// Starts a streamer, and returns when it listens. It writes to this log, else to this process's standard
/// error. It outlives this process: the restored processes depend on it. `removes_work`: it removes its work
/// directory at its end ([`super::work_folder`]).
///
/// # Errors
/// It cannot be started, or ends at once: with its last log line, if it has a log. [`StartedNotLazily`]: CRIU
/// can restore the image, but not lazily. [`Failure`]: the image is damaged.
pub async fn start(
    images: &Path,
    work: &Path,
    plan: &LaunchPlan,
    loading: LoadingOptions,
    log: Option<&Path>,
    removes_work: bool,
) -> anyhow::Result<()> {
    let mut command = launch::command(images, work, plan, loading)?;
    if removes_work {
        command.arg("--remove-work-dir");
    }
    if let Some(log) = log {
        command.stderr(File::create(log).with_context(|| format!("making {}", log.display()))?);
    }
    let mut command = Command::from(command);
    // The runtime takes the status of children that have ended.
    let mut child = command.stdout(Stdio::piped()).spawn().context("starting the streamer")?;
    let mut ready = child.stdout.take().context("the streamer has no output")?;
    let mut byte = [0];
    let listening = timeout(START_LIMIT, ready.read(&mut byte)).await;
    if listening.context("the streamer does not listen")?? == 0 {
        let words = log.and_then(last_words).unwrap_or_else(|| "see above".to_owned());
        let ended = timeout(START_LIMIT, child.wait()).await;
        let code = ended.ok().and_then(Result::ok).and_then(|status| status.code()?.try_into().ok());
        let reason = format!("the streamer could not be started: {words}");
        return Err(match code {
            Some(NOT_LAZY) => StartedNotLazily(words).into(),
            Some(DAMAGED_IMAGE) => Failure { cause: FailureCause::DamagedImage, reason }.into(),
            _ => anyhow!("{reason}"),
        });
    }
    Ok(())
}

/// The last error of a log, else its last line.
fn last_words(log: &Path) -> Option<String> {
    let log = fs::read(log).ok()?;
    let log = String::from_utf8_lossy(&log);
    let lines = || log.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let error =
        |line: &str| ["ERROR ", "rewake: "].iter().find_map(|mark| Some(line.strip_prefix(mark)?.to_owned()));
    lines().find_map(error).or_else(|| lines().next().map(str::to_owned))
}

/// Connects to the streamer of a work directory.
///
/// # Errors
/// [`ClientError::NotServed`]: it has ended, or the directory does not exist.
pub async fn connect(work: &Path) -> Result<Client, ClientError> {
    let Ok(directory) = File::open(work) else { return Err(ClientError::NotServed(work.join(SOCKET))) };
    Client::connect(&private_socket::within(&directory, SOCKET)).await
}

/// Follows a streamer to its end, through the deaths of workers. `report` is called every 100 ms. When all
/// its processes were killed, another streamer that serves its session is waited for until `successor` after
/// the last answer.
///
/// # Errors
/// [`ClientError::NotServed`]: all its processes were killed. Else it does not answer.
pub async fn follow(
    work: &Path,
    successor: Duration,
    mut report: impl FnMut(Streaming),
) -> Result<Ended, ClientError> {
    let mut answered = Instant::now();
    loop {
        let attempt = async {
            let mut client = connect(work).await?;
            let mut answer = client.ask(request::Kind::Follow(proto::Follow {})).await?;
            loop {
                match answer {
                    reply::Kind::Streaming(now) => report(now),
                    reply::Kind::Ended(ended) => return Ok(ended),
                    _ => return Err(ClientError::Unexpected),
                }
                answered = Instant::now();
                answer = client.answer(SILENCE_LIMIT).await?;
            }
        };
        match attempt.await {
            Err(error) if error.is_passing() && answered.elapsed() < SILENCE_LIMIT => {
                sleep(RETRY_INTERVAL).await;
            }
            Err(error @ ClientError::NotServed(_)) => match recorded(work) {
                Some(ended) => return Ok(ended),
                None if answered.elapsed() < successor => sleep(RETRY_INTERVAL).await,
                None => return Err(error),
            },
            other => return other,
        }
    }
}

/// Notifies a streamer that no restore will connect any more: it ends when nothing depends on it. Returns
/// when it has been notified, or has ended.
pub async fn ask_to_end(work: &Path) {
    let asked = async {
        let mut client = connect(work).await?;
        client.ask(request::Kind::End(proto::End {})).await
    };
    // A worker that has just died has a successor.
    if asked.await.is_err_and(|error| error.is_passing()) {
        sleep(RETRY_INTERVAL).await;
        if let Ok(mut client) = connect(work).await {
            let _ = client.ask(request::Kind::End(proto::End {})).await;
        }
    }
}

/// The end of a streamer that this client did not see, by the record that it has left.
fn recorded(work: &Path) -> Option<Ended> {
    let record = files::read(work).ok()??;
    match record.state {
        State::Waiting | State::Loading => None,
        State::Complete | State::Failed | State::Ended => Some(ended(record.failure(), &record)),
    }
}
