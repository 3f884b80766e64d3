// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the output of test programs line by line: which job ran for how long, which tests ran, failed or did
//! not run. A job that succeeds is one line on the screen; of one that fails, all that it printed is shown.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;

/// Begins the line of a test that does not run (`tests/skip`), before `PROGRAM::TEST: REASON`.
const SKIPPED: &str = "skipped: ";
/// Begins the line that a script prints before it starts a job.
pub(crate) const JOB: &str = "job: ";
/// Begins the line that a script prints after a job that failed.
pub(crate) const FAILED: &str = "failed: ";

/// Lines that wait for their reader; a program that prints more waits as well.
const LINES: usize = 1024;
/// How long a job's output is waited for before its process is looked at.
const GLANCE: Duration = Duration::from_millis(200);
/// Time for a job's last processes to end after it.
const LEFT: Duration = Duration::from_secs(10);
/// The exit code of a job that succeeded and left processes.
const LEFT_CODE: i32 = 70;

/// Tests that take longer are listed by name.
const SLOW: Duration = Duration::from_secs(5);

/// One job's run.
#[derive(Debug, Clone)]
pub(crate) struct Ran {
    /// `PROGRAM::MODULE`, or `PROGRAM` for one that runs as a whole.
    pub(crate) name: String,
    start: Instant,
    /// From its first line to its last.
    pub(crate) time: Duration,
}

/// The events in the output so far.
#[derive(Debug, Default)]
pub(crate) struct Record {
    /// The jobs, in the order of their runs.
    pub(crate) jobs: Vec<Ran>,
    /// Tests that have run, as `PROGRAM::TEST`, and their times; those that were skipped or failed among
    /// them.
    pub(crate) tests: BTreeMap<String, Duration>,
    /// Tests that were skipped, with the reason.
    pub(crate) skipped: BTreeMap<String, String>,
    /// Tests that failed, with the reason as far as the harness shows it.
    pub(crate) failed: BTreeMap<String, String>,
    /// Jobs that failed.
    pub(crate) failed_jobs: BTreeSet<String>,
    /// When the current job began, or its last test ended.
    last: Option<Instant>,
    /// What the current job printed.
    printed: String,
    /// The failed test whose message comes next.
    panicking: Option<String>,
}

impl Record {
    /// A job begins: its lines follow.
    pub(crate) fn begin(&mut self, name: &str, now: Instant) {
        self.jobs.push(Ran { name: name.to_owned(), start: now, time: Duration::ZERO });
        self.last = Some(now);
        self.printed.clear();
        self.panicking = None;
    }

    /// The job of the lines before has failed.
    pub(crate) fn fail(&mut self) {
        self.failed_jobs.extend(self.jobs.last().map(|job| job.name.clone()));
    }

    /// Reads one line that was printed at that moment.
    pub(crate) fn line(&mut self, line: &str, now: Instant) {
        let line = line.trim_end();
        self.printed.push_str(line);
        self.printed.push('\n');
        if let Some(job) = self.jobs.last_mut() {
            job.time = now - job.start;
        }
        if let Some((name, reason)) = line.strip_prefix(SKIPPED).and_then(|rest| rest.split_once(": ")) {
            self.skipped.insert(name.to_owned(), reason.to_owned());
        } else if let Some((test, outcome)) = test(line) {
            let name = self.full_name(test);
            if outcome.starts_with("ignored") {
                self.skipped.insert(name.clone(), "#[ignore]".to_owned());
            }
            // A job's tests run one after the other, and each is one line.
            self.tests.insert(name, now - self.last.replace(now).unwrap_or(now));
        } else if let Some(test) =
            line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"))
        {
            self.panicking = Some(self.full_name(test));
            self.failed.insert(self.full_name(test), String::new());
        } else if let Some(test) = &self.panicking {
            let reason = self.failed.entry(test.clone()).or_default();
            match line.split_once(" panicked at ") {
                Some((_, place)) if reason.is_empty() => place.clone_into(reason),
                // The message is the line after the place.
                None if reason.ends_with(':') => {
                    *reason += &format!(" {line}");
                    self.panicking = None;
                }
                _ => {}
            }
        }
    }

    /// `PROGRAM::TEST` of a test of the current job.
    fn full_name(&self, test: &str) -> String {
        let job = self.jobs.last().map_or("", |job| job.name.as_str());
        let program = job.split_once("::").map_or(job, |(program, _)| program);
        format!("{program}::{test}")
    }

    /// The current job's time, its tests and its end, for the screen: one line, or all that it printed if it
    /// failed.
    pub(crate) fn shown(&self) -> String {
        let Some(job) = self.jobs.last() else { return self.printed.clone() };
        let failed = self.failed_jobs.contains(&job.name);
        let verdict = if failed { "FAILED" } else { "ok" };
        let line = format!("{verdict:>6}  {:>6.1} s  {}", job.time.as_secs_f64(), job.name);
        if failed { format!("{}{line}", self.printed) } else { line }
    }

