// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake status`: the sessions of the agent, and those without a streamer.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, absolute};
use std::time::Duration;

use anyhow::bail;
use rewake_process::names::printable;
use serde_json::{Value, json};

use super::{picture, print};
use crate::cli::StatusArgs;
use rewake_process::private_socket;
use rewake_streamer::control::client::{Client, ClientError};
use rewake_streamer::control::proto::{self, State};
use rewake_streamer::control::streamer;
use rewake_streamer::supervise::leftover_stores;
use rewake_streamer::supervise::recover::{self, Orphan};
use rewake_streamer::units;

/// Runs the command; gives the exit code.
///
/// # Errors
/// No agent runs, or it does not answer.
pub fn run(options: &StatusArgs) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if let Some(work) = &options.work_dir {
        let picture = runtime.block_on(streaming(work))?;
        let lines = picture::lines(&picture).join("\n");
        return shown(&if options.json {
            format!("{:#}\n", picture::as_json(&picture))
        } else {
            lines + "\n"
        });
    }
    let socket = match &options.socket {
        Some(path) => absolute(path)?,
        None => private_socket::default_socket()?,
    };
    let orphans = recover::orphans()?;
    let left = leftover_stores::all()?.into_iter().map(|(_, left)| (left.holders(), left.images));
    let left: Vec<_> = left.filter(|(processes, _)| !processes.is_empty()).collect();
    let status = runtime.block_on(async { Client::connect(&socket).await?.status().await });
    let status = match status {
        Err(ClientError::NotServed(_)) if !orphans.is_empty() || !left.is_empty() => None,
        status => Some(status?),
    };
    if options.json {
        let mut all = status.as_ref().map_or_else(|| json!({}), as_json);
        all["orphaned"] = orphans.iter().map(orphan_as_json).collect();
        all["left"] = left.iter().map(|(processes, images)| left_as_json(images, processes)).collect();
        return shown(&format!("{all:#}\n"));
    }
    let lines = orphans.iter().map(orphan_as_line);
    let lines = lines.chain(left.iter().map(|(processes, images)| left_as_line(images, processes)));
    let lines = lines.collect::<String>();
    shown(&(lines + &status.as_ref().map(as_table).unwrap_or_default()))
}

fn left_as_line(images: &Path, processes: &[i32]) -> String {
    let processes: Vec<String> = processes.iter().map(ToString::to_string).collect();
    format!(
        "a restore of {} is over, and processes keep an empty descriptor of it, with which CRIU cannot dump \
         them: {}; run `rewake recover` when they are neither frozen nor traced\n",
        images.display(),
        processes.join(", ")
    )
}

fn left_as_json(images: &Path, processes: &[i32]) -> Value {
    json!({"images_dir": images.display().to_string(), "processes": processes})
}

fn orphan_as_line(orphan: &Orphan) -> String {
    format!(
        "a restore of {} has no streamer for {} s: {} processes have missing memory, {} of their threads \
         wait; run `rewake recover`\n",
        orphan.images.display(),
        orphan.silent.as_secs(),
        orphan.processes.len(),
        orphan.waiting
    )
}

fn orphan_as_json(orphan: &Orphan) -> Value {
    json!({
        "images_dir": orphan.images.display().to_string(),
        "processes": orphan.processes,
        "waiting_threads": orphan.waiting,
        "seconds": orphan.silent.as_secs(),
    })
}

fn shown(text: &str) -> anyhow::Result<u8> {
    print::text(text);
    Ok(0)
}

/// Asks the streamer of a work directory.
async fn streaming(work: &Path) -> anyhow::Result<proto::Streaming> {
    match streamer::connect(work).await {
        Ok(mut client) => Ok(client.streaming().await?),
        Err(ClientError::NotServed(_)) => {
            bail!("{}: no streamer serves a restore with this work directory", work.display())
        }
        Err(error) => Err(error.into()),
    }
}

/// Path bytes for programs, as text.
fn path(bytes: &[u8]) -> String {
    Path::new(OsStr::from_bytes(bytes)).display().to_string()
}

