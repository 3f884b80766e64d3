// SPDX-License-Identifier: MIT OR Apache-2.0
//! One server, restored again and again from one image, on a disk and with copy engines of known speed. It is
//! restored at once, with a background load of GPU memory, and with a background load of all memory. `cargo
//! xtask bench behind` makes machines where disk and copies are so slow that they are the limit, and not the
//! processor.
//!
//! * [`round`]: a restore. [`table`]: the figures, and their required values. [`stored`]: restores from a
//!   store.
//!
//! The first table has seconds since the start of `criu restore`. It shows when that returns, when the first
//! answer has arrived and is right, and when all memory is resident (the streamer has ended; at once: `criu
//! restore` has). Beside them it shows how long an answer takes afterwards. The second table has the rate of
//! GPU memory, in bytes that are not zero, and its share of the slower of disk and copies, each measured by
//! plain loops of the same run. The rate is from the first engine's opening to the last byte, as the loader
//! logs it. In the background it is also from the handoff to the last byte (`rewake-timeline.json`, which is
//! up to 20 ms late). Between handoff and load the plugin loads the first buffers, waits for CPU memory that
//! is registered with the GPU, and lets the process run. With several processes each is resumed when its own
//! memory is resident: the table has the first and the last. If all memory is loaded in the background, CPU
//! memory comes from the same disk at the same time. An emulated processor takes tenths of a second for
//! engines, staging memory and CRIU.

mod round;
pub(crate) mod stored;
mod table;

use std::path::PathBuf;

use gpu_app::shape::{Mode, Shape};

use crate::harness::{self, Taken, in_turn};
use crate::limits::{self, Limits, MadeFor};
use round::{Sample, Subject, Way};

/// Buffers of weights.
const LAYERS: u64 = 4;

/// Arguments of `rewake-bench behind`. The last value of a repeated option counts.
#[derive(Debug, clap::Args)]
#[command(args_override_self = true)]
pub(crate) struct Options {
    /// Weights of the server in MiB, all random, which no CPU can access
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(4..=1 << 20))]
    mib: u64,
    /// Memory of its CPU in MiB, all random, which no GPU can access
    #[arg(long, default_value_t = 0)]
    own_mib: u64,
    /// Processes, each with its share of the weights, all on one GPU
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=LAYERS))]
    processes: u64,
    /// Restores in each way
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Where images lie: the disk that is measured
    #[arg(long)]
    dir: PathBuf,
}

/// All results of one run.
#[derive(Debug)]
struct Run {
    mib: u64,
    own_mib: u64,
    rounds: u64,
    /// Bytes of the image: of CPU memory, and of everything.
    image: (u64, u64),
    made_for: MadeFor,
    limits: Limits,
    samples: Vec<Taken<Way, Sample>>,
}

/// A server with `mib` MiB of weights, which no CPU can access.
fn server(mib: u64) -> Shape {
    let layer_kib = mib * 1024 / LAYERS;
    Shape { layers: LAYERS, layer_kib, cache_mib: 1, queues: 1, mode: Mode::NoAccess, ..Shape::small() }
}

/// Measures and prints the tables.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    harness::check_root("behind")?;
    eprintln!("measuring the disk and the copy engines");
    let limits = limits::measure(1, options.mib, &options.dir)?;
    let shape = Shape { own_mib: options.own_mib, processes: options.processes, ..server(options.mib) };
    let subject = Subject::dumped(&shape, &options.dir)?;
    let samples = in_turn(options.rounds, |_| Way::ALL.to_vec(), |way, _| subject.restores(way))?;
    let run = Run {
        mib: options.mib,
        own_mib: options.own_mib,
        rounds: options.rounds,
        image: subject.image()?,
        made_for: MadeFor::of_this_machine(1),
        limits,
        samples,
    };
    print!("{}", table::text(&run));
    Ok(())
}
