// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replicas of one image, restored at once from a store, beside empty programs that CRIU restores at once.

use std::fs;
use std::path::Path;

use super::Options;
use super::stored::Stored;
use crate::criu;
use crate::harness::{Tools, folder, in_turn};
use crate::lazy::Image;
use crate::replicas::{apart, time};
use crate::report::{MIB, Spread, Table, spread};

/// MiB of an empty program.
const EMPTY_MIB: u64 = 1;

/// Times in milliseconds, and the store's bytes.
#[derive(Debug, Clone, Copy)]
struct Round {
    empty_ms: f64,
    alive_ms: f64,
    received: u64,
    received_once: u64,
    memory_mib: f64,
}

/// The rows, and their values of a round.
type Value = fn(&Round) -> f64;
const ROWS: [(&str, Value); 5] = [
    ("empty programs by `criu restore`, last one runs after, ms", |of| of.empty_ms),
    ("replicas from the store, last one runs after, ms", |of| of.alive_ms),
    ("share", |of| of.alive_ms / of.empty_ms),
    ("bytes from the store, beside one restore's", |of| of.received as f64 / of.received_once as f64),
    ("largest process, MiB", |of| of.memory_mib),
];

/// Measures, and returns the table.
pub(super) fn measure(options: &Options, directory: &Path) -> anyhow::Result<Table> {
    let Options { tools, replicas: count, mib, .. } = options;
    let empty = Image::dump(&tools.criu, &folder(directory, "empty")?, EMPTY_MIB, 0)?;
    let image = Image::dump(&tools.criu, &folder(directory, "full")?, mib / 2, 0)?;
    image.seal(&tools.rewake)?;
    let stored = Stored::new(options, &image.dumped.directory)?;
    let all = in_turn(
        options.rounds,
        |_| vec!["replicas at once"],
        |_, round| {
            let empty_ms = empty_programs(*count, tools, &empty, &folder(directory, &format!("e{round}"))?)?;
            let work = folder(directory, &format!("one{round}"))?;
            let (_, received_once, _) = replicas(1, tools, &stored, &work)?;
            let work = folder(directory, &format!("all{round}"))?;
            let (alive_ms, received, memory) = replicas(*count, tools, &stored, &work)?;
            Ok(Round { empty_ms, alive_ms, received, received_once, memory_mib: memory as f64 / MIB })
        },
    )?;
    let mut table = Table::new(&[&format!("{count} replicas of {} MiB at once", mib / 2), ""]);
    for (name, value) in ROWS {
        table.row(&[name.to_owned(), spread(Spread::of(all.iter().map(|taken| value(&taken.sample))))]);
    }
    Ok(table)
}

/// Restores empty programs. Returns when the last one ran.
fn empty_programs(count: u64, tools: &Tools, image: &Image, work: &Path) -> anyhow::Result<f64> {
    let start = |number: u64| {
        let work = folder(work, &number.to_string())?;
        Ok(apart(&criu::restore(&tools.criu, &image.dumped.directory, &work)))
    };
    let restores = (0..count).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let mut last = 0.0_f64;
    for restore in restores {
        last = last.max(restore.join().expect("a restore's thread returns errors")?.elapsed_ms);
    }
    Ok(last)
}

/// Restores replicas from the store, with an empty cache. Returns when the last one ran, the store's bytes,
/// and the memory of the largest process.
fn replicas(count: u64, tools: &Tools, stored: &Stored, work: &Path) -> anyhow::Result<(f64, u64, u64)> {
    let agent = stored.agent(tools, work)?;
    let before = stored.link.passed();
    let start = |_| {
        let mut restore = tools.restore(&["--json"], Stored::URL);
        apart(restore.arg("--socket").arg(agent.socket()).args(["--", "-d"]))
    };
    let restores = (0..count).map(start).collect::<Vec<_>>();
    let mut last = 0.0_f64;
    for restore in restores {
        let ended = restore.join().expect("a restore's thread returns errors")?;
        last = last.max(time(&ended.output, "alive_ms")?);
    }
    agent.has_image()?;
    let received = stored.link.passed() - before;
    let memory = agent.end()?;
    fs::remove_dir_all(work)?;
    Ok((last, received, memory))
}
