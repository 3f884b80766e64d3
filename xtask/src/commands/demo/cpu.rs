// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask demo --cpu`: one process is dumped, and restored twice: by CRIU alone, which reads all memory
//! first, and by `rewake restore`. Both times the process checks every byte of its memory itself. The
//! trace of the second restore is kept.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::actors::{Restore, Target, bytes_of, in_folder, keep_trace};
use crate::{files, program, repository, setup};

/// Memory of the process, in MiB.
const MEMORY_MIB: u64 = 1024;
/// Time that filling, checking or restoring that memory may take on a slow machine.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs the demo, and prints its steps.
pub(crate) fn run() -> anyhow::Result<()> {
    let criu = setup::run()?;
    let programs = [("rewake", "rewake"), ("rewake-tests", "target")];
    let [rewake, program] = repository::build_for_demo(programs, &[])?;
    let stage = Stage { home: repository::scratch().join("demo"), criu: criu.path };
    in_folder(&stage.home, || {
        [stage.images(), stage.files(), stage.work()].iter().try_for_each(files::create_folder)?;
        stage.play(&program, &rewake)
    })
}

/// The folders of the demo.
struct Stage {
    home: PathBuf,
    criu: PathBuf,
}

impl Stage {
    fn images(&self) -> PathBuf {
        self.home.join("img")
    }

    /// The folder for files between the process and the demo.
    fn files(&self) -> PathBuf {
        self.home.join("files")
    }

    /// Socket and logs.
    fn work(&self) -> PathBuf {
        self.home.join("work")
    }

    fn play(&self, program: &Path, rewake: &Path) -> anyhow::Result<()> {
        let (target, filling) = timed(|| Target::start(program, &self.files(), MEMORY_MIB, LIMIT))?;
        say(filling, &format!("process {} has filled {MEMORY_MIB} MiB of memory", target.pid()));
        let (target, dumping) = timed(|| {
            self.dump(target.pid())?;
            target.dumped()
        })?;
        let size = bytes_of(&self.images(), "pages-")? >> 20;
        say(dumping, &format!("CRIU has dumped it ({size} MiB of pages) and it has ended"));

        let mut command = Command::new(&self.criu);
        command.args(["restore", "-D"]).arg(self.images()).arg("-W").arg(self.work());
        let (restored, eager) = timed(|| Restore::start(command, &self.work(), LIMIT))?;
        say(eager, "CRIU alone: the process runs again, after all of its memory was read");
        restored.ended(LIMIT)?;
        target.check()?;
        println!("{:12}  it has checked every byte: all right", "");
        target.again()?;

        let lazy = Instant::now();
        let mut command = Command::new(rewake);
        command.arg("restore").arg("--criu").arg(&self.criu).arg("-D").arg(self.images());
        command.arg("-W").arg(self.work()).arg("--");
        let restored = Restore::start(command, &self.work(), LIMIT)?;
        let running = lazy.elapsed();
        say(running, "with rewake: the process runs again, its memory is loaded in the background");
        restored.ended(LIMIT)?;
        target.check()?;
        say(lazy.elapsed(), "it has accessed and checked every byte in random order meanwhile: all right");
        let path = keep_trace(&self.work())?;
        println!("{:12}  its trace, for ui.perfetto.dev: {}", "", path.display());
        let gain = eager.as_secs_f64() / running.as_secs_f64();
        println!("\nThe process ran again {gain:.1} times sooner than with CRIU alone.");
        Ok(())
    }

    fn dump(&self, pid: u32) -> anyhow::Result<()> {
        let mut command = Command::new(&self.criu);
        command.arg("dump").args(["-t", &pid.to_string(), "-D"]).arg(self.images()).args(["-o", "dump.log"]);
        program::capture(&mut command).map(drop)
    }
}

fn timed<T>(act: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, Duration)> {
    let start = Instant::now();
    let value = act()?;
    Ok((value, start.elapsed()))
}

fn say(time: Duration, what: &str) {
    println!("{:>9.1} ms  {what}", time.as_secs_f64() * 1000.0);
}
