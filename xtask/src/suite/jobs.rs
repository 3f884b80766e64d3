// SPDX-License-Identifier: MIT OR Apache-2.0
//! Jobs: a module of an integration test program, or another test program as a whole, in a process of its
//! own.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;

use super::budget::Budget;
use super::programs::{self, TestProgram};
use super::record::Record;

/// Time limit of a job. The longest takes four minutes with three emulated machines on two processors, and
/// three times as long on a slow day; one that hangs must not hang the suite.
pub(crate) const LIMIT: Duration = Duration::from_secs(1200);

/// Some tests of one program, which one process runs one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// `PROGRAM::MODULE`, or `PROGRAM`.
    pub(crate) name: String,
    pub(crate) program: PathBuf,
    pub(crate) folder: PathBuf,
    /// The tests' paths.
    pub(crate) tests: Vec<String>,
}

impl Job {
    /// Words that start it.
    pub(crate) fn words(&self, limit: Duration) -> Vec<String> {
        let limit = limit.as_secs().to_string();
        let mut words =
            ["timeout", "--signal=KILL", &limit, &self.program.to_string_lossy()].map(str::to_owned).to_vec();
        words.extend(["--test-threads=1", "--exact"].map(str::to_owned));
        words.extend_from_slice(&self.tests);
        words
    }
}

/// The jobs of a program: one for each module of tests from outside. With a filter, only with tests whose
/// names contain it.
///
/// # Errors
/// The program does not start.
pub(crate) fn of(program: &TestProgram, filter: Option<&str>) -> anyhow::Result<Vec<Job>> {
    let mut tests = programs::tests(&program.path)?;
    tests.retain(|test| filter.is_none_or(|filter| format!("{}::{test}", program.name).contains(filter)));
    let job = |name: String, tests| Job {
        name,
        program: program.path.clone(),
        folder: program.folder.clone(),
        tests,
    };
    Ok(match () {
        () if tests.is_empty() => Vec::new(),
        () if program.is_integration => {
            let named = |(module, tests): (String, Vec<String>)| {
                let name = if module.is_empty() {
                    program.name.clone()
                } else {
                    format!("{}::{module}", program.name)
                };
                job(name, tests)
            };
            programs::by_module(tests).into_iter().map(named).collect()
        }
        () => vec![job(program.name.clone(), tests)],
    })
}

/// Runs the jobs, the longest first, in that many lanes; a failure stops none of them.
///
/// # Errors
/// A job does not start.
pub(crate) fn run(
    mut jobs: Vec<Job>,
    lanes: usize,
    budget: &Budget,
    machine: &str,
    environment: &[(&str, String)],
) -> anyhow::Result<Record> {
    jobs.sort_by(|one, other| {
        let seconds = |job: &Job| budget.seconds(machine, &job.name).unwrap_or(f64::MAX);
        seconds(other).total_cmp(&seconds(one))
    });
    let waiting = Mutex::new(jobs.into_iter());
    let next = || waiting.lock().ok().and_then(|mut waiting| waiting.next());
    let lane = || -> anyhow::Result<Record> {
        let mut record = Record::default();
        while let Some(job) = next() {
            let words = job.words(LIMIT);
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).current_dir(&job.folder);
            command.envs(environment.iter().map(|(name, value)| (name, value)));
            record.of_job(&job.name, &mut command).with_context(|| job.name.clone())?;
        }
        Ok(record)
    };
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        let mut all = Record::default();
        for lane in lanes {
            all.add(lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(all)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_names_its_tests_exactly() {
        let job = Job {
            name: "e2e::serve".to_owned(),
            program: "/t/e2e-1".into(),
            folder: "/r/tests".into(),
            tests: vec!["serve::one".to_owned()],
        };
        let words = job.words(Duration::from_secs(9));
        assert_eq!(
            words,
            ["timeout", "--signal=KILL", "9", "/t/e2e-1", "--test-threads=1", "--exact", "serve::one"]
        );
    }

    #[test]
    fn jobs_run_in_lanes_and_their_results_are_one_record() {
        let job = |name: &str, program: &str| Job {
            name: name.to_owned(),
            program: program.into(),
            folder: "/".into(),
            tests: Vec::new(),
        };
        let jobs = vec![job("a", "/bin/true"), job("b", "/bin/false"), job("c", "/bin/true")];
        let record = run(jobs, 2, &Budget::default(), "host", &[]).unwrap();
        assert_eq!((record.jobs.len(), Vec::from_iter(&record.failed_jobs)), (3, vec![&"b".to_owned()]));
    }
}
