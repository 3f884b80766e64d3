// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask`: set-up, test, demo, bench, tidy, codegen. Builds with nothing but Rust installed.

#![forbid(unsafe_code)]

mod apt;
mod program;
mod repository;
mod root;
mod setup;

use std::process::ExitCode;

use anyhow::bail;

const HELP: &str = "\
cargo xtask <command>

  setup [--criu trixie|sid]   get what the other commands need: packages, CRIU
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match dispatch(&words) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(words: &[&str]) -> anyhow::Result<ExitCode> {
    match words {
        ["setup"] => setup::run().map(drop)?,
        ["setup", "--criu", suite] => setup::run_for(setup::Suite::named(suite)?).map(drop)?,
        [] | ["help" | "--help" | "-h"] => print!("{HELP}"),
        other => bail!("`{}` is no command of xtask; `cargo xtask help` lists them", other.join(" ")),
    }
    Ok(ExitCode::SUCCESS)
}
