// SPDX-License-Identifier: MIT OR Apache-2.0
//! The dumped process and its image.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::unistd::Pid;

use crate::processes::{Process, check_interrupted};

/// A dumped toucher: it can be restored any number of times, one after another.
#[derive(Debug)]
pub(crate) struct Image {
    pid: Pid,
    size_mib: u64,
    directory: PathBuf,
    report: PathBuf,
    page_files: Vec<PathBuf>,
}

/// Bound of any act that moves the whole memory once. Generous because stock's cost of a fault grows with the number
/// of ranges that earlier faults have cut: its time grows faster than the size.
pub(crate) fn time_limit(size_mib: u64) -> Duration {
    Duration::from_secs(120 + size_mib / 4)
}

impl Image {
    /// Starts a toucher, dumps it (which ends it) and writes the image back to the disk.
    pub(crate) fn dump(criu: &Path, base: &Path, size_mib: u64) -> anyhow::Result<Self> {
        let directory = base.join("img");
        std::fs::create_dir(&directory).with_context(|| directory.display().to_string())?;
        let report = base.join("toucher.json");
        let mut toucher = start_toucher(base, &report, size_mib)?;
        let mut dump = Command::new(criu);
        dump.args(["dump", "-o", "dump.log", "-t", &toucher.pid().to_string(), "-D"]).arg(&directory);
        quiet(&mut dump);
        let exit = Process::spawn(&mut dump)?.wait(time_limit(size_mib))?;
        if !exit.success {
            bail!("criu dump: {}\n{}", exit.status, log_tail(&directory.join("dump.log")));
        }
        toucher.wait(Duration::from_secs(60)).context("criu dump must end the process it dumped")?;
        let mut page_files = Vec::new();
        for entry in std::fs::read_dir(&directory)? {
            let path = entry?.path();
            std::fs::File::open(&path)?.sync_all().with_context(|| path.display().to_string())?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with("pages-") && path.metadata()?.len() > 0 {
                page_files.push(path);
            }
        }
        Ok(Self { pid: toucher.pid(), size_mib, directory, report, page_files })
    }

    /// The process's pid, before the dump and after every restore.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where the restored process writes its report.
    pub(crate) fn report(&self) -> &Path {
        &self.report
    }

    /// Bytes of the touched memory. The image holds some hundred KiB more (libraries, heap, stack).
    pub(crate) fn bytes(&self) -> u64 {
        self.size_mib << 20
    }

    pub(crate) fn time_limit(&self) -> Duration {
        time_limit(self.size_mib)
    }

    pub(crate) fn page_files(&self) -> &[PathBuf] {
        &self.page_files
    }

    /// The file with the touched memory.
    pub(crate) fn largest_page_file(&self) -> anyhow::Result<&Path> {
        let size = |path: &&PathBuf| path.metadata().map_or(0, |metadata| metadata.len());
        let largest = self.page_files.iter().max_by_key(size);
        largest.map(PathBuf::as_path).context("the image has no pages-*.img")
    }
}

fn start_toucher(base: &Path, report: &Path, size_mib: u64) -> anyhow::Result<Process> {
    let ready = base.join("toucher.ready");
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["toucher", "--size-mib", &size_mib.to_string(), "--ready"]).arg(&ready);
    command.arg("--report").arg(report).current_dir(base);
    quiet(&mut command);
    let mut toucher = Process::spawn(&mut command)?;
    let deadline = Instant::now() + time_limit(size_mib);
    while !ready.exists() {
        check_interrupted()?;
        if let Ok(exit) = toucher.wait(Duration::from_millis(5)) {
            bail!("the process to dump ended early ({}): is there memory for {size_mib} MiB?", exit.status);
        }
        if Instant::now() > deadline {
            bail!("the process to dump was not ready within {:?}", time_limit(size_mib));
        }
    }
    Ok(toucher)
}

/// No terminal: the dumped process must not hold ours, and logs go to files.
pub(crate) fn quiet(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// The end of a log, for an error message.
pub(crate) fn log_tail(path: &Path) -> String {
    let log = match std::fs::read(path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => return format!("(no log {}: {error})", path.display()),
    };
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
