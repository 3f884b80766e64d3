// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask vm test`: the tests of the software GPU, and those that need one. They are built here and run
//! in machines of both kernels and of several shapes of GPU.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::accelerator;
use super::machine::quote;
use super::options::MEMORY;
use super::shapes::{SHAPES, Shape};
use crate::commands::plugin::{self, Profile};
use crate::expected::{self, Expected};
use crate::record::{self, PROGRAM, Record};
use crate::{program, repository, root};

/// Packages whose tests run in the machine.
const TESTED: [&str; 1] = ["softgpu-tests"];
/// Programs that they start.
const PROGRAMS: [&str; 2] = ["gpu-app", "rewake"];
/// A scratch disk for programs that measure: MiB and 10^6 bytes a second.
const DISK: &str = "256@50";
/// Time limit of a machine, in seconds: one that hangs must not hang the suite.
const TIME_LIMIT: u64 = 4500;
/// Time limit of a program, in seconds: the longest one took 236 s with two machines on two processors, and may take
/// half as much again with three.
const PROGRAM_LIMIT: u64 = 900;
/// Machines at once, at most.
const AT_ONCE: usize = 3;

/// What the script prints before the path of a program that failed.
const FAILED: &str = "failed: ";

/// The tests and machines of a run.
#[derive(Debug, Default)]
pub(crate) struct Wanted<'a> {
    /// Tests whose names contain it; none: all.
    pub(crate) filter: Option<&'a str>,
    /// Test programs by their names; empty: all.
    pub(crate) programs: &'a [&'a str],
    /// One machine by its name, which then runs all selected programs, whether the suite assigns them to it
    /// or not; None: each.
    pub(crate) machine: Option<&'a str>,
    /// Environment variables of the tests.
    pub(crate) environment: Vec<(&'a str, String)>,
    /// Time limit of a machine, and of a program in it; None: the suite's.
    pub(crate) limit: Option<Duration>,
}

impl<'a> Wanted<'a> {
    /// Whether tests and a machine are named, so that the suite's assignment and its list of skips do not
    /// count.
    fn by_name(&self) -> bool {
        self.machine.is_some() && (self.filter.is_some() || !self.programs.is_empty())
    }

    /// Whether nothing is named: another boot for a part of the programs then saves more time than it takes.
    fn is_whole(&self) -> bool {
        self.machine.is_none() && self.filter.is_none() && self.programs.is_empty()
    }

    /// `[FILTER] [--machine NAME]`
    ///
    /// # Errors
    /// There is more, or the name is missing.
    pub(crate) fn parse(words: &[&'a str]) -> anyhow::Result<Self> {
        let (filter, machine) = match words {
            [] => (None, None),
            ["--machine", name] => (None, Some(*name)),
            [filter] => (Some(*filter), None),
            [filter, "--machine", name] => (Some(*filter), Some(*name)),
            _ => bail!("vm test {}: expected `[FILTER] [--machine NAME]`", words.join(" ")),
        };
        Ok(Self { filter, machine, ..Self::default() })
    }
}

/// The result of one machine.
#[derive(Debug)]
struct Ran {
    machine: &'static str,
    record: Record,
    time: Duration,
    failure: Option<String>,
}

/// Runs the tests in their machines; a failure stops none of them.
pub(crate) fn run(wanted: &Wanted<'_>) -> anyhow::Result<()> {
    root::become_root()?;
    let shapes: Vec<&Shape> =
        SHAPES.iter().filter(|shape| wanted.machine.is_none_or(|name| name == shape.name)).collect();
    ensure!(
        !shapes.is_empty(),
        "no machine {:?}; there are {}",
        wanted.machine.unwrap_or_default(),
        SHAPES.map(|shape| shape.name).join(", ")
    );
    let expected = Expected::read()?;
    let known = |name: &str| name == expected::HOST || SHAPES.iter().any(|shape| shape.name == name);
    let unknown = expected.machines().find(|name| !known(name));
    ensure!(
        unknown.is_none(),
        "tests/expected-skips: no machine {unknown:?}; xtask/src/vm/shapes.rs has them"
    );
    let tests = tests()?;
    every_program_has_a_machine(&tests)?;
    let mut tests = tests_named(tests, wanted.filter)?;
    tests.retain(|test| wanted.programs.is_empty() || wanted.programs.contains(&name(test).as_str()));
    if tests.is_empty() {
        println!("no test of that name runs in the machine");
        return Ok(());
    }
    let jobs = shapes.into_iter().flat_map(|shape| {
        let count = if wanted.is_whole() { shape.parts } else { 1 };
        parts(&tests_for(&tests, shape, wanted), count).into_iter().map(move |tests| (shape, tests))
    });
    let jobs: Vec<_> = jobs.enumerate().collect();
    let waiting = Mutex::new(jobs.into_iter());
    let start = Instant::now();
    let next = || waiting.lock().ok().and_then(|mut waiting| waiting.next());
    let work = || -> Vec<Ran> {
        let mut all = Vec::new();
        while let Some((number, (shape, tests))) = next() {
            println!("=== {number}: {}: {}", shape.name, shape.why);
            let ran = ran(shape, number, &script(&tests, wanted), wanted.limit);
            println!("=== {number}: ended, {:.0} s so far", start.elapsed().as_secs_f64());
            all.push(ran);
        }
        all
    };
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let lanes = at_once(cores, accelerator::is_emulated(), available_memory()?);
    let all: Vec<Ran> = thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(work)).collect();
        let ended: Result<Vec<Vec<Ran>>, _> = lanes.into_iter().map(thread::ScopedJoinHandle::join).collect();
        ended.map(|all| all.into_iter().flatten().collect())
    })
    .map_err(|_| anyhow::anyhow!("a lane panicked"))?;
    verdict(&by_machine(all), &expected, wanted)
}

