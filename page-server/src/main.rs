// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake`: see `rewake --help`.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

use std::io::Write as _;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};
use rewake::cli::{Cli, Command};
use rewake::{commands, criu_args};
use rewake_process::core_dump;
use rewake_streamer::limits;

fn main() -> ExitCode {
    // Its memory may have keys, and memory of programs.
    core_dump::leave_no_core();
    let script =
        commands::dump::action_script::run_if_called().or_else(rewake_migration_agent::script::run_if_called);
    if let Some(code) = script {
        return ExitCode::from(code);
    }
    let cli = match criu_args::normalise(std::env::args_os()) {
        Ok(args) => Cli::parse_from(args),
        Err(wrong) => Cli::command().error(ErrorKind::UnknownArgument, wrong).exit(),
    };
    let result = match &cli.command {
        Command::LazyPages(options) => commands::lazy_pages::run(options),
        Command::PageServer(options) => commands::page_server::run(options),
        Command::Serve(options) => commands::serve::run(options),
        Command::Dump(options) => commands::dump::run(options),
        Command::Restore(options) => commands::restore::run(options),
        Command::Migrate(options) => commands::migrate::run(options),
        Command::Receive(options) => commands::receive::run(options),
        Command::Seal(options) => commands::seal::run(options),
        Command::Verify(options) => commands::verify::run(options),
        Command::Export(options) => commands::export::run(options),
        Command::Pull(options) => commands::pull::run(options),
        Command::Push(options) => commands::push::run(options),
        Command::Ls(options) => commands::ls::run(options),
        Command::Rm(options) => commands::rm::run(options),
        Command::Gc(options) => commands::gc::run(options),
        Command::Cache(options) => commands::cache::run(options),
        Command::Streamer(options) => commands::streamer::run(options),
        Command::Status(options) => commands::status::run(options),
        Command::Planner(options) => commands::planner::run(options),
        Command::Fetcher => rewake_fetcher::process::run(),
        Command::Park(options) => commands::park::run(options),
        Command::Recover(options) => commands::recover::run(options),
        Command::Manual(options) => commands::manual::run(options),
        Command::Inspect(options) => commands::inspect::run(options),
        Command::Doctor(options) => commands::doctor::run(options),
        Command::Version(options) => commands::version::run(options),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // If stderr is closed, no message can be shown.
            let _ = writeln!(std::io::stderr(), "rewake: {}", limits::explained(&error));
            ExitCode::FAILURE
        }
    }
}
