// SPDX-License-Identifier: MIT OR Apache-2.0
//! `-d`: daemons in the background, and their pidfiles.
//!
//! The daemon does nothing before its pidfile is written, so a pidfile that cannot be written leaves no
//! process.

use std::fs::{self, File};
use std::io::{self, PipeReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::sys::signal::kill;
use nix::unistd::{ForkResult, Pid};
use rewake_process::proc;
use rewake_process::ready::Ready;

/// Digits of the longest process id, and a newline.
const MAX_PIDFILE: usize = 20;

/// Whose rule a pidfile follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PidfileRule {
    /// CRIU's: a file that exists is refused, and the daemon leaves its own behind for the script that waits
    /// for its end.
    Criu,
    /// That of daemons which are started again with the same command: the file of a process that no longer
    /// runs is replaced, and a daemon that ends removes its own.
    Agent,
}

/// A pidfile that is to be written.
#[derive(Debug)]
pub(super) struct Pidfile {
    path: PathBuf,
    rule: PidfileRule,
}

impl Pidfile {
    /// Takes the path of `--pidfile`. To be called before anything is started.
    ///
    /// # Errors
    /// The file exists, and may not be replaced.
    pub(super) fn claim(path: &Path, rule: PidfileRule) -> anyhow::Result<Self> {
        let pidfile = Self { path: path.to_owned(), rule };
        pidfile.remove_stale()?;
        Ok(pidfile)
    }

    fn remove_stale(&self) -> anyhow::Result<()> {
        let shown = self.path.display();
        let found = match fs::read(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.has_folder() => return Ok(()),
            found => found.with_context(|| format!("--pidfile {shown}"))?,
        };
        if self.rule == PidfileRule::Criu {
            bail!(
                "--pidfile {shown}: the file exists already: remove it, or name another; nothing was started"
            );
        }
        let Some(pid) = pid(&found) else {
            bail!(
                "--pidfile {shown}: the file exists, and has no process id in it: name another; nothing was \
                 started"
            );
        };
        if runs(pid) {
            bail!(
                "--pidfile {shown}: it names process {pid}, which runs: end that process, or name another \
                 file; nothing was started"
            );
        }
        fs::remove_file(&self.path).with_context(|| format!("--pidfile {shown}: replacing it"))
    }

