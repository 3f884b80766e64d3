// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the output of test programs line by line: which program ran for how long, which tests ran, which did
//! not.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;

/// Begins the line of a test that does not run (`tests/skip`), before `PROGRAM::TEST: REASON`.
const SKIPPED: &str = "skipped: ";
/// Begins the line that a script prints before it starts a test program.
pub(crate) const PROGRAM: &str = "program: ";

/// One test program's run.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    /// Its name without cargo's hash; `doc CRATE` for tests in a crate's documentation.
    pub(crate) name: String,
    start: Instant,
    /// From its first line to its last.
    pub(crate) time: Duration,
}

/// The events in the output so far.
#[derive(Debug, Default)]
pub(crate) struct Record {
    /// The programs, in the order of their runs.
    pub(crate) programs: Vec<Program>,
    /// Tests that the programs have run, as `PROGRAM::TEST`; those that were skipped among them.
    pub(crate) tests: BTreeSet<String>,
    /// Tests that were skipped, with the reason.
    pub(crate) skipped: BTreeMap<String, String>,
}

impl Record {
    /// Reads one line that was printed at that moment.
    pub(crate) fn line(&mut self, line: &str, now: Instant) {
        let line = line.trim_end();
        if let Some(name) = program(line) {
            self.programs.push(Program { name, start: now, time: Duration::ZERO });
        } else if let Some((name, reason)) = line.strip_prefix(SKIPPED).and_then(|rest| rest.split_once(": "))
        {
            self.skipped.insert(name.to_owned(), reason.to_owned());
        } else if let (Some((test, outcome)), Some(program)) = (test(line), self.programs.last()) {
            let name = format!("{}::{test}", program.name);
            if outcome.starts_with("ignored") {
                self.skipped.insert(name.clone(), "#[ignore]".to_owned());
            }
            self.tests.insert(name);
        }
        if let Some(program) = self.programs.last_mut() {
            program.time = now - program.start;
        }
    }

    /// Adds what another record has.
    pub(crate) fn add(&mut self, other: Self) {
        self.programs.extend(other.programs);
        self.tests.extend(other.tests);
        self.skipped.extend(other.skipped);
    }

    /// Reads all that a command prints, and prints it here too, after the prefix; returns whether it
    /// succeeded.
    ///
    /// # Errors
    /// It does not start, or its output cannot be read.
    pub(crate) fn of(&mut self, command: &mut Command, prefix: &str) -> anyhow::Result<Ended> {
        let (output, end) = std::io::pipe().context("make a pipe")?;
        command.stdout(end.try_clone().context("share the pipe")?).stderr(end);
        let name = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().with_context(|| format!("start `{name}`"))?;
        // The pipe ends when its last writer has ended: this process does not write.
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let printed = self.read(output, prefix)?;
        let status = child.wait().with_context(|| format!("wait for `{name}`"))?;
        Ok(Ended { status, printed })
    }

    fn read(&mut self, output: impl Read, prefix: &str) -> anyhow::Result<String> {
        let mut printed = String::new();
        for line in BufReader::new(output).split(b'\n') {
            let line = line.context("read what tests print")?;
            let line = String::from_utf8_lossy(&line);
            println!("{prefix}{}", line.trim_end());
            self.line(&line, Instant::now());
            printed += &line;
            printed.push('\n');
        }
        Ok(printed)
    }
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: std::process::ExitStatus,
    /// All that it printed.
    pub(crate) printed: String,
}

/// The program that the line announces: a script's, or cargo's `Running` and `Doc-tests`.
fn program(line: &str) -> Option<String> {
    if let Some(path) = line.strip_prefix(PROGRAM) {
        return Some(without_hash(path));
    }
    let line = line.trim_start();
    if let Some(name) = line.strip_prefix("Doc-tests ") {
        return Some(format!("doc {name}"));
    }
    let (_, path) = line.strip_prefix("Running ")?.rsplit_once('(')?;
    Some(without_hash(path.strip_suffix(')')?))
}

/// A test program's name; cargo calls it `NAME-HASH`.
pub(crate) fn without_hash(path: &str) -> String {
    let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.rsplit_once('-').map_or_else(|| name.clone(), |(name, _)| name.to_owned())
}

/// `test NAME ... OUTCOME`; the outcome may be in a later line.
fn test(line: &str) -> Option<(&str, &str)> {
    let (name, outcome) = line.strip_prefix("test ")?.split_once(" ...")?;
    let name = name.strip_suffix(" - should panic").unwrap_or(name);
    Some((name, outcome.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_tests_and_skips_are_read_from_the_output() {
        let output = "     Running unittests src/lib.rs (target/debug/deps/rewake_uffd-0123456789abcdef)\n\
            \nrunning 2 tests\ntest a::one ... ok\ntest two - should panic ... ok\n\
            test result: ok. 2 passed; 0 failed\n\
            program: /t/deps/engines-0123456789abcdef\ntest cold ... \nskipped: engines::cold: no: disk\nok\n\
            test slow ... ignored\n   Doc-tests rewake_uffd\ntest src/lib.rs - (line 3) ... ok\n";
        let mut record = Record::default();
        assert!(record.read(output.as_bytes(), "").unwrap().ends_with("... ok\n"));
        let names: Vec<&str> = record.programs.iter().map(|program| program.name.as_str()).collect();
        assert_eq!(names, ["rewake_uffd", "engines", "doc rewake_uffd"]);
        let tests: Vec<&str> = record.tests.iter().map(String::as_str).collect();
        assert_eq!(
            tests,
            [
                "doc rewake_uffd::src/lib.rs - (line 3)",
                "engines::cold",
                "engines::slow",
                "rewake_uffd::a::one",
                "rewake_uffd::two"
            ]
        );
        let skipped: Vec<(&str, &str)> =
            record.skipped.iter().map(|(name, reason)| (name.as_str(), reason.as_str())).collect();
        assert_eq!(skipped, [("engines::cold", "no: disk"), ("engines::slow", "#[ignore]")]);
    }

    #[test]
    fn a_program_s_time_is_that_to_its_last_line() {
        let start = Instant::now();
        let mut record = Record::default();
        record.line("noise", start);
        record.line("program: /t/a-1", start + Duration::from_secs(1));
        record.line("test x ... ok", start + Duration::from_secs(5));
        record.line("program: /t/b-1", start + Duration::from_secs(6));
        let times: Vec<u64> = record.programs.iter().map(|program| program.time.as_secs()).collect();
        assert_eq!(times, [4, 0]);
    }

    #[test]
    fn the_end_of_a_command_is_given_with_what_it_printed() {
        let mut record = Record::default();
        let mut command = Command::new("sh");
        command.args(["-c", "echo program: /t/a-1; echo 'skipped: a::b: why' >&2; exit 3"]);
        let ended = record.of(&mut command, "1| ").unwrap();
        assert_eq!(ended.status.code(), Some(3));
        assert_eq!(ended.printed, "program: /t/a-1\nskipped: a::b: why\n");
        assert_eq!(record.skipped.len(), 1);
    }
}
