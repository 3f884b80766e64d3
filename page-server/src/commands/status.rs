// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake status`: what a running daemon does.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, absolute};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::picture;
use crate::cli::Status;
use crate::control;
use crate::control::client::{Client, ClientError};
use crate::control::proto::{self, State};
use rewake_streamer::session::address;
use rewake_streamer::supervise::recover::{self, Orphan};
use rewake_streamer::units;

/// Runs the command; gives the exit code.
///
/// # Errors
/// No daemon listens, or it cannot be talked to.
pub fn run(options: &Status) -> anyhow::Result<u8> {
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
        None => address::default_socket()?,
    };
    let orphans = recover::orphans()?;
    let status = runtime.block_on(async { Client::connect(&socket).await?.status().await });
    let status = match status {
        Err(ClientError::NoDaemon(_)) if !orphans.is_empty() => None,
        status => Some(status?),
    };
    if options.json {
        let mut all = status.as_ref().map_or_else(|| json!({}), as_json);
        all["orphaned"] = orphans.iter().map(orphan_as_json).collect();
        return shown(&format!("{all:#}\n"));
    }
    let lines = orphans.iter().map(orphan_as_line).collect::<String>();
    shown(&(lines + &status.as_ref().map(as_table).unwrap_or_default()))
}

fn orphan_as_line(orphan: &Orphan) -> String {
    format!(
        "session {} of {} has no streamer for {} s: {} processes have missing memory, {} of their threads wait; run \
         `rewake recover`\n",
        orphan.session,
        orphan.images.display(),
        orphan.silent.as_secs(),
        orphan.processes.len(),
        orphan.waiting
    )
}

fn orphan_as_json(orphan: &Orphan) -> Value {
    json!({
        "session": orphan.session,
        "images_dir": orphan.images.display().to_string(),
        "processes": orphan.processes,
        "waiting_threads": orphan.waiting,
        "seconds": orphan.silent.as_secs(),
    })
}

fn shown(text: &str) -> anyhow::Result<u8> {
    std::io::stdout().write_all(text.as_bytes()).context("writing the status")?;
    Ok(0)
}

/// Asks the streamer of a work directory.
async fn streaming(work: &Path) -> anyhow::Result<proto::Streaming> {
    match Client::connect(&control::status_server::socket(work)).await {
        Ok(mut client) => Ok(client.streaming().await?),
        Err(ClientError::NoDaemon(_)) => {
            bail!("{}: no memory of GPUs is loaded for a restore with this work directory", work.display())
        }
        Err(error) => Err(error.into()),
    }
}

/// Path bytes for people.
pub(super) fn path(bytes: &[u8]) -> String {
    Path::new(OsStr::from_bytes(bytes)).display().to_string()
}

/// State for people and programs.
pub(super) fn state(session: &proto::Session) -> &'static str {
    state_name(session.state())
}

/// The same, for whatever has one.
pub(super) fn state_name(state: State) -> &'static str {
    match state {
        State::Unknown => "unknown",
        State::Listening => "listening",
        State::Restoring => "restoring",
        State::Running => "running",
        State::Complete => "complete",
        State::Failed => "failed",
    }
}

fn as_table(status: &proto::Status) -> String {
    let mut text = String::new();
    let daemon = status.daemon.unwrap_or_default();
    let cache = daemon.cache.unwrap_or_default();
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(
        text,
        "daemon {} (worker {}, generation {}), up {}: {} served, {} failed, {} resident",
        daemon.pid,
        daemon.worker_pid,
        daemon.generation,
        units::seconds(Duration::from_nanos(daemon.uptime_ns)),
        daemon.sessions_served,
        daemon.sessions_failed,
        units::bytes(daemon.rss_bytes),
    );
    let _ = writeln!(
        text,
        "cache: {} blocks, {} hits, {} loads, {} shared loads; {} read directly, {} through the page cache",
        cache.blocks,
        cache.hits,
        cache.loads,
        cache.shared_loads,
        units::bytes(cache.bytes_direct),
        units::bytes(cache.bytes_buffered),
    );
    let _ = writeln!(
        text,
        "\n{:>7}  {:<9}  {:>7}  {:>22}  {:>8}  {:>8}  {:>8}  images",
        "session", "state", "time", "back", "faults", "p50", "p99"
    );
    for session in &status.sessions {
        line(&mut text, session);
    }
    for ended in &status.recent {
        if let Some(session) = &ended.summary {
            line(&mut text, session);
        }
        if !ended.ok {
            let _ = writeln!(text, "         {}", ended.reason);
        }
    }
    text
}

