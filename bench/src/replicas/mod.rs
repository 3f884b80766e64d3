// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores of one image at once, each in pid and mount namespaces of its own: bytes read from the disk,
//! memory, and times.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context as _, bail};
use nix::unistd::Pid;

use crate::agent::Agent;
use crate::cache;
use crate::criu;
use crate::harness::{self, Place, Tools, folder, in_turn, pairs, run_folder};
use crate::lazy::Image;
use crate::processes::{Watch, read_bytes, share_of_rewake};
use crate::report::{Column, MIB, Table};

/// Arguments of `rewake-bench replicas`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    tools: Tools,
    /// Memory of the restored process in MiB
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size_mib: u64,
    /// Restores at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    count: u64,
    /// Repetitions of each way
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    #[command(flatten)]
    place: Place,
}

/// The cost of n restores at once.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// Bytes that all processes have read from the disk.
    read: u64,
    /// Peak memory of all processes of rewake, in bytes.
    memory: u64,
    /// When the first and the last of the processes ran, and when the last had all its memory, in
    /// milliseconds.
    first_runs_ms: f64,
    last_runs_ms: f64,
    all_ms: f64,
}

/// Measures and prints the table.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    harness::begin("replicas")?;
    let directory = run_folder(&options.place.dir)?;
    let image = Image::dump(&options.tools.criu, directory.path(), options.size_mib, 0)?;
    let bytes = image.bytes() as f64;
    // With the sample of eager restores of the same round. Without an agent the readers end with their pid
    // namespaces, and the kernel does not count them here.
    let columns: [Column<'_, (Way, Sample, Sample)>; 6] = [
        ("images read", &|(way, of, _)| (*way == Way::Served).then_some(of.read as f64 / bytes)),
        ("memory, MiB", &|(_, of, _)| Some(of.memory as f64 / MIB)),
        ("first runs, ms", &|(_, of, _)| Some(of.first_runs_ms)),
        ("last runs, ms", &|(_, of, _)| Some(of.last_runs_ms)),
        ("all resident, ms", &|(_, of, _)| Some(of.all_ms)),
        ("of eager's", &|(_, of, eager)| Some(of.all_ms / eager.all_ms)),
    ];
    let title = format!("{} restores at once of an image of {} MiB", options.count, options.size_mib);
    let mut table = Table::of(&title, &columns);
    for (cached, state) in [(false, "cold"), (true, "warm")] {
        let samples = in_turn(
            options.rounds,
            |_| Way::ALL.to_vec(),
            |way, round| {
                let work = folder(directory.path(), &format!("{state}-{way:?}-{round}"))?;
                cache::bring(&image.dumped.page_files, cached)?;
                sample(options, &image, way, &work)
            },
        )?;
        for way in Way::ALL {
            let row = |(of, eager): (&Sample, &Sample)| (way, *of, *eager);
            let row: Vec<_> = pairs(&samples, [way, Way::Eager]).map(row).collect();
            table.spreads(format!("{state}, {}", way.name()), row.iter(), &columns);
        }
    }
    print!("{table}");
    Ok(())
}

/// What restores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// `criu restore`, which returns when all is resident.
    Eager,
    /// `rewake restore` without an agent.
    Alone,
    /// `rewake restore` with `rewake serve`.
    Served,
}

impl Way {
    const ALL: [Self; 3] = [Self::Eager, Self::Alone, Self::Served];

    fn name(self) -> &'static str {
        match self {
            Self::Eager => "criu restore",
            Self::Alone => "each by itself",
            Self::Served => "by rewake serve",
        }
    }
}

fn sample(options: &Options, image: &Image, way: Way, work: &Path) -> anyhow::Result<Sample> {
    let before = read_bytes("self")?;
    let start = || Agent::start(&options.tools.rewake, work, &[], &[]);
    let agent = (way == Way::Served).then(start).transpose()?;
    let socket = agent.as_ref().map(Agent::socket);
    let watch = Watch::start(Pid::this(), share_of_rewake);
    let start = |number: u64| restore(options, image, way, &work.join(number.to_string()), socket);
    let restores = (0..options.count).map(start).collect::<Vec<_>>();
    let mut times = Vec::new();
    for restore in restores {
        times.push(restore.join().expect("a restore's thread returns errors")?);
    }
    let memory = watch.finish().together;
    agent.map(Agent::end).transpose()?;
    reap();
    let most = |of: fn(&(f64, f64)) -> f64| times.iter().map(of).fold(0.0, f64::max);
    Ok(Sample {
        read: read_bytes("self")? - before,
        memory,
        first_runs_ms: times.iter().map(|of| of.0).fold(f64::INFINITY, f64::min),
        last_runs_ms: most(|of| of.0),
        all_ms: most(|of| of.1),
    })
}

/// Starts a restore in namespaces of its own. Its thread returns when the process ran and when all was
/// resident, in milliseconds.
fn restore(
    options: &Options,
    image: &Image,
    way: Way,
    work: &Path,
    socket: Option<&Path>,
) -> JoinHandle<anyhow::Result<(f64, f64)>> {
    let image = &image.dumped.directory;
    let command = if way == Way::Eager {
        criu::restore(&options.tools.criu, image, work)
    } else {
        let mut command = options.tools.restore(&["--json", "-D"], image);
        if let Some(socket) = socket {
            command.arg("--socket").arg(socket);
        }
        command.args(["--", "-d"]);
        command
    };
    let work = work.to_owned();
    std::thread::spawn(move || {
        std::fs::create_dir(&work)?;
        let RestoreEnd { elapsed_ms, output } =
            apart(&command).join().expect("a restore's thread returns errors")?;
        if way == Way::Eager {
            return Ok((elapsed_ms, elapsed_ms));
        }
        Ok((time(&output, "alive_ms")?, time(&output, "all_resident_ms")?))
    })
}

/// A restore that has succeeded.
#[derive(Debug)]
pub(crate) struct RestoreEnd {
    pub(crate) elapsed_ms: f64,
    /// What it wrote to standard output.
    pub(crate) output: Vec<u8>,
}

/// A time of `rewake restore --json`.
pub(crate) fn time(output: &[u8], name: &str) -> anyhow::Result<f64> {
    let result: serde_json::Value = serde_json::from_slice(output)?;
    result[name].as_f64().with_context(|| format!("no {name} in {result}"))
}

/// Starts a command of a restore in pid and mount namespaces of its own. The restored processes end with it.
pub(crate) fn apart(restore: &Command) -> JoinHandle<anyhow::Result<RestoreEnd>> {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc"]);
    command.arg(restore.get_program()).args(restore.get_args());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    std::thread::spawn(move || {
        let began = Instant::now();
        let output = command.output().context("unshare")?;
        let elapsed_ms = began.elapsed().as_secs_f64() * 1e3;
        if !output.status.success() {
            bail!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(RestoreEnd { elapsed_ms, output: output.stdout })
    })
}

/// Reaps every child that has ended: only then the kernel adds its reads here.
fn reap() {
    while nix::sys::wait::waitpid(None, Some(nix::sys::wait::WaitPidFlag::WNOHANG))
        .is_ok_and(|status| status.pid().is_some())
    {}
}
