// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask vm test`: the tests of the software GPU, and those that need one, built here and run in machines of
//! both kernels and of several shapes of GPU.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};

use super::boot;
use super::options::{Options, Series};
use crate::{program, repository, root};

/// Packages whose tests run in the machine.
const TESTED: [&str; 1] = ["softgpu-tests"];
/// Programs that they start.
const PROGRAMS: [&str; 1] = ["gpu-app"];
/// A test that hangs must not hang the suite.
const TIME_LIMIT: Duration = Duration::from_secs(900);

/// One machine that the tests run in.
#[derive(Debug)]
struct Shape {
    series: Series,
    /// softgpu.ko's parameters.
    module_arguments: &'static str,
}

/// Both kernels, each family of GPU, large and small BAR, fresh memory poisoned and cleared.
const SHAPES: [Shape; 4] = [
    Shape { series: Series::Linux6_12, module_arguments: "gpus=2 gfx=90a xgmi=1" },
    Shape { series: Series::Linux7, module_arguments: "gpus=2 gfx=90a xgmi=1" },
    Shape {
        series: Series::Linux6_12,
        module_arguments: "gpus=2 gfx=1100 small_bar=1 fresh=zero copy_mbps=100",
    },
    Shape { series: Series::Linux7, module_arguments: "gpus=2 gfx=942 xnack=1 seed=7" },
];

/// All tests in every machine, or those whose names contain the filter. Goes on after a failure.
pub(super) fn run(filter: Option<&str>) -> anyhow::Result<()> {
    root::become_root()?;
    let tests = tests_named(tests()?, filter)?;
    if tests.is_empty() {
        println!("no test of that name runs in the machine");
        return Ok(());
    }
    let script = script(&tests, filter);
    let mut failures = Vec::new();
    let start = Instant::now();
    for shape in &SHAPES {
        let name = format!("Linux {}, {}", shape.series.name(), shape.module_arguments);
        println!("\n=== {name}");
        let mut options = Options::new(["sh", "-c", &script].map(str::to_owned).to_vec());
        options.series = shape.series;
        shape.module_arguments.clone_into(&mut options.module_arguments);
        options.time_limit = TIME_LIMIT;
        match boot(&options) {
            Ok(0) => {}
            Ok(code) => failures.push(format!("{name}: tests failed (exit code {code})")),
            Err(error) => failures.push(format!("{name}: {error:#}")),
        }
        println!("=== {:.0} s so far", start.elapsed().as_secs_f64());
    }
    if !failures.is_empty() {
        bail!("{}", failures.join("; "));
    }
    Ok(())
}

/// The test programs, built now with the programs that they start.
fn tests() -> anyhow::Result<Vec<PathBuf>> {
    let packages = |names: &[&str]| -> Vec<String> {
        names.iter().flat_map(|name| ["--package".to_owned(), (*name).to_owned()]).collect()
    };
    program::run(repository::cargo().arg("build").args(packages(&PROGRAMS)))?;
    let arguments = ["test", "--no-run", "--message-format=json-render-diagnostics", "--lib", "--tests"];
    let mut cargo = repository::cargo();
    let messages = program::listen(cargo.args(arguments).args(packages(&TESTED)))?;
    let tests: Vec<PathBuf> = executables(&messages);
    ensure!(!tests.is_empty(), "cargo names no test program of {}", TESTED.join(", "));
    Ok(tests)
}

/// The programs that have a test whose name contains the filter.
fn tests_named(mut tests: Vec<PathBuf>, filter: Option<&str>) -> anyhow::Result<Vec<PathBuf>> {
    let Some(filter) = filter else { return Ok(tests) };
    let mut failure = None;
    tests.retain(|test| {
        let list = program::capture(Command::new(test).args(["--list", "--format=terse", filter]));
        list.map_err(|error| failure = Some(error)).is_ok_and(|list| list.contains(": test"))
    });
    failure.map_or(Ok(tests), Err)
}

fn executables(messages: &str) -> Vec<PathBuf> {
    let found = messages.lines().filter(|line| line.contains("\"reason\":\"compiler-artifact\""));
    found.filter_map(|line| repository::field(line, "executable").map(PathBuf::from)).collect()
}

/// Runs every program, and fails if one did. Where a GPU must be there, a test that skips itself fails.
fn script(tests: &[PathBuf], filter: Option<&str>) -> String {
    let mut script = "export SOFTGPU_REQUIRED=1; failed=0\n".to_owned();
    let filter = filter.map(|filter| format!(" {}", super::machine::quote(filter))).unwrap_or_default();
    for test in tests {
        let path = super::machine::quote(&test.display().to_string());
        script += &format!("echo; echo {path}; {path} --test-threads=1{filter} || failed=1\n");
    }
    script + "exit $failed\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_those_that_cargo_says_it_made() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"a"},"executable":null,"fresh":true}
{"reason":"compiler-artifact","target":{"name":"b"},"executable":"/t/deps/b-1","fresh":true}
{"reason":"build-script-executed","executable":"/t/no"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executables(messages), [PathBuf::from("/t/deps/b-1")]);
    }

    #[test]
    fn one_failure_fails_the_script_and_stops_nothing() {
        let script = script(&[PathBuf::from("/bin/false"), PathBuf::from("/bin/true")], Some("it's"));
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "\n/bin/false\n\n/bin/true\n");
        assert!(script.contains(r"'/bin/true' --test-threads=1 'it'\''s'"));
    }
}
