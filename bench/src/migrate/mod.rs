// SPDX-License-Identifier: MIT OR Apache-2.0
//! Live migrations between two hosts, which are namespaces of this machine with a link of 1 Gbit/s: downtime
//! and bytes.
//!
//! * [`writer`]: the program that migrates.

pub(crate) mod writer;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use rewake_testkit::hosts::{DESTINATION, HostPair};
use rewake_testkit::{PATIENCE, until};
use writer::WriteOrder;

use crate::harness::{in_turn, value_name};
use crate::pipes::PipeRoom;
use crate::report::{Spread, Table};

const PORT: &str = "7700";
const NAME: &str = "rewake-bench";
/// Memory of the program that stands for an empty one.
const EMPTY_MIB: usize = 1;
/// Memory of the demo's program.
const DEMO_MIB: usize = 256;

/// Arguments of `rewake-bench migrate`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The CRIU that dumps and restores
    #[arg(long)]
    criu: PathBuf,
    /// rewake
    #[arg(long)]
    rewake: PathBuf,
    /// Memory of the programs in MiB
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size_mib: u64,
    /// MiB that the programs write in a second
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    write_rate: u64,
    /// Rate of the link in Mbit/s
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    link_mbit: u64,
    /// Migrations of each program
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Migrate one program, and show the steps
    #[arg(long)]
    demo: bool,
}

/// Figures of one migration.
#[derive(Debug, Clone, Copy)]
struct MigrationFigures {
    downtime_ms: f64,
    sent_mib: f64,
    rounds: f64,
    total_s: f64,
}

/// Measures and prints the table, or shows one migration.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    if options.demo {
        return demo(options);
    }
    let _room = PipeRoom::made()?;
    println!(
        "medians of {}; {} Mbit/s; {} MiB/s are written",
        options.rounds, options.link_mbit, options.write_rate
    );
    let heads = ["program", "downtime, ms", "sent, MiB", "rounds of pre-copy", "whole migration, s"];
    let mut table = Table::new(&heads);
    let size = usize::try_from(options.size_mib)?;
    let programs = [
        (EMPTY_MIB, WriteOrder::Idle, &[][..]),
        (size, WriteOrder::Idle, &[]),
        (size, WriteOrder::Sequential, &[]),
        (size, WriteOrder::Random, &[]),
        (size, WriteOrder::Sequential, &["--pre-copy-only"]),
    ];
    for (mib, order, more) in programs {
        let figures = in_turn(options.rounds, |_| vec![order], |_, _| round(options, mib, order, more))?;
        let median = |figure: fn(&MigrationFigures) -> f64| {
            Spread::of(figures.iter().map(|taken| figure(&taken.sample))).map_or(0.0, |all| all.median)
        };
        let more = more.first().map(|option| format!(", `{option}`")).unwrap_or_default();
        table.row(&[
            format!("{mib} MiB, {}{more}", value_name(&order)),
            format!("{:.0}", median(|figures| figures.downtime_ms)),
            format!("{:.0}", median(|figures| figures.sent_mib)),
            format!("{:.0}", median(|figures| figures.rounds)),
            format!("{:.1}", median(|figures| figures.total_s)),
        ]);
    }
    print!("{table}");
    Ok(())
}

fn round(
    options: &Options,
    mib: usize,
    order: WriteOrder,
    more: &[&str],
) -> anyhow::Result<MigrationFigures> {
    let scene = MigrationScene::start(options, mib, order)?;
    let start = Instant::now();
    let line = scene.migrate(options, more)?;
    let total_s = start.elapsed().as_secs_f64();
    scene.check()?;
    Ok(MigrationFigures {
        downtime_ms: number(&line, "ms")?,
        sent_mib: number(&line, "MiB")?,
        rounds: number(&line, "rounds")?,
        total_s,
    })
}

fn demo(options: &Options) -> anyhow::Result<()> {
    let scene = MigrationScene::start(options, DEMO_MIB, WriteOrder::Random)?;
    println!(
        "a program with {DEMO_MIB} MiB of memory runs on the source, and writes {} MiB/s",
        options.write_rate
    );
    let compared = scene.run_migrate(options, &["--dry-run"])?;
    print!("rewake migrate --dry-run: {}", String::from_utf8_lossy(&compared.stdout));
    println!("rewake migrate: {}", scene.migrate(options, &[])?);
    println!("it runs on the destination, and has no process on the source");
    scene.check()?;
    println!("it has checked every byte: all right");
    Ok(())
}

