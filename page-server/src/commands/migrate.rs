// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake migrate`: the source of a live migration, in the foreground.

use std::time::Duration;

use anyhow::ensure;
use rewake_migration::source::SourceOutcome;
use rewake_migration_agent::criu::CriuChoice;
use rewake_migration_agent::dry_run;
use rewake_migration_agent::pre_copy::PreCopyGoal;
use rewake_migration_agent::source::{self, SourceOptions};
use rewake_plugin_protocol::plugin_folder;
use rewake_streamer::supervise::leftover_stores;

use super::criu::CriuOptions;
use super::{aborts, print};
use crate::cli::{MigrateArgs, Programs};
use crate::logging;

/// Options that the migration gives to CRIU itself.
const OURS: [&str; 19] = [
    "-t",
    "--tree",
    "-D",
    "--images-dir",
    "-W",
    "--work-dir",
    "-o",
    "--log-file",
    "--action-script",
    "--lazy-pages",
    "--page-server",
    "--manage-cgroups",
    "--ps-socket",
    "--prev-images-dir",
    "--config",
    "--leave-running",
    "-R",
    "--leave-stopped",
    "-s",
];

/// The program is lost.
const LOST: u8 = 3;
/// The program does not run here, and may run at the destination; or it is frozen here.
const UNKNOWN: u8 = 4;

/// The host of `HOST:PORT` or `[IPV6]:PORT`, which the destination's certificate must name.
fn host(to: &str) -> &str {
    let host = to.rsplit_once(':').map_or(to, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Runs the command; gives the exit code: 0 when the program runs at the destination with all its memory, 1
/// when it runs here.
///
/// # Errors
/// Nothing was touched.
pub fn run(options: &MigrateArgs) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    CriuOptions::refuse(&options.criu_options, &OURS)?;
    let Some(to) = options.to.as_deref().filter(|_| !options.abort) else {
        return abort(options.tree);
    };
    let wanted = wanted(options, to)?;
    if options.dry_run {
        return dry_run(&wanted);
    }
    let kept = leftover_stores::take_back_from(options.tree)?;
    ensure!(kept.is_empty(), "-t {} was not touched: {}", options.tree, kept.join("; "));
    let aborts = aborts::watch()?;
    let report = source::migrate(&wanted, aborts)?;
    let (pid, to) = (wanted.tree, &wanted.to);
    let (code, line) = match &report.outcome {
        SourceOutcome::Migrated => {
            let downtime =
                report.downtime.map(|time| format!(", downtime {:.1} ms", time.as_secs_f64() * 1e3));
            let (sent, rounds) = (report.sent >> 20, report.rounds);
            let downtime = downtime.unwrap_or_default();
            print::done(format!(
                "{pid} runs at {to}{downtime}, {sent} MiB sent, {rounds} rounds of pre-copy"
            ));
            return Ok(0);
        }
        SourceOutcome::Aborted(reason) => match &report.stays_frozen {
            None => (1, format!("{pid} runs here: {reason}")),
            Some(error) => {
                let line = format!("{pid} is frozen here ({reason}), and cannot be thawed: {error}");
                (UNKNOWN, format!("{line}: run this command again"))
            }
        },
        SourceOutcome::Lost(reason) => {
            (LOST, format!("{pid} is lost: the destination had it, and has ended: {reason}"))
        }
        SourceOutcome::Unknown(reason) => (
            UNKNOWN,
            format!("{pid} was given to {to}, which has not reported that it has all memory: {reason}"),
        ),
        SourceOutcome::Frozen(reason) => {
            (UNKNOWN, format!("{pid} was given to {to}, and stays frozen here: {reason}"))
        }
    };
    print::say(line);
    Ok(code)
}

fn wanted(options: &MigrateArgs, to: &str) -> anyhow::Result<SourceOptions> {
    let programs = Programs { criu: options.criu.clone(), plugin_dir: None };
    let given = CriuOptions::read(&options.criu_options, &[])?;
    let plugins = programs.plugins(plugin_folder::machine_has_gpu(), &given)?;
    Ok(SourceOptions {
        tree: options.tree,
        to: to.to_owned(),
        insecure: options.insecure,
        tls: options.tls.client(host(to))?,
        criu: CriuChoice { program: programs.criu(), options: options.criu_options.clone(), plugins },
        goal: PreCopyGoal {
            all_first: options.pre_copy_only,
            max_downtime: options.max_downtime.map(Duration::from_millis),
        },
        give_up_after: options.give_up_after.map(Duration::from_secs),
    })
}

/// Ends the migration that another process runs: exit code 1 if the program was given away.
fn abort(pid: i32) -> anyhow::Result<u8> {
    if rewake_migration_agent::abort::abort(pid)? {
        print::done(format!("{pid} runs here"));
        return Ok(0);
    }
    print::say(format!("{pid} was given to the destination: its migration is not ended"));
    Ok(1)
}

/// Shows what a migration would be refused for: exit code 1 if anything is.
fn dry_run(options: &SourceOptions) -> anyhow::Result<u8> {
    let refusals = dry_run::compare(options)?;
    for refusal in &refusals {
        print::done(format!("refused: {refusal}"));
    }
    if refusals.is_empty() {
        print::done(format!("{} can move to {}", options.tree, options.to));
    }
    Ok(u8::from(!refusals.is_empty()))
}
