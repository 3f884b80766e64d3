// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask vm test`: the tests of the software GPU, and those that need one. They are built here and run
//! in machines of both kernels and of several shapes of GPU.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
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
use crate::root;
use crate::suite::budget::{self, Budget};
use crate::suite::expected::{self, Expected};
use crate::suite::jobs::{self, Job};
use crate::suite::programs::{self, Targets, TestProgram};
use crate::suite::record::{FAILED, JOB, Record};

/// The test program that runs in the machines.
pub(crate) const PROGRAM: &str = "gpu";
/// A scratch disk for programs that measure: MiB and 10^6 bytes a second.
const DISK: &str = "256@50";
/// Time limit of a machine, in seconds: one that hangs must not hang the suite.
const TIME_LIMIT: u64 = 4500;
/// Seconds of a part of a machine's tests. The boot for another part takes ten, and tests of one part share
/// dumps; in longer parts some lanes would be idle at the end.
const PART: f64 = 240.0;
/// What a job takes that was not measured yet, in seconds: some restores.
const UNMEASURED: f64 = 30.0;
/// Machines at once, at most.
const AT_ONCE: usize = 3;

/// The tests and machines of a run.
#[derive(Debug, Default)]
pub(crate) struct Wanted<'a> {
    /// Tests whose names contain it; none: all.
    pub(crate) filter: Option<&'a str>,
    /// Modules of the test program by their names; empty: all.
    pub(crate) modules: &'a [&'a str],
    /// One machine by its name, which then runs all selected tests, whether the suite assigns them to it
    /// or not; None: each.
    pub(crate) machine: Option<&'a str>,
    /// Environment variables of the tests.
    pub(crate) environment: Vec<(&'a str, String)>,
    /// Time limit of a machine, and of a job in it; None: the suite's.
    pub(crate) limit: Option<Duration>,
}

impl<'a> Wanted<'a> {
    /// Whether tests and a machine are named, so that the suite's assignment and its list of skips do not
    /// count.
    fn by_name(&self) -> bool {
        self.machine.is_some() && (self.filter.is_some() || !self.modules.is_empty())
    }

    /// Whether nothing is named.
    fn is_whole(&self) -> bool {
        self.machine.is_none() && self.filter.is_none() && self.modules.is_empty()
    }

