// SPDX-License-Identifier: MIT OR Apache-2.0
//! The disk's limits, measured by `fio` on the very file that the servers read.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Serialize;
use serde_json::Value;

use crate::processes::Process;

/// What `fio` measured, all of it with O_DIRECT.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct DiskLimits {
    /// One sequential reader, 1 MiB blocks, 16 in flight: GB/s.
    pub(crate) sequential_gb_per_s: f64,
    /// One random 4 KiB read at a time while that reader runs: the least that a cold fault can cost, in µs.
    pub(crate) random_p50_us: f64,
    /// Its 99th percentile, in µs.
    pub(crate) random_p99_us: f64,
}

const SEQUENTIAL_LIMIT_S: u64 = 15;
const RANDOM_S: u64 = 5;
const START_AND_END: Duration = Duration::from_secs(30);
const SEQUENTIAL: &[&str] = &["--rw=read", "--bs=1M", "--iodepth=16", "--ioengine=io_uring"];
const RANDOM: &[&str] = &["--rw=randread", "--bs=4k", "--iodepth=1", "--ioengine=psync"];

/// Reads `file`, which must not change meanwhile; takes at most 20 s. `work` gets fio's output files.
pub(crate) fn measure(file: &Path, work: &Path) -> anyhow::Result<DiskLimits> {
    let limit = format!("--runtime={SEQUENTIAL_LIMIT_S}");
    let mut alone = vec!["--name=sequential", &limit];
    alone.extend(SEQUENTIAL);
    let alone = fio(file, work, &alone)?;
    let time = format!("--runtime={RANDOM_S}");
    let mut both = vec!["--name=sequential", "--time_based", &time];
    both.extend(SEQUENTIAL);
    both.extend(["--name=random", "--time_based", &time]);
    both.extend(RANDOM);
    limits(&alone, &fio(file, work, &both)?)
}

fn fio(file: &Path, work: &Path, jobs: &[&str]) -> anyhow::Result<String> {
    let output = work.join("fio.json");
    let mut command = Command::new("fio");
    command.args(["--readonly", "--direct=1", "--output-format=json", "--group_reporting=0"]);
    command.arg(format!("--output={}", output.display())).stdin(Stdio::null()).stdout(Stdio::null());
    // Options before the first --name hold for every job.
    command.arg(format!("--filename={}", file.display())).args(jobs).current_dir(work);
    let limit = Duration::from_secs(SEQUENTIAL_LIMIT_S) + START_AND_END;
    let exit = Process::spawn(&mut command).context("is fio installed?")?.wait(limit)?;
    let text = std::fs::read_to_string(&output).unwrap_or_default();
    if !exit.success {
        bail!("fio on {}: {}\n{text}", file.display(), exit.status);
    }
    Ok(text)
}

fn limits(alone: &str, both: &str) -> anyhow::Result<DiskLimits> {
    let sequential = read_of(alone, "sequential")?;
    let random = read_of(both, "random")?;
    let percentile = |name: &str| {
        let value = random["clat_ns"]["percentile"][name].as_f64();
        value.map(|ns| ns / 1e3).with_context(|| format!("fio reports no percentile {name}"))
    };
    let rate = sequential["bw_bytes"].as_f64().context("fio reports no bw_bytes")?;
    Ok(DiskLimits {
        sequential_gb_per_s: rate / 1e9,
        random_p50_us: percentile("50.000000")?,
        random_p99_us: percentile("99.000000")?,
    })
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
        let alone = r#"fio: a warning
            {"jobs": [{"jobname": "sequential", "read": {"bw_bytes": 2500000000}}]}"#;
        let both = r#"{"jobs": [{"jobname": "sequential", "read": {}}, {"jobname": "random", "read":
            {"clat_ns": {"percentile": {"50.000000": 90000, "99.000000": 1500000}}}}]}"#;
        let expected = DiskLimits { sequential_gb_per_s: 2.5, random_p50_us: 90.0, random_p99_us: 1500.0 };
        assert_eq!(limits(alone, both).unwrap(), expected);
        assert!(limits(both, alone).is_err());
    }
}
