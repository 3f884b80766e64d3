// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask test`: every check of this repository, on two versions of CRIU. A failure stops no later step, so
//! that one run finds all, and the run fails at the end. `--quick` is the part that needs no set-up.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};

use crate::expected::{self, Expected, HOST};
use crate::record::Record;
use crate::setup::{self, Criu};
use crate::{program, repository, tidy, vm};

/// Files that one test run keeps open at most: userfaultfds, sockets and images of many processes, with some
/// to spare.
const OPEN_FILES: u64 = 16_384;

/// Packages for single tests: containers, two of `bench programs`, and copies of images in registries.
const PACKAGES: [&str; 5] = ["runc", "python3-numpy", "redis-tools", "iproute2", "skopeo"];

/// End to end test programs that mostly wait, for limits and for links that are cut; those of migrations do too.
const WAITING: [&str; 4] = ["isolation", "page_server_lost", "serve_gpus", "working_set"];

/// Programs that took less time are not in the list of times.
const SHOWN: Duration = Duration::from_secs(1);

/// What `--quick` prints at its end.
const LEFT_OUT: &str = "\nleft out by --quick: the crates' own tests/ folders and documentation, every test with CRIU \
    (tests/tests), containers, and the virtual machines with the software GPU; `cargo xtask test` runs them";

/// Runs all; with a filter only the tests whose names contain it, and no style checks.
pub(crate) fn run(filter: Option<&str>) -> anyhow::Result<()> {
    let criu = setup::run()?;
    let other = setup::run_other_than(&criu);
    raise_open_files()?;
    describe_machine(&criu, other.as_ref().ok())?;
    let mut environment = environment(&criu, other.as_ref().ok())?;
    let mut report = Report::default();
    report.step("the kernel's headers", || {
        // The generated code is compared with these.
        let headers = vm::headers()?.to_str().context("the path of the headers is not UTF-8")?.to_owned();
        environment.push(("REWAKE_UAPI", headers));
        Ok(())
    });
    report.step("set-up of a second CRIU", || other.as_ref().map(drop).map_err(|error| anyhow!("{error:#}")));
    report.step("set-up of runc, numpy, redis and skopeo", || setup::install(&PACKAGES));
    report.step("set-up of docker-registry and nginx", || {
        environment.push(("REWAKE_DOCKER_REGISTRY", setup::docker_registry()?.display().to_string()));
        environment.push(("REWAKE_NGINX", setup::nginx()?.display().to_string()));
        Ok(())
    });
    report.step("set-up of SeaweedFS", || {
        // Without it, its tests say so, and tests/expected-skips allows that.
        let program = setup::seaweedfs()?.map(|program| ("REWAKE_WEED", program.display().to_string()));
        environment.extend(program);
        Ok(())
    });
    if filter.is_none() {
        style(&mut report);
    }
    let name = filter;
    let filter: Vec<&str> = filter.into_iter().collect();
    let mut host = Record::default();
    let built = report.step("release build", || {
        cargo(&["build", "--release", "--package", "rewake", "--package", "rewake-tests", "--bins"], &[])
    });
    report.step("tests of every crate", || {
        // The software GPU's tests have machines of their own.
        let arguments = [
            "test",
            "--no-fail-fast",
            "--workspace",
            "--exclude",
            "rewake-tests",
            "--exclude",
            "softgpu-tests",
        ];
        tests(&[&arguments, &filter[..]].concat(), &environment, &mut host, "")
    });
    report.step("end to end tests", || {
        ensure!(built, "not run: the release build failed");
        end_to_end(&filter, &environment, &mut host)
    });
    let whole = name.is_none() && report.is_fine();
    report.step("tests that did not run here", || as_expected(&host, whole));
    report.step("tests in virtual machines", || {
        vm::test(&vm::Wanted { filter: name, ..vm::Wanted::default() })
    });
    report.end()
}

