// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask test`: every check of this repository, on two versions of CRIU. A failure stops no later
//! step, so that one run finds all, and the run fails at the end. `--quick` is the part that needs no set-up.

use std::num::NonZeroUsize;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::setup::{self, Criu};
use crate::suite::budget::{self, Budget};
use crate::suite::expected::{self, Expected, HOST};
use crate::suite::jobs;
use crate::suite::programs::{self, Targets, TestProgram};
use crate::suite::record::Record;
use crate::suite::selection::{self, Selection};
use crate::suite::versions;
use crate::{program, repository, tidy, vm};

/// The most files that one test run keeps open: userfaultfds, sockets and images of many processes, with some
/// to spare.
const OPEN_FILES: u64 = 16_384;

/// Packages for single tests: containers, two of `bench programs`, copies of images in registries,
/// certificates, signatures, the disk's own speed, and programs that are dumped, restored and moved.
const PACKAGES: [&str; 12] = [
    "runc",
    "python3-numpy",
    "redis-tools",
    "iproute2",
    "skopeo",
    "openssl",
    "openssh-client",
    "fio",
    "tmux",
    "default-jdk-headless",
    "postgresql-client-15",
    // Of PostgreSQL's server, which is unpacked only.
    "libxml2",
];

/// What `--quick` prints at its end.
const LEFT_OUT: &str = "\nleft out by --quick: the crates' own tests/ folders and documentation, every test \
    with CRIU (tests/tests), containers, and the virtual machines with the software GPU; `cargo xtask test` \
    runs them";

/// Runs all; with a filter only the tests whose names contain it, and no style checks.
pub(crate) fn run(filter: Option<&str>) -> anyhow::Result<()> {
    let selection = filter.map(selection::of).transpose()?;
    let targets = selection.as_ref().map_or(Targets::All, Targets::Selected);
    if let Some(Selection { packages, programs }) = &selection {
        ensure!(
            !(packages.is_empty() && programs.is_empty()),
            "no test has {:?} in its name, e.g. `e2e::serve::NAME` or `rewake_pager::MODULE::NAME`",
            filter.unwrap_or_default()
        );
    }
    let is_prepared = selection.as_ref().is_none_or(|selection| !selection.programs.is_empty());
    let criu = if is_prepared { Some(setup::run()?) } else { None };
    raise_open_files()?;
    let mut report = Report::default();
    if filter.is_none() {
        report.step("tidy", tidy::check);
        report.step("cargo fmt", || cargo(&["fmt", "--all", "--check"]));
    }
    let (mut programs, mut environment) = (Vec::new(), Vec::new());
    // Set-up mostly waits for downloads, and compilers for the processors.
    let built = thread::scope(|scope| {
        let prepared = criu.as_ref().map(|criu| scope.spawn(|| prepare(criu)));
        let built = report.step("build", || {
            programs = programs::build(targets)?;
            Ok(())
        });
        if let Some((prepared, variables)) = prepared.map(joined) {
            report.add(prepared);
            environment = variables;
        }
        built
    });
    let mut ran = Record::default();
    // End to end tests mostly wait, and leave a processor to clippy.
    thread::scope(|scope| {
        let style = filter.is_none().then(|| scope.spawn(|| documented(lints())));
        if built {
            report.step("tests on this machine", || host(&programs, filter, &environment, &mut ran));
        }
        style.map(joined).into_iter().for_each(|style| report.add(style));
    });
    if programs.iter().any(|program| program.name == vm::PROGRAM) {
        report.step("tests in virtual machines", || {
            vm::run_tests(&vm::Wanted { filter, ..vm::Wanted::default() }, &programs, &mut ran)
        });
    }
    report.end(&ran)
}

/// What tests need besides the first CRIU, and the tests' environment.
fn prepare(criu: &Criu) -> (Report, Vec<(&'static str, String)>) {
    let mut report = Report::default();
    let (mut variables, mut unknown) = (Vec::new(), Vec::new());
    report.step("set-up of packages for single tests", || setup::install(&PACKAGES));
    report.step("set-up of a second CRIU", || {
        let other = setup::run_other_than(criu);
        describe_machine(criu, other.as_ref().ok())?;
        let found = [Some(criu), other.as_ref().ok()].into_iter().flatten();
        unknown.extend(found.filter_map(|criu| versions::CRIU.unknown(&criu.version.to_string())));
        variables.extend(environment(criu, other.as_ref().ok())?);
        other.map(drop)
    });
    report.step("set-up of the virtual machines", || {
        // The generated code is compared with these headers.
        let headers = vm::prepare_all()?.to_str().context("the path of the headers is not UTF-8")?.to_owned();
        variables.push(("REWAKE_UAPI", headers));
        unknown.extend(vm::kernels()?.iter().filter_map(|release| versions::KERNEL.unknown(release)));
        Ok(())
    });
    report.step("set-up of docker-registry, nginx and PostgreSQL", || {
        variables.push(("REWAKE_DOCKER_REGISTRY", setup::docker_registry()?.display().to_string()));
        variables.push(("REWAKE_NGINX", setup::nginx()?.display().to_string()));
        variables.push(("REWAKE_POSTGRES", setup::postgresql()?.display().to_string()));
        Ok(())
    });
    report.step("set-up of SeaweedFS", || {
        // Without it, its tests report that they are skipped, and tests/expected-skips allows that.
        let program = setup::seaweedfs()?.map(|program| ("REWAKE_WEED", program.display().to_string()));
        variables.extend(program);
        Ok(())
    });
    report.unknown = unknown;
    (report, variables)
}

/// Adds the tests in the documentation of crates, which rustdoc builds.
fn documented(mut report: Report) -> Report {
    report.step("tests in documentation", || cargo(&["test", "--quiet", "--workspace", "--doc"]));
    report
}

/// Checks that compile something else than the tests do.
fn lints() -> Report {
    let mut report = Report::default();
    report.step("cargo clippy", || {
        cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])
    });
    report.step("a rewake without stores and TLS", || {
        cargo(&["clippy", "--quiet", "--package", "rewake", "--no-default-features", "--", "-D", "warnings"])
    });
    report
}