/// How many machines run at once. All processors of an emulated one share a thread, which waits for a fifth of the
/// time, so that three machines keep two processors busy. A machine may use all of its memory, since its `/tmp` is
/// memory. `available` is that of this host, in MiB.
fn at_once(cores: usize, is_emulated: bool, available: usize) -> usize {
    let by_cores = if is_emulated { cores * 3 / 2 } else { cores };
    by_cores.min(available / MEMORY as usize).clamp(1, AT_ONCE)
}

/// Memory that programs of this host can still use without swap, MiB.
fn available_memory() -> anyhow::Result<usize> {
    let text = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.strip_suffix(" kB"));
    let line = line.context("/proc/meminfo has no line MemAvailable")?;
    let kib: usize = line.trim().parse().with_context(|| format!("/proc/meminfo: MemAvailable:{line}"))?;
    Ok(kib / 1024)
}

/// One result for each machine, of all its parts.
fn by_machine(parts: Vec<Ran>) -> Vec<Ran> {
    let mut all: Vec<Ran> = Vec::new();
    for part in parts {
        let Some(ran) = all.iter_mut().find(|ran| ran.machine == part.machine) else {
            all.push(part);
            continue;
        };
        ran.record.add(part.record);
        ran.time += part.time;
        ran.failure =
            [ran.failure.take(), part.failure].into_iter().flatten().reduce(|one, other| one + ", " + &other);
    }
    all
}

/// Prints the times of programs and the tests that did not run; an error if a machine failed, or differs from
/// the list.
fn verdict(all: &[Ran], expected: &Expected, wanted: &Wanted<'_>) -> anyhow::Result<()> {
    print!("{}", table(all));
    let mut failures = Vec::new();
    for Ran { machine, record, failure, .. } in all {
        expected::print(machine, record);
        failures.extend(failure.as_ref().map(|failure| format!("{machine}: {failure}")));
        if failure.is_none() && !wanted.by_name() {
            let against = expected.against(machine, record, wanted.filter.is_none());
            failures.extend(against.into_iter().map(|line| format!("{machine}: {line}")));
        }
    }
    if wanted.filter.is_none() && wanted.machine.is_none() {
        failures.extend(never_run(all).into_iter().map(|test| format!("{test} ran on no machine")));
    }
    if !failures.is_empty() {
        bail!("{}", failures.join("; "));
    }
    Ok(())
}

/// Tests that were skipped by every machine that has them.
fn never_run(all: &[Ran]) -> BTreeSet<&str> {
    let skipped = all.iter().flat_map(|ran| ran.record.skipped.keys());
    let runs = |test: &str| {
        let one = |ran: &Ran| ran.record.tests.contains(test) && !ran.record.skipped.contains_key(test);
        all.iter().any(one)
    };
    skipped.map(String::as_str).filter(|test| !runs(test)).collect()
}