/// Checks that need no CRIU, no virtual machine and no root: style, and the tests inside crates.
pub(crate) fn quick() -> anyhow::Result<()> {
    let mut report = Report::default();
    style(&mut report);
    let mut host = Record::default();
    report.step("unit tests of every crate", || {
        let arguments =
            ["test", "--no-fail-fast", "--workspace", "--exclude", "rewake-tests", "--lib", "--bins"];
        tests(&arguments, &[], &mut host, "")
    });
    report.step("tests that did not run here", || as_expected(&host, false));
    println!("{LEFT_OUT}");
    report.end()
}

fn style(report: &mut Report) {
    report.step("tidy", tidy::check);
    report.step("cargo fmt", || cargo(&["fmt", "--all", "--check"], &[]));
    report.step("cargo clippy", || {
        cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"], &[])
    });
}

/// Runs the end to end tests. Those that mostly wait, half of their time in all, run beside the others.
fn end_to_end(filter: &[&str], environment: &[(&str, String)], record: &mut Record) -> anyhow::Result<()> {
    const ALL: [&str; 5] = ["test", "--no-fail-fast", "--release", "--package", "rewake-tests"];
    cargo(&[&ALL[..], &["--no-run"]].concat(), environment)?;
    let (waiting, others): (Vec<_>, Vec<_>) = end_to_end_programs()?
        .into_iter()
        .partition(|name| name.starts_with("migrate") || WAITING.contains(&name.as_str()));
    let waiting: Vec<&str> = waiting.iter().flat_map(|name| ["--test", name]).collect();
    let others: Vec<&str> = others.iter().flat_map(|name| ["--test", name]).collect();
    let threads = &["--", "--test-threads=2"][..];
    let waiting = [&ALL[..], &waiting, filter, threads].concat();
    let others = [&ALL[..], &["--lib", "--bins", "--examples"], &others, filter, threads].concat();
    let mut beside = Record::default();
    let (one, other) = thread::scope(|scope| {
        let waited = scope.spawn(|| tests(&waiting, environment, &mut beside, "beside| "));
        let other = tests(&others, environment, record, "");
        (waited.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), other)
    });
    record.add(beside);
    one.and(other)
}

/// The names of the end to end test programs.
fn end_to_end_programs() -> anyhow::Result<Vec<String>> {
    let folder = repository::root().join("tests/tests");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

/// Runs cargo's tests, and notes which ran; `prefix` begins each line that is shown.
fn tests(
    arguments: &[&str],
    environment: &[(&str, String)],
    record: &mut Record,
    prefix: &str,
) -> anyhow::Result<()> {
    let mut command = repository::cargo();
    command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
    let ended = record.of(&mut command, prefix)?;
    ensure!(ended.status.success(), "`cargo {}` failed: {}", arguments.join(" "), ended.status);
    Ok(())
}

/// Prints the times of programs and the tests that did not run; an error where the list differs.
fn as_expected(record: &Record, whole: bool) -> anyhow::Result<()> {
    let mut programs: Vec<_> = record.programs.iter().collect();
    programs.sort_by_key(|program| std::cmp::Reverse(program.time));
    for program in programs.iter().take_while(|program| program.time >= SHOWN) {
        println!("{:>7.1} s  {}", program.time.as_secs_f64(), program.name);
    }
    expected::print(HOST, record);
    let against = Expected::read()?.against(HOST, record, whole);
    ensure!(against.is_empty(), "{}", against.join("; "));
    Ok(())
}

/// The environment of the tests: the CRIUs and the daemon to use.
pub(super) fn environment(criu: &Criu, other: Option<&Criu>) -> anyhow::Result<Vec<(&'static str, String)>> {
    let text = |path: &std::path::Path| {
        path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
    };
    let criu = text(&criu.path)?;
    let mut environment = vec![
        ("REWAKE_CRIU", criu.clone()),
        ("CRIU", criu),
        ("REWAKE_BIN", text(&repository::target()?.join("release/rewake"))?),
    ];
    if let Some(other) = other {
        environment.push(("CRIU_ALT", text(&other.path)?));
    }
    Ok(environment)
}

fn cargo(arguments: &[&str], environment: &[(&str, String)]) -> anyhow::Result<()> {
    let mut command = repository::cargo();
    program::run(command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value))))
}

