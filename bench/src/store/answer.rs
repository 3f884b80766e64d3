// SPDX-License-Identifier: MIT OR Apache-2.0
//! The first right answer of a program from a store: pulled and restored eagerly; restored while it arrives;
//! the second replica on the host; restored while it arrives, with a recorded working set.

use std::fs;
use std::path::Path;
use std::time::Instant;

use rewake_testkit::process::output;

use super::stored::Stored;
use super::{Options, push};
use crate::agent::Agent;
use crate::criu::Image;
use crate::harness::{Tools, folder, in_turn};
use crate::processes::Process;
use crate::programs::{Dumped, Program};
use crate::report::{Column, MIB, Table};

/// The columns of the table.
const COLUMNS: [Column<'_, Round>; 9] = [
    ("pull, then `criu restore`", &|of| Some(of.pulled_s)),
    ("`rewake restore URL`", &|of| Some(of.restored_s)),
    ("share", &|of| Some(of.restored_s / of.pulled_s)),
    ("second replica", &|of| Some(of.second_s)),
    ("share of the first", &|of| Some(of.second_s / of.restored_s)),
    ("with a working set", &|of| Some(of.recorded_s)),
    ("share of without", &|of| Some(of.recorded_s / of.restored_s)),
    ("bytes from the store", &|of| Some(of.received)),
    ("largest process, MiB", &|of| Some(of.memory_mib)),
];

pub(super) fn table() -> Table {
    Table::of("program: first answer, s", &COLUMNS)
}

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

/// Measures one program, and adds its row.
pub(super) fn measure(
    table: &mut Table,
    program: Program,
    options: &Options,
    directory: &Path,
) -> anyhow::Result<()> {
    let tools = &options.tools;
    let mut dumped = Dumped::new(program, options.mib, &tools.criu, directory)?;
    tools.seal(&dumped.image.directory)?;
    let stored = Stored::new(options, &dumped.image.directory)?;
    let bytes = dumped.page_bytes()?;
    fs::remove_dir_all(&dumped.image.directory)?;
    dumped.image.page_files.clear();
    record(&dumped, &stored, tools, &folder(directory, "record")?)?;
    let rounds = in_turn(
        options.rounds,
        |_| vec![program],
        |_, round| {
            let work = folder(directory, &round.to_string())?;
            let measured = measure_round(&dumped, bytes, &stored, tools, &work)?;
            fs::remove_dir_all(&work)?;
            Ok(measured)
        },
    )?;
    table.spreads(program.to_string(), rounds.iter().map(|taken| &taken.sample), &COLUMNS);
    Ok(())
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
    let memory_mib = agent.end()? as f64 / MIB;
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
    output(tools.rewake(&["pull", Stored::URL]).arg(&image).envs(variables.clone()))?;
    let (_, target) = first_answer(dumped, || {
        let mut restore = tools.restore(&["--record", "-D"], &image);
        output(restore.arg("-W").arg(work).args(["--", "-d"]))?;
        Process::adopt(dumped.image.pid, "the restored process")
    })?;
    drop(target);
    push(tools, &image, Stored::RECORDED_URL, &variables)?;
    Ok(fs::remove_dir_all(work)?)
}

/// Pulls the image, and restores it with CRIU alone.
fn pulled(dumped: &Dumped, stored: &Stored, tools: &Tools, work: &Path) -> anyhow::Result<f64> {
    let directory = work.join("img");
    let (answered, target) = first_answer(dumped, || {
        output(tools.rewake(&["pull", Stored::URL]).arg(&directory).envs(stored.variables()))?;
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
        let mut restore = tools.restore(&["--wait", "alive"], url);
        output(restore.arg("--socket").arg(agent.socket()).arg("-W").arg(work).args(["--", "-d"]))?;
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
    let began = Instant::now();
    let (restored, answered) =
        dumped.restored_while_asked(|_| restore(), |client| dumped.first.ask(client, began));
    let target = restored?;
    Ok(((answered?.at - began).as_secs_f64(), target))
}
