// SPDX-License-Identifier: MIT OR Apache-2.0
//! One process, dumped and restored again and again with either plugin; its answers must stay the same.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gpu_app::client;
use gpu_app::model::Model;
use gpu_app::shape::Shape;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version};

use super::log::{Contents, between};
use crate::cache::{drop_files, files};
use crate::processes::{Exit, Process, Watch, high_water_mark};

/// The request before a dump and after each restore; one token goes through all weights.
const PROMPT: [u32; 2] = [3, 141];
const TOKENS: usize = 1;
/// What the stock plugin logs when it begins and ends to move a GPU's memory.
const STOCK_BEGINS: &str = "] started";
const STOCK_ENDS: &str = "] done num_bos:";
/// For one dump or restore.
const LIMIT: Duration = Duration::from_secs(180);

/// A dump, or a restore.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Act {
    /// Time from CRIU's start to its end, in seconds.
    pub(crate) whole_s: f64,
    /// Time from a dump's start until everything is on the disk.
    pub(crate) durable_s: f64,
    /// The counts of this project's plugin.
    pub(crate) contents: Option<Contents>,
    /// How long the stock plugin moved memory, in seconds.
    pub(crate) phase_s: Option<f64>,
    /// Peak of resident memory of CRIU and, in a restore, of the task: bytes, the sum of both.
    pub(crate) peak: u64,
}

/// Both, with one plugin.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) dump: Act,
    pub(crate) restore: Act,
}

/// The process, with its first answer.
#[derive(Debug)]
pub(crate) struct Subject {
    app: App,
    pid: u32,
    /// Restored processes become this program's children.
    restored: bool,
    answer: Vec<u32>,
    folder: PathBuf,
}

impl Subject {
    /// Starts it; its images will be in `folder`.
    pub(crate) fn start(shape: &Shape, folder: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        let work = tempfile::tempdir().context("a folder for the process's socket")?.keep();
        let app = App::start(shape, &work)?;
        let pid = app.pid().context("it has just been started")?;
        let answer = client::generate(app.socket(), &PROMPT, TOKENS)?;
        let right = Model::new(shape).generate(&PROMPT, TOKENS);
        ensure!(answer == right, "the process answers {answer:?} before any dump, expected {right:?}");
        Ok(Self { app, pid, restored: false, answer, folder: folder.to_owned() })
    }

    /// Dumps it and restores it. The image is not in the page cache when it is restored.
    pub(crate) fn dump_and_restore(&mut self, plugin: Plugin) -> anyhow::Result<Sample> {
        let images = self.folder.join("images");
        let criu = Criu::with(plugin, Version::V4_2, &images)?;
        let pid = self.pid.to_string();
        let dump = run(&criu, plugin, &["dump", "--tree", &pid])?;
        self.collect()?;
        drop_files(&files(&images)?)?;
        let mut restore = run(&criu, plugin, &["restore", "--restore-detached"])?;
        self.restored = true;
        restore.peak +=
            high_water_mark(Pid::from_raw(i32::try_from(self.pid)?)).context("the task's memory")?;
        let answer = client::generate(self.app.socket(), &PROMPT, TOKENS)?;
        ensure!(answer == self.answer, "{plugin:?}: the restored process answers {answer:?}");
        std::fs::remove_dir_all(&images).with_context(|| format!("remove {}", images.display()))?;
        Ok(Sample { dump, restore })
    }

    /// Ends it.
    pub(crate) fn quit(mut self) -> anyhow::Result<()> {
        client::ask(self.app.socket(), "quit")?;
        self.collect()
    }

    /// Waits for its end, so that its number is free.
    fn collect(&mut self) -> anyhow::Result<()> {
        if self.restored {
            waitpid(Pid::from_raw(i32::try_from(self.pid)?), None).context("collect the process")?;
        } else {
            self.app.was_dumped();
        }
        Ok(())
    }
}

fn run(criu: &Criu, plugin: Plugin, arguments: &[&str]) -> anyhow::Result<Act> {
    let start = Instant::now();
    let (exit, peak) = watched(&mut Process::spawn(&mut criu.command(arguments))?)?;
    let log = criu.log(arguments[0]);
    exit.check(&format!("criu {arguments:?}"), || {
        log.lines().filter(|line| line.contains("Error")).collect::<Vec<_>>().join("\n")
    })?;
    let whole_s = (exit.at - start).as_secs_f64();
    for file in files(criu.images())? {
        File::open(&file)
            .and_then(|file| file.sync_all())
            .with_context(|| format!("sync {}", file.display()))?;
    }
    let durable_s = start.elapsed().as_secs_f64();
    let phase_s = match plugin {
        Plugin::Ours => None,
        Plugin::Stock => between(&log, STOCK_BEGINS, STOCK_ENDS),
    };
    Ok(Act { whole_s, durable_s, contents: Contents::of_rewake(&log), phase_s, peak })
}

/// Waits for the end of a process, and returns its peak resident memory in bytes. Not by `wait4`: that counts
/// this program's memory before the exec.
fn watched(process: &mut Process) -> anyhow::Result<(Exit, u64)> {
    let watch = Watch::start(process.pid(), high_water_mark);
    let exit = process.wait(LIMIT)?;
    Ok((exit, watch.finish().of(process.pid())))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const TRIES: u32 = 5;

    #[test]
    fn the_memory_of_a_process_is_its_own_alone() {
        // This memory is resident here, and must not count.
        let ballast = vec![1_u8; 200 << 20];
        let peak = |mib: u32| {
            // Its buffer is one block; the kernel ends it after a second.
            let script = format!("ulimit -t 1; exec dd if=/dev/zero of=/dev/null bs={mib}M");
            let mut command = Command::new("sh");
            command.args(["-c", &script]).stderr(std::process::Stdio::null());
            watched(&mut Process::spawn(&mut command).unwrap()).unwrap().1 >> 20
        };
        // The kernel's count lags by up to a MiB. Too long an interval would miss memory.
        let peaks = (0..TRIES).map(|_| (peak(8), peak(64)));
        let seen = |(small, large): &(u64, u64)| (4..50).contains(small) && (60..120).contains(large);
        let last = peaks.inspect(|peaks| eprintln!("{peaks:?} MiB")).find(seen);
        assert!(last.is_some(), "never about 8 and 64 MiB");
        drop(ballast);
    }
}
