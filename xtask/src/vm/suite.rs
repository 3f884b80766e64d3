// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask vm test`: the tests of the software GPU, and those that need one, built here and run in machines of
//! both kernels and of several shapes of GPU.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};

use super::options::Series;
use crate::commands::plugin::{self, Profile};
use crate::{program, repository, root};

/// Packages whose tests run in the machine.
const TESTED: [&str; 1] = ["softgpu-tests"];
/// Programs that they start.
const PROGRAMS: [&str; 2] = ["gpu-app", "rewake"];
/// A scratch disk for those that measure: MiB and 10^6 bytes a second.
const DISK: &str = "256@50";
/// A machine that hangs must not hang the suite. Seconds.
const TIME_LIMIT: &str = "4500";
/// Nor must a program: the longest one takes four minutes, and twice that where the host is busy. Seconds.
const PROGRAM_LIMIT: u32 = 900;
/// Machines at once: an emulated one keeps one processor busy, and may have 4 GiB of memory.
const AT_ONCE: usize = 2;

/// What the script prints before the path of a program that failed.
const FAILED: &str = "failed: ";

/// One machine that the tests run in.
#[derive(Debug)]
struct Shape {
    series: Series,
    /// softgpu.ko's parameters.
    module_arguments: &'static str,
    /// More words for the kernel's command line.
    kernel_arguments: &'static str,
    /// Which test programs; none: all.
    only: Option<&'static [&'static str]>,
}

/// What copies contents, for machines that differ in nothing else.
const COPIERS: &[&str] = &["copy_engine", "plugin", "plugin_contents"];

/// What depends on whether GPUs retry faults: only this family's queues are restored by a kernel that knows such processes.
const RETRIED: &[&str] = &["both", "lazy_pages"];

/// What depends on whether calls are held.
const UNHELD: &[&str] = &["unheld", "gated"];

/// What a machine is where nothing else is said: it runs everything.
const WHOLE: Shape =
    Shape { series: Series::Linux6_12, module_arguments: "", kernel_arguments: "", only: None };

/// Both kernels, each family of GPU, large and small BAR, fresh memory poisoned and cleared, with copy rings and without, with faults that GPUs retry,
/// and with the security modules of kernels that run no program for calls.
const SHAPES: [Shape; 7] = [
    Shape { module_arguments: "gpus=2 gfx=90a xgmi=1", ..WHOLE },
    Shape { series: Series::Linux7, module_arguments: "gpus=2 gfx=90a xgmi=1", ..WHOLE },
    Shape { module_arguments: "gpus=2 gfx=1100 small_bar=1 fresh=zero copy_mbps=100", ..WHOLE },
    Shape { series: Series::Linux7, module_arguments: "gpus=2 gfx=942 xnack=1 seed=7", ..WHOLE },
    Shape {
        module_arguments: "gpus=2 gfx=90a xgmi=1 sdma_rings=0 fresh=poison",
        only: Some(COPIERS),
        ..WHOLE
    },
    Shape {
        series: Series::Linux7,
        module_arguments: "gpus=2 gfx=90a xgmi=1 xnack=1",
        only: Some(RETRIED),
        ..WHOLE
    },
    Shape {
        series: Series::Linux7,
        module_arguments: "gpus=2 gfx=90a xgmi=1",
        kernel_arguments: "lsm=capability,yama",
        only: Some(UNHELD),
    },
];

/// All tests in every machine, or those whose names contain the filter. Goes on after a failure.
pub(super) fn run(filter: Option<&str>) -> anyhow::Result<()> {
    root::become_root()?;
    let tests = tests_named(tests()?, filter)?;
    if tests.is_empty() {
        println!("no test of that name runs in the machine");
        return Ok(());
    }
    let waiting = Mutex::new(SHAPES.iter().enumerate());
    let start = Instant::now();
    let next = || waiting.lock().ok().and_then(|mut waiting| waiting.next());
    let work = || -> Vec<String> {
        let mut failures = Vec::new();
        while let Some((number, shape)) = next() {
            let tests = tests_for(&tests, shape.only);
            if tests.is_empty() {
                continue;
            }
            let words = [shape.module_arguments, shape.kernel_arguments].join(" ");
            let name = format!("Linux {}, {}", shape.series.name(), words.trim_end());
            println!("=== {number}: {name}");
            if let Err(error) = shape.test(number, &script(&tests, filter)) {
                failures.push(format!("{name}: {error:#}"));
            }
            println!("=== {number}: ended, {:.0} s so far", start.elapsed().as_secs_f64());
        }
        failures
    };
    let at_once = thread::available_parallelism().map_or(1, |cores| cores.get().min(AT_ONCE));
    let failures: Vec<String> = thread::scope(|scope| {
        let lanes: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        let ended = lanes.into_iter().map(|lane| lane.join());
        ended.flat_map(|failures| failures.unwrap_or_else(|_| vec!["a lane panicked".to_owned()])).collect()
    });
    if !failures.is_empty() {
        bail!("{}", failures.join("; "));
    }
    Ok(())
}