    /// Whether the file can be made: a path that leads nowhere is found before anything is started.
    fn has_folder(&self) -> bool {
        match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.is_dir(),
            _ => true,
        }
    }

    /// Writes the id of a process as a new file.
    fn write(&self, pid: Pid) -> anyhow::Result<()> {
        let written = fs::File::create_new(&self.path).and_then(|mut file| write!(file, "{pid}"));
        written.with_context(|| format!("--pidfile {}", self.path.display()))
    }

    /// Removes the file of a process that has ended or ends, unless the file names another process by now.
    fn remove(&self, of: Pid) {
        if fs::read(&self.path).is_ok_and(|found| pid(&found) == Some(of)) {
            // It may be gone, and the next start replaces what stays.
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Ends the use of the file: this process is the daemon, and ends.
    pub(super) fn release(self) {
        if self.rule == PidfileRule::Agent {
            self.remove(nix::unistd::getpid());
        }
    }
}

/// The process that a pidfile names; an empty file names none that runs.
fn pid(file: &[u8]) -> Option<Pid> {
    let text = std::str::from_utf8(file.get(..file.len().min(MAX_PIDFILE))?).ok()?.trim();
    let pid = if text.is_empty() { Some(0) } else { text.parse().ok() };
    pid.filter(|pid| *pid >= 0 && file.len() <= MAX_PIDFILE).map(Pid::from_raw)
}

/// Whether a process runs. One of another user does, too; one that has ended and was not awaited yet does
/// not.
fn runs(pid: Pid) -> bool {
    let has_ended = || proc::status(pid.as_raw()).is_some_and(|status| status.has_ended());
    pid.as_raw() > 0 && kill(pid, None) != Err(nix::errno::Errno::ESRCH) && !has_ended()
}

/// Becomes a background process. In the parent returns the exit code, once the daemon is ready or the child
/// has failed; in the child, whose pidfile is written, returns none. The child releases the terminal when it
/// is ready.
///
/// # Errors
/// No process can be made, or the pidfile cannot be written: no process is left.
pub(super) fn background(
    pidfile: Option<&Pidfile>,
    log: Option<File>,
    ready: &mut Ready,
) -> anyhow::Result<Option<u8>> {
    let (is_ready, writer) = io::pipe().context("making a pipe")?;
    let (mut permitted, permit) = io::pipe().context("making a pipe")?;
    // SAFETY: this process has one thread.
    match unsafe { nix::unistd::fork() }.context("going to the background")? {
        ForkResult::Child => {
            drop((is_ready, permit));
            if permitted.read(&mut [0]).unwrap_or(0) != 1 {
                std::process::exit(1); // the parent says why
            }
            nix::unistd::setsid().context("leaving the session")?;
            release_terminal(log, ready)?;
            ready.waiting.push(OwnedFd::from(writer).into());
            Ok(None)
        }
        ForkResult::Parent { child } => {
            drop((writer, permitted));
            if let Some(pidfile) = pidfile {
                pidfile.write(child)?;
            }
            let is_ready = start(permit, is_ready);
            if !is_ready && let Some(pidfile) = pidfile {
                pidfile.remove(child);
            }
            Ok(Some(u8::from(!is_ready))) // a child that has failed has said why
        }
    }
}

/// Has a daemon release the standard descriptors of the command that started it, because a script reads until
/// no process has its pipe any more. Until the daemon is ready, it says there what goes wrong; from then on,
/// in its log.
///
/// # Errors
/// There is no `/dev/null`.
pub(super) fn release_terminal(log: Option<File>, ready: &mut Ready) -> anyhow::Result<()> {
    let null = rewake_process::ready::release_terminal().context("/dev/null")?;
    ready.standard_error = Some(log.map_or(null, OwnedFd::from));
    Ok(())
}

/// Lets the daemon begin, and waits until it is ready. False: it has ended.
fn start(mut permit: io::PipeWriter, mut ready: PipeReader) -> bool {
    // A child that has ended reads nothing.
    let _ = permit.write_all(&[0]);
    ready.read(&mut [0]).unwrap_or(0) == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process id that no process has: that of a child which has ended and was awaited.
    fn ended() -> Pid {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        Pid::from_raw(i32::try_from(child.id()).unwrap())
    }

    fn with(content: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pid");
        fs::write(&path, content).unwrap();
        (folder, path)
    }

    fn refused(path: &Path, rule: PidfileRule) -> String {
        let error = format!("{:#}", Pidfile::claim(path, rule).unwrap_err());
        assert!(error.contains("nothing was started") && !error.contains('\n'), "{error}");
        error
    }

    #[test]
    fn the_pidfile_of_a_process_that_has_ended_is_replaced() {
        for content in [ended().to_string(), format!("{}\n", ended()), String::new()] {
            let (_folder, path) = with(&content);
            let pidfile = Pidfile::claim(&path, PidfileRule::Agent).unwrap();
            pidfile.write(Pid::from_raw(77)).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "77", "after {content:?}");
        }
    }

    #[test]
    fn a_process_that_nothing_has_awaited_does_not_run() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        let (flags, all) = (nix::sys::wait::WaitPidFlag::WNOWAIT, nix::sys::wait::WaitPidFlag::WEXITED);
        nix::sys::wait::waitid(nix::sys::wait::Id::Pid(pid), flags | all).unwrap();
        assert!(!runs(pid), "it is a zombie");
        child.wait().unwrap();
    }

    #[test]
    fn the_pidfile_of_a_process_that_runs_is_refused_and_stays() {
        let own = std::process::id().to_string();
        let (_folder, path) = with(&own);
        assert!(refused(&path, PidfileRule::Agent).contains(&format!("process {own}, which runs")));
        assert_eq!(fs::read_to_string(&path).unwrap(), own);
    }

    #[test]
    fn a_file_that_is_no_pidfile_is_refused_and_stays() {
        for content in ["precious", "-1", "12 13", "111111111111111111111111111"] {
            let (_folder, path) = with(content);
            assert!(refused(&path, PidfileRule::Agent).contains("no process id"), "{content}");
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
    }

    #[test]
    fn a_pidfile_in_no_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for rule in [PidfileRule::Agent, PidfileRule::Criu] {
            Pidfile::claim(&folder.path().join("pid"), rule).unwrap();
            Pidfile::claim(&folder.path().join("no/pid"), rule).unwrap_err();
        }
    }

    #[test]
    fn criu_refuses_every_pidfile_that_exists() {
        for content in [String::new(), ended().to_string()] {
            let (_folder, path) = with(&content);
            assert!(refused(&path, PidfileRule::Criu).contains("exists already"));
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
    }

    #[test]
    fn a_daemon_that_ends_removes_its_own_pidfile_and_no_other() {
        let own = std::process::id().to_string();
        for (rule, content, stays) in [
            (PidfileRule::Agent, &*own, false),
            (PidfileRule::Agent, "1", true),
            (PidfileRule::Criu, &*own, true),
        ] {
            let (_folder, path) = with(content);
            Pidfile { path: path.clone(), rule }.release();
            assert_eq!(path.exists(), stays, "{rule:?} {content}");
        }
    }
}
