// SPDX-License-Identifier: MIT OR Apache-2.0
//! The demo with a GPU, inside the machine: `xtask demo --scene PROGRAM PLUGIN REWAKE RIGHT`. A server with
//! weights on a GPU is dumped in the middle of an answer. It is restored by turns eagerly and on demand, and
//! must finish the answer each time. The image lies on a disk of known speed, and is in no cache when a
//! restore begins.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;

use super::figures::{Comparison, Figures};
use super::server::{Progress, Server};
use super::timeline;
use crate::progress::{say, step};
use crate::{files, program};

/// Where the machine mounts its disk.
const DISK: &str = "/mnt/disk";
/// The request that is unfinished at the dump.
pub(super) const PROMPT: [&str; 3] = ["2", "7", "1"];
pub(super) const TOKENS: &str = "8";
const JUDGE: &str = "/sys/kernel/debug/softgpu";
/// Restores of each kind.
const ROUNDS: u32 = 2;

/// How long the steps usually take, on an emulated processor.
const USUAL_LOAD: Duration = Duration::from_secs(10);
const USUAL_DUMP: Duration = Duration::from_secs(12);
const USUAL_RESTORE: Duration = Duration::from_secs(13);

/// Runs the demo; an error if a token differs, or if the figures do not show what they must.
pub(crate) fn play(program: &str, plugin: &str, rewake: &str, right: &str) -> anyhow::Result<()> {
    let scene = Scene {
        program: program.into(),
        plugin: plugin.into(),
        rewake: rewake.into(),
        right: right.to_owned(),
        folder: Path::new(DISK).join("demo"),
    };
    for path in [scene.images(), scene.work()] {
        files::create_folder(&path)?;
    }
    scene.play()
}

/// How memory is loaded.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// Before the process runs.
    Eager,
    OnDemand,
}

struct Scene {
    /// `gpu-app`.
    program: PathBuf,
    /// The folder with the plugin.
    plugin: PathBuf,
    rewake: PathBuf,
    /// The tokens of the answer.
    right: String,
    /// On the disk whose speed is known.
    folder: PathBuf,
}

impl Scene {
    fn play(&self) -> anyhow::Result<()> {
        let (server, pid) = step(
            "An inference server loads 128 MiB of weights onto a GPU and begins an answer",
            USUAL_LOAD,
            || self.start(),
        )?;
        step("`rewake dump` in the middle of that answer", USUAL_DUMP, || self.dump(pid))?;
        let mut comparison = Comparison::default();
        for _ in 0..ROUNDS {
            for way in [Way::Eager, Way::OnDemand] {
                let figures = step(way.says(), USUAL_RESTORE, || {
                    let figures = self.restore(way, &server)?;
                    server.finishes(&self.right)?;
                    Ok(figures)
                })?;
                server.ends(pid)?;
                match way {
                    Way::Eager => comparison.eager.push(figures),
                    Way::OnDemand => comparison.on_demand.push(figures),
                }
            }
        }
        judge()?;
        say("\nEvery token was right each time, and no GPU accessed missing memory.\n");
        println!("{}", comparison.table());
        // Said and not failed by yet: the load of GPU memory begins after CRIU's handoff (docs/setup.md).
        if let Err(shortfall) = comparison.verdict() {
            println!("{shortfall}");
        }
        Ok(())
    }

    fn start(&self) -> anyhow::Result<(Server, u32)> {
        let (server, mut child) = Server::start(&self.program, &self.folder)?;
        let pid = child.id();
        // Collects the process when it was dumped, so that its pid is free.
        thread::spawn(move || child.wait());
        server.tell(&[&["start", TOKENS], &PROMPT[..]].concat())?;
        server.progress(|tokens| tokens > 0, || false)?;
        Ok((server, pid))
    }

    fn dump(&self, pid: u32) -> anyhow::Result<()> {
        program::capture(self.rewake("dump").args(["-t", &pid.to_string(), "--", "-v4"]))?;
        for moment in timeline::dump(&self.log("dump")?)? {
            say(&format!("{:10.2} s  {}", moment.seconds, moment.what));
        }
        Ok(())
    }

