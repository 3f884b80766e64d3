// SPDX-License-Identifier: MIT OR Apache-2.0
//! The first right answer of a program from a store: pulled and restored eagerly; restored while it arrives; the second
//! replica on the host; restored while it arrives, with a recorded working set.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::stored::{Stored, folder};
use super::{Tools, run};
use crate::agent::Agent;
use crate::criu::Image;
use crate::processes::Process;
use crate::programs::{Client, Dumped, Program};
use crate::report::{Spread, spread};

/// The columns of [`measure`].
pub(super) const HEADING: &str = "\
    | program: first answer, s | pull, then `criu restore` | `rewake restore URL` | share | second replica \
    | share of the first | with a working set | share of without | bytes from the store | largest process, MiB |
|---|---|---|---|---|---|---|---|---|---|";

/// One round.
#[derive(Debug, Clone, Copy)]
struct Round {
    pulled_s: f64,
    restored_s: f64,
    second_s: f64,
    recorded_s: f64,
    /// Bytes over the link until the cache was complete, of the image's bytes.
    received: f64,
    memory_mib: f64,
}

/// Measures one program. Returns its row.
pub(super) fn measure(
    program: Program,
    mib: u64,
    rounds: u64,
    tools: &Tools,
    directory: &Path,
) -> anyhow::Result<String> {
    let mut dumped = Dumped::new(program, mib, &tools.criu, directory)?;
    tools.seal(&dumped.image.directory)?;
    let stored = Stored::new(tools, &dumped.image.directory)?;
    let bytes = dumped.page_bytes()?;
    fs::remove_dir_all(&dumped.image.directory)?;
    dumped.image.page_files.clear();
    record(&dumped, &stored, tools, &folder(directory, "record")?)?;
    let mut all = Vec::new();
    for round in 0..rounds {
        eprintln!("{program}, round {round}");
        let work = folder(directory, &round.to_string())?;
        all.push(measure_round(&dumped, bytes, &stored, tools, &work)?);
        fs::remove_dir_all(&work)?;
    }
    let cell = |value: &dyn Fn(&Round) -> f64| spread(Spread::of(all.iter().map(value).collect()));
    Ok(format!(
        "| {program} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
        cell(&|of| of.pulled_s),
        cell(&|of| of.restored_s),
        cell(&|of| of.restored_s / of.pulled_s),
        cell(&|of| of.second_s),
        cell(&|of| of.second_s / of.restored_s),
        cell(&|of| of.recorded_s),
        cell(&|of| of.recorded_s / of.restored_s),
        cell(&|of| of.received),
        cell(&|of| of.memory_mib)
    ))
}

fn measure_round(
    dumped: &Dumped,
    bytes: u64,
    stored: &Stored,
    tools: &Tools,
    work: &Path,
) -> anyhow::Result<Round> {
    let pulled_s = pulled(dumped, stored, tools, &folder(work, "pull")?)?;
    let host = folder(work, "host")?;
    let agent = stored.agent(tools, &host)?;
    let before = stored.link.passed();
    let restored_s = from_store(dumped, &agent, Stored::URL, tools, &folder(work, "first")?)?;
    let second_s = from_store(dumped, &agent, Stored::URL, tools, &folder(work, "second")?)?;
    let received = (stored.link.passed() - before) as f64 / bytes as f64;
    let memory_mib = agent.end()? as f64 / f64::from(1 << 20);
    fs::remove_dir_all(&host)?;
    let agent = stored.agent(tools, &folder(work, "other-host")?)?;
    let recorded_s = from_store(dumped, &agent, Stored::RECORDED_URL, tools, &folder(work, "recorded")?)?;
    agent.end()?;
    Ok(Round { pulled_s, restored_s, second_s, recorded_s, received, memory_mib })
}

/// Records what the first answer reads, and stores the image again, with this working set.
fn record(dumped: &Dumped, stored: &Stored, tools: &Tools, work: &Path) -> anyhow::Result<()> {
    let image = work.join("img");
    let variables = stored.variables_without_link();
    run(tools.rewake(&["pull", Stored::URL]).arg(&image).envs(variables.clone()))?;
    let (_, target) = first_answer(dumped, || {
        let mut restore = tools.rewake(&["restore", "--record", "--quiet"]);
        restore.arg("--criu").arg(&tools.criu).arg("-D").arg(&image);
        run(restore.arg("-W").arg(work).args(["--", "-d"]))?;
        Process::adopt(dumped.image.pid, "the restored process")
    })?;
    drop(target);
    tools.push(&image, Stored::RECORDED_URL, &variables)?;
    Ok(fs::remove_dir_all(work)?)
}

/// Pulls the image, and restores it with CRIU alone.
fn pulled(dumped: &Dumped, stored: &Stored, tools: &Tools, work: &Path) -> anyhow::Result<f64> {
    let directory = work.join("img");
    let (answered, target) = first_answer(dumped, || {
        run(tools.rewake(&["pull", Stored::URL]).arg(&directory).envs(stored.variables()))?;
        let image = Image { directory: directory.clone(), page_files: Vec::new(), ..dumped.image };
        Ok(image.restore(&tools.criu, &[], work)?.0)
    })?;
    drop(target);
    fs::remove_dir_all(&directory)?;
    Ok(answered)
}

/// Restores the image from the store, while it arrives. Returns when all of it is in the cache.
fn from_store(dumped: &Dumped, agent: &Agent, url: &str, tools: &Tools, work: &Path) -> anyhow::Result<f64> {
    let (answered, target) = first_answer(dumped, || {
        let mut restore: Command = tools.rewake(&["restore", url, "--quiet", "--wait", "alive"]);
        restore.arg("--socket").arg(agent.socket()).arg("--criu").arg(&tools.criu);
        run(restore.arg("-W").arg(work).args(["--", "-d"]))?;
        Process::adopt(dumped.image.pid, "the restored process")
    })?;
    agent.has_image()?;
    drop(target);
    Ok(answered)
}

/// Restores, and requests the first answer from the start on. Returns the seconds until it arrived.
fn first_answer(
    dumped: &Dumped,
    restore: impl FnOnce() -> anyhow::Result<Process>,
) -> anyhow::Result<(f64, Process)> {
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    let client = Client { socket: &dumped.socket, deadline: began + dumped.image.limit, stop: &stop };
    let (restored, answered) = std::thread::scope(|scope| {
        let answered = scope.spawn(|| dumped.first.ask(&client, began));
        let restored = restore();
        stop.store(restored.is_err(), Ordering::Relaxed);
        (restored, answered.join().expect("the client does not panic"))
    });
    let target = restored?;
    Ok(((answered?.at - began).as_secs_f64(), target))
}