    fn wants(&self, test: &str) -> bool {
        let module = test.split_once("::").map_or("", |(module, _)| module);
        let named = self.modules.is_empty() || self.modules.contains(&module);
        named && self.filter.is_none_or(|filter| format!("{PROGRAM}::{test}").contains(filter))
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

/// The result of one machine, or of one part of its tests.
#[derive(Debug)]
struct Ran {
    machine: &'static str,
    record: Record,
    time: Duration,
    failure: Option<String>,
}

/// Builds the tests and runs them.
pub(crate) fn build_and_run(wanted: &Wanted<'_>) -> anyhow::Result<()> {
    root::become_root()?;
    let programs = programs::build(Targets::Integration(&[PROGRAM]))?;
    run(wanted, &programs, &mut Record::default())
}

/// Runs the tests in their machines; a failure stops none of them. Adds what ran to `record`.
pub(crate) fn run(wanted: &Wanted<'_>, programs: &[TestProgram], record: &mut Record) -> anyhow::Result<()> {
    let shapes: Vec<&Shape> =
        SHAPES.iter().filter(|shape| wanted.machine.is_none_or(|name| name == shape.name)).collect();
    ensure!(
        !shapes.is_empty(),
        "no machine {:?}; there are {}",
        wanted.machine.unwrap_or_default(),
        SHAPES.map(|shape| shape.name).join(", ")
    );
    let (expected, budget) = (Expected::read()?, Budget::read()?);
    let known = |name: &str| name == expected::HOST || SHAPES.iter().any(|shape| shape.name == name);
    let unknown = expected.machines().chain(budget.machines()).find(|name| !known(name));
    ensure!(
        unknown.is_none(),
        "tests/expected-skips or tests/budget: no machine {unknown:?}; xtask/src/vm/shapes.rs has them"
    );
    plugin::place_all(Profile::Debug)?;
    let program = programs.iter().find(|program| program.name == PROGRAM);
    let all = jobs::of(program.context("cargo built no test program `gpu`")?, None)?;
    every_test_has_a_machine(&all)?;
    let mut parts = Vec::new();
    for shape in shapes {
        let jobs = jobs_for(&all, shape, wanted);
        let seconds = |job: &Job| budget.seconds(shape.name, &job.name).unwrap_or(UNMEASURED);
        for part in parts_of(jobs, seconds) {
            parts.push((part.iter().map(seconds).sum::<f64>(), shape, part));
        }
    }
    // The longest first, so that none ends long after all others.
    parts.sort_by(|(one, ..), (other, ..)| other.total_cmp(one));
    let parts: Vec<_> = parts.into_iter().map(|(_, shape, jobs)| (shape, jobs)).collect();
    if parts.is_empty() {
        println!("no test of that name runs in the machine");
        return Ok(());
    }
    let all = by_machine(run_parts(parts, wanted)?);
    let verdict = verdict(&all, &expected, &budget, wanted);
    all.into_iter().for_each(|ran| record.add(ran.record));
    verdict
}

/// Runs the parts, as many at once as this host can.
fn run_parts(parts: Vec<(&'static Shape, Vec<Job>)>, wanted: &Wanted<'_>) -> anyhow::Result<Vec<Ran>> {
    let waiting = Mutex::new(parts.into_iter().enumerate());
    let start = Instant::now();
    let next = || waiting.lock().ok().and_then(|mut waiting| waiting.next());
    let work = || -> Vec<Ran> {
        let mut all = Vec::new();
        while let Some((number, (shape, jobs))) = next() {
            println!("=== {number}: {}: {}", shape.name, shape.why);
            let ran = ran(shape, number, &script(&jobs, wanted), wanted.limit);
            println!("=== {number}: ended, {:.0} s so far", start.elapsed().as_secs_f64());
            all.push(ran);
        }
        all
    };
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let lanes = at_once(cores, accelerator::is_emulated(), available_memory()?);
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(work)).collect();
        let ended: Result<Vec<Vec<Ran>>, _> = lanes.into_iter().map(thread::ScopedJoinHandle::join).collect();
        ended.map(|all| all.into_iter().flatten().collect())
    })
    .map_err(|_| anyhow::anyhow!("a lane panicked"))
}

/// How many machines run at once. All processors of an emulated one share a thread, which waits for a fifth
/// of the time, so that three machines keep two processors busy. A machine may use all of its memory, since
/// its `/tmp` is memory. `available` is that of this host, in MiB.
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

/// Prints the times of jobs and the tests that did not run; an error if a machine failed, or differs from
/// the lists.
fn verdict(all: &[Ran], expected: &Expected, budget: &Budget, wanted: &Wanted<'_>) -> anyhow::Result<()> {
    print!("{}", table(all));
    for Ran { machine, record, .. } in all {
        println!("\nthe slowest tests on {machine}\n{}", record.slowest());
    }
    let mut failures = Vec::new();
    for Ran { machine, record, failure, .. } in all {
        expected::print(machine, record);
        failures.extend(failure.as_ref().map(|failure| format!("{machine}: {failure}")));
        if failure.is_none() && !wanted.by_name() {
            let mut against = expected.against(machine, record, wanted.filter.is_none());
            if wanted.is_whole() {
                against.extend(budget.against(machine, record));
                budget::keep(machine, record)?;
            }
            failures.extend(against.into_iter().map(|line| format!("{machine}: {line}")));
        }
    }
    if wanted.is_whole() {
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
        let one = |ran: &Ran| ran.record.tests.contains_key(test) && !ran.record.skipped.contains_key(test);
        all.iter().any(one)
    };
    skipped.map(String::as_str).filter(|test| !runs(test)).collect()
}