/// Seconds of each program on each machine, the longest in all first, and of each machine with its boot.
fn table(all: &[Ran]) -> String {
    let names: BTreeSet<&str> =
        all.iter().flat_map(|ran| &ran.record.programs).map(|program| program.name.as_str()).collect();
    let seconds = |ran: &Ran, name: &str| -> Option<f64> {
        let of_name = ran.record.programs.iter().filter(|program| program.name == name);
        of_name.map(|program| program.time.as_secs_f64()).reduce(|one, other| one + other)
    };
    let mut rows: Vec<(&str, Vec<Option<f64>>)> =
        names.into_iter().map(|name| (name, all.iter().map(|ran| seconds(ran, name)).collect())).collect();
    let sum = |row: &[Option<f64>]| -> f64 { row.iter().flatten().sum() };
    rows.sort_by(|(_, one), (_, other)| sum(other).total_cmp(&sum(one)));
    rows.push(("all, with the boot", all.iter().map(|ran| Some(ran.time.as_secs_f64())).collect()));
    let mut table = "\nseconds of each program\n".to_owned();
    let heads: String = all.iter().map(|ran| format!("{:>18}", ran.machine)).collect();
    table += &format!("{:20}{:>8}{heads}\n", "", "sum");
    for (name, row) in rows {
        let cells: String = row
            .iter()
            .map(|cell| cell.map_or_else(|| " ".repeat(18), |time| format!("{time:18.1}")))
            .collect();
        table += &format!("{name:20}{:8.1}{cells}\n", sum(&row));
    }
    table
}

/// Runs a script in such a machine, in a process of its own that ends with this one; prints its output, with
/// the machine's number before each line.
fn ran(shape: &Shape, number: usize, script: &str, limit: Option<Duration>) -> Ran {
    let start = Instant::now();
    let mut record = Record::default();
    let mut run = || -> anyhow::Result<()> {
        let own = std::env::current_exe().context("find this program")?;
        let mut machine = Command::new("setpriv");
        machine.args(["--pdeathsig", "KILL"]).arg(own).args(["vm", "--kernel", shape.series.name()]);
        machine.args(["--kernel-args", shape.kernel_arguments]);
        let limit = limit.map_or(TIME_LIMIT, |limit| limit.as_secs()).to_string();
        machine.args(["--module-args", shape.module_arguments, "--disk", DISK, "--time-limit", &limit]);
        machine.args(["--", "sh", "-c", script]).stdin(Stdio::null());
        let ended = record.of(&mut machine, &format!("{number}| "))?;
        let failed = failed(&ended.printed);
        ensure!(
            ended.status.success(),
            "{}",
            if failed.is_empty() { ended.status.to_string() } else { failed }
        );
        Ok(())
    };
    let failure = run().err().map(|error| format!("{error:#}"));
    Ran { machine: shape.name, record, time: start.elapsed(), failure }
}

/// The test programs, built now with the programs that they start and the plugin that CRIU loads. The release build
/// exists already when the end to end tests have run, and takes a fifth less of an emulated processor's time.
fn tests() -> anyhow::Result<Vec<PathBuf>> {
    let packages = |names: &[&str]| -> Vec<String> {
        names.iter().flat_map(|name| ["--package".to_owned(), (*name).to_owned()]).collect()
    };
    plugin::make(Profile::Release, &PROGRAMS)?;
    let arguments =
        ["test", "--release", "--no-run", "--message-format=json-render-diagnostics", "--lib", "--tests"];
    let mut cargo = repository::cargo();
    let messages = program::listen(cargo.args(arguments).args(packages(&TESTED)))?;
    let mut tests = executables(&messages);
    tests.sort();
    ensure!(!tests.is_empty(), "cargo names no test program of {}", TESTED.join(", "));
    Ok(tests)
}

/// A program's name.
fn name(test: &Path) -> String {
    record::without_hash(&test.to_string_lossy())
}

/// Every program runs on some machine, and machines name programs that exist.
fn every_program_has_a_machine(tests: &[PathBuf]) -> anyhow::Result<()> {
    let names: BTreeSet<String> = tests.iter().map(|test| name(test)).collect();
    for test in &names {
        let some = SHAPES.iter().any(|shape| shape.programs.have(test));
        ensure!(some, "no machine in xtask/src/vm/shapes.rs runs {test}: name it there");
    }
    for shape in &SHAPES {
        let missing = shape.programs.named().iter().find(|program| !names.contains(**program));
        ensure!(missing.is_none(), "{}: no test program {missing:?} exists", shape.name);
    }
    Ok(())
}

