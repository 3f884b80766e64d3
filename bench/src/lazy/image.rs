// SPDX-License-Identifier: MIT OR Apache-2.0
//! The dumped toucher and its image.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rewake_testkit::process::output;

use crate::criu;
use crate::processes::{Process, check_interrupted, quiet};

/// A dumped toucher.
#[derive(Debug)]
pub(crate) struct Image {
    /// The image that CRIU wrote.
    pub(crate) dumped: criu::Image,
    size_mib: u64,
    /// Where the restored process writes its report.
    pub(crate) report: PathBuf,
}

/// Time limit of an operation that moves the whole memory once. Generous, because stock's cost of a fault
/// grows with the number of ranges that earlier faults have split: its time grows faster than the size.
fn time_limit(size_mib: u64) -> Duration {
    Duration::from_secs(120 + size_mib / 4)
}

impl Image {
    /// Starts a toucher and dumps it.
    pub(crate) fn dump(criu: &Path, base: &Path, size_mib: u64, pause_us: u64) -> anyhow::Result<Self> {
        let report = base.join("toucher.json");
        let mut toucher = start_program(base, &report, size_mib, pause_us)?;
        let dumped = criu::Image::dump(criu, &mut toucher, base.join("img"), time_limit(size_mib))?;
        Ok(Self { dumped, size_mib, report })
    }

    /// Seals the image.
    pub(crate) fn seal(&self, rewake: &Path) -> anyhow::Result<()> {
        output(Command::new(rewake).arg("seal").arg(&self.dumped.directory)).map(drop)
    }

    /// Sets whether the sealed image has its manifest. Without one its blocks are not checked.
    pub(crate) fn keep_manifest(&self, keeps: bool) -> anyhow::Result<()> {
        let names = ["rewake-manifest", "away"].map(|name| self.dumped.directory.join(name));
        let [from, to] = if keeps { [&names[1], &names[0]] } else { [&names[0], &names[1]] };
        // An image that was not sealed has none.
        if from.exists() { std::fs::rename(from, to).context("renaming the manifest") } else { Ok(()) }
    }

    /// Bytes of the touched memory. The image holds some hundred KiB more (libraries, heap, stack).
    pub(crate) fn bytes(&self) -> u64 {
        self.size_mib << 20
    }

    /// The file with the touched memory.
    pub(crate) fn largest_page_file(&self) -> anyhow::Result<&Path> {
        let size = |path: &&PathBuf| path.metadata().map_or(0, |metadata| metadata.len());
        let largest = self.dumped.page_files.iter().max_by_key(size);
        largest.map(PathBuf::as_path).context("the image has no pages-*.img")
    }
}

fn start_program(base: &Path, report: &Path, size_mib: u64, pause_us: u64) -> anyhow::Result<Process> {
    let ready = base.join("toucher.ready");
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["toucher", "--size-mib", &size_mib.to_string(), "--pause-us", &pause_us.to_string()]);
    command.arg("--ready").arg(&ready);
    command.arg("--report").arg(report).current_dir(base);
    quiet(&mut command);
    let mut toucher = Process::spawn(&mut command)?;
    let deadline = Instant::now() + time_limit(size_mib);
    while !ready.exists() {
        check_interrupted()?;
        if let Ok(exit) = toucher.wait(Duration::from_millis(5)) {
            bail!(
                "the process to dump ended early ({}): does the machine have memory for {size_mib} MiB?",
                exit.status
            );
        }
        if Instant::now() > deadline {
            bail!("the process to dump was not ready within {:?}", time_limit(size_mib));
        }
    }
    Ok(toucher)
}