fn line(text: &mut String, session: &proto::Session) {
    let pages = |pages: u64| units::bytes(pages * rewake_uffd::PAGE_SIZE);
    let latency =
        |nanos: u64| if nanos == 0 { "-".to_owned() } else { units::latency(Duration::from_nanos(nanos)) };
    let _ = writeln!(
        text,
        "{:>7}  {:<9}  {:>7}  {:>22}  {:>8}  {:>8}  {:>8}  {}",
        session.session,
        state(session),
        units::seconds(Duration::from_nanos(session.elapsed_ns)),
        format!("{} / {}", pages(session.pages_copied + session.pages_zero), pages(session.pages_total)),
        session.faults,
        latency(session.fault_p50_ns),
        latency(session.fault_p99_ns),
        path(&session.images_dir),
    );
    if session.gpus {
        let _ = writeln!(text, "         with memory of GPUs: rewake status -W {}", path(&session.work_dir));
    }
}

fn as_json(status: &proto::Status) -> Value {
    let daemon = status.daemon.unwrap_or_default();
    let cache = daemon.cache.unwrap_or_default();
    json!({
        "daemon": {
            "pid": daemon.pid,
            "worker_pid": daemon.worker_pid,
            "generation": daemon.generation,
            "uptime_ns": daemon.uptime_ns,
            "sessions_served": daemon.sessions_served,
            "sessions_failed": daemon.sessions_failed,
            "rss_bytes": daemon.rss_bytes,
        },
        "cache": {
            "blocks": cache.blocks,
            "hits": cache.hits,
            "loads": cache.loads,
            "shared_loads": cache.shared_loads,
            "full": cache.full,
            "bytes_direct": cache.bytes_direct,
            "bytes_buffered": cache.bytes_buffered,
            "retries": cache.retries,
        },
        "sessions": status.sessions.iter().map(session_json).collect::<Vec<_>>(),
        "recent": status.recent.iter().map(ended_json).collect::<Vec<_>>(),
    })
}

fn ended_json(ended: &proto::Ended) -> Value {
    let summary = ended.summary.clone().unwrap_or_default();
    json!({ "ok": ended.ok, "reason": ended.reason, "summary": session_json(&summary) })
}

fn session_json(session: &proto::Session) -> Value {
    json!({
        "session": session.session,
        "images_dir": path(&session.images_dir),
        "work_dir": path(&session.work_dir),
        "state": state(session),
        "elapsed_ns": session.elapsed_ns,
        "running_ns": session.running_ns,
        "tasks": session.tasks,
        "pages_total": session.pages_total,
        "pages_copied": session.pages_copied,
        "pages_zero": session.pages_zero,
        "pages_dropped": session.pages_dropped,
        "faults": session.faults,
        "fault_p50_ns": session.fault_p50_ns,
        "fault_p99_ns": session.fault_p99_ns,
        "first_fault_ns": session.first_fault_ns,
        "last_fault_ns": session.last_fault_ns,
        "gpus": session.gpus,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> proto::Status {
        let session = |session, state: State| proto::Session {
            session,
            state: state as i32,
            images_dir: b"/images/a".to_vec(),
            pages_total: 256,
            pages_copied: 128,
            faults: 3,
            fault_p99_ns: 85_000,
            ..Default::default()
        };
        let ended = |ok, reason: &str, summary| proto::Ended {
            ok,
            reason: reason.to_owned(),
            summary: Some(summary),
        };
        proto::Status {
            sessions: vec![session(7, State::Running)],
            recent: vec![
                ended(
                    true,
                    "",
                    proto::Session {
                        gpus: true,
                        work_dir: b"/jobs/5".to_vec(),
                        ..session(5, State::Complete)
                    },
                ),
                ended(false, "pages-1.img ends early", session(6, State::Failed)),
            ],
            daemon: Some(proto::Daemon { pid: 77, sessions_served: 5, ..Default::default() }),
        }
    }

    #[test]
    fn the_table_shows_every_session_and_why_one_failed() {
        let text = as_table(&example());
        for part in [
            "daemon 77",
            "5 served",
            "running",
            "512.0 KiB / 1.0 MiB",
            "85 µs",
            "complete",
            "-W /jobs/5",
            "ends early",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn the_json_holds_the_same() {
        let value = as_json(&example());
        assert_eq!(value["sessions"][0]["pages_copied"], 128);
        assert_eq!(value["recent"][1]["reason"], "pages-1.img ends early");
        assert_eq!(value["daemon"]["pid"], 77);
    }
}
