// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tests/budget`: seconds of each job on a quiet machine. They order the jobs, and a job that takes much
//! more than its share of a run fails the run by name. Shares are compared, because the same suite takes
//! twice as long on some days.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::Context as _;

use super::list::List;
use super::record::{Ran, Record};
use crate::{files, repository};

const FILE: &str = "tests/budget";

/// A job may take this many times its share of a run: twice, and half as much again because the jobs that run
/// at the same time differ from run to run.
const TIMES: f64 = 3.0;
/// And this many seconds more, because a short job may wait for the disk.
const SPARE: f64 = 60.0;
/// Jobs that took less are not written into a list.
const LISTED: f64 = 2.0;

/// Seconds by machine and job.
#[derive(Debug, Default)]
pub(crate) struct Budget(List<f64>);

/// `SECONDS JOB`
fn entry(line: &str) -> anyhow::Result<(String, f64)> {
    let entry = line.split_once(' ').and_then(|(seconds, job)| Some((job.to_owned(), seconds.parse().ok()?)));
    entry.context("expected `SECONDS JOB` below `[MACHINE]`")
}

impl Budget {
    /// The repository's.
    ///
    /// # Errors
    /// It cannot be read, or a line makes no sense.
    pub(crate) fn read() -> anyhow::Result<Self> {
        List::read(FILE, entry).map(Self)
    }

    /// Machines that the file names.
    pub(crate) fn machines(&self) -> impl Iterator<Item = &str> {
        self.0.machines()
    }

    /// What a job takes there; `None` if the file does not list it.
    pub(crate) fn seconds(&self, machine: &str, job: &str) -> Option<f64> {
        self.0.get(machine, job).copied()
    }

    /// Jobs of a run that took too much of it, and lines without a job. A job without a line has no limit.
    /// Only a run of all jobs can be compared.
    pub(crate) fn against(&self, machine: &str, record: &Record) -> Vec<String> {
        let listed = |job: &str| self.seconds(machine, job);
        let ran = seconds_by_job(&record.jobs);
        let (mut all, mut wanted) = (0.0, 0.0);
        for (job, seconds) in &ran {
            if let Some(budget) = listed(job) {
                all += seconds;
                wanted += budget;
            }
        }
        let slower = if wanted > 0.0 { all / wanted } else { 1.0 };
        let too_long = |(job, seconds): (&&str, &f64)| {
            let budget = listed(job)?;
            let limit = budget * slower * TIMES + SPARE * slower.max(1.0);
            (*seconds > limit).then(|| {
                format!(
                    "{job} took {seconds:.0} s, more than its share of this run ({limit:.0} s at most; \
                     {FILE} has {budget} s below [{machine}]): make it cheaper, or change its line"
                )
            })
        };
        let mut against: Vec<String> = ran.iter().filter_map(too_long).collect();
        let gone = self.0.of(machine).map(|(job, _)| job).filter(|job| !ran.contains_key(job.as_str()));
        against
            .extend(gone.map(|job| format!("no job {job} ran: delete its line below [{machine}] in {FILE}")));
        against
    }
}

/// Seconds of each job, of all its runs.
fn seconds_by_job(jobs: &[Ran]) -> BTreeMap<&str, f64> {
    let mut seconds: BTreeMap<&str, f64> = BTreeMap::new();
    for job in jobs {
        *seconds.entry(&job.name).or_default() += job.time.as_secs_f64();
    }
    seconds
}

/// Writes a run's seconds below `.rewake`, from where they can be copied into the file.
///
/// # Errors
/// They cannot be written.
pub(crate) fn keep(machine: &str, record: &Record) -> anyhow::Result<()> {
    let folder = repository::scratch().join("budget");
    files::create_folder(&folder)?;
    let path = folder.join(machine);
    files::write(&path, lines(machine, record))
}

/// A run's seconds in the file's form, the longest first.
fn lines(machine: &str, record: &Record) -> String {
    let mut jobs: Vec<_> = seconds_by_job(&record.jobs).into_iter().collect();
    jobs.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let mut lines = format!("[{machine}]\n");
    for (job, seconds) in jobs.into_iter().take_while(|(_, seconds)| *seconds >= LISTED) {
        let _ = writeln!(lines, "{seconds:.1} {job}");
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn parse(text: &str) -> anyhow::Result<Budget> {
        List::parse(FILE, text, entry).map(Budget)
    }

    fn record(jobs: &[(&str, u64)]) -> Record {
        let mut record = Record::default();
        let start = Instant::now();
        for (job, seconds) in jobs {
            record.begin(job, start);
            record.line("test result: ok", start + Duration::from_secs(*seconds));
        }
        record
    }

    const FILE_TEXT: &str = "# seconds\n[host]\n60 a\n30.5 b\n\n[vm]\n5 c\n";

    #[test]
    fn a_slow_day_is_no_failure() {
        let budget = parse(FILE_TEXT).unwrap();
        assert_eq!(budget.against("host", &record(&[("a", 240), ("b", 120)])), Vec::<String>::new());
    }

    #[test]
    fn a_job_that_takes_more_than_its_share_is_named() {
        let budget = parse("[host]\n60 a\n60 b\n60 c\n60 d\n60 e\n60 f\n10 g\n").unwrap();
        let jobs = [("a", 60), ("b", 60), ("c", 60), ("d", 60), ("e", 60), ("f", 60), ("g", 150)];
        let against = budget.against("host", &record(&jobs));
        assert_eq!(against.len(), 1);
        assert!(against[0].starts_with("g took 150 s, more than its share of this run ("), "{against:?}");
    }

    #[test]
    fn a_job_needs_no_line_and_a_line_needs_a_job() {
        let budget = parse(FILE_TEXT).unwrap();
        let against = budget.against("vm", &record(&[("d", 100)]));
        assert_eq!(against, ["no job c ran: delete its line below [vm] in tests/budget"]);
    }

    #[test]
    fn a_line_without_a_number_is_an_error() {
        let error = format!("{:#}", parse("[host]\nfast a\n").unwrap_err());
        assert_eq!(error, "tests/budget:2: expected `SECONDS JOB` below `[MACHINE]`");
    }

    #[test]
    fn a_run_is_written_as_the_file_is_read() {
        let lines = lines("host", &record(&[("a", 1), ("b", 2), ("a", 3), ("c", 1)]));
        assert_eq!(lines, "[host]\n4.0 a\n2.0 b\n");
        assert_eq!(parse(&lines).unwrap().seconds("host", "a"), Some(4.0));
    }
}