    fn restore(&self, way: Way, server: &Server) -> anyhow::Result<Figures> {
        self.forget()?;
        let mut command = match way {
            Way::Eager => self.criu(),
            // It returns when all is resident.
            Way::OnDemand => {
                let mut command = self.rewake("restore");
                command.args(["--quiet", "--", "-d", "-v4", "--log-file", "restore.log"]);
                command
            }
        };
        let failed = AtomicBool::new(false);
        let start = Instant::now();
        let (answers, resident) = thread::scope(|scope| {
            let ended = scope.spawn(|| {
                let ended = program::capture(&mut command).map(|_| start.elapsed());
                failed.store(ended.is_err(), Ordering::Relaxed);
                ended
            });
            let answers = Self::answers(server, || failed.load(Ordering::Relaxed));
            // Its failure is the reason why no process answers.
            let resident = ended.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            anyhow::Ok((answers?, resident))
        })?;
        let [first, next] = answers;
        let moved = self.moved(way)?;
        let figures = Figures { runs: first.at - start, token: next.at - start, resident, moved };
        say(&format!(
            "    it runs after {:.2} s, in the middle of token {}, which is ready after {:.2} s; all is \
             resident after {:.2} s",
            figures.runs.as_secs_f64(),
            first.tokens + 1,
            figures.token.as_secs_f64(),
            resident.as_secs_f64()
        ));
        Ok(figures)
    }

    /// The first progress of a restored server, and the next token.
    fn answers(server: &Server, is_lost: impl Fn() -> bool) -> anyhow::Result<[Progress; 2]> {
        let first = server.progress(|_| true, &is_lost)?;
        Ok([first, server.progress(|tokens| tokens > first.tokens, &is_lost)?])
    }

    /// Bytes that the restore moved to the GPU.
    fn moved(&self, way: Way) -> anyhow::Result<u64> {
        match way {
            Way::Eager => timeline::moved(&self.log("restore")?),
            Way::OnDemand => {
                let path = self.work().join("rewake-timeline.json");
                let text = files::read(&path)?;
                timeline::resident(&text)
            }
        }
    }

    /// Removes the image's bytes from the page cache, and the files of an earlier restore.
    fn forget(&self) -> anyhow::Result<()> {
        files::empty_folder(&self.work())?;
        program::run(&mut Command::new("sync"))?;
        for file in files::list(self.images())? {
            program::capture(
                Command::new("dd").arg(format!("if={}", file.display())).args(["iflag=nocache", "count=0"]),
            )?;
        }
        Ok(())
    }

    fn criu(&self) -> Command {
        let mut command = Command::new("criu");
        command.args(["restore", "--restore-detached", "-v4", "--log-file", "restore.log", "--images-dir"]);
        command.arg(self.images()).arg("--work-dir").arg(self.work()).arg("--libdir").arg(&self.plugin);
        command
    }

    fn rewake(&self, act: &str) -> Command {
        let mut command = Command::new(&self.rewake);
        command.args([act, "--criu", "criu", "--plugin-dir"]).arg(&self.plugin);
        command.arg("-D").arg(self.images()).arg("-W").arg(self.work());
        command
    }

    fn log(&self, act: &str) -> anyhow::Result<String> {
        let path = self.work().join(format!("{act}.log"));
        let text = files::bytes(&path)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn images(&self) -> PathBuf {
        self.folder.join("images")
    }

    /// For logs.
    fn work(&self) -> PathBuf {
        self.folder.join("work")
    }
}

impl Way {
    fn says(self) -> &'static str {
        match self {
            Self::Eager => "`criu restore`: eager, the process runs when all memory is loaded",
            Self::OnDemand => "`rewake restore`: on demand, the process runs while memory is loaded",
        }
    }
}

/// The software GPU reports what hardware hides.
fn judge() -> anyhow::Result<()> {
    let path = Path::new(JUDGE).join("violations");
    let found = files::read(&path)?;
    ensure!(found.trim().is_empty(), "the software GPU saw rules broken:\n{found}");
    Ok(())
}
