// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs of many kinds on a host, each of which is asked for bytes of its own, again and again: before a
//! dump, after each restore, and where it has moved to.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use rewake_process::proc;
use rewake_testkit::hosts::Host;
use rewake_testkit::programs;

use crate::plugins;
use crate::process::{output, processes_naming, until};
use crate::scene::{ACT, ODD_NAME};

/// The source of the Java program.
const JAVA: &str = include_str!("../programs/Answers.java");
/// Who PostgreSQL takes itself for, as the library of `tests/examples/not_root.rs` says.
const USER: u32 = 65_534;
/// What PostgreSQL compares, and a row that it writes for each answer.
const ROWS: &str = "CREATE TABLE rows AS SELECT g AS i, md5(g::text) AS m FROM generate_series(1, 20000) g; \
                    CREATE TABLE asked (at int)";
const ANSWER: &str = "INSERT INTO asked VALUES (1); SELECT count(*) FROM asked; \
                      SELECT count(*) FROM rows WHERE m = md5(i::text)";

/// A kind of program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The test program, in one of its modes `answers-MODE`.
    Target(&'static str),
    /// The test program in a user namespace, with pids and mounts of its own.
    Users,
    /// The test program, stopped by a signal: it continues for an answer only.
    Stopped,
    /// A database server: six processes, and shared memory of both kinds.
    PostgreSql,
    /// A Java program.
    Java,
    /// A shell in a terminal of tmux.
    Tmux,
}

/// A program, with all its files in one folder.
#[derive(Debug)]
pub struct Program {
    kind: Kind,
    folder: PathBuf,
    /// How often it was asked.
    asked: usize,
}

impl Program {
    /// Why this machine lacks a kind of program.
    ///
    /// # Errors
    /// It is that.
    pub fn installed(kind: Kind) -> Result<(), String> {
        let runs = |program: &Path, option: &str, package: &str| {
            let runs = Command::new(program).arg(option).output().is_ok_and(|it| it.status.success());
            let missing = || format!("{} does not run: apt-get install {package}", program.display());
            runs.then_some(()).ok_or_else(missing)
        };
        match kind {
            Kind::PostgreSql => {
                runs(&postgres("postgres"), "--version", "postgresql-15")?;
                runs("psql".as_ref(), "--version", "postgresql-client-15")
            }
            Kind::Java => runs("javac".as_ref(), "--version", "default-jdk-headless"),
            Kind::Tmux => runs("tmux".as_ref(), "-V", "tmux"),
            Kind::Target("huge-pages") => {
                let free = fs::read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
                let free: Option<u32> =
                    String::from_utf8_lossy(&free.unwrap_or_default()).trim().parse().ok();
                // Two on each of two hosts.
                let is_enough = free.is_some_and(|free| free >= 4);
                is_enough.then_some(()).ok_or_else(|| "fewer than 4 huge pages of 2 MiB are free".to_owned())
            }
            Kind::Target(_) | Kind::Users | Kind::Stopped => Ok(()),
        }
    }

    /// Starts a program on a host, and waits until it answers. Its folder is empty.
    ///
    /// # Errors
    /// It does not answer.
    pub fn start(kind: Kind, folder: &Path, host: &Host) -> anyhow::Result<Self> {
        let mut program = Self { kind, folder: folder.to_owned(), asked: 0 };
        program.prepare(host)?;
        let command = program.command()?;
        // A child of the host's first process, which collects it: `nsenter` stops when its own child is
        // stopped.
        let mut apart = Command::new("setsid");
        apart.args(["--fork", "bash", "-c", "exec 10>&- 11>&- 12>&-; exec \"$@\"", "bash"]);
        apart.arg(command.get_program()).args(command.get_args());
        output(&mut host.alone(&apart))?;
        match kind {
            Kind::PostgreSql => {
                until(ACT, || program.sql("SELECT 1").ok()).context("PostgreSQL does not start")?;
                program.sql(ROWS)?;
            }
            Kind::Tmux => {
                until(ACT, || program.tmux(&["has-session"]).ok()).context("tmux does not start")?;
                program.tmux(&["send-keys", "kept=right", "Enter"])?;
            }
            _ => {
                let is_ready = || program.folder.join("ready").exists().then_some(());
                until(ACT, is_ready).with_context(|| format!("it is not ready: {}", program.verdict()))?;
            }
        }
        if kind == Kind::Stopped {
            kill(program.first(host)?, Signal::SIGSTOP)?;
        }
        program.ask(host)?;
        Ok(program)
    }

