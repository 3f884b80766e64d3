// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake version`: what this program is, and with what it works.

use std::io::{self, Write};

use anyhow::Context as _;
use serde::Serialize;

use super::print;
use crate::cli::VersionArgs;

/// The versions of CRIU with which the tests run.
const CRIUS: [&str; 2] = ["4.1.1", "4.2.1"];

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    /// The commit that a package was built from; none in a build of one's own.
    commit: Option<&'static str>,
    features: Vec<&'static str>,
    /// Both sides must have the same one.
    protocols: Protocols,
    /// The versions of CRIU that the tests use.
    criu: [&'static str; 2],
}

#[derive(Debug, Serialize)]
struct Protocols {
    /// Between commands, CRIU's plugins and the node agent.
    control: u32,
    /// Between the GPU plugin and a streamer.
    plugin: u32,
    /// Between `rewake migrate` and `rewake receive`.
    migration: u32,
    /// Between `rewake export` and its clients.
    images: u32,
}

/// Runs the command; gives the exit code.
///
/// # Errors
/// The output cannot be written.
pub fn run(options: &VersionArgs) -> anyhow::Result<u8> {
    let report = of_this_program();
    print::report(options.json, &report, |out| write(&report, out)).context("writing the version")?;
    Ok(0)
}

fn of_this_program() -> Report {
    let features = [("stores", cfg!(feature = "stores")), ("tls", cfg!(feature = "tls"))];
    Report {
        version: env!("CARGO_PKG_VERSION"),
        commit: option_env!("REWAKE_COMMIT"),
        features: features.into_iter().filter_map(|(name, is_built)| is_built.then_some(name)).collect(),
        protocols: Protocols {
            control: rewake_plugin_protocol::control::VERSION,
            plugin: rewake_plugin_protocol::VERSION,
            migration: rewake_migration::message::VERSION,
            images: rewake_image_transfer::protocol::VERSION,
        },
        criu: CRIUS,
    }
}

fn write(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let Report { version, commit, features, protocols, criu } = report;
    let Protocols { control, plugin, migration, images } = protocols;
    writeln!(out, "rewake {version} ({})", commit.unwrap_or("no commit is known"))?;
    writeln!(
        out,
        "features   {}",
        if features.is_empty() { "none".to_owned() } else { features.join(", ") }
    )?;
    writeln!(out, "protocols  control {control}, plugin {plugin}, migration {migration}, images {images}")?;
    writeln!(out, "tested with CRIU {}", criu.join(" and "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_people_are_shown_the_same() {
        let report = of_this_program();
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
        let mut text = Vec::new();
        write(&report, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        for (name, version) in json["protocols"].as_object().unwrap() {
            assert!(text.contains(&format!("{name} {version}")), "{name}: {text}");
        }
    }
}