fn as_table(status: &proto::Status) -> String {
    let mut text = String::new();
    let agent = status.agent.clone().unwrap_or_default();
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(
        text,
        "agent {}, up {}: {} served, {} failed, {} resident",
        agent.pid,
        units::seconds(Duration::from_nanos(agent.uptime_ns)),
        agent.sessions_served,
        agent.sessions_failed,
        units::bytes(agent.rss_bytes),
    );
    let _ = writeln!(
        text,
        "\n{:>7}  {:<9}  {:>7}  {:>22}  {:>8}  {:>8}  {:>8}  images",
        "session", "state", "time", "resident", "faults", "p50", "p99"
    );
    for session in status.sessions.iter().chain(&status.recent) {
        line(&mut text, session);
        if !session.reason.is_empty() {
            let _ = writeln!(text, "         {}", session.reason);
        }
    }
    text
}

fn line(text: &mut String, session: &proto::Session) {
    let latency =
        |nanos: u64| if nanos == 0 { "-".to_owned() } else { units::latency(Duration::from_nanos(nanos)) };
    let progress = session.progress.clone().unwrap_or_default();
    let (resident, all) = picture::sizes(&progress);
    let _ = writeln!(
        text,
        "{:>7}  {:<9}  {:>7}  {:>22}  {:>8}  {:>8}  {:>8}  {}",
        session.session,
        state(session),
        units::seconds(Duration::from_nanos(session.elapsed_ns)),
        format!("{} / {}", units::bytes(resident), units::bytes(all)),
        picture::faults(&progress),
        latency(progress.page_fault_p50_ns),
        latency(progress.page_fault_p99_ns),
        printable(&session.images_dir),
    );
}

/// The state of a session that may have ended before its streamer reported.
fn state(session: &proto::Session) -> &'static str {
    let state = session.progress.as_ref().map_or(State::Unknown, proto::Streaming::state);
    picture::state_name(if session.reason.is_empty() || state == State::Ended {
        state
    } else {
        State::Failed
    })
}

fn as_json(status: &proto::Status) -> Value {
    let agent = status.agent.clone().unwrap_or_default();
    let sessions = |of: &[proto::Session]| of.iter().map(session_json).collect::<Vec<_>>();
    json!({
        "agent": {
            "pid": agent.pid,
            "uptime_ns": agent.uptime_ns,
            "sessions_served": agent.sessions_served,
            "sessions_failed": agent.sessions_failed,
            "rss_bytes": agent.rss_bytes,
        },
        "sessions": sessions(&status.sessions),
        "recent": sessions(&status.recent),
    })
}

/// The streamer's report, with what the agent knows of the session.
fn session_json(session: &proto::Session) -> Value {
    let mut all = picture::as_json(&session.progress.clone().unwrap_or_default());
    all["session"] = session.session.into();
    all["images_dir"] = path(&session.images_dir).into();
    all["work_dir"] = path(&session.work_dir).into();
    all["state"] = state(session).into();
    all["elapsed_ns"] = session.elapsed_ns.into();
    all["reason"] = if session.reason.is_empty() { Value::Null } else { session.reason.clone().into() };
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> proto::Status {
        let session = |session, state: State, reason: &str| proto::Session {
            session,
            images_dir: b"/images/a".to_vec(),
            work_dir: b"/jobs/5".to_vec(),
            reason: reason.to_owned(),
            progress: Some(proto::Streaming {
                state: state.into(),
                page_fault_p99_ns: 85_000,
                processes: vec![proto::StreamedProcess {
                    page_faults: 3,
                    of_cpus: Some(proto::StreamedMemory {
                        bytes: 1 << 20,
                        resident: 1 << 19,
                        ..Default::default()
                    }),
                    ..Default::default()
                }],
                ..Default::default()
            }),
            ..Default::default()
        };
        proto::Status {
            sessions: vec![session(7, State::Running, "")],
            recent: vec![
                session(5, State::Complete, ""),
                session(6, State::Running, "pages-1.img ends early"),
            ],
            agent: Some(proto::Agent { pid: 77, sessions_served: 5, ..Default::default() }),
        }
    }

    #[test]
    fn the_table_shows_every_session_and_why_one_failed() {
        let text = as_table(&example());
        for part in [
            "agent 77",
            "5 served",
            "running",
            "512.0 KiB / 1.0 MiB",
            "85 µs",
            "complete",
            "failed",
            "ends early",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn the_json_holds_the_same() {
        let value = as_json(&example());
        assert_eq!(value["sessions"][0]["processes"][0]["memory"][0]["resident"], 1 << 19);
        assert_eq!(
            (&value["sessions"][0]["state"], &value["recent"][1]["state"]),
            (&"running".into(), &"failed".into())
        );
        assert_eq!(value["recent"][1]["reason"], "pages-1.img ends early");
        assert_eq!(value["agent"]["pid"], 77);
    }
}
