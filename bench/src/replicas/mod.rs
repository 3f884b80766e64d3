// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores of one image at once, each in pid and mount namespaces of its own: bytes read from the disk, memory, and
//! times.

mod memory;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use crate::cache;
use crate::criu::quiet;
use crate::lazy::Image;
use crate::processes::{Process, catch_interrupts};

/// Time until `rewake serve` answers.
const START: Duration = Duration::from_secs(30);

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
        "{} restores at once of an image of {} MiB\n{:<28} {:>12} {:>12} {:>11} {:>10} {:>12}",
        options.count,
        options.size_mib,
        "",
        "images read",
        "memory, MiB",
        "first runs",
        "last runs",
        "all resident"
    );
    for cold in [true, false] {
        for served in [true, false] {
            let mut samples = Vec::new();
            for round in 0..options.rounds {
                let work = directory.path().join(format!("{cold}-{served}-{round}"));
                std::fs::create_dir(&work)?;
                if cold {
                    cache::drop_files(image.page_files())?;
                } else {
                    cache::load_files(image.page_files())?;
                }
                samples.push(sample(options, &image, served, &work)?);
            }
            let median = |of: fn(&Sample) -> f64| {
                let mut values: Vec<f64> = samples.iter().map(of).collect();
                values.sort_by(f64::total_cmp);
                values[values.len() / 2]
            };
            #[expect(clippy::cast_precision_loss, reason = "for users")]
            let (read, memory) = (
                median(|of| of.read as f64) / image.bytes() as f64,
                median(|of| of.memory as f64) / f64::from(1 << 20),
            );
            println!(
                "{:<28} {read:>12.2} {memory:>12.1} {:>8.0} ms {:>7.0} ms {:>9.0} ms",
                format!(
                    "{}, {}",
                    if cold { "cold" } else { "warm" },
                    if served { "by rewake serve" } else { "each by itself" }
                ),
                median(|of| of.first_runs_ms),
                median(|of| of.last_runs_ms),
                median(|of| of.all_ms),
            );
        }
    }
    Ok(())
}

fn sample(options: &Options, image: &Image, served: bool, work: &Path) -> anyhow::Result<Sample> {
    let socket = work.join("socket");
    let before = read_bytes()?;
    let agent = if served { Some(start_agent(&options.rewake, &socket, work)?) } else { None };
    let memory = memory::Sampler::start();
    let command = |_| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--mount-proc"]).arg(&options.rewake);
        command.args(["restore", "--json", "--quiet", "-D"]).arg(&image.dumped().directory);
        if served {
            command.arg("--socket").arg(&socket);
        }
        command.arg("--criu").arg(&options.criu).args(["--", "-d"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let restores = (0..options.count).map(command).collect::<Result<Vec<_>, _>>().context("unshare")?;
    let mut times = Vec::new();
    for restore in restores {
        let output = restore.wait_with_output()?;
        if !output.status.success() {
            bail!("rewake restore: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        let result: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let time = |name: &str| result[name].as_f64().with_context(|| format!("no {name} in {result}"));
        times.push((time("alive_ms")?, time("all_resident_ms")?));
    }
    let memory = memory.finish();
    if let Some(mut agent) = agent {
        agent.signal(nix::sys::signal::Signal::SIGTERM)?;
        agent.wait(START)?;
    }
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

fn start_agent(program: &Path, socket: &Path, work: &Path) -> anyhow::Result<Process> {
    let mut command = Command::new(program);
    command.arg("serve").arg("--socket").arg(socket).arg("-o").arg(work.join("serve.log"));
    let agent = Process::spawn(quiet(&mut command))?;
    let answers = || {
        let mut status = Command::new(program);
        status.arg("status").arg("--socket").arg(socket);
        quiet(&mut status).status().is_ok_and(|status| status.success())
    };
    let until = std::time::Instant::now() + START;
    while !answers() {
        ensure!(std::time::Instant::now() < until, "rewake serve does not answer within {START:?}");
    }
    Ok(agent)
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