    /// Adds what another record has.
    pub(crate) fn add(&mut self, other: Self) {
        self.jobs.extend(other.jobs);
        self.tests.extend(other.tests);
        self.skipped.extend(other.skipped);
        self.failed.extend(other.failed);
        self.failed_jobs.extend(other.failed_jobs);
    }

    /// The failed jobs with their failed tests, one line each.
    pub(crate) fn failures(&self) -> Vec<String> {
        let of_job = |job: &String| {
            let tests: Vec<String> = self
                .failed
                .iter()
                .filter(|(test, _)| test.starts_with(&format!("{job}::")))
                .map(|(test, reason)| format!("{test} ({reason})"))
                .collect();
            if tests.is_empty() { format!("{job}: its program failed") } else { tests.join(", ") }
        };
        self.failed_jobs.iter().map(of_job).collect()
    }

    /// The tests that took longest, one line each.
    pub(crate) fn slowest(&self) -> String {
        let mut tests: Vec<_> = self.tests.iter().filter(|(_, time)| **time >= SLOW).collect();
        tests.sort_by(|(_, one), (_, other)| other.cmp(one));
        tests.iter().map(|(test, time)| format!("{:>8.1} s  {test}\n", time.as_secs_f64())).collect()
    }

    /// The numbers of tests that passed, failed and did not run.
    pub(crate) fn counts(&self) -> String {
        let is_passed =
            |test: &&String| !self.skipped.contains_key(*test) && !self.failed.contains_key(*test);
        let passed = self.tests.keys().filter(is_passed);
        format!("{} passed, {} failed, {} skipped", passed.count(), self.failed.len(), self.skipped.len())
    }

    /// Reads all that a command prints, where lines of its own name the jobs ([`JOB`], [`FAILED`]). A job is
    /// shown when it has ended, `prefix` before each line.
    ///
    /// # Errors
    /// It does not start, or its output cannot be read.
    pub(crate) fn of_script(&mut self, command: &mut Command, prefix: &str) -> anyhow::Result<Ended> {
        let mut printed = String::new();
        let show = |record: &Self| show(&record.shown(), prefix);
        let status = read_lines(command, |line| {
            printed.push_str(line);
            printed.push('\n');
            let line = line.trim_end();
            if let Some(name) = line.strip_prefix(JOB) {
                if !self.jobs.is_empty() {
                    show(self);
                }
                self.begin(name, Instant::now());
            } else if line.starts_with(FAILED) {
                self.fail();
            } else {
                self.line(line, Instant::now());
            }
        })?;
        if !self.jobs.is_empty() {
            show(self);
        }
        Ok(Ended { status, printed })
    }

    /// Runs a command as the job of that name, and shows it at its end.
    ///
    /// # Errors
    /// It does not start, or its output cannot be read.
    pub(crate) fn of_job(&mut self, name: &str, command: &mut Command) -> anyhow::Result<ExitStatus> {
        self.begin(name, Instant::now());
        let status = read_lines(command, |line| self.line(line, Instant::now()))?;
        if let Some(job) = self.jobs.last_mut() {
            job.time = job.start.elapsed();
        }
        if !status.success() {
            self.fail();
        }
        show(&self.shown(), "");
        Ok(status)
    }
}

fn show(text: &str, prefix: &str) {
    let text: String = text.lines().map(|line| format!("{prefix}{line}\n")).collect();
    print!("{text}");
}

/// Runs a command to its end, each of its lines given to `read`; standard output and error are one.
///
/// Processes that it leaves fail it if they hold its output, and are killed if they are in its process group:
/// a test that fails may leave a program that sleeps for minutes.
fn read_lines(command: &mut Command, mut read: impl FnMut(&str)) -> anyhow::Result<ExitStatus> {
    let (output, end) = std::io::pipe().context("make a pipe")?;
    command.stdout(end.try_clone().context("share the pipe")?).stderr(end).process_group(0);
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command.spawn().with_context(|| format!("start `{name}`"))?;
    // The pipe ends when its last writer has ended: this process does not write.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let (send, lines) = mpsc::sync_channel(LINES);
    thread::spawn(move || {
        // A line that is not received any more is one of a process that was left.
        BufReader::new(output).split(b'\n').try_for_each(|line| send.send(line))
    });
    let mut ended: Option<(ExitStatus, Instant)> = None;
    loop {
        match lines.recv_timeout(GLANCE) {
            Ok(line) => read(&String::from_utf8_lossy(&line.context("read what tests print")?)),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        match ended {
            None => {
                ended = child.try_wait().context("wait for a job")?.map(|status| (status, Instant::now()));
            }
            Some((status, since)) if since.elapsed() > LEFT => {
                read("processes that it left hold its output: the processes of its group are killed");
                let group = format!("-{}", child.id());
                Command::new("kill").args(["-KILL", "--", &group]).status().context("start `kill`")?;
                return Ok(if status.success() { ExitStatus::from_raw(LEFT_CODE << 8) } else { status });
            }
            Some(_) => {}
        }
    }
    child.wait().with_context(|| format!("wait for `{name}`"))
}

/// How a script ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// All that it printed.
    pub(crate) printed: String,
}

