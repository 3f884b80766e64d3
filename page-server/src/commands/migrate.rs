// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake migrate`: the source of a live migration, in the foreground.

use rewake_migration::source::SourceOutcome;
use rewake_migration_agent::criu::CriuChoice;
use rewake_migration_agent::source::{self, SourceOptions};
use rewake_streamer::gpu::plugin_folder;

use super::aborts;
use super::criu::CriuOptions;
use crate::cli::{MigrateArgs, Programs};
use crate::logging;

/// Options that the migration gives to CRIU itself.
const OURS: [&str; 12] = [
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

/// Runs the command; gives the exit code: 0 when the program runs at the destination with all its memory, 1 when it
/// runs here.
///
/// # Errors
/// Nothing was touched.
pub fn run(options: &MigrateArgs) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    CriuOptions::refuse(&options.criu_options, &OURS)?;
    let programs = Programs { criu: options.criu.clone(), plugin_dir: None };
    let given = CriuOptions::read(&options.criu_options, &[])?;
    let plugins = programs.plugins(plugin_folder::machine_has_gpu(), &given)?;
    let aborts = aborts::watch()?;
    let wanted = SourceOptions {
        tree: options.tree.cast_signed(),
        to: options.to.clone(),
        insecure: options.insecure,
        tls: options.tls.client(host(&options.to))?,
        criu: CriuChoice { program: programs.criu(), options: options.criu_options.clone(), plugins },
    };
    let report = source::migrate(&wanted, aborts)?;
    let (pid, to) = (options.tree, &options.to);
    let (code, line) = match &report.outcome {
        SourceOutcome::Migrated => {
            let downtime =
                report.downtime.map(|time| format!(", downtime {:.1} ms", time.as_secs_f64() * 1e3));
            println!("{pid} runs at {to}{}", downtime.unwrap_or_default());
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
    eprintln!("rewake: {line}");
    Ok(code)
}
