// SPDX-License-Identifier: MIT OR Apache-2.0
//! A server on a GPU whose image is in a store: a folder on a disk of known speed. Its first answer, which
//! must be right, after `rewake pull` and `criu restore`, after `rewake restore URL` with an empty cache, and
//! after another restore on the same host. Copy and cache lie in memory: the disk is the store alone. The
//! link of `bench replicas` would be no limit for an emulated processor.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::Context as _;
use rewake_testkit::process::output;
use rewake_testkit::programs::rewake;
use tempfile::TempDir;

use super::round::Subject;
use super::server;
use crate::agent::Agent;
use crate::cache::{drop_files, files};
use crate::harness;
use crate::limits::{self, MadeFor};
use crate::report::{Column, Table};

/// Arguments of `rewake-bench gpu-store`. The last value of a repeated option counts.
#[derive(Debug, clap::Args)]
#[command(args_override_self = true)]
pub(crate) struct Options {
    /// Weights of the server in MiB, all random, which no CPU can access
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(4..=512))]
    mib: u64,
    /// Restores in each way
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=5))]
    rounds: u64,
    /// Where the store lies: the disk that is measured
    #[arg(long)]
    dir: PathBuf,
}

/// Seconds until the first right answer.
#[derive(Debug, Clone, Copy)]
struct Round {
    pulled: f64,
    first: f64,
    second: f64,
}

/// The server's image in a store.
struct Stored {
    subject: Subject,
    store: TempDir,
    url: String,
}

impl Stored {
    fn new(subject: Subject, dir: &Path) -> anyhow::Result<Self> {
        let store = tempfile::tempdir_in(dir).with_context(|| format!("a folder in {}", dir.display()))?;
        let url = format!("file://{}/server", store.path().display());
        output(Command::new(rewake()?).arg("push").arg(subject.criu.images()).arg(&url))?;
        Ok(Self { subject, store, url })
    }

    /// Measures each way once.
    fn round(&self, work: &Path) -> anyhow::Result<Round> {
        let pulled = self.pulled()?;
        let agent = Agent::start(&rewake()?, work, &[Path::new("--cache"), &work.join("cache")], &[])?;
        self.forget()?;
        let first = self.restored(&agent)?;
        agent.has_image()?;
        let second = self.restored(&agent)?;
        agent.end()?;
        Ok(Round { pulled, first, second })
    }

    fn pulled(&self) -> anyhow::Result<f64> {
        let images = self.subject.criu.images();
        fs::remove_dir_all(images).with_context(|| format!("remove {}", images.display()))?;
        self.forget()?;
        let start = Instant::now();
        output(Command::new(rewake()?).arg("pull").arg(&self.url).arg(images))?;
        self.subject.criu.restore()?;
        self.answered(start)
    }

    fn restored(&self, agent: &Agent) -> anyhow::Result<f64> {
        let work = tempfile::tempdir().context("a work directory")?;
        let mut command = self.subject.criu.restore_from_store(&self.url, work.path())?;
        command.arg("--socket").arg(agent.socket()).args(["--wait=alive", "--", "-d", "-v4"]);
        let start = Instant::now();
        output(&mut command)?;
        self.answered(start)
    }

    /// Ends the server after its first answer. Returns when that came.
    fn answered(&self, start: Instant) -> anyhow::Result<f64> {
        self.subject.answers()?;
        let elapsed = start.elapsed().as_secs_f64();
        self.subject.ends()?;
        Ok(elapsed)
    }

    /// Makes the kernel drop what it has of the store.
    fn forget(&self) -> anyhow::Result<()> {
        let mut all = files(self.store.path())?;
        while let Some(at) = all.iter().position(|path| path.is_dir()) {
            let folder = all.swap_remove(at);
            all.extend(files(&folder)?);
        }
        drop_files(&all)
    }
}

/// Measures, and prints the table.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    harness::check_root("gpu-store")?;
    let limits = limits::measure(1, options.mib, &options.dir)?;
    let memory = tempfile::tempdir().context("a folder in memory")?;
    let stored = Stored::new(Subject::dumped(&server(options.mib), memory.path())?, &options.dir)?;
    let mut rounds = Vec::new();
    for round in 0..options.rounds {
        let work = tempfile::tempdir_in(&memory).context("a folder for a round")?;
        rounds.push(stored.round(work.path()).with_context(|| format!("round {round}"))?);
    }
    let columns: [Column<'_, Round>; 5] = [
        ("pull", &|of| Some(of.pulled)),
        ("`rewake restore URL`", &|of| Some(of.first)),
        ("share", &|of| Some(of.first / of.pulled)),
        ("second", &|of| Some(of.second)),
        ("its share of the first", &|of| Some(of.second / of.first)),
    ];
    let mut table = Table::of("first right answer, s", &columns);
    table.spreads("server on a GPU".to_owned(), rounds.iter(), &columns);
    println!(
        "{} MiB of weights, {} rounds; medians (least .. most)\n\n{}\n{table}",
        options.mib,
        options.rounds,
        limits.text(MadeFor::of_this_machine(1)),
    );
    Ok(())
}
