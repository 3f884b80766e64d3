// SPDX-License-Identifier: MIT OR Apache-2.0
//! Side-by-side comparisons with the stock daemon and the stock plugin.
//!
//! * [`harness`]: what all comparisons have in common. [`report`]: from samples to tables.
//! * [`lazy`]: one comparison, from the dump to the samples of every round.
//! * [`touch`]: the process that is dumped and restored; it measures its own page faults.
//! * [`disk`], [`fill`]: the machine's own limits, measured in the same run.
//! * [`processes`]: processes that cannot outlive the bench, their CPU time, and their memory one by one.
//! * [`programs`]: real programs, and the time of their first answer.
//! * [`replicas`]: restores of one image at once.
//! * [`store`]: restores from a store. [`link`]: a link with a rate and a delay.
//! * [`remote`]: restores whose pages another host has: page servers and their clients, plain loops.
//! * [`migrate`]: live migrations, and the demo of one.
//! * [`plugin`]: CRIU's plugins for AMD GPUs, on one process and one disk. [`limits`]: limits of disk and
//!   copies.
//! * [`behind`]: this project's plugin, with and without a background load.
//! * [`engine`]: the engine that loads GPU memory, compared with memcpy and the disk.
//! * [`checksums`]: what it costs to check blocks.
//! * [`agent`]: `rewake serve`.
//! * [`cache`]: the share of a file in the page cache. [`criu`]: runs CRIU and servers of lazy pages.
//!   [`pipes`]: what its lazy dumps need of the machine.

mod agent;
mod behind;
mod cache;
mod checksums;
mod criu;
mod disk;
mod engine;
mod fill;
mod harness;
mod lazy;
mod limits;
mod link;
mod migrate;
mod pipes;
mod plugin;
mod processes;
mod programs;
mod remote;
mod replicas;
mod report;
mod store;
mod touch;

use std::process::ExitCode;

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
    /// Restores Python, Node, Java and redis servers alternately eagerly, through `criu lazy-pages` and
    /// through `rewake lazy-pages`, and requests a first answer from each (needs root)
    Programs(programs::Options),
    /// Restores one image several times at once, by `rewake serve` and each by itself (needs root)
    Replicas(replicas::Options),
    /// Restores programs from a store behind a link of 1 Gbit/s, and measures the store (needs root)
    Store(store::Options),
    /// Restores one image in turn from page servers on loopback, stock CRIU's and rewake's, by clients of
    /// both (needs root)
    Remote(remote::Options),
    /// Moves programs between two hosts, which are namespaces of this machine (needs root)
    Migrate(migrate::Options),
    /// Dumps and restores a process on GPUs alternately with CRIU's own plugin and with rewake's (needs root,
    /// GPUs)
    Plugin(plugin::Options),
    /// Restores a process on a GPU alternately at once, with a background load of GPU memory, and with one of
    /// all memory (needs root, GPUs)
    Behind(behind::Options),
    /// Restores a process on a GPU from a store, after a pull and at once (needs root, GPUs)
    GpuStore(behind::stored::Options),
    /// Loads an image of GPU memory into this machine's memory, alternately with memcpy and fio (needs root)
    Engine(engine::Options),
    /// Compares ways to check blocks of an image while they are loaded
    Checksums(checksums::Options),
    /// The process that `lazy` dumps and restores
    #[command(hide = true)]
    Toucher(touch::Options),
    /// The process that `migrate` moves
    #[command(hide = true)]
    MigratingWriter(migrate::writer::WriterOptions),
    /// The process whose memory the fill limit is measured on
    #[command(hide = true)]
    FillTarget(fill::TargetOptions),
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rewake-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Lazy(options) => lazy::run(&options),
        Command::Programs(options) => programs::run(&options),
        Command::Replicas(options) => replicas::run(&options),
        Command::Store(options) => store::run_all(&options),
        Command::Remote(options) => remote::run(&options),
        Command::Migrate(options) => migrate::run(&options),
        Command::MigratingWriter(options) => migrate::writer::run(&options),
        Command::Plugin(options) => plugin::run(&options),
        Command::Behind(options) => behind::run(&options),
        Command::GpuStore(options) => behind::stored::run(&options),
        Command::Engine(options) => engine::run(&options),
        Command::Checksums(options) => checksums::run(&options),
        Command::Toucher(options) => touch::run(&options),
        Command::FillTarget(options) => fill::run_target(&options),
    }
}
