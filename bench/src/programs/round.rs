// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore of a dumped program, with a client that sends requests from its start on.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::Tools;
use super::client::Client;
use super::dumped::Dumped;
use super::program::Program;
use crate::criu::server_log;
use crate::processes::{Exit, Process, page_faults};

/// Polling interval for the end of a program that has not answered yet.
const LOOK: Duration = Duration::from_millis(50);

/// How a restore gets the program's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Way {
    /// `criu restore` reads all of it before the program runs.
    Eager,
    /// `criu lazy-pages` serves it.
    Stock,
    /// `rewake lazy-pages` serves it.
    Rewake,
}

impl Way {
    pub(super) const ALL: [Self; 3] = [Self::Eager, Self::Stock, Self::Rewake];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Eager => "eager",
            Self::Stock => "stock",
            Self::Rewake => "rewake",
        })
    }
}

/// One restore.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Sample {
    pub(super) program: Program,
    pub(super) way: Way,
    /// The image was dropped from the page cache before; otherwise all of it was cached.
    pub(super) cold: bool,
    pub(super) round: u64,
    #[serde(flatten)]
    pub(super) figures: Figures,
}

/// The figures of one restore; the first three in seconds since the start of `criu restore`. All answers were
/// right.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Figures {
    /// The first answer had arrived.
    pub(super) answered_s: f64,
    /// `criu restore` had returned: the program runs.
    pub(super) returned_s: f64,
    /// All memory was resident: the server had ended, or, without a server, `criu restore` had returned.
    pub(super) resident_s: f64,
    /// Seconds that an answer takes which reads all memory, when all is resident.
    pub(super) whole_answer_s: f64,
    /// User and system seconds of the server and of the processes that it reaped, for each 10^9 bytes of the
    /// image's pages; none without a server.
    pub(super) server_cpu_s_per_gb: Option<f64>,
    /// Page faults of the program, minor and major, from the return of `criu restore` to the first answer.
    pub(super) faults: u64,
}

/// The client's figures of the first answer.
struct First {
    answer: String,
    at: Instant,
    /// Page faults of the program so far.
    faults: u64,
}

/// The figures of the restoring side.
struct Restored {
    target: Process,
    returned: Exit,
    /// Page faults of the program when `criu restore` had returned.
    faults: u64,
    served: Option<Exit>,
}

/// Restores the program and sends requests from the start on, then again when all memory is resident, and
/// ends it. `work` gets the logs.
///
/// # Errors
/// A command fails or takes too long, the program ends, or an answer is wrong or missing.
pub(super) fn run(dumped: &Dumped, tools: &Tools, way: Way, work: &Path) -> anyhow::Result<Figures> {
    let image = &dumped.image;
    let mut server = match way {
        Way::Eager => None,
        Way::Stock => Some(image.serve(&tools.criu, work)?),
        Way::Rewake => Some(image.serve(&tools.rewake, work)?),
    };
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    let client = Client { socket: &dumped.socket, deadline: began + image.limit, stop: &stop };
    let (restored, first) = std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let (answer, at) = client.answer(dumped.first.question)?;
            anyhow::Ok(First { answer, at, faults: page_faults(image.pid)? })
        });
        let restored = restore(dumped, tools, server.as_mut(), work, || first.is_finished());
        stop.store(restored.is_err(), Ordering::Relaxed);
        (restored, first.join().expect("the client does not panic"))
    });
    let restored = restored.with_context(|| match way {
        Way::Eager => "without a server".to_owned(),
        Way::Stock | Way::Rewake => format!("the server's log:\n{}", server_log(work)),
    })?;
    let first = first?;
    dumped.first.verify(&first.answer).context("the first answer")?;
    let again = Instant::now();
    let patient = Client { deadline: again + image.limit, ..client };
    let (answer, whole) = patient.answer(dumped.whole.question)?;
    dumped.whole.verify(&answer).context("the answer with all memory resident")?;
    // The next round needs the program's pid.
    drop(restored.target);
    let since = |at: Instant| at.duration_since(began).as_secs_f64();
    let gb = dumped.page_bytes()? as f64 / 1e9;
    Ok(Figures {
        answered_s: since(first.at),
        returned_s: since(restored.returned.at),
        resident_s: since(restored.served.as_ref().unwrap_or(&restored.returned).at),
        whole_answer_s: (whole - again).as_secs_f64(),
        server_cpu_s_per_gb: restored.served.map(|exit| exit.cpu_seconds / gb),
        faults: first.faults.saturating_sub(restored.faults),
    })
}

/// Restores the program, waits until its server has ended, and stays until the program has answered.
fn restore(
    dumped: &Dumped,
    tools: &Tools,
    server: Option<&mut Process>,
    work: &Path,
    has_answered: impl Fn() -> bool,
) -> anyhow::Result<Restored> {
    let image = &dumped.image;
    let lazily: &[&str] = if server.is_some() { &["--lazy-pages"] } else { &[] };
    let (mut target, returned) = image.restore(&tools.criu, lazily, work)?;
    let faults = page_faults(image.pid)?;
    let served = server.map(|server| image.served(server, work)).transpose()?;
    while !has_answered() {
        if let Ok(exit) = target.wait(LOOK) {
            bail!("the restored program ended without an answer: {}", exit.status);
        }
    }
    Ok(Restored { target, returned, faults, served })
}