/// Seconds of each job on each machine, the longest in all first, and of each machine with its boot.
fn table(all: &[Ran]) -> String {
    let names: BTreeSet<&str> =
        all.iter().flat_map(|ran| &ran.record.jobs).map(|job| job.name.as_str()).collect();
    let seconds = |ran: &Ran, name: &str| -> Option<f64> {
        let of_name = ran.record.jobs.iter().filter(|job| job.name == name);
        of_name.map(|job| job.time.as_secs_f64()).reduce(|one, other| one + other)
    };
    let mut rows: Vec<(&str, Vec<Option<f64>>)> =
        names.into_iter().map(|name| (name, all.iter().map(|ran| seconds(ran, name)).collect())).collect();
    let sum = |row: &[Option<f64>]| -> f64 { row.iter().flatten().sum() };
    rows.sort_by(|(_, one), (_, other)| sum(other).total_cmp(&sum(one)));
    rows.push(("all, with the boot", all.iter().map(|ran| Some(ran.time.as_secs_f64())).collect()));
    let mut table = "\nseconds of each job\n".to_owned();
    let heads: String = all.iter().map(|ran| format!("{:>12}", ran.machine)).collect();
    table += &format!("{:24}{:>8}{heads}\n", "", "sum");
    for (name, row) in rows {
        let cells: String = row
            .iter()
            .map(|cell| cell.map_or_else(|| " ".repeat(12), |time| format!("{time:12.1}")))
            .collect();
        table += &format!("{name:24}{:8.1}{cells}\n", sum(&row));
    }
    table
}

/// Runs a script in such a machine, in a process of its own that ends with this one; prints its jobs as they
/// end, with the machine's number before each line.
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
        let ended = record.of_script(&mut machine, &format!("{number}| "))?;
        if !ended.status.success() {
            let errors = ended.printed.lines().filter_map(|line| line.strip_prefix("xtask: "));
            let failures: Vec<String> =
                record.failures().into_iter().chain(errors.map(str::to_owned)).collect();
            let failures = failures.join(", ");
            bail!("{}", if failures.is_empty() { ended.status.to_string() } else { failures });
        }
        Ok(())
    };
    let failure = run().err().map(|error| format!("{error:#}"));
    Ran { machine: shape.name, record, time: start.elapsed(), failure }
}

/// Every test runs on some machine, and machines name tests that exist.
fn every_test_has_a_machine(all: &[Job]) -> anyhow::Result<()> {
    let tests: Vec<&str> = all.iter().flat_map(|job| &job.tests).map(String::as_str).collect();
    for test in &tests {
        let some = SHAPES.iter().any(|shape| shape.tests.have(test));
        ensure!(some, "no machine in xtask/src/vm/shapes.rs runs {test}: name it there");
    }
    for shape in &SHAPES {
        let missing = shape.tests.named().find(|named| !tests.iter().any(|test| named.has(test)));
        ensure!(missing.is_none(), "{}: no test {missing:?} exists", shape.name);
    }
    Ok(())
}

/// What a machine runs: tests that the suite assigns to it, or those that were named.
fn jobs_for(all: &[Job], shape: &Shape, wanted: &Wanted<'_>) -> Vec<Job> {
    let by_name = wanted.by_name();
    let some = |job: &Job| {
        let has = |test: &&String| wanted.wants(test) && (by_name || shape.tests.have(test));
        let tests: Vec<String> = job.tests.iter().filter(has).cloned().collect();
        (!tests.is_empty()).then(|| Job { tests, ..job.clone() })
    };
    all.iter().filter_map(some).collect()
}

/// The jobs in parts that may run at the same time: as many as take [`PART`] each. Jobs of a part keep their
/// order.
fn parts_of(jobs: Vec<Job>, seconds: impl Fn(&Job) -> f64) -> Vec<Vec<Job>> {
    let all: f64 = jobs.iter().map(&seconds).sum();
    let count =
        (1..=jobs.len()).find(|count| all <= PART * f64::from(u32::try_from(*count).unwrap_or(u32::MAX)));
    let mut parts: Vec<(f64, Vec<(usize, Job)>)> =
        (0..count.unwrap_or(jobs.len())).map(|_| (0.0, Vec::new())).collect();
    let mut jobs: Vec<(usize, Job)> = jobs.into_iter().enumerate().collect();
    jobs.sort_by(|(_, one), (_, other)| seconds(other).total_cmp(&seconds(one)));
    for (place, job) in jobs {
        if let Some((sum, part)) = parts.iter_mut().min_by(|(one, _), (other, _)| one.total_cmp(other)) {
            *sum += seconds(&job);
            part.push((place, job));
        }
    }
    let in_order = |(_, mut part): (f64, Vec<(usize, Job)>)| {
        part.sort_by_key(|(place, _)| *place);
        part.into_iter().map(|(_, job)| job).collect()
    };
    parts.into_iter().map(in_order).collect()
}

