// SPDX-License-Identifier: MIT OR Apache-2.0
//! The test programs: one build of the whole workspace makes them, with the programs and libraries that they
//! start.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::selection::Selection;
use crate::{program, repository};

/// A program with Rust's test harness.
#[derive(Debug, Clone)]
pub(crate) struct TestProgram {
    /// Its target's name, e.g. `e2e`, `rewake_pager`.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Its package's folder, which tests expect as their working directory.
    pub(crate) folder: PathBuf,
    /// Whether it tests its package from outside (`tests/`), and not with a crate's own code inside.
    pub(crate) is_integration: bool,
}

/// Which programs are wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Targets<'a> {
    /// Every target of every package: programs, libraries, examples and tests.
    All,
    /// These integration tests, and what they start.
    Integration(&'a [&'a str]),
    /// The tests inside crates.
    Unit,
    /// Those that have tests of one name.
    Selected(&'a Selection),
}

impl Targets<'_> {
    /// Words for cargo, of each command. Where tests start programs of other packages, the workspace is named
    /// as a whole, because the features of dependencies are then the same for each choice, and nothing is
    /// compiled twice.
    fn commands(&self) -> Vec<Vec<&str>> {
        match self {
            Self::All => vec![vec!["build", "--workspace", "--all-targets"]],
            Self::Integration(names) => vec![integration(names.iter().copied())],
            // `test --no-run` builds these targets as tests, and `build` as programs.
            Self::Unit => vec![vec!["test", "--no-run", "--workspace", "--lib", "--bins"]],
            Self::Selected(Selection { packages, programs }) => {
                let mut commands = Vec::new();
                if !packages.is_empty() {
                    let packages = packages.iter().flat_map(|package| ["--package", package]);
                    commands.push(["test", "--no-run"].into_iter().chain(packages).collect());
                }
                if !programs.is_empty() {
                    commands.push(integration(programs.iter().map(String::as_str)));
                }
                commands
            }
        }
    }
}

/// Words that build integration tests, and the programs and libraries that they start.
fn integration<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let words = ["build", "--workspace", "--lib", "--bins", "--examples"];
    words.into_iter().chain(names.flat_map(|name| ["--test", name])).collect()
}

/// Builds them; returns the test programs.
///
/// # Errors
/// The build fails, which cargo explains.
pub(crate) fn build(targets: Targets<'_>) -> anyhow::Result<Vec<TestProgram>> {
    let mut programs = Vec::new();
    for words in targets.commands() {
        let mut cargo = repository::cargo();
        cargo.args(words).arg("--message-format=json-render-diagnostics");
        programs.extend(test_programs(&program::listen(&mut cargo)?));
    }
    programs.sort_by(|one, other| one.name.cmp(&other.name));
    ensure!(!programs.is_empty(), "cargo names no test program");
    Ok(programs)
}

/// Test programs only: cargo names other programs, too, which tests start.
fn test_programs(messages: &str) -> Vec<TestProgram> {
    messages.lines().filter_map(test_program).collect()
}

fn test_program(message: &str) -> Option<TestProgram> {
    let of = |object: &str| -> Option<&str> {
        let (_, rest) = message.split_once(&format!("\"{object}\":{{"))?;
        rest.split_once('}').map(|(inside, _)| inside)
    };
    if !message.contains("\"reason\":\"compiler-artifact\"") || !of("profile")?.contains("\"test\":true") {
        return None;
    }
    let target = of("target")?;
    let manifest = PathBuf::from(repository::field(message, "manifest_path")?);
    Some(TestProgram {
        name: repository::field(target, "name")?.replace('-', "_"),
        path: repository::field(message, "executable")?.into(),
        folder: manifest.parent()?.to_owned(),
        is_integration: target.contains("\"kind\":[\"test\"]"),
    })
}

/// The paths of a program's tests, in the order of the program, including the measurements, which are
/// `#[ignore]`d.
///
/// # Errors
/// The program does not start.
pub(crate) fn tests(path: &Path) -> anyhow::Result<Vec<String>> {
    let list = program::capture(Command::new(path).args(["--list", "--format=terse"]))
        .with_context(|| format!("list the tests of {}", path.display()))?;
    Ok(list.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Tests by the first part of their path: `recover::a`, `recover::b` are the module `recover`.
pub(crate) fn by_module(tests: Vec<String>) -> BTreeMap<String, Vec<String>> {
    let mut modules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for test in tests {
        let module = test.split_once("::").map_or("", |(module, _)| module).to_owned();
        modules.entry(module).or_default().push(test);
    }
    modules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_those_that_cargo_says_it_made() {
        let messages = r#"{"reason":"compiler-artifact","manifest_path":"/r/a/Cargo.toml","target":{"kind":["bin"],"name":"a"},"profile":{"test":false},"executable":null,"fresh":true}
{"reason":"compiler-artifact","manifest_path":"/r/b/Cargo.toml","target":{"kind":["test"],"name":"b"},"profile":{"opt_level":"0","test":true},"executable":"/t/deps/b-1","fresh":true}
{"reason":"compiler-artifact","manifest_path":"/r/u/Cargo.toml","target":{"kind":["lib"],"name":"my-lib","test":true},"profile":{"opt_level":"0","test":true},"executable":"/t/deps/u-1","fresh":true}
{"reason":"compiler-artifact","manifest_path":"/r/c/Cargo.toml","target":{"kind":["bin"],"name":"c","test":true},"profile":{"test":false},"executable":"/t/c","fresh":true}
{"reason":"build-script-executed","executable":"/t/no"}
{"reason":"build-finished","success":true}"#;
        let programs = test_programs(messages);
        let found: Vec<_> = programs
            .iter()
            .map(|program| (program.name.as_str(), program.folder.to_str().unwrap(), program.is_integration))
            .collect();
        assert_eq!(found, [("b", "/r/b", true), ("my_lib", "/r/u", false)]);
    }

    #[test]
    fn tests_are_grouped_by_the_module_that_begins_their_path() {
        let modules = by_module(["b::x", "a::tests::y", "b::z", "w"].map(str::to_owned).to_vec());
        let found: Vec<(&str, usize)> =
            modules.iter().map(|(name, tests)| (name.as_str(), tests.len())).collect();
        assert_eq!(found, [("", 1), ("a", 1), ("b", 2)]);
    }
}
