// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake receive`: the destination of a live migration, in the foreground, for one program.

use std::path::Path;

use crate::page_server::endpoint::{Endpoint, Entrance};
use anyhow::{bail, ensure};
use rewake_migration::destination::DestinationOutcome;
use rewake_migration_agent::criu::CriuChoice;
use rewake_migration_agent::destination;
use rewake_plugin_protocol::plugin_folder;
use rewake_streamer::supervise::launch::LaunchPlan;

use super::criu::CriuOptions;
use super::{aborts, print};
use crate::cli::{Programs, ReceiveArgs};
use crate::logging;

/// Options that the migration gives to CRIU itself.
const OURS: [&str; 18] = [
    "-d",
    "--restore-detached",
    "-D",
    "--images-dir",
    "-W",
    "--work-dir",
    "-o",
    "--log-file",
    "--action-script",
    "--lazy-pages",
    "--manage-cgroups",
    "-t",
    "--tree",
    "--page-server",
    "--ps-socket",
    "--config",
    "--leave-stopped",
    "-s",
];

/// Whether GPU memory may arrive while the program runs. If not, one line says why.
fn gpu_memory_may_arrive(plugins: Option<&Path>) -> anyhow::Result<bool> {
    let remedy = "put it beside `rewake`, or name its folder in CRIU_LIBS_DIR";
    let reason = LaunchPlan::eager_reason(plugins, remedy)?;
    if let Some(reason) = &reason {
        tracing::warn!("GPU memory of a program is copied before it runs here: {reason}");
    }
    Ok(reason.is_none())
}

/// Runs the command; gives the exit code: 0 when the program runs here with all its memory.
///
/// # Errors
/// The address cannot be bound, or the host has no cgroups of version 2.
pub fn run(options: &ReceiveArgs) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    CriuOptions::refuse(&options.criu_options, &OURS)?;
    let programs = Programs { criu: options.criu.clone(), plugin_dir: None };
    let given = CriuOptions::read(&options.criu_options, &[])?;
    let has_gpu = plugin_folder::machine_has_gpu();
    let plugins = programs.plugins(has_gpu, &given)?;
    let gpu_on_demand = has_gpu && gpu_memory_may_arrive(plugins.as_deref())?;
    let criu = CriuChoice { program: programs.criu(), options: options.criu_options.clone(), plugins };
    let aborts = aborts::watch()?;
    ensure!(
        options.allow.iter().all(|allowed| allowed.folder.is_none()),
        "--allow: expected NAME without a folder: a program has none"
    );
    let admission = options.peers.admission(&options.allow)?;
    let (address, port) = (options.address.clone(), options.port);
    let for_other_hosts = options.peers.for_other_hosts();
    let Entrance::Tcp(listener) = (Endpoint::Tcp { address, port, for_other_hosts }).open()? else {
        bail!("--address: expected an address of TCP");
    };
    // The source needs the port, whatever the log level.
    print::say(format!("listening on {}", listener.local_addr()?));
    let report = destination::receive(listener, admission, &criu, gpu_on_demand, aborts)?;
    let line = match &report.outcome {
        DestinationOutcome::Restored { is_discarded: true } => {
            print::done("the program runs here, with all its memory");
            return Ok(0);
        }
        DestinationOutcome::Restored { is_discarded: false } => {
            print::say(
                "the program runs here, with all its memory; the source has not reported that it has ended \
                 it",
            );
            return Ok(0);
        }
        DestinationOutcome::Aborted(reason) => format!("the program does not run here: {reason}"),
        DestinationOutcome::Lost(reason) => {
            format!("the program is lost: it ran here, and was killed: {reason}")
        }
    };
    print::say(line);
    Ok(1)
}