fn describe_machine(criu: &Criu, other: Option<&Criu>) -> anyhow::Result<()> {
    let kernel =
        std::fs::read_to_string("/proc/sys/kernel/osrelease").context("read the kernel's release")?;
    let cores = std::thread::available_parallelism().context("count the cores")?;
    let other = other.map_or_else(|| "none".to_owned(), |other| other.version.to_string());
    println!("kernel {}, {cores} cores, CRIU {} and {other}", kernel.trim(), criu.version);
    Ok(())
}

/// Raises this process's limit, which every test inherits, as far as it may go.
fn raise_open_files() -> anyhow::Result<()> {
    let limits = std::fs::read_to_string("/proc/self/limits").context("read /proc/self/limits")?;
    let (soft, hard) = open_files(&limits).context("no \"Max open files\" in /proc/self/limits")?;
    let limit = OPEN_FILES.min(hard);
    if limit < OPEN_FILES {
        println!(
            "only {limit} open files are allowed here, {OPEN_FILES} are wanted: tests with many processes may fail"
        );
    }
    if soft < limit {
        let limit = format!("--nofile={limit}:");
        program::capture(Command::new("prlimit").args(["--pid", &std::process::id().to_string(), &limit]))?;
    }
    Ok(())
}

/// Soft and hard limit; `unlimited` is the largest number.
fn open_files(limits: &str) -> Option<(u64, u64)> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let mut numbers = line.split_whitespace().map(|word| match word {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    });
    Some((numbers.next()??, numbers.next()??))
}

/// The steps that ran, their times and results.
#[derive(Debug, Default)]
struct Report {
    steps: Vec<(&'static str, Duration, Option<String>)>,
}

impl Report {
    /// Runs one step, whatever the result of earlier ones; true if it succeeded.
    fn step(&mut self, name: &'static str, act: impl FnOnce() -> anyhow::Result<()>) -> bool {
        println!("\n== {name}");
        let start = Instant::now();
        let failure = act().err().map(|error| format!("{error:#}"));
        if let Some(failure) = &failure {
            println!("{failure}");
        }
        let succeeded = failure.is_none();
        self.steps.push((name, start.elapsed(), failure));
        succeeded
    }

    /// Whether no step has failed so far.
    fn is_fine(&self) -> bool {
        self.steps.iter().all(|(_, _, failure)| failure.is_none())
    }

    /// Prints the summary; an error if any step failed.
    fn end(&self) -> anyhow::Result<()> {
        println!("\n== summary");
        for (name, time, failure) in &self.steps {
            let verdict = if failure.is_some() { "FAILED" } else { "ok" };
            println!("{verdict:>6}  {:>7.1} s  {name}", time.as_secs_f64());
        }
        let failed: Vec<&str> =
            self.steps.iter().filter(|(_, _, failure)| failure.is_some()).map(|(name, ..)| *name).collect();
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_stops_nothing_and_fails_the_run() {
        let mut report = Report::default();
        let mut ran = 0;
        assert!(!report.step("first", || bail!("broken")));
        assert!(report.step("second", || {
            ran += 1;
            Ok(())
        }));
        assert_eq!(ran, 1);
        assert_eq!(report.end().unwrap_err().to_string(), "failed: first");
    }

    #[test]
    fn programs_that_run_beside_others_exist() {
        let programs = end_to_end_programs().unwrap();
        assert!(WAITING.iter().all(|name| programs.iter().any(|program| program == name)), "{programs:?}");
    }

    #[test]
    fn a_run_without_failures_succeeds() {
        let mut report = Report::default();
        report.step("only", || Ok(()));
        assert!(report.end().is_ok());
    }

    #[test]
    fn limits_are_read_as_the_kernel_writes_them() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
            Max open files            1024                 unlimited            files\n";
        assert_eq!(open_files(text), Some((1024, u64::MAX)));
        assert_eq!(open_files("Max cpu time  unlimited\n"), None);
    }
}
