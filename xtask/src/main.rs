// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask`: set-up, test, demo, bench, tidy, codegen. Builds with nothing but Rust installed.

#![forbid(unsafe_code)]

mod apt;
mod commands;
mod files;
mod program;
mod progress;
mod repository;
mod root;
mod setup;
mod suite;
mod tidy;
mod vm;

use std::process::ExitCode;

use anyhow::bail;
use commands::plugin::Profile;

const HELP: &str = "\
cargo xtask <command>

  setup [--criu trixie|sid]  get what the other commands need: packages, CRIU (test, demo, bench call it)
  test [filter]              every check and test, on two versions of CRIU; with a filter only tests of
                             that name
  test --quick               style and the tests inside crates: no CRIU, no virtual machine, no root;
                             3 minutes
  stress [name [options]]    a long random test; without a name, the list of them and of their options
  demo                       an inference server on a software GPU, dumped and restored in mid-answer
  demo --migrate             a program moves between two namespaces while it writes its memory; every
                             byte is checked
  demo --replicas            push an image to a store, restore three replicas from it, show the metrics
  demo --cpu                 dump a process, restore it with CRIU alone and with rewake, check every byte
  bench lazy [options]       stock `criu lazy-pages` and rewake side by side; `bench lazy --help` for options
  bench programs [options]   Python, Node, Java and redis servers, restored eagerly, through stock
                             `criu lazy-pages` and through rewake: when each answers; `bench programs --help`
  bench remote [options]     stock `criu page-server` and `criu lazy-pages --page-server`, and rewake in
                             the place of each; `bench remote --help`
  bench migrate [options]    downtime and bytes of live migrations between two namespaces;
                             `bench migrate --help`
  bench replicas [options]   replicas from a store behind 1 Gbit/s and 5 ms: first answers, bytes, eight
                             at once, the store's own rates next to restic's; `bench replicas --help`
  bench replicas --gpu [options]
                             the first answer of a server on a GPU, from a store: in a virtual machine;
                             10 minutes
  bench plugin [options]     CRIU's plugin for GPUs and rewake's side by side, in virtual machines; 10 minutes
  bench behind               how soon a process runs with a background load, and its first answer; the
                             rate of the load of GPU memory; how long a page fault waits: in virtual
                             machines; 25 minutes
  bench engine [options]     the loader of GPU memory, without a GPU, compared with memcpy and fio;
                             `bench engine --help`
  zdtm SOURCE [--tls] [test ...]
                             CRIU's own tests of its page server, from its source tree: stock with
                             itself, and with rewake as the server
  plugin [--release]         build the CRIU plugins and print their folder, for `criu --libdir`
  package                    Debian packages of the program and of the plugins, and their checksums
  vm [options] -- command    run a command in a virtual machine with the software GPU; docs/setup.md has
                             the options
  vm test [filter] [--machine NAME]
                             the tests of the software GPU, in every machine of the suite or in one
  tidy                       style rules beyond rustfmt and clippy
  figures                    product lines, type names that several types have, import circles
  codegen                    write the code generated from proto/ again

setup, test, demo, bench and vm need root and start again under sudo. CRIU=/path chooses a CRIU.
More: docs/setup.md
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
        ["test"] => commands::test::run(None)?,
        ["test", "--quick"] => commands::test::quick()?,
        ["stress"] => print!("{}", commands::stress::help()),
        ["stress", name, more @ ..] => commands::stress::run(name, more)?,
        ["test", filter] => commands::test::run(Some(filter))?,
        ["demo"] => commands::demo::gpu::run()?,
        ["demo", "--migrate"] => commands::bench::migrate_demo()?,
        ["demo", "--replicas"] => commands::demo::replicas::run()?,
        ["demo", "--cpu"] => commands::demo::cpu::run()?,
        // Inside the machine.
        ["demo", "--scene", program, plugin, rewake, right] => {
            commands::demo::scene::play(program, plugin, rewake, right)?;
        }
        ["bench", "lazy", more @ ..] => commands::bench::lazy(more)?,
        ["bench", "programs", more @ ..] => commands::bench::programs(more)?,
        ["bench", "remote", more @ ..] => commands::bench::remote(more)?,
        ["bench", "migrate", more @ ..] => commands::bench::migrate(more)?,
        ["bench", "replicas", more @ ..] => commands::bench::replicas(more)?,
        ["bench", "plugin", more @ ..] => commands::bench::plugin(more)?,
        ["bench", "behind"] => commands::bench::behind()?,
        ["bench", "engine", more @ ..] => commands::bench::engine(more)?,
        ["zdtm", more @ ..] => commands::zdtm::run(more)?,
        ["package"] => commands::package::run()?,
        ["plugin"] => commands::plugin::run(Profile::Debug)?,
        ["plugin", "--release"] => commands::plugin::run(Profile::Release)?,
        ["vm", "test", more @ ..] => vm::test(&vm::Wanted::parse(more)?)?,
        ["vm", more @ ..] => return vm::run(more),
        ["tidy"] => tidy::check()?,
        ["figures"] => commands::figures::run()?,
        ["codegen"] => commands::codegen::run()?,
        [] | ["help" | "--help" | "-h"] => print!("{HELP}"),
        other => bail!("`{}` is no command of xtask; `cargo xtask help` lists them", other.join(" ")),
    }
    Ok(ExitCode::SUCCESS)
}