/// Programs that a machine runs: those that the suite assigns to it, or those that were named.
fn tests_for(tests: &[PathBuf], shape: &Shape, wanted: &Wanted<'_>) -> Vec<PathBuf> {
    let all = wanted.by_name();
    tests.iter().filter(|test| all || shape.programs.have(&name(test))).cloned().collect()
}

/// The programs of a machine in as many parts, which may run at the same time; none is empty.
fn parts(tests: &[PathBuf], count: usize) -> Vec<Vec<PathBuf>> {
    let part = |number| tests.iter().skip(number).step_by(count).cloned().collect();
    (0..count.min(tests.len())).map(part).collect()
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

/// Test programs only: cargo names the package's other programs as well, which it makes for the tests to start.
fn executables(messages: &str) -> Vec<PathBuf> {
    let is_test = |line: &&str| {
        let profile = line.split_once("\"profile\":{").and_then(|(_, rest)| rest.split_once('}'));
        profile.is_some_and(|(profile, _)| profile.contains("\"test\":true"))
    };
    let made = messages.lines().filter(|line| line.contains("\"reason\":\"compiler-artifact\""));
    made.filter(is_test).filter_map(|line| repository::field(line, "executable").map(PathBuf::from)).collect()
}

/// Runs every program, and fails if one did. On machines that must have a GPU, a test that finds none fails.
fn script(tests: &[PathBuf], wanted: &Wanted<'_>) -> String {
    let mut script = "export SOFTGPU_REQUIRED=1; failed=0\n".to_owned();
    for (name, value) in &wanted.environment {
        script += &format!("export {name}={}\n", quote(value));
    }
    let limit = wanted.limit.map_or(PROGRAM_LIMIT, |limit| limit.as_secs());
    let filter = wanted.filter.map(|filter| format!(" {}", quote(filter))).unwrap_or_default();
    for test in tests {
        let path = quote(&test.display().to_string());
        script += &format!(
            "echo; echo {PROGRAM}{path}; timeout --signal=KILL {limit} {path} --test-threads=1{filter} || \
             {{ failed=1; echo {FAILED}{path}; }}\n"
        );
    }
    script + "exit $failed\n"
}

/// Programs that failed, from the output of [`script`], and the failed tests of each with their reasons, from
/// Rust's test harness; or the error of `cargo xtask vm`.
fn failed(output: &str) -> String {
    let mut programs = Vec::new();
    let mut tests: Vec<String> = Vec::new();
    let mut lines = output.lines().map(str::trim_end);
    while let Some(line) = lines.next() {
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            tests.push(test.to_owned());
        } else if let Some((_, place)) = line.split_once(" panicked at ")
            && let (Some(test), Some(message)) = (tests.last_mut(), lines.next())
        {
            *test += &format!(": {place} {message}");
        } else if let Some(program) = line.strip_prefix(FAILED) {
            let program = Path::new(program).file_name().unwrap_or_default().to_string_lossy();
            programs.push(format!("{program} failed ({})", tests.join(", ")));
            tests.clear();
        } else if let Some(error) = line.strip_prefix("xtask: ") {
            programs.push(error.to_owned());
        }
    }
    programs.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_those_that_cargo_says_it_made() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"a"},"profile":{"test":false},"executable":null,"fresh":true}
{"reason":"compiler-artifact","target":{"name":"b"},"profile":{"opt_level":"0","test":true},"executable":"/t/deps/b-1","fresh":true}
{"reason":"compiler-artifact","target":{"name":"c","test":true},"profile":{"test":false},"executable":"/t/c","fresh":true}
{"reason":"build-script-executed","executable":"/t/no"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executables(messages), [PathBuf::from("/t/deps/b-1")]);
    }

    fn ran_on(machine: &'static str, programs: &[(&str, u64)], tests: &[&str], skipped: &[&str]) -> Ran {
        let (start, mut record) = (Instant::now(), Record::default());
        for (name, seconds) in programs {
            record.line(&format!("{PROGRAM}/t/{name}-1"), start);
            for test in tests {
                record.line(&format!("test {test} ... ok"), start + Duration::from_secs(*seconds));
            }
        }
        for test in skipped {
            record.line(&format!("skipped: {test}: why"), start);
        }
        Ran { machine, record, time: Duration::from_secs(100), failure: None }
    }

    #[test]
    fn programs_are_listed_with_the_longest_first() {
        let all =
            [ran_on("one", &[("a", 2), ("b", 3)], &["x"], &[]), ran_on("two", &[("a", 5)], &["x"], &[])];
        let table = table(&all);
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[2], ["sum", "one", "two"]);
        assert_eq!(lines[3], ["a", "7.0", "2.0", "5.0"]);
        assert_eq!(lines[4], ["b", "3.0", "3.0"]);
        assert_eq!(lines[5], ["all,", "with", "the", "boot", "200.0", "100.0", "100.0"]);
    }

    #[test]
    fn parts_of_a_machine_have_each_program_once() {
        let tests = ["a", "b", "c", "d", "e"].map(PathBuf::from);
        let as_text = |count| -> Vec<String> {
            let joined = |part: Vec<PathBuf>| part.iter().map(|test| test.display().to_string()).collect();
            parts(&tests, count).into_iter().map(joined).collect()
        };
        assert_eq!(as_text(1), ["abcde"]);
        assert_eq!(as_text(2), ["ace", "bd"]);
        assert_eq!(as_text(9), ["a", "b", "c", "d", "e"]);
        assert!(parts(&[], 2).is_empty());
    }

    #[test]
    fn machines_at_once_fit_processors_and_memory() {
        assert_eq!(at_once(2, true, 12288), 3);
        assert_eq!(at_once(2, true, 12287), 2);
        assert_eq!(at_once(2, false, 99_999), 2);
        assert_eq!(at_once(16, false, 99_999), 3);
        assert_eq!(at_once(1, true, 1024), 1);
    }

    #[test]
    fn only_a_run_of_everything_boots_a_machine_in_parts() {
        assert!(Wanted::default().is_whole());
        let named = [&["gated"][..], &["--machine", "7-90a"]].map(|words| Wanted::parse(words).unwrap());
        let program = Wanted { programs: &["gated"], ..Wanted::default() };
        assert!(named.iter().chain([&program]).all(|wanted| !wanted.is_whole()));
    }

    #[test]
    fn the_parts_of_a_machine_have_one_result() {
        let part = |program, failure: Option<&str>| Ran {
            failure: failure.map(str::to_owned),
            ..ran_on("one", &[(program, 1)], &["x"], &[])
        };
        let other = ran_on("two", &[("a", 1)], &["x"], &[]);
        let all = by_machine(vec![
            part("a", None),
            other,
            part("b", Some("b failed")),
            part("c", Some("c failed")),
        ]);
        let [one, two] = &all[..] else { panic!("{all:?}") };
        assert_eq!((one.machine, two.machine), ("one", "two"));
        assert_eq!(Vec::from_iter(&one.record.tests), ["a::x", "b::x", "c::x"]);
        assert_eq!(
            (one.time, one.failure.as_deref()),
            (Duration::from_secs(300), Some("b failed, c failed"))
        );
        assert_eq!((two.time, two.failure.as_deref()), (Duration::from_secs(100), None));
    }

    #[test]
    fn a_test_that_every_machine_skips_has_run_on_none() {
        let one = ran_on("one", &[("a", 1)], &["x", "y"], &["a::x", "a::y"]);
        let two = ran_on("two", &[("a", 1)], &["x", "y"], &["a::x"]);
        assert_eq!(Vec::from_iter(never_run(&[one, two])), ["a::x"]);
    }

    #[test]
    fn one_failure_fails_the_script_and_stops_nothing() {
        let wanted = Wanted {
            filter: Some("it's"),
            environment: vec![("ROUNDS", "a b".to_owned())],
            ..Wanted::default()
        };
        let script = script(&[PathBuf::from("/bin/false"), PathBuf::from("/bin/true")], &wanted);
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "\nprogram: /bin/false\nfailed: /bin/false\n\nprogram: /bin/true\n"
        );
        assert!(script.contains(r"'/bin/true' --test-threads=1 'it'\''s'"));
        assert!(script.contains("export ROUNDS='a b'\n"));
    }

    #[test]
    fn failed_programs_and_tests_are_named() {
        let output = "running 2 tests\r\n---- a::one stdout ----\r\n\r\n\
            thread 'a::one' (7) panicked at a.rs:9:1:\r\nno GPU\r\n---- two stdout ----\r\n\
            failed: /t/deps/first-1f\r\ntest three ... ok\r\nfailed: /t/deps/second-2\r\nxtask: it is late\n";
        assert_eq!(
            failed(output),
            "first-1f failed (a::one: a.rs:9:1: no GPU, two), second-2 failed (), it is late"
        );
    }
}
