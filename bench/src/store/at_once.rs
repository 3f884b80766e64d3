// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replicas of one image, restored at once from a store, beside empty programs that CRIU restores at once.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use super::stored::{Stored, folder};
use super::{Options, Tools};
use crate::lazy::Image;
use crate::replicas::apart;
use crate::report::{Spread, spread};

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

/// Measures, and returns the table.
pub(super) fn measure(options: &Options, tools: &Tools, directory: &Path) -> anyhow::Result<String> {
    let empty = Image::dump(&tools.criu, &folder(directory, "empty")?, EMPTY_MIB, 0)?;
    let image = Image::dump(&tools.criu, &folder(directory, "full")?, options.mib / 2, 0)?;
    image.seal(&tools.rewake)?;
    let stored = Stored::new(tools, &image.dumped().directory)?;
    let mut all = Vec::new();
    for round in 0..options.rounds {
        eprintln!("{} replicas at once, round {round}", options.replicas);
        let empty_ms =
            empty_programs(options.replicas, tools, &empty, &folder(directory, &format!("e{round}"))?)?;
        let work = folder(directory, &format!("one{round}"))?;
        let (_, received_once, _) = replicas(1, tools, &stored, &work)?;
        let work = folder(directory, &format!("all{round}"))?;
        let (alive_ms, received, memory) = replicas(options.replicas, tools, &stored, &work)?;
        let memory_mib = memory as f64 / f64::from(1 << 20);
        all.push(Round { empty_ms, alive_ms, received, received_once, memory_mib });
    }
    let mut text =
        format!("| {} replicas of {} MiB at once | |\n|---|---|\n", options.replicas, options.mib / 2);
    let mut row = |name: &str, value: &dyn Fn(&Round) -> f64| {
        let cell = spread(Spread::of(all.iter().map(value).collect()));
        let _ = writeln!(text, "| {name} | {cell} |");
    };
    row("empty programs by `criu restore`, last one runs after, ms", &|of| of.empty_ms);
    row("replicas from the store, last one runs after, ms", &|of| of.alive_ms);
    row("share", &|of| of.alive_ms / of.empty_ms);
    row("bytes from the store, beside one restore's", &|of| of.received as f64 / of.received_once as f64);
    row("largest process, MiB", &|of| of.memory_mib);
    Ok(text)
}

/// Restores empty programs. Returns when the last one ran.
fn empty_programs(count: u64, tools: &Tools, image: &Image, work: &Path) -> anyhow::Result<f64> {
    let start = |number: u64| {
        let mut restore = Command::new(&tools.criu);
        restore.args(["restore", "-d", "-o", "restore.log", "-D"]).arg(&image.dumped().directory);
        restore.arg("-W").arg(folder(work, &number.to_string())?);
        Ok(apart(&restore))
    };
    let restores = (0..count).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let mut last = 0.0_f64;
    for restore in restores {
        last = last.max(restore.join().expect("a restore's thread returns errors")?.elapsed_ms);
    }
    Ok(last)
}

/// Restores replicas from the store, with an empty cache. Returns when the last one ran, the store's bytes, and the
/// memory of the largest process.
fn replicas(count: u64, tools: &Tools, stored: &Stored, work: &Path) -> anyhow::Result<(f64, u64, u64)> {
    let agent = stored.agent(tools, work)?;
    let before = stored.link.passed();
    let start = |_| {
        let mut restore = tools.rewake(&["restore", Stored::URL, "--json", "--quiet"]);
        restore.arg("--socket").arg(agent.socket()).arg("--criu").arg(&tools.criu).args(["--", "-d"]);
        apart(&restore)
    };
    let restores = (0..count).map(start).collect::<Vec<_>>();
    let mut last = 0.0_f64;
    for restore in restores {
        let ended = restore.join().expect("a restore's thread returns errors")?;
        let result: serde_json::Value = serde_json::from_slice(&ended.output)?;
        last = last.max(result["alive_ms"].as_f64().with_context(|| format!("no alive_ms in {result}"))?);
    }
    agent.has_image()?;
    let received = stored.link.passed() - before;
    let memory = agent.end()?;
    fs::remove_dir_all(work)?;
    Ok((last, received, memory))
}
