// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs `criu dump`, `criu restore` and servers of lazy pages, each for a bounded time. An error quotes the
//! log's end.

use std::io::{PipeReader, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, poll};
use nix::unistd::Pid;
use rewake_testkit::process::tail;

use crate::processes::{Exit, Process, check_interrupted, descendants, quiet, reap_adopted};

const SERVER_READY: Duration = Duration::from_secs(30);
/// Time between the end of `criu dump` and that of the process it dumped.
const DUMPED_END: Duration = Duration::from_secs(60);
/// The longest time after which an interruption is noticed, in milliseconds.
const SLICE_MS: u8 = 200;
const LOG_LINES: usize = 15;

/// A dumped process and the place of its image. The process can be restored any number of times, one after
/// another.
#[derive(Debug)]
pub(crate) struct Image {
    /// The pid of the process, before the dump and after every restore.
    pub(crate) pid: Pid,
    pub(crate) directory: PathBuf,
    /// `pages-*.img` that are not empty.
    pub(crate) page_files: Vec<PathBuf>,
    /// Time limit of each command that moves the whole memory once.
    pub(crate) limit: Duration,
}

impl Image {
    /// Dumps `process`, which ends it, into the new folder `directory` and writes the image back to the disk.
    ///
    /// # Errors
    /// The folder exists, `criu dump` fails, or the process or CRIU still runs after `limit`.
    pub(crate) fn dump(
        criu: &Path,
        process: &mut Process,
        directory: PathBuf,
        limit: Duration,
    ) -> anyhow::Result<Self> {
        std::fs::create_dir(&directory).with_context(|| directory.display().to_string())?;
        let pid = process.pid();
        let tree = descendants(pid);
        let mut dump = Command::new(criu);
        dump.args(["dump", "-o", "dump.log", "-t", &pid.to_string(), "-D"]).arg(&directory);
        let exit = Process::spawn(quiet(&mut dump))?.wait(limit)?;
        exit.check("criu dump", || tail(&directory.join("dump.log"), LOG_LINES))?;
        process.wait(DUMPED_END).context("criu dump must end the process it dumped")?;
        reap_adopted(&tree);
        let mut page_files = Vec::new();
        for entry in std::fs::read_dir(&directory)? {
            let path = entry?.path();
            std::fs::File::open(&path)?.sync_all().with_context(|| path.display().to_string())?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with("pages-") && path.metadata()?.len() > 0 {
                page_files.push(path);
            }
        }
        Ok(Self { pid, directory, page_files, limit })
    }

    /// Starts `program lazy-pages` for one restore and waits until it listens. `work` gets its log and its
    /// socket.
    pub(crate) fn serve(&self, program: &Path, work: &Path) -> anyhow::Result<Process> {
        self.listen(program, "lazy-pages", &[], work)
    }

    /// Starts `program role` with further options and waits until it listens. `work` gets its log and its
    /// socket.
    pub(crate) fn listen(
        &self,
        program: &Path,
        role: &str,
        options: &[String],
        work: &Path,
    ) -> anyhow::Result<Process> {
        let (mut status, ready) = std::io::pipe().context("status pipe")?;
        fcntl(ready.as_fd(), FcntlArg::F_SETFD(FdFlag::empty())).context("F_SETFD")?;
        let mut command = Command::new(program);
        command.args([role, "-o", "lazy.log", "--status-fd", &ready.as_raw_fd().to_string()]);
        command.arg("-D").arg(&self.directory).arg("-W").arg(work).args(options).current_dir(work);
        let server = Process::spawn(quiet(&mut command))?;
        drop(ready);
        let mut byte = [0xff];
        if !readable(&status, SERVER_READY)? || status.read(&mut byte)? != 1 || byte[0] != 0 {
            let log = server_log(work);
            bail!("{} did not say that it listens within {SERVER_READY:?}\n{log}", program.display());
        }
        Ok(server)
    }

    /// Restores the process with `criu restore -d` and the arguments `more`. `work` gets its log. Returns the
    /// restored process and the exit of `criu restore`.
    pub(crate) fn restore(&self, criu: &Path, more: &[&str], work: &Path) -> anyhow::Result<(Process, Exit)> {
        let mut command = restore(criu, &self.directory, work);
        let exit = Process::spawn(quiet(command.args(more).current_dir(work)))?.wait(self.limit)?;
        exit.check("criu restore", || tail(&work.join("restore.log"), LOG_LINES))?;
        let target = Process::adopt(self.pid, "the restored process")?;
        Ok((target, exit))
    }

    /// Waits until a server has served all memory.
    pub(crate) fn served(&self, server: &mut Process, work: &Path) -> anyhow::Result<Exit> {
        let exit = server.wait(self.limit)?;
        exit.check("the server failed", || server_log(work))?;
        Ok(exit)
    }
}

/// `criu restore -d`; `work` gets its log.
pub(crate) fn restore(criu: &Path, images: &Path, work: &Path) -> Command {
    let mut command = Command::new(criu);
    command.args(["restore", "-d", "-o", "restore.log", "-D"]).arg(images).arg("-W").arg(work);
    command
}

/// The end of a server's log, for an error message.
pub(crate) fn server_log(work: &Path) -> String {
    tail(&work.join("lazy.log"), LOG_LINES)
}

/// True when the pipe can be read, or is at its end, within `limit`.
fn readable(pipe: &PipeReader, limit: Duration) -> anyhow::Result<bool> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        check_interrupted()?;
        let ready = poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], SLICE_MS);
        if ready.is_ok_and(|count| count > 0) {
            return Ok(true);
        }
    }
    Ok(false)
}