    /// Options of CRIU for its dump and restore.
    #[must_use]
    pub fn options(&self) -> Vec<&OsStr> {
        // The root of its mounts must be a mount.
        if self.kind == Kind::Users { vec!["--root".as_ref(), "/mnt".as_ref()] } else { Vec::new() }
    }

    /// Prepares a host on which it is to run.
    ///
    /// # Errors
    /// A command fails.
    pub fn prepare(&self, host: &Host) -> anyhow::Result<()> {
        let mount = |words: &[&str]| output(host.command("mount").args(words)).map(drop);
        match self.kind {
            Kind::Users => mount(&["--bind", "/", "/mnt"]),
            // A terminal has the same number on both hosts.
            Kind::Tmux => mount(&["-t", "devpts", "devpts", "/dev/pts", "-o", "newinstance,ptmxmode=666"]),
            _ => Ok(()),
        }
    }

    /// What is started.
    fn command(&self) -> anyhow::Result<Command> {
        let folder = &self.folder;
        let target = |mode: &str| {
            let mut command = Command::new(programs::folder()?.join("target"));
            command.arg(mode).arg("--dir").arg(folder).args(["--mib", "8", "--seed", "5"]);
            anyhow::Ok(command)
        };
        let mut command;
        match self.kind {
            Kind::Target(mode) => return target(&format!("answers-{mode}")),
            Kind::Stopped => return target("answers"),
            Kind::Users => {
                let target = target("answers")?;
                command = Command::new("unshare");
                command.args(["--mount", "sh", "-ec", IN_USER_NAMESPACE]).arg(folder);
                command.arg(target.get_program()).args(target.get_args());
            }
            Kind::PostgreSql => {
                let data = folder.join("data");
                fs::create_dir(&data)?;
                chown(&data, Some(USER), Some(USER))?;
                let mut initdb = Command::new(postgres("initdb"));
                initdb.args(["-A", "trust", "-U", "user", "--no-sync", "-D"]).arg(&data);
                output(initdb.env("LD_PRELOAD", plugins::not_root()?))?;
                // Its shared memory has a key.
                command = Command::new("unshare");
                command.args(["--ipc", "env"]).arg(preload()?).arg(postgres("postgres")).arg("-D").arg(&data);
                command.arg("-k").arg(folder);
                for setting in ["listen_addresses=", "shared_buffers=8MB", "fsync=off", "huge_pages=off"] {
                    command.args(["-c", setting]);
                }
            }
            Kind::Java => {
                let source = folder.join("Answers.java");
                fs::write(&source, JAVA)?;
                mkfifo(&folder.join("asks"), Mode::from_bits_truncate(0o600))?;
                output(Command::new("javac").arg("-d").arg(folder).arg(&source))?;
                command = Command::new("java");
                command.args(["-Xmx64m", "-cp"]).arg(folder).arg("Answers").arg(folder);
            }
            Kind::Tmux => {
                command = Command::new("tmux");
                command.args(["-f", "/dev/null", "-S"]).arg(folder.join("socket"));
                command.args(["new-session", "-d", "bash", "--norc"]);
            }
        }
        Ok(command)
    }

    /// Its processes on a host.
    #[must_use]
    pub fn processes(&self, host: &Host) -> Vec<Pid> {
        let name: &[u8] = match self.kind {
            Kind::Target("odd-names") => ODD_NAME,
            Kind::Target(_) | Kind::Users | Kind::Stopped => b"target",
            Kind::PostgreSql => b"postgres",
            Kind::Java => b"java",
            Kind::Tmux => b"tmux: server",
        };
        let naming = self.folder.to_string_lossy();
        let all = processes_naming(&naming).into_iter();
        all.filter(|pid| proc::name(pid.as_raw()) == name && host.has(*pid) && lives(*pid)).collect()
    }

    /// Its first process on a host, as this machine numbers it.
    ///
    /// # Errors
    /// It does not run there.
    pub fn first(&self, host: &Host) -> anyhow::Result<Pid> {
        let pids = self.processes(host);
        pids.into_iter().min().with_context(|| format!("{:?} does not run there", self.kind))
    }

