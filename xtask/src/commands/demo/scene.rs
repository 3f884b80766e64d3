// SPDX-License-Identifier: MIT OR Apache-2.0
//! The demo with a GPU, inside the machine: `xtask demo --scene PROGRAM PLUGIN REWAKE`. A server with weights
//! on a GPU is dumped in the middle of an answer and restored, and must finish it: once with all memory at
//! once, and once with a background load of its weights.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::timeline::{self, Moment};
use crate::program;

/// The server's weights: four layers of 32 MiB, random, where no CPU can access them.
const SHAPE: [&str; 10] =
    ["--layers", "4", "--layer-kib", "32768", "--cache-mib", "4", "--queues", "2", "--mode", "no-access"];
/// Its first request, and the request that is unfinished at the dump.
const PROMPT: [&str; 5] = ["3", "1", "4", "1", "5"];
const LONG_PROMPT: [&str; 3] = ["2", "7", "1"];
const TOKENS: &str = "3";
const LONG_TOKENS: &str = "12";
const JUDGE: &str = "/sys/kernel/debug/softgpu";
/// Polls for the end of the load, and time between them: two minutes.
const LOOKS: u32 = 1200;
const LOOK: Duration = Duration::from_millis(100);

/// Runs the demo, and prints its steps; an error if any answer differs.
pub(crate) fn play(program: &str, plugin: &str, rewake: &str) -> anyhow::Result<()> {
    let folder = std::env::temp_dir().join("rewake-demo");
    fs::create_dir_all(folder.join("images")).with_context(|| format!("create {}", folder.display()))?;
    Scene { program: program.into(), plugin: plugin.into(), rewake: rewake.into(), folder }.play()
}

struct Scene {
    /// `gpu-app`.
    program: PathBuf,
    /// The folder with the plugin.
    plugin: PathBuf,
    /// `rewake`.
    rewake: PathBuf,
    folder: PathBuf,
}

impl Scene {
    fn play(&self) -> anyhow::Result<()> {
        let right = self.expected(TOKENS, &PROMPT)?;
        let long_right = self.expected(LONG_TOKENS, &LONG_PROMPT)?;
        println!("\nAn inference server, 128 MiB of weights on a GPU.");
        let mut server = self.start()?;
        self.ask(&right, "it answers")?;
        self.tell(&[&["start", LONG_TOKENS], &LONG_PROMPT[..]].concat())?;
        println!("            a longer answer has begun");

        println!("\ncriu dump --libdir {} ...", self.plugin.display());
        self.criu("dump", &["--tree", &server.id().to_string()])?;
        server.wait().context("collect the dumped process")?;
        show(&timeline::dump(&self.log("dump")?)?);
        println!("            the image has {} MB", self.image_bytes()? / 1_000_000);

        println!("\ncriu restore --libdir {} ...", self.plugin.display());
        let start = Instant::now();
        self.criu("restore", &["--restore-detached"])?;
        let returned = start.elapsed().as_secs_f64();
        let long = self.tell(&["result"])?;
        let moments = timeline::restore(&self.log("restore")?)?;
        show(&moments);
        let long = long.strip_prefix("tokens ").unwrap_or(&long);
        ensure!(long == long_right, "the longer answer is {long}, expected {long_right}");
        // CRIU's clock, and from its return on this one.
        let first =
            moments.last().map_or(0.0, |last| last.seconds) + start.elapsed().as_secs_f64() - returned;
        println!("{first:8.2} s  the longer answer is finished: {long}");
        self.ask(&right, "it answers as before")?;
        self.ends(server.id())?;

        self.behind(&long_right)?;
        self.ask(&right, "it answers as before")?;
        self.ends(server.id())?;
        judge()?;
        println!("\nEvery token is right, and no GPU accessed missing memory.");
        Ok(())
    }