/// What a thread returned; its panic becomes this thread's.
fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Checks that need no CRIU, no virtual machine and no root: style, and the tests inside crates.
pub(crate) fn quick() -> anyhow::Result<()> {
    let mut report = Report::default();
    report.step("tidy", tidy::check);
    report.step("cargo fmt", || cargo(&["fmt", "--all", "--check"]));
    report.add(lints());
    let mut ran = Record::default();
    report.step("unit tests of every crate", || {
        let programs = programs::build(Targets::Unit)?;
        host(&programs, None, &[], &mut ran)
    });
    println!("{LEFT_OUT}");
    report.end(&ran)
}

/// Runs the jobs of this machine: all tests except the tests of virtual machines.
fn host(
    programs: &[TestProgram],
    filter: Option<&str>,
    environment: &[(&str, String)],
    ran: &mut Record,
) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for program in programs.iter().filter(|program| program.name != vm::PROGRAM) {
        all.extend(jobs::of(program, filter)?);
    }
    let budget = Budget::read()?;
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    // Most end to end tests wait: for limits, for links that are cut, for CRIU.
    let record = jobs::run(all, 2 * cores, &budget, HOST, environment)?;
    let (failures, is_whole) = (record.failures(), filter.is_none() && !environment.is_empty());
    let mut against = Expected::read()?.against(HOST, &record, is_whole && failures.is_empty());
    expected::print(HOST, &record);
    println!("\nthe slowest tests on this machine\n{}", record.slowest());
    if is_whole && failures.is_empty() {
        against.extend(budget.against(HOST, &record));
        budget::keep(HOST, &record)?;
    }
    ran.add(record);
    let wrong = [failures, against].concat();
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
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
        ("REWAKE_BIN", text(&repository::target()?.join("debug/rewake"))?),
    ];
    if let Some(other) = other {
        environment.push(("CRIU_ALT", text(&other.path)?));
    }
    Ok(environment)
}

fn cargo(arguments: &[&str]) -> anyhow::Result<()> {
    program::run(repository::cargo().args(arguments))
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
            "only {limit} open files are allowed here, {OPEN_FILES} are wanted: tests with many processes \
             may fail"
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
    /// Versions that the tests do not know.
    unknown: Vec<String>,
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

    /// Adds the steps of another thread.
    fn add(&mut self, other: Self) {
        self.steps.extend(other.steps);
        self.unknown.extend(other.unknown);
    }

    /// Prints the summary; an error if any step failed, or no test ran.
    fn end(&self, ran: &Record) -> anyhow::Result<()> {
        println!("\n== summary");
        for (name, time, failure) in &self.steps {
            let verdict = if failure.is_some() { "FAILED" } else { "ok" };
            println!("{verdict:>6}  {:>7.1} s  {name}", time.as_secs_f64());
        }
        let failed: Vec<&str> =
            self.steps.iter().filter(|(_, _, failure)| failure.is_some()).map(|(name, ..)| *name).collect();
        for (name, _, failure) in &self.steps {
            // Again, because the end of a long output is what people see first.
            failure.iter().for_each(|failure| println!("\n{name}: {failure}"));
        }
        println!();
        self.unknown.iter().for_each(|version| println!("{version}"));
        println!("{}", ran.counts());
        ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
        ensure!(!ran.tests.is_empty(), "no test has run");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

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
        assert_eq!(report.end(&Record::default()).unwrap_err().to_string(), "failed: first");
    }

    #[test]
    fn a_run_without_failures_succeeds_unless_no_test_ran() {
        let (mut report, mut ran) = (Report::default(), Record::default());
        report.step("only", || Ok(()));
        assert_eq!(report.end(&ran).unwrap_err().to_string(), "no test has run");
        ran.tests.insert("a::b".to_owned(), Duration::ZERO);
        assert!(report.end(&ran).is_ok());
    }

    #[test]
    fn limits_are_read_as_the_kernel_writes_them() {
        let text = "Limit                     Soft Limit           Hard Limit           Units\n\
            Max open files            1024                 unlimited            files\n";
        assert_eq!(open_files(text), Some((1024, u64::MAX)));
        assert_eq!(open_files("Max cpu time  unlimited\n"), None);
    }
}
