// SPDX-License-Identifier: MIT OR Apache-2.0
//! The processes of the demo without GPUs, which end with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::{files, repository};
use anyhow::{Context as _, bail, ensure};

/// The test suite's target program: fills memory, says "ready" through a file, waits for the file "go",
/// checks every byte, writes "OK" or what is wrong to the file "verdict".
pub(super) struct Target {
    /// The started process; a restored one is no child.
    child: Option<Child>,
    pid: u32,
    files: PathBuf,
}

impl Target {
    /// Returns when the memory is filled.
    pub(super) fn start(program: &Path, files: &Path, mib: u64, limit: Duration) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.args(["random", "--mib", &mib.to_string(), "--dir"]).arg(files);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        let mut target = Self { pid: child.id(), child: Some(child), files: files.to_owned() };
        wait_until(limit, "the process did not get ready", || {
            ensure!(target.is_first_life_running()?, "the process ended before it was ready");
            Ok(target.files.join("ready").exists())
        })?;
        Ok(target)
    }

    /// The same before the dump and after each restore.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Collects the dumped process, so that its pid is free, and lets the restored one check its memory at
    /// once, in one pass.
    pub(super) fn dumped(mut self) -> anyhow::Result<Self> {
        if let Some(mut child) = self.child.take() {
            child.wait().context("collect the dumped process")?;
        }
        for name in ["go", "stop"] {
            let path = self.files.join(name);
            files::write(&path, "")?;
        }
        Ok(self)
    }

    /// The verdict of the restored process, which has ended: its memory must be right.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let verdict = fs::read_to_string(self.verdict()).unwrap_or_default();
        if verdict.trim() != "OK" {
            bail!("the restored process has wrong memory: {verdict:?}");
        }
        Ok(())
    }

    /// Removes the verdict, for another restore.
    pub(super) fn again(&self) -> anyhow::Result<()> {
        fs::remove_file(self.verdict()).context("remove the verdict")
    }

    fn verdict(&self) -> PathBuf {
        self.files.join("verdict")
    }

    fn is_first_life_running(&mut self) -> anyhow::Result<bool> {
        let Some(child) = &mut self.child else { return Ok(false) };
        Ok(child.try_wait().context("look after the process")?.is_none())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        } else if is_running(self.pid) {
            let _ = Command::new("kill").args(["-KILL", &self.pid.to_string()]).status();
        }
    }
}

/// Plays a demo in an empty folder, which is left there if it fails.
pub(super) fn in_folder(home: &Path, play: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    files::empty_folder(home)?;
    play().with_context(|| format!("the demo's images and logs are left in {}", home.display()))?;
    files::remove(home)
}

/// Keeps the trace of a restore that had this work folder, and returns its path.
pub(super) fn keep_trace(work: &Path) -> anyhow::Result<PathBuf> {
    let kept = repository::target()?.join("demo-trace.json");
    files::copy(&work.join("rewake-trace.json"), &kept)?;
    Ok(kept)
}

/// The bytes of the files in a folder whose names begin so.
pub(super) fn bytes_of(folder: &Path, beginning: &str) -> anyhow::Result<u64> {
    let mut all = files::list(folder)?;
    all.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(beginning)));
    let bytes = all.iter().filter_map(|path| path.metadata().ok()).map(|found| found.len()).sum();
    ensure!(bytes > 0, "the dump wrote no {beginning:?} to {}", folder.display());
    Ok(bytes)
}

/// `criu restore` or `rewake restore`, which stays as the parent of the restored process and collects it.
/// With `-d` init would, and a container's init may leave the pid taken for ever.
pub(super) struct Restore {
    criu: Child,
    log: PathBuf,
}