    /// The same image again, by one command: the process runs before its memory is resident.
    fn behind(&self, long_right: &str) -> anyhow::Result<()> {
        println!("\nrewake restore -D {} -- -d", self.images().display());
        let start = Instant::now();
        let mut command = Command::new(&self.rewake);
        command.args(["restore", "--criu", "criu", "--plugin-dir"]).arg(&self.plugin);
        command.arg("-D").arg(self.images()).args(["--", "-d", "-v4"]);
        program::run(&mut command)?;
        let long = self.tell(&["result"])?;
        let long = long.strip_prefix("tokens ").unwrap_or(&long);
        ensure!(long == long_right, "the longer answer is {long}, expected {long_right}");
        println!("{:8.2} s  the longer answer is finished", start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Ends the server.
    fn ends(&self, pid: u32) -> anyhow::Result<()> {
        self.tell(&["quit"])?;
        let task = Path::new("/proc").join(pid.to_string());
        let ended = (0..LOOKS).any(|_| {
            !task.exists() || {
                sleep(LOOK);
                false
            }
        });
        ensure!(ended, "the server does not end");
        Ok(())
    }

    /// Waits until the server serves, and returns it.
    fn start(&self) -> anyhow::Result<Child> {
        let path = self.folder.join("server.log");
        let log = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        let start = Instant::now();
        let mut child = Command::new("setsid")
            .arg(&self.program)
            .args(["serve", "--socket"])
            .arg(self.socket())
            .args(SHAPE)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start the server")?;
        for _ in 0..LOOKS {
            let said = fs::read_to_string(&path).unwrap_or_default();
            if said.contains("READY") {
                println!(
                    "{:8.2} s  it has loaded them, process {}",
                    start.elapsed().as_secs_f64(),
                    child.id()
                );
                return Ok(child);
            }
            ensure!(child.try_wait()?.is_none(), "the server ended: {said}");
            sleep(LOOK);
        }
        anyhow::bail!("the server does not get ready")
    }

    /// The right tokens, computed without any GPU.
    fn expected(&self, tokens: &str, prompt: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(&self.program);
        command.args(["expect", "--tokens", tokens]).args(SHAPE).args(prompt);
        Ok(program::capture(&mut command)?.trim().to_owned())
    }

    fn ask(&self, right: &str, words: &str) -> anyhow::Result<()> {
        let start = Instant::now();
        let mut command = Command::new(&self.program);
        command.arg("ask").arg("--socket").arg(self.socket()).args(["--tokens", TOKENS]).args(PROMPT);
        let answer = program::capture(&mut command)?;
        let answer = answer.trim();
        println!("{:8.2} s  {words}: {answer}", start.elapsed().as_secs_f64());
        ensure!(answer == right, "the server answers {answer}, expected {right}");
        Ok(())
    }

    fn tell(&self, words: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(&self.program);
        command.arg("tell").arg("--socket").arg(self.socket()).args(words);
        Ok(program::capture(&mut command)?.trim().to_owned())
    }

    fn criu(&self, act: &str, more: &[&str]) -> anyhow::Result<()> {
        let mut command = Command::new("criu");
        command.arg(act).args(more).arg("--images-dir").arg(self.images()).arg("--libdir").arg(&self.plugin);
        command.args(["-v4", "--log-file", &format!("{act}.log")]);
        program::capture(&mut command)
            .with_context(|| last_errors(&self.log(act).unwrap_or_default()))
            .map(drop)
    }

    fn log(&self, act: &str) -> anyhow::Result<String> {
        let path = self.images().join(format!("{act}.log"));
        let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn image_bytes(&self) -> anyhow::Result<u64> {
        let list = fs::read_dir(self.images()).context("list the image's files")?;
        list.map(|file| Ok(file?.metadata()?.len()))
            .sum::<std::io::Result<u64>>()
            .context("look at the image")
    }

    fn images(&self) -> PathBuf {
        self.folder.join("images")
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }
}

fn show(moments: &[Moment]) {
    for Moment { seconds, what } in moments {
        println!("{seconds:8.2} s  {what}");
    }
}

/// The software GPU reports what hardware hides.
fn judge() -> anyhow::Result<()> {
    let path = Path::new(JUDGE).join("violations");
    let found = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    ensure!(found.trim().is_empty(), "the software GPU saw rules broken:\n{found}");
    Ok(())
}

fn last_errors(log: &str) -> String {
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("Error (")).collect();
    errors[errors.len().saturating_sub(3)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_errors_of_a_log_are_quoted() {
        let log = "fine\nError (a.c:1): 1\nError (a.c:1): 2\nfine\nError (a.c:1): 3\nError (a.c:1): 4\n";
        assert_eq!(last_errors(log), "Error (a.c:1): 2\nError (a.c:1): 3\nError (a.c:1): 4");
        assert_eq!(last_errors("fine\n"), "");
    }
}
