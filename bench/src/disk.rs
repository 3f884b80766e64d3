// SPDX-License-Identifier: MIT OR Apache-2.0
//! The disk's limits, measured by `fio` on the very file that the servers read.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use serde_json::Value;

use crate::processes::{Process, quiet};

/// What `fio` measured, all of it with O_DIRECT.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct DiskLimits {
    /// One sequential reader, 1 MiB blocks, 16 in flight: GB/s.
    pub(crate) sequential_gb_per_s: f64,
    /// One random 4 KiB read at a time and nothing else: the minimum of a cold fault.
    pub(crate) random_alone: ReadLatency,
    /// The same while the sequential reader runs: the cost of a fault with so deep a queue.
    pub(crate) random_beside: ReadLatency,
}

/// Latency of reads in µs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct ReadLatency {
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

const SEQUENTIAL_LIMIT_S: u64 = 15;
const RANDOM_S: u64 = 3;
const START_AND_END: Duration = Duration::from_secs(30);

/// Reads `file`, which must not change meanwhile, for at most 21 s. `work` gets fio's output files.
pub(crate) fn measure(file: &Path, work: &Path) -> anyhow::Result<DiskLimits> {
    let (engine, sequential) = sequential_by_the_best(file, work)?;
    let timed = vec!["--time_based".to_owned(), format!("--runtime={RANDOM_S}")];
    let random_job = [&["--name=random"], RANDOM].concat();
    let random = fio(file, work, &[timed.clone(), owned(&random_job)].concat())?;
    let sequential_job = [&["--name=sequential", engine], SEQUENTIAL].concat();
    let both = fio(file, work, &[timed, owned(&sequential_job), owned(&random_job)].concat())?;
    limits(&sequential, &random, &both)
}

const SEQUENTIAL: &[&str] = &["--rw=read", "--bs=1M", "--iodepth=16"];
const RANDOM: &[&str] = &["--rw=randread", "--bs=4k", "--iodepth=1", "--ioengine=psync"];

fn owned(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(|&argument| argument.to_owned()).collect()
}

/// The rate, in GB/s, of one sequential reader of `file` with O_DIRECT, for at most 15 s. `work` gets fio's
/// output file.
pub(crate) fn sequential(file: &Path, work: &Path) -> anyhow::Result<f64> {
    let (_, report) = sequential_by_the_best(file, work)?;
    rate(&report)
}

/// The engine of fio, and its report.
fn sequential_by_the_best(file: &Path, work: &Path) -> anyhow::Result<(&'static str, String)> {
    // libaio where io_uring is switched off (sysctl kernel.io_uring_disabled).
    let (best, other) = ("--ioengine=io_uring", "--ioengine=libaio");
    match sequential_alone(file, work, best) {
        Ok(report) => Ok((best, report)),
        Err(_) => Ok((other, sequential_alone(file, work, other)?)),
    }
}

/// The file once from its start, or as far as the time limit allows.
fn sequential_alone(file: &Path, work: &Path, engine: &str) -> anyhow::Result<String> {
    let job = [&["--name=sequential", engine], SEQUENTIAL].concat();
    fio(file, work, &[vec![format!("--runtime={SEQUENTIAL_LIMIT_S}")], owned(&job)].concat())
}

fn fio(file: &Path, work: &Path, jobs: &[String]) -> anyhow::Result<String> {
    let output = work.join("fio.json");
    let mut command = Command::new("fio");
    command.args(["--readonly", "--direct=1", "--output-format=json", "--group_reporting=0"]);
    command.arg(format!("--output={}", output.display()));
    // Options before the first --name hold for every job.
    command.arg(format!("--filename={}", file.display())).args(jobs).current_dir(work);
    let limit = Duration::from_secs(SEQUENTIAL_LIMIT_S) + START_AND_END;
    let exit = Process::spawn(quiet(&mut command)).context("is fio installed?")?.wait(limit)?;
    let text = std::fs::read_to_string(&output).unwrap_or_default();
    exit.check(&format!("fio on {}", file.display()), || text.clone())?;
    Ok(text)
}

fn limits(sequential: &str, random: &str, both: &str) -> anyhow::Result<DiskLimits> {
    Ok(DiskLimits {
        sequential_gb_per_s: rate(sequential)?,
        random_alone: latency(&read_of(random, "random")?)?,
        random_beside: latency(&read_of(both, "random")?)?,
    })
}

/// The rate of the sequential reader, in GB/s.
fn rate(report: &str) -> anyhow::Result<f64> {
    let rate = read_of(report, "sequential")?["bw_bytes"].as_f64();
    Ok(rate.context("fio reports no bw_bytes")? / 1e9)
}

fn latency(read: &Value) -> anyhow::Result<ReadLatency> {
    let percentile = |name: &str| {
        let value = read["clat_ns"]["percentile"][name].as_f64();
        value.map(|ns| ns / 1e3).with_context(|| format!("fio reports no percentile {name}"))
    };
    Ok(ReadLatency { p50_us: percentile("50.000000")?, p99_us: percentile("99.000000")? })
}

/// The `read` object of a job. fio writes warnings before its JSON.
fn read_of(text: &str, job: &str) -> anyhow::Result<Value> {
    let start = text.find('{').with_context(|| format!("no JSON from fio: {text}"))?;
    let report: Value = serde_json::from_str(&text[start..]).context("JSON of fio")?;
    let jobs = report["jobs"].as_array().context("fio reports no jobs")?;
    let found = jobs.iter().find(|entry| entry["jobname"] == job);
    Ok(found.with_context(|| format!("fio reports no job {job}"))?["read"].clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_reports_are_read_with_warnings_before_them() {
        let sequential = r#"fio: a warning
            {"jobs": [{"jobname": "sequential", "read": {"bw_bytes": 2500000000}}]}"#;
        let random = r#"{"jobs": [{"jobname": "random", "read":
            {"clat_ns": {"percentile": {"50.000000": 90000, "99.000000": 1500000}}}}]}"#;
        let both = r#"{"jobs": [{"jobname": "sequential", "read": {}}, {"jobname": "random", "read":
            {"clat_ns": {"percentile": {"50.000000": 900000, "99.000000": 15000000}}}}]}"#;
        let expected = DiskLimits {
            sequential_gb_per_s: 2.5,
            random_alone: ReadLatency { p50_us: 90.0, p99_us: 1500.0 },
            random_beside: ReadLatency { p50_us: 900.0, p99_us: 15_000.0 },
        };
        assert_eq!(limits(sequential, random, both).unwrap(), expected);
        assert!(limits(random, sequential, both).is_err());
    }
}
