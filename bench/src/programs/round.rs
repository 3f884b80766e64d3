// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore of a dumped program, with a client that sends requests from its start on.

use std::fmt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::check::{Answered, Check};
use super::client::Client;
use super::dumped::Dumped;
use super::program::Program;
use crate::criu::server_log;
use crate::harness::{Tools, value_name};
use crate::processes::{Exit, Process, page_faults};

/// Questions of one size that a program answers when all memory is resident; the figure is the least time.
const REPEATS: usize = 3;
/// The time from the start of a restore in which requests to redis are counted.
const FIRST_SECOND: Duration = Duration::from_secs(1);
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

/// Where the image is when a restore starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum ImageState {
    /// All of it was read into the page cache
    Warm,
    /// It was dropped from the page cache
    Cold,
    /// It was dropped from the page cache, and then restored once in the same way
    Again,
}

impl ImageState {
    pub(super) const ALL: [Self; 3] = [Self::Warm, Self::Cold, Self::Again];
}

impl fmt::Display for ImageState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&value_name(self))
    }
}

/// The figures of one restore; the first three in seconds since the start of `criu restore`. All answers were
/// right.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Sample {
    pub(super) program: Program,
    pub(super) state: ImageState,
    /// The first answer had arrived.
    pub(super) answered_s: f64,
    /// `criu restore` had returned: the program runs.
    pub(super) returned_s: f64,
    /// All memory was resident: the server had ended, or, without a server, `criu restore` had returned.
    pub(super) resident_s: f64,
    /// Seconds that an answer takes which reads all memory, when all is resident: the least of three.
    pub(super) whole_answer_s: f64,
    /// The same of an answer that reads as much as the first one.
    pub(super) first_repeated_s: f64,
    /// User and system seconds of the server and of the processes that it reaped, for each 10^9 bytes of the
    /// image's pages; none without a server.
    pub(super) server_cpu_s_per_gb: Option<f64>,
    /// Page faults of the program, minor and major, from the return of `criu restore` to the first answer.
    pub(super) faults: u64,
    /// Requests answered in the first second; none but with redis.
    pub(super) first_second_requests: Option<u64>,
}

/// The figures of the restoring side.
struct Restored {
    target: Process,
    returned: Exit,
    /// Page faults of the program when `criu restore` had returned.
    faults: u64,
    served: Option<Exit>,
}

/// Restores the program and sends requests from the start on, then more when all memory is resident, and
/// ends it. `work` gets the logs.
///
/// # Errors
/// A command fails or takes too long, the program ends, or an answer is wrong or missing.
pub(super) fn run(
    dumped: &Dumped,
    state: ImageState,
    tools: &Tools,
    way: Way,
    work: &Path,
) -> anyhow::Result<Sample> {
    let image = &dumped.image;
    let mut server = match way {
        Way::Eager => None,
        Way::Stock => Some(image.serve(&tools.criu, work)?),
        Way::Rewake => Some(image.serve(&tools.rewake, work)?),
    };
    let began = Instant::now();
    let (restored, first) = dumped.restored_while_asked(
        |has_answered| restore(dumped, tools, server.as_mut(), work, has_answered),
        |client| first_answer(dumped, client, began + FIRST_SECOND),
    );
    let restored = restored.with_context(|| match way {
        Way::Eager => "without a server".to_owned(),
        Way::Stock | Way::Rewake => format!("the server's log:\n{}", server_log(work)),
    })?;
    let (answered, faults, first_second_requests) = first.context("the first answer")?;
    let client = Client { socket: &dumped.socket, deadline: began, stop: &AtomicBool::new(false) };
    let repeated =
        |check| least_time(check, &client, image.limit).context("an answer with all memory resident");
    let whole_answer_s = repeated(&dumped.whole)?;
    let first_repeated_s =
        if dumped.first.reads_as_much_as(&dumped.whole) { whole_answer_s } else { repeated(&dumped.first)? };
    // The next round needs the program's pid.
    drop(restored.target);
    let since = |at: Instant| at.duration_since(began).as_secs_f64();
    let gb = dumped.page_bytes()? as f64 / 1e9;
    Ok(Sample {
        program: dumped.program,
        state,
        answered_s: since(answered),
        returned_s: since(restored.returned.at),
        resident_s: since(restored.served.as_ref().unwrap_or(&restored.returned).at),
        whole_answer_s,
        first_repeated_s,
        server_cpu_s_per_gb: restored.served.map(|exit| exit.cpu_seconds / gb),
        faults: faults.saturating_sub(restored.faults),
        first_second_requests,
    })
}

/// Asks the first question, and sends redis more requests until `second`. Returns when the answer arrived,
/// the page faults of the program so far, and, of redis, the requests answered until `second`.
fn first_answer(
    dumped: &Dumped,
    client: &Client<'_>,
    second: Instant,
) -> anyhow::Result<(Instant, u64, Option<u64>)> {
    let Answered { at, in_time } = dumped.first.ask(client, second)?;
    let faults = page_faults(dumped.image.pid)?;
    let more = dumped.first.ask_on(client, second)?;
    Ok((at, faults, in_time.map(|requests| requests + more)))
}

/// Seconds of the fastest of some answers, each within `limit`.
fn least_time(check: &Check, client: &Client<'_>, limit: Duration) -> anyhow::Result<f64> {
    let mut least = f64::INFINITY;
    for _ in 0..REPEATS {
        let began = Instant::now();
        let patient = Client { deadline: began + limit, ..*client };
        let answered = check.ask(&patient, began)?;
        least = least.min((answered.at - began).as_secs_f64());
    }
    Ok(least)
}

/// Restores the program, waits until its server has ended, and stays until the program has answered.
fn restore(
    dumped: &Dumped,
    tools: &Tools,
    server: Option<&mut Process>,
    work: &Path,
    has_answered: &dyn Fn() -> bool,
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
