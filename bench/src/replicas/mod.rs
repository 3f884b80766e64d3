// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores of one image at once, each in pid and mount namespaces of its own: bytes read from the disk, memory, and
//! times.

mod memory;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};

use crate::agent::Agent;
use crate::cache;
use crate::lazy::Image;
use crate::processes::catch_interrupts;

/// Arguments of `rewake-bench replicas`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Stock criu: dumps and restores
    #[arg(long)]
    criu: PathBuf,
    /// rewake, or another release of it
    #[arg(long)]
    rewake: PathBuf,
    /// Memory of the restored process in MiB
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size_mib: u64,
    /// Restores at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    count: u64,
    /// Repetitions of each way
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Where images lie during the run: the disk that is measured [default: the directory for temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
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
    ensure!(
        nix::unistd::geteuid().is_root(),
        "rewake-bench replicas dumps and restores with CRIU: run it as root"
    );
    catch_interrupts()?;
    // Orphans become children of this process: the bytes that they have read are counted here.
    nix::sys::prctl::set_child_subreaper(true).context("PR_SET_CHILD_SUBREAPER")?;
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir).canonicalize()?;
    let directory = tempfile::Builder::new().prefix("rewake-bench-").tempdir_in(&parent)?;
    let image = Image::dump(&options.criu.canonicalize()?, directory.path(), options.size_mib, 0)?;
    println!(
        "{} restores at once of an image of {} MiB\n{:<28} {:>12} {:>12} {:>11} {:>10} {:>12} {:>14}",
        options.count,
        options.size_mib,
        "",
        "images read",
        "memory, MiB",
        "first runs",
        "last runs",
        "all resident",
        "of eager's"
    );
    for cold in [true, false] {
        let mut samples = [(); 3].map(|()| Vec::new());
        for round in 0..options.rounds {
            for (way, samples) in Way::ALL.into_iter().zip(&mut samples) {
                let work = directory.path().join(format!("{cold}-{way:?}-{round}"));
                std::fs::create_dir(&work)?;
                if cold {
                    cache::drop_files(image.page_files())?;
                } else {
                    cache::load_files(image.page_files())?;
                }
                samples.push(sample(options, &image, way, &work)?);
            }
        }
        let state = if cold { "cold" } else { "warm" };
        for (way, ours) in Way::ALL.into_iter().zip(&samples) {
            print_row(&format!("{state}, {}", way.name()), image.bytes(), way, ours, &samples[0]);
        }
    }
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

/// Prints the medians of `samples`, and the time of each round beside that of `eager` in the same round.
#[expect(clippy::cast_precision_loss, reason = "for users")]
fn print_row(name: &str, bytes: u64, way: Way, samples: &[Sample], eager: &[Sample]) {
    let median = |of: &dyn Fn(&Sample) -> f64| sorted(samples.iter().map(of))[samples.len() / 2];
    // Without an agent the readers end with their pid namespaces, and the kernel does not count them here.
    let read = (way == Way::Served).then(|| median(&|of| of.read as f64));
    let shares = sorted(samples.iter().zip(eager).map(|(ours, eager)| ours.all_ms / eager.all_ms));
    println!(
        "{name:<28} {:>12} {:>12.1} {:>8.0} ms {:>7.0} ms {:>9.0} ms {:.2} ({:.2} .. {:.2})",
        read.map_or_else(|| "-".to_owned(), |read| format!("{:.2}", read / bytes as f64)),
        median(&|of| of.memory as f64) / f64::from(1 << 20),
        median(&|of| of.first_runs_ms),
        median(&|of| of.last_runs_ms),
        median(&|of| of.all_ms),
        shares[shares.len() / 2],
        shares[0],
        shares[shares.len() - 1]
    );
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn sample(options: &Options, image: &Image, way: Way, work: &Path) -> anyhow::Result<Sample> {
    let before = read_bytes()?;
    let start = || Agent::start(&options.rewake, work, &[], &[]);
    let agent = (way == Way::Served).then(start).transpose()?;
    let socket = agent.as_ref().map(Agent::socket);
    let memory = memory::Sampler::start();
    let start = |number: u64| restore(options, image, way, &work.join(number.to_string()), socket);
    let restores = (0..options.count).map(start).collect::<Vec<_>>();
    let mut times = Vec::new();
    for restore in restores {
        times.push(restore.join().expect("a restore's thread returns errors")?);
    }
    let memory = memory.finish();
    agent.map(Agent::end).transpose()?;
    reap();
    let most = |of: fn(&(f64, f64)) -> f64| times.iter().map(of).fold(0.0, f64::max);
    Ok(Sample {
        read: read_bytes()? - before,
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
    let image = &image.dumped().directory;
    let mut command;
    if way == Way::Eager {
        command = Command::new(&options.criu);
        command.args(["restore", "-d", "-o", "restore.log", "-D"]).arg(image).arg("-W").arg(work);
    } else {
        command = Command::new(&options.rewake);
        command.args(["restore", "--json", "--quiet", "-D"]).arg(image);
        if let Some(socket) = socket {
            command.arg("--socket").arg(socket);
        }
        command.arg("--criu").arg(&options.criu).args(["--", "-d"]);
    }
    let work = work.to_owned();
    std::thread::spawn(move || {
        std::fs::create_dir(&work)?;
        let RestoreEnd { elapsed_ms, output } =
            apart(&command).join().expect("a restore's thread returns errors")?;
        if way == Way::Eager {
            return Ok((elapsed_ms, elapsed_ms));
        }
        let result: serde_json::Value = serde_json::from_slice(&output)?;
        let time = |name: &str| result[name].as_f64().with_context(|| format!("no {name} in {result}"));
        Ok((time("alive_ms")?, time("all_resident_ms")?))
    })
}

/// A restore that has succeeded.
#[derive(Debug)]
pub(crate) struct RestoreEnd {
    pub(crate) elapsed_ms: f64,
    /// What it wrote to standard output.
    pub(crate) output: Vec<u8>,
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

/// Bytes that this process and the children that it has reaped have read from disks: proc(5).
fn read_bytes() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/io").context("/proc/self/io")?;
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.context("/proc/self/io has no read_bytes")?.parse().context("read_bytes of /proc/self/io")
}
