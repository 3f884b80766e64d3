// SPDX-License-Identifier: MIT OR Apache-2.0
//! Side-by-side comparisons with the stock daemon.
//!
//! * [`lazy`]: one comparison, from the dump to the samples of every round.
//! * [`touch`]: the process that is dumped and restored; it measures its own page faults.
//! * [`disk`], [`fill`]: what the machine itself can do, measured in the same run.
//! * [`processes`]: processes that cannot outlive the bench, their CPU time and memory.
//! * [`report`]: from samples to a table, Markdown and JSON.

mod disk;
mod fill;
mod lazy;
mod processes;
mod report;
mod touch;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "rewake-bench", about = "Compares rewake with stock CRIU on this machine, in one run")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Restores one image in turn through `criu lazy-pages` and `rewake lazy-pages` (needs root)
    Lazy(lazy::Options),
    /// The process that `lazy` dumps and restores
    #[command(hide = true)]
    Toucher(touch::Options),
    /// The process whose memory the fill limit is measured on
    #[command(hide = true)]
    FillTarget(fill::TargetOptions),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Lazy(options) => lazy::run(&options),
        Command::Toucher(options) => touch::run(&options),
        Command::FillTarget(options) => fill::run_target(&options),
    }
}
