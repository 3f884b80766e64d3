// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore of a dumped program, with a client that asks from its start on.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use serde::Serialize;

use super::Tools;
use super::client::Client;
use super::program::{Dumped, Program};
use crate::criu::server_log;
use crate::processes::{Process, page_faults};

/// How the memory comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Way {
    /// `criu restore` loads all of it before the program runs.
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
    pub(super) times: Times,
}

/// What it took. Seconds since the start of `criu restore`, but for the last three.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Times {
    /// The first answer had come, and it is right.
    pub(super) answered_s: f64,
    /// `criu restore` had returned: the program is alive.
    pub(super) alive_s: f64,
    /// All memory was resident: the server had ended or, eager, `criu restore` had.
    pub(super) resident_s: f64,
    /// How long an answer took when all memory was resident.
    pub(super) resident_answer_s: f64,
    /// User and system seconds of the server and of the processes that it waited for, per 10^9 bytes of the image's
    /// pages; none without a server.
    pub(super) server_cpu_s_per_gb: Option<f64>,
    /// Page faults of the program between alive and its first answer, minor and major.
    pub(super) faults: u64,
}

/// Restores the program, asks it until the first answer has come and again when all memory is resident, and ends it.
/// `work` gets logs.
///
/// # Errors
/// An act fails or takes too long, or an answer differs from the one before the dump.
pub(super) fn run(dumped: &Dumped, tools: &Tools, way: Way, work: &Path) -> anyhow::Result<Times> {
    let image = &dumped.image;
    let (mut server, more): (Option<Process>, &[&str]) = match way {
        Way::Eager => (None, &[]),
        Way::Stock => (Some(image.serve(&tools.criu, work)?), &["--lazy-pages"]),
        Way::Rewake => (Some(image.serve(&tools.rewake, work)?), &["--lazy-pages"]),
    };
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    let client = Client { socket: &dumped.socket, deadline: began + image.limit, stop: &stop };
    let (restored, asked) = std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let (answer, at) = client.first_answer()?;
            Ok::<_, anyhow::Error>((answer, at, page_faults(image.pid)))
        });
        let restored = image.restore(&tools.criu, more, work).and_then(|(target, exit)| {
            let faults = page_faults(image.pid);
            let served = server.as_mut().map(|server| image.served(server, work)).transpose()?;
            Ok((target, exit, faults, served))
        });
        if restored.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        (restored, asked.join().expect("the client does not panic"))
    });
    let (target, alive, faults_alive, served) = restored.with_context(|| match way {
        Way::Eager => "no server".to_owned(),
        Way::Stock | Way::Rewake => format!("the server's log:\n{}", server_log(work)),
    })?;
    let (answer, answered, faults_answered) = asked?;
    check(&answer, dumped, "the first answer")?;
    let again = Instant::now();
    let (answer, at) = Client { deadline: again + image.limit, ..client }.first_answer()?;
    check(&answer, dumped, "the answer with all memory resident")?;
    // Ends the program.
    drop(target);
    let since = |at: Instant| at.duration_since(began).as_secs_f64();
    let gb = dumped.page_bytes()? as f64 / 1e9;
    Ok(Times {
        answered_s: since(answered),
        alive_s: since(alive.at),
        resident_s: since(served.as_ref().map_or(alive.at, |exit| exit.at)),
        resident_answer_s: (at - again).as_secs_f64(),
        server_cpu_s_per_gb: served.map(|exit| exit.cpu_seconds / gb),
        faults: faults_answered?.saturating_sub(faults_alive?),
    })
}

fn check(answer: &str, dumped: &Dumped, which: &str) -> anyhow::Result<()> {
    ensure!(
        answer == dumped.answer,
        "wrong bytes: {which} is {answer:?}, and before the dump it was {:?}",
        dumped.answer
    );
    Ok(())
}