/// A program on one of two hosts, and the agent of the other.
struct MigrationScene {
    folder: tempfile::TempDir,
    hosts: HostPair,
    _program: Child,
    _receive: Child,
    pid: String,
}

impl MigrationScene {
    fn start(options: &Options, mib: usize, order: WriteOrder) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("make a folder")?;
        let hosts = HostPair::start(folder.path())?;
        for (host, link) in hosts.links() {
            let rate = format!("{}mbit", options.link_mbit);
            let mut command = host.command("tc");
            command.args(["qdisc", "add", "dev", &link, "root", "tbf", "rate", &rate]);
            command.args(["burst", "256kb", "latency", "50ms"]);
            ensure!(command.status()?.success(), "tc: no link of {rate}");
        }
        let mut program = Command::new(std::env::current_exe()?);
        program.args(["migrating-writer", "--mib", &mib.to_string(), "--order", &value_name(&order)]);
        program.args(["--rate", &options.write_rate.to_string(), "--dir"]).arg(folder.path());
        let program = hosts.source.apart(&program).spawn().context("start a program")?;
        let ready = folder.path().join("ready");
        until(PATIENCE, || ready.exists().then_some(())).context("the program is not ready")?;
        let pid = hosts.source.named(NAME).into_iter().min().context("the program has ended")?;
        let pid = hosts.source.own_number(pid)?.to_string();
        let mut receive = hosts.destination.command(&options.rewake);
        receive.args(["receive", "--address", DESTINATION, "--port", PORT, "--insecure", "--criu"]);
        let log = folder.path().join("receive.log");
        let file = File::create(&log)?;
        receive.arg(&options.criu).stdout(file.try_clone()?).stderr(file);
        let receive = receive.spawn().context("start rewake receive")?;
        let listens = || fs::read_to_string(&log).is_ok_and(|text| text.contains("listening on"));
        until(PATIENCE, || listens().then_some(())).context("rewake receive does not listen")?;
        Ok(Self { folder, hosts, _program: program, _receive: receive, pid })
    }

    fn run_migrate(&self, options: &Options, more: &[&str]) -> anyhow::Result<Output> {
        let mut command = self.hosts.source.command(&options.rewake);
        command.args(["migrate", "-t", &self.pid, "--to", &format!("{DESTINATION}:{PORT}"), "--insecure"]);
        command.arg("--criu").arg(&options.criu).args(more);
        command.output().context("start rewake migrate")
    }

    /// Migrates the program. Returns what the command says.
    fn migrate(&self, options: &Options, more: &[&str]) -> anyhow::Result<String> {
        let output = self.run_migrate(options, more)?;
        let text = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
        ensure!(output.status.success(), "{text}\n{}", self.received());
        let processes = (self.hosts.source.named(NAME).len(), self.hosts.destination.named(NAME).len());
        ensure!(processes == (0, 1), "processes on both hosts: {processes:?}");
        Ok(text.trim_end().to_owned())
    }

    fn received(&self) -> String {
        fs::read_to_string(self.folder.path().join("receive.log")).unwrap_or_default()
    }

    /// Stops the program, which checks its memory.
    fn check(&self) -> anyhow::Result<()> {
        fs::write(self.folder.path().join("stop"), "")?;
        let verdict = self.folder.path().join("verdict");
        let said = until(PATIENCE, || read(&verdict)).context("the program does not end")?;
        ensure!(said == "OK", "the program: {said}");
        Ok(())
    }
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().filter(|text| !text.is_empty())
}

/// The number before a word of a report.
fn number(text: &str, unit: &str) -> anyhow::Result<f64> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let at = words.windows(2).position(|pair| pair[1].trim_end_matches(',') == unit);
    let at = at.with_context(|| format!("no {unit} in {text:?}"))?;
    Ok(words[at].parse()?)
}
