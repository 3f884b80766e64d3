// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask demo --cpu`: one process is dumped, and restored twice: by CRIU alone, which reads all memory
//! first, and by `rewake restore`. Both times the process checks every byte of its memory itself. The
//! timeline of the second restore is kept as a drawing, as in the README.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::actors::{Restore, Target};
use super::drawing::drawing;
use crate::{program, repository, setup};

/// Memory of the process, in MiB.
const MEMORY_MIB: u64 = 1024;
/// Time that filling, checking or restoring that memory may take on a slow machine.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs the demo, and prints its steps.
pub(crate) fn run() -> anyhow::Result<()> {
    let criu = setup::run()?;
    let programs = [("rewake", "rewake"), ("rewake-tests", "target")];
    let [rewake, program] = repository::build_for_demo(programs, &[])?;
    let stage = Stage::new(repository::scratch().join("demo"), criu.path)?;
    let story = stage.play(&program, &rewake);
    story.with_context(|| format!("the demo's images and logs are left in {}", stage.home.display()))?;
    fs::remove_dir_all(&stage.home).with_context(|| format!("remove {}", stage.home.display()))
}

/// The folders of the demo.
struct Stage {
    home: PathBuf,
    criu: PathBuf,
}

impl Stage {
    /// Empty folders, without files of an earlier demo.
    fn new(home: PathBuf, criu: PathBuf) -> anyhow::Result<Self> {
        if home.exists() {
            fs::remove_dir_all(&home).with_context(|| format!("remove {}", home.display()))?;
        }
        let stage = Self { home, criu };
        for folder in [stage.images(), stage.files(), stage.work()] {
            fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        }
        Ok(stage)
    }

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
        let size = image_bytes(&self.images())? >> 20;
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
        let page = self.work().join("rewake-timeline.html");
        let page = fs::read_to_string(&page).with_context(|| format!("read {}", page.display()))?;
        let path = repository::target()?.join("timeline.svg");
        fs::write(&path, drawing(&page)?).with_context(|| format!("write {}", path.display()))?;
        println!("{:12}  its timeline: {}", "", path.display());
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

/// Sizes of all `pages-*.img`.
fn image_bytes(images: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for file in fs::read_dir(images).with_context(|| format!("list {}", images.display()))? {
        let file = file.with_context(|| format!("list {}", images.display()))?;
        if file.file_name().to_string_lossy().starts_with("pages-") {
            bytes += file.metadata().with_context(|| format!("look at {}", file.path().display()))?.len();
        }
    }
    ensure!(bytes > 0, "the dump wrote no pages to {}", images.display());
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_begins_empty_and_knows_its_pages() {
        let home = std::env::temp_dir().join(format!("rewake-demo-{}", std::process::id()));
        fs::create_dir_all(home.join("img")).unwrap();
        fs::write(home.join("img/pages-1.img"), "old").unwrap();
        let stage = Stage::new(home.clone(), PathBuf::from("criu")).unwrap();
        assert!(image_bytes(&stage.images()).is_err(), "the old image was removed");
        fs::write(stage.images().join("pages-1.img"), [0; 10]).unwrap();
        fs::write(stage.images().join("pages-2.img"), [0; 5]).unwrap();
        fs::write(stage.images().join("pagemap-1.img"), [0; 7]).unwrap();
        assert_eq!(image_bytes(&stage.images()).unwrap(), 15);
        fs::remove_dir_all(home).unwrap();
    }
}
