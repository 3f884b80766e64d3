// SPDX-License-Identifier: MIT OR Apache-2.0
//! One process on GPUs, dumped and restored alternately by CRIU with its own plugin and with this project's.
//! Disk and copy engines have known rates. `cargo xtask bench plugin` makes machines where both are so slow
//! that they are the limit, and not the processor.
//!
//! * [`round`]: a dump and a restore. [`log`]: figures from their logs.
//! * [`table`]: the figures, and their required values.

pub(crate) mod log;
mod round;
mod table;

use std::path::PathBuf;

use gpu_app::shape::Shape;
use softgpu_tests::criu::Plugin;

use crate::harness::{self, Taken, in_turn};
use crate::limits::{self, Limits, MadeFor};
use round::{Sample, Subject};

/// Buffers of weights: two for each of two GPUs.
const LAYERS: u64 = 4;
/// KiB of a layer of a process with almost no memory.
const TINY_KIB: u64 = 4;

/// Arguments of `rewake-bench plugin`. The last value of a repeated option counts.
#[derive(Debug, clap::Args)]
#[command(args_override_self = true)]
pub(crate) struct Options {
    /// Weights of the process in MiB, all random
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(4..=1 << 20))]
    mib: u64,
    /// GPUs that have a part of them each
    #[arg(long, default_value_t = 1)]
    gpus: usize,
    /// Dumps and restores with each plugin
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Also a process with this number of buffers of one page each
    #[arg(long, default_value_t = 0)]
    small_bos: u64,
    /// Where images lie: the disk that is measured
    #[arg(long)]
    dir: PathBuf,
}

/// All results of one run.
#[derive(Debug)]
struct Comparison {
    mib: u64,
    gpus: usize,
    rounds: u64,
    /// The machine's promised rates, in millions of bytes a second.
    made_for: MadeFor,
    limits: Limits,
    /// Samples of a process with tiny weights, one of each plugin.
    tiny: Vec<Taken<Plugin, Sample>>,
    samples: Vec<Taken<Plugin, Sample>>,
    /// A sample of a process with small buffers.
    small: Option<Sample>,
}

/// Measures and prints the table.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    harness::begin("plugin")?;
    print!("{}", table::text(&measure(options)?));
    Ok(())
}

fn measure(options: &Options) -> anyhow::Result<Comparison> {
    let large = Shape {
        gpus: options.gpus,
        layers: LAYERS,
        layer_kib: options.mib * 1024 / LAYERS,
        cache_mib: 1,
        queues: 1,
        ..Shape::small()
    };
    let tiny = Shape { layer_kib: TINY_KIB, ..large.clone() };
    eprintln!("measuring the disk and the copy engines");
    let limits = limits::measure(options.gpus, options.mib, &options.dir)?;
    eprintln!("a process with {} KiB of weights", LAYERS * TINY_KIB);
    let tiny_samples = rounds(&tiny, options, 1, &[Plugin::Stock, Plugin::Ours])?;
    eprintln!("a process with {} MiB of weights", options.mib);
    let samples = rounds(&large, options, options.rounds, &[Plugin::Stock, Plugin::Ours])?;
    let mut small = None;
    if options.small_bos > 0 {
        eprintln!("a process with {} buffers of one page each", options.small_bos);
        let shape = Shape { small_bos: options.small_bos, ..tiny };
        small = rounds(&shape, options, 1, &[Plugin::Ours])?.pop().map(|taken| taken.sample);
    }
    Ok(Comparison {
        mib: options.mib,
        gpus: options.gpus,
        rounds: options.rounds,
        made_for: MadeFor::of_this_machine(options.gpus),
        limits,
        tiny: tiny_samples,
        samples,
        small,
    })
}

/// A process of this shape, dumped and restored with the plugins alternately.
fn rounds(
    shape: &Shape,
    options: &Options,
    count: u64,
    plugins: &[Plugin],
) -> anyhow::Result<Vec<Taken<Plugin, Sample>>> {
    let mut subject = Subject::start(shape, &options.dir)?;
    let samples = in_turn(count, |_| plugins.to_vec(), |plugin, _| subject.dump_and_restore(plugin))?;
    subject.quit()?;
    Ok(samples)
}