    /// Asks it for its bytes.
    ///
    /// # Errors
    /// It does not run on this host, does not answer, or has wrong bytes.
    pub fn ask(&mut self, host: &Host) -> anyhow::Result<()> {
        let first = self.first(host)?;
        self.asked += 1;
        match self.kind {
            Kind::PostgreSql => {
                let expected = format!("INSERT 0 1\n{}\n20000", self.asked);
                let answer = self.sql(ANSWER)?;
                ensure!(answer == expected, "PostgreSQL: {answer:?}, expected {expected:?}");
                return Ok(());
            }
            Kind::Tmux => {
                self.tmux(&["send-keys", "echo \"($kept $((n += 1)))\"", "Enter"])?;
                let expected = format!("(right {})", self.asked);
                let shows = || {
                    let screen = self.tmux(&["capture-pane", "-p"]).unwrap_or_default();
                    screen.lines().any(|line| line == expected).then_some(())
                };
                return until(ACT, shows)
                    .with_context(|| self.tmux(&["capture-pane", "-p"]).unwrap_or_default());
            }
            _ => {}
        }
        if self.kind == Kind::Stopped {
            let is_stopped = || proc::status(first.as_raw()).is_some_and(|status| status.state == 'T');
            until(ACT, || is_stopped().then_some(())).context("it was stopped, and runs")?;
            kill(first, Signal::SIGCONT)?;
        }
        self.question()?;
        if self.kind == Kind::Stopped {
            kill(first, Signal::SIGSTOP)?;
        }
        Ok(())
    }

    /// Asks through the pipe.
    fn question(&self) -> anyhow::Result<()> {
        let answers = || {
            let text = fs::read_to_string(self.folder.join("answers")).unwrap_or_default();
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let mut options = OpenOptions::new();
        let pipe = options.write(true).custom_flags(libc::O_NONBLOCK).open(self.folder.join("asks"));
        pipe.and_then(|mut pipe: File| pipe.write_all(b"?")).context("no process reads questions")?;
        until(ACT, || (answers().len() == self.asked).then_some(()))
            .with_context(|| format!("{:?} does not answer: {}", self.kind, self.verdict()))?;
        match answers().last().map(String::as_str) {
            Some("OK") => Ok(()),
            other => bail!("{:?}: {other:?}: {}", self.kind, self.verdict()),
        }
    }

    fn verdict(&self) -> String {
        fs::read_to_string(self.folder.join("verdict")).unwrap_or_default()
    }

    fn sql(&self, query: &str) -> anyhow::Result<String> {
        let mut psql = Command::new("psql");
        psql.args(["-U", "user", "-d", "postgres", "-At", "-c", query, "-h"]).arg(&self.folder);
        output(&mut psql)
    }

    fn tmux(&self, words: &[&str]) -> anyhow::Result<String> {
        output(Command::new("tmux").arg("-S").arg(self.folder.join("socket")).args(words))
    }
}

/// Becomes root of a user namespace whose mounts are the root file system and `/proc` alone: CRIU could
/// restore no others there. Its standard files are on that file system.
const IN_USER_NAMESPACE: &str = r#"
    folder=$0 root=$0/root
    mkdir "$root" && mount --bind / "$root" && mount -t proc proc "$root/proc"
    cd "$root" && mkdir -p "$root$folder/old" && pivot_root . "${folder#/}/old" && umount -l "$folder/old" && cd /
    export standard=$folder/standard && : > "$standard"
    exec unshare --user --map-root-user --pid --mount --fork sh -ec '
        mount -t proc proc /proc
        exec "$@" < "$standard" > "$standard" 2>&1' sh "$@"
"#;

/// A program of PostgreSQL: of the folder of `REWAKE_POSTGRES`, which `cargo xtask test` sets, or of Debian's
/// package.
fn postgres(name: &str) -> PathBuf {
    let folder = std::env::var_os("REWAKE_POSTGRES").unwrap_or_else(|| "/usr/lib/postgresql/15/bin".into());
    Path::new(&folder).join(name)
}

fn preload() -> anyhow::Result<std::ffi::OsString> {
    let mut variable = std::ffi::OsString::from("LD_PRELOAD=");
    variable.push(plugins::not_root()?);
    Ok(variable)
}

fn lives(pid: Pid) -> bool {
    proc::status(pid.as_raw()).is_some_and(|status| !status.has_ended())
}