impl Shape {
    /// Runs a script in such a machine, in a process of its own that ends with this one; prints what it prints, with the
    /// machine's number before each line.
    fn test(&self, number: usize, script: &str) -> anyhow::Result<()> {
        let own = std::env::current_exe().context("find this program")?;
        let (output, end) = std::io::pipe().context("make a pipe")?;
        let mut machine = Command::new("setpriv");
        machine.args(["--pdeathsig", "KILL"]).arg(own).args(["vm", "--kernel", self.series.name()]);
        machine.args(["--kernel-args", self.kernel_arguments]);
        machine.args(["--module-args", self.module_arguments, "--disk", DISK, "--time-limit", TIME_LIMIT]);
        machine.args(["--", "sh", "-c", script]).stdin(Stdio::null());
        machine.stdout(end.try_clone().context("share the pipe")?).stderr(end);
        let mut child = machine.spawn().context("start a machine")?;
        // The pipe ends when nobody has its other end: not this process either.
        drop(machine);
        let mut said = String::new();
        for line in BufReader::new(output).split(b'\n') {
            let line = line.context("read what the machine says")?;
            let line = String::from_utf8_lossy(&line);
            println!("{number}| {}", line.trim_end());
            said += &line;
            said.push('\n');
        }
        let status = child.wait().context("wait for the machine")?;
        let failed = failed(&said);
        ensure!(status.success(), "{}", if failed.is_empty() { status.to_string() } else { failed });
        Ok(())
    }
}

/// The test programs, built now with the programs that they start and the plugin that CRIU loads.
fn tests() -> anyhow::Result<Vec<PathBuf>> {
    let packages = |names: &[&str]| -> Vec<String> {
        names.iter().flat_map(|name| ["--package".to_owned(), (*name).to_owned()]).collect()
    };
    program::run(repository::cargo().arg("build").args(packages(&PROGRAMS)))?;
    plugin::make(Profile::Debug)?;
    let arguments = ["test", "--no-run", "--message-format=json-render-diagnostics", "--lib", "--tests"];
    let mut cargo = repository::cargo();
    let messages = program::listen(cargo.args(arguments).args(packages(&TESTED)))?;
    let tests: Vec<PathBuf> = executables(&messages);
    ensure!(!tests.is_empty(), "cargo names no test program of {}", TESTED.join(", "));
    Ok(tests)
}

/// Those of the programs that a machine runs. Cargo calls a test program `NAME-HASH`.
fn tests_for(tests: &[PathBuf], only: Option<&[&str]>) -> Vec<PathBuf> {
    let name = |test: &PathBuf| -> Option<String> {
        let name = test.file_name()?.to_str()?;
        Some(name.rsplit_once('-')?.0.to_owned())
    };
    let wanted = |test: &&PathBuf| {
        only.is_none_or(|only| name(test).is_some_and(|name| only.contains(&name.as_str())))
    };
    tests.iter().filter(wanted).cloned().collect()
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

/// Runs every program, and fails if one did. Where a GPU must be there, a test that skips itself fails.
fn script(tests: &[PathBuf], filter: Option<&str>) -> String {
    let mut script = "export SOFTGPU_REQUIRED=1; failed=0\n".to_owned();
    let filter = filter.map(|filter| format!(" {}", super::machine::quote(filter))).unwrap_or_default();
    for test in tests {
        let path = super::machine::quote(&test.display().to_string());
        script += &format!(
            "echo; echo {path}; timeout --signal=KILL {PROGRAM_LIMIT} {path} --test-threads=1{filter} || \
             {{ failed=1; echo {FAILED}{path}; }}\n"
        );
    }
    script + "exit $failed\n"
}

/// Which programs failed, by what [`script`] printed, and which tests of each, by what Rust's test harness did; or
/// what `cargo xtask vm` says of the machine.
fn failed(output: &str) -> String {
    let mut programs = Vec::new();
    let mut tests = Vec::new();
    for line in output.lines().map(str::trim_end) {
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            tests.push(test);
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

    #[test]
    fn a_machine_may_run_some_programs_only() {
        let tests = ["/t/plugin-1a", "/t/plugin_contents-2b", "/t/sdma-3c"].map(PathBuf::from);
        assert_eq!(tests_for(&tests, None), tests);
        assert_eq!(tests_for(&tests, Some(&["plugin", "sdma"])), [tests[0].clone(), tests[2].clone()]);
        assert!(tests_for(&tests, Some(&["judge"])).is_empty());
    }

    #[test]
    fn one_failure_fails_the_script_and_stops_nothing() {
        let script = script(&[PathBuf::from("/bin/false"), PathBuf::from("/bin/true")], Some("it's"));
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "\n/bin/false\nfailed: /bin/false\n\n/bin/true\n"
        );
        assert!(script.contains(r"'/bin/true' --test-threads=1 'it'\''s'"));
    }

    #[test]
    fn what_failed_is_told_by_name() {
        let output = "running 2 tests\r\n---- a::one stdout ----\r\npanicked\r\n---- two stdout ----\r\n\
            failed: /t/deps/first-1f\r\ntest three ... ok\r\nfailed: /t/deps/second-2\r\nxtask: it is late\n";
        assert_eq!(failed(output), "first-1f failed (a::one, two), second-2 failed (), it is late");
    }
}