impl Restore {
    /// Starts a restore, and returns when the process runs again: CRIU runs a script then. `command` has the
    /// image and the work directory already, and ends with options for CRIU.
    pub(super) fn start(mut command: Command, work: &Path, limit: Duration) -> anyhow::Result<Self> {
        let (script, resumed, log) = (work.join("on-event"), work.join("resumed"), work.join("restore.log"));
        files::write_program(&script, ON_EVENT)?;
        // CRIU's current folder is the work folder, and it passes the name to a shell: a relative name needs
        // no quoting.
        command.args(["-o", "restore.log", "--action-script", "./on-event"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut restore = Self { criu: command.spawn().context("start the restore")?, log };
        wait_until(limit, "`criu restore` did not finish", || {
            let resumed = resumed.exists();
            ensure!(
                resumed || restore.criu.try_wait()?.is_none(),
                "`criu restore` failed: {}",
                last_error(&restore.log)
            );
            Ok(resumed)
        })?;
        files::remove(&resumed)?;
        Ok(restore)
    }

    /// Waits for the end of the restored process, whose status must be 0.
    pub(super) fn ended(mut self, limit: Duration) -> anyhow::Result<()> {
        let mut end = None;
        wait_until(limit, "the restored process did not end", || {
            end = self.criu.try_wait()?;
            Ok(end.is_some())
        })?;
        ensure!(end.is_some_and(|status| status.success()), "the restore failed: {end:?}");
        Ok(())
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        // It may have ended already. The restored process belongs to the target, which ends it.
        let _ = self.criu.kill();
        let _ = self.criu.wait();
    }
}

/// CRIU runs it at every event of a restore.
const ON_EVENT: &str = "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" != post-resume ] || : > resumed\n";

/// The last error of a CRIU log.
fn last_error(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let error = text.lines().rfind(|line| line.contains("Error (")).unwrap_or("no error in its log");
    format!("{error} (log: {})", log.display())
}

/// Waits until `done`, or fails.
pub(super) fn wait_until(
    limit: Duration,
    failure: &str,
    mut done: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let start = Instant::now();
    while !done()? {
        ensure!(start.elapsed() < limit, "{failure} within {} s", limit.as_secs());
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Whether a process of this pid exists and is no zombie.
fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may hold any character.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_ended_are_not_running_even_as_zombies() {
        assert!(is_running(std::process::id()));
        let mut child = Command::new("true").spawn().unwrap();
        wait_until(Duration::from_secs(10), "still running", || Ok(!is_running(child.id()))).unwrap();
        child.wait().unwrap();
        assert!(!is_running(child.id()));
    }

    #[test]
    fn the_last_error_of_a_log_is_quoted() {
        let log = std::env::temp_dir().join(format!("rewake-log-{}", std::process::id()));
        fs::write(&log, "fine\nError (a.c:1): first\nError (b.c:2): last\nfine\n").unwrap();
        let error = last_error(&log);
        fs::remove_file(&log).unwrap();
        assert!(error.starts_with("Error (b.c:2): last (log: "), "{error}");
        assert!(last_error(&log).starts_with("no error in its log"));
    }

    #[test]
    fn a_demo_begins_in_an_empty_folder_and_knows_its_pages() {
        let home = std::env::temp_dir().join(format!("rewake-demo-{}", std::process::id()));
        files::create_folder(&home).unwrap();
        files::write(home.join("pages-1.img"), "old").unwrap();
        let played = in_folder(&home, || {
            assert!(bytes_of(&home, "pages-").is_err(), "the old image was removed");
            files::write(home.join("pages-1.img"), [0; 10])?;
            files::write(home.join("pages-2.img"), [0; 5])?;
            files::write(home.join("pagemap-1.img"), [0; 7])?;
            assert_eq!((bytes_of(&home, "pages-")?, bytes_of(&home, "")?), (15, 22));
            bail!("no")
        });
        assert!(format!("{:#}", played.unwrap_err()).ends_with(": no") && home.exists());
        in_folder(&home, || Ok(())).unwrap();
        assert!(!home.exists());
    }

    #[test]
    fn waiting_has_a_limit() {
        let error = wait_until(Duration::ZERO, "nothing came", || Ok(false)).unwrap_err().to_string();
        assert_eq!(error, "nothing came within 0 s");
    }
}