/// Runs every job, and fails if one did. On machines that must have a GPU, a test that finds none fails.
fn script(jobs: &[Job], wanted: &Wanted<'_>) -> String {
    let mut script = "export SOFTGPU_REQUIRED=1; failed=0\n".to_owned();
    for (name, value) in &wanted.environment {
        script += &format!("export {name}={}\n", quote(value));
    }
    for job in jobs {
        let words: Vec<String> =
            job.words(wanted.limit.unwrap_or(jobs::LIMIT)).iter().map(|word| quote(word)).collect();
        script += &format!(
            "echo {JOB}{name}; {} || {{ failed=1; echo {FAILED}{name}; }}\n",
            words.join(" "),
            name = quote(&job.name)
        );
    }
    script + "exit $failed\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str) -> Job {
        let tests = vec![format!("{name}::test")];
        Job { name: name.to_owned(), program: "/bin/true".into(), folder: "/".into(), tests }
    }

    fn ran_on(machine: &'static str, jobs: &[(&str, u64)], tests: &[&str], skipped: &[&str]) -> Ran {
        let (start, mut record) = (Instant::now(), Record::default());
        for (name, seconds) in jobs {
            record.begin(name, start);
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
    fn jobs_are_listed_with_the_longest_first() {
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
    fn parts_of_a_machine_take_about_as_long_as_each_other() {
        let parts_of = |scale: f64| -> Vec<String> {
            let seconds = |job: &Job| scale * if job.name == "c" { 10.0 } else { 4.0 };
            let jobs = ["a", "b", "c", "d", "e"].map(job).to_vec();
            let joined = |part: Vec<Job>| part.iter().map(|job| job.name.as_str()).collect();
            parts_of(jobs, seconds).into_iter().map(joined).collect()
        };
        assert_eq!(parts_of(PART / 26.0), ["abcde"]);
        assert_eq!(parts_of(PART / 13.0), ["ce", "abd"]);
        assert_eq!(parts_of(PART), ["c", "a", "b", "d", "e"]);
        assert!(super::parts_of(Vec::new(), |_| 1.0).is_empty());
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
    fn only_a_run_of_everything_is_whole() {
        assert!(Wanted::default().is_whole());
        let named = [&["gated"][..], &["--machine", "7-90a"]].map(|words| Wanted::parse(words).unwrap());
        let module = Wanted { modules: &["gated"], ..Wanted::default() };
        assert!(named.iter().chain([&module]).all(|wanted| !wanted.is_whole()));
    }

    #[test]
    fn tests_are_wanted_by_module_and_by_a_part_of_their_names() {
        let wanted = Wanted { filter: Some("gpu::killed"), modules: &["killed"], ..Wanted::default() };
        assert!(wanted.wants("killed::a") && !wanted.wants("gated::killed"));
        assert!(Wanted { filter: Some("a_dump"), ..Wanted::default() }.wants("gated::a_dump_at_any_moment"));
    }

    #[test]
    fn the_parts_of_a_machine_have_one_result() {
        let part = |job, failure: Option<&str>| Ran {
            failure: failure.map(str::to_owned),
            ..ran_on("one", &[(job, 1)], &["x"], &[])
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
        assert_eq!(Vec::from_iter(one.record.tests.keys()), ["a::x", "b::x", "c::x"]);
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
        let wanted = Wanted { environment: vec![("ROUNDS", "a b".to_owned())], ..Wanted::default() };
        let failing = Job { program: "/bin/false".into(), ..job("it's") };
        let script = script(&[failing, job("b")], &wanted);
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(script.contains(r"'--exact' 'it'\''s::test'"), "{script}");
        assert!(script.contains("export ROUNDS='a b'\n"));
    }
}