/// `test NAME ... OUTCOME`; the outcome may be in a later line.
fn test(line: &str) -> Option<(&str, &str)> {
    let (name, outcome) = line.strip_prefix("test ")?.split_once(" ...")?;
    let name = name.strip_suffix(" - should panic").unwrap_or(name);
    Some((name, outcome.trim()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn record_of(job: &str, output: &str) -> Record {
        let mut record = Record::default();
        let start = Instant::now();
        record.begin(job, start);
        output.lines().for_each(|line| record.line(line, start));
        record
    }

    #[test]
    fn tests_and_skips_are_read_from_the_output() {
        let record = record_of(
            "image_io::engines",
            "\nrunning 3 tests\ntest engines::one ... ok\ntest engines::two - should panic ... ok\n\
             test engines::cold ... \nskipped: image_io::engines::cold: no: disk\nok\n\
             test engines::slow ... ignored, a measurement\n",
        );
        let tests: Vec<&str> = record.tests.keys().map(String::as_str).collect();
        assert_eq!(
            tests,
            [
                "image_io::engines::cold",
                "image_io::engines::one",
                "image_io::engines::slow",
                "image_io::engines::two"
            ]
        );
        let skipped: Vec<(&str, &str)> =
            record.skipped.iter().map(|(name, reason)| (name.as_str(), reason.as_str())).collect();
        assert_eq!(
            skipped,
            [("image_io::engines::cold", "no: disk"), ("image_io::engines::slow", "#[ignore]")]
        );
    }

    #[test]
    fn a_failed_test_is_named_with_the_place_and_the_reason() {
        let mut record = record_of(
            "e2e::a",
            "test a::one ... FAILED\ntest a::two ... FAILED\n\nfailures:\n\n---- a::one stdout ----\n\n\
             thread 'a::one' (7) panicked at a.rs:9:1:\nno GPU\nmore\n---- a::two stdout ----\nError: late\n",
        );
        record.fail();
        assert_eq!(record.failures(), ["e2e::a::one (a.rs:9:1: no GPU), e2e::a::two ()"]);
    }

    #[test]
    fn a_program_that_fails_without_a_failed_test_is_named() {
        let mut record = record_of("e2e::a", "test a::one ... ok\n");
        record.fail();
        assert_eq!(record.failures(), ["e2e::a: its program failed"]);
    }

    #[test]
    fn a_job_that_succeeds_is_one_line_and_one_that_fails_shows_all() {
        let mut record = record_of("e2e::a", "noise\n");
        assert_eq!(record.shown(), "    ok     0.0 s  e2e::a");
        record.fail();
        assert_eq!(record.shown(), "noise\nFAILED     0.0 s  e2e::a");
    }

    #[test]
    fn a_script_names_its_jobs_and_those_that_failed() {
        let mut record = Record::default();
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "echo boot; echo job: e2e::a; echo 'skipped: e2e::a::b: why' >&2; echo failed: e2e::a; echo job: \
             e2e::c; exit 3",
        ]);
        let ended = record.of_script(&mut command, "1| ").unwrap();
        assert_eq!(ended.status.code(), Some(3));
        assert!(ended.printed.starts_with("boot\njob: e2e::a\nskipped: "), "{}", ended.printed);
        let jobs: Vec<&str> = record.jobs.iter().map(|job| job.name.as_str()).collect();
        assert_eq!(jobs, ["e2e::a", "e2e::c"]);
        assert_eq!((record.skipped.len(), record.failed_jobs.len()), (1, 1));
    }

    #[test]
    fn a_job_that_leaves_a_process_fails_and_the_process_is_killed() {
        let mut record = Record::default();
        let mut command = Command::new("sh");
        record.of_job("e2e::a", command.args(["-c", "sleep 1000 & echo its pid: $!"])).unwrap();
        assert_eq!(Vec::from_iter(&record.failed_jobs), ["e2e::a"]);
        let pid = record.printed.lines().find_map(|line| line.strip_prefix("its pid: ")).unwrap();
        let runs =
            || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
        let start = Instant::now();
        while runs() {
            assert!(start.elapsed() < Duration::from_secs(60), "{pid} runs");
        }
    }

    #[test]
    fn a_job_fails_by_its_exit_code() {
        let mut record = Record::default();
        record.of_job("e2e::a", Command::new("sh").args(["-c", "exit 3"])).unwrap();
        record.of_job("e2e::b", &mut Command::new("true")).unwrap();
        assert_eq!(Vec::from_iter(&record.failed_jobs), ["e2e::a"]);
    }

    #[test]
    fn a_job_s_time_is_that_to_its_last_line() {
        let start = Instant::now();
        let mut record = Record::default();
        record.line("noise", start);
        record.begin("a", start + Duration::from_secs(1));
        record.line("test x ... ok", start + Duration::from_secs(5));
        record.begin("b", start + Duration::from_secs(6));
        let times: Vec<u64> = record.jobs.iter().map(|job| job.time.as_secs()).collect();
        assert_eq!(times, [4, 0]);
    }
}
