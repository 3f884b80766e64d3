// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gets facts from CRIU: the only program that the doctor runs.

use std::env;
use std::ffi::OsStr;
use std::io::{self, Read as _, Seek as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rewake_process::descriptors::memory_file;

/// How long one CRIU command may take; `criu check` takes well under a second.
const COMMAND_LIMIT: Duration = Duration::from_secs(10);
/// How many bytes of its output are read.
const OUTPUT_BYTES: u64 = 64 * 1024;

/// The result of one command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Whether it exited with 0.
    pub success: bool,
    /// What it wrote.
    pub text: String,
}

/// The CRIU that was found, and its answers or why it gave none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CriuProgram {
    /// The program.
    pub path: PathBuf,
    /// `criu --version`.
    pub version: Result<Answer, String>,
    /// `criu check`.
    pub check: Result<Answer, String>,
    /// `criu check --feature mem_dirty_track`.
    pub dirty_tracking: Result<Answer, String>,
}

/// Finds CRIU (the environment variable CRIU, else `criu` on the path) and runs its commands.
///
/// # Errors
/// CRIU is not found; the error says where it was searched.
pub fn examine() -> Result<CriuProgram, String> {
    let path = locate()?;
    let run = |arguments: &[&str]| run(&path, arguments, COMMAND_LIMIT).map_err(|error| error.to_string());
    let version = run(&["--version"]);
    let check = run(&["check"]);
    let dirty_tracking = run(&["check", "--feature", "mem_dirty_track"]);
    Ok(CriuProgram { version, check, dirty_tracking, path })
}

fn locate() -> Result<PathBuf, String> {
    let chosen = env::var_os("CRIU").filter(|value| !value.is_empty());
    let name = chosen.as_deref().unwrap_or_else(|| OsStr::new("criu"));
    let found = if name.as_bytes().contains(&b'/') {
        Some(PathBuf::from(name)).filter(|path| path.is_file())
    } else {
        on_path(name)
    };
    found.ok_or_else(|| match &chosen {
        Some(value) => {
            format!("the environment variable CRIU is {}, and no such program exists", value.display())
        }
        None => "no `criu` on the path".into(),
    })
}

fn on_path(name: &OsStr) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|directory| directory.join(name)).find(|path| path.is_file())
}

/// Runs a command for `limit` at most.
fn run(path: &Path, arguments: &[&str], limit: Duration) -> io::Result<Answer> {
    // A file and not a pipe: a process that the command leaves running could keep a pipe open.
    let mut output = memory_file(c"criu-output", 0)?;
    let mut command = Command::new(path);
    command.args(arguments).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output.try_clone()?);
    let status = wait(command.spawn()?, limit)?;
    output.rewind()?;
    let mut bytes = Vec::new();
    output.take(OUTPUT_BYTES).read_to_end(&mut bytes)?;
    Ok(Answer { success: status.success(), text: String::from_utf8_lossy(&bytes).into_owned() })
}

fn wait(mut child: Child, limit: Duration) -> io::Result<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::other(format!("no answer within {} s", limit.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_outputs_and_the_exit_code_are_the_answer() {
        let answer =
            run(Path::new("/bin/sh"), &["-c", "echo one; echo two >&2; exit 3"], COMMAND_LIMIT).unwrap();
        assert_eq!(answer, Answer { success: false, text: "one\ntwo\n".into() });
    }

    #[test]
    fn a_command_that_does_not_end_is_killed() {
        let began = Instant::now();
        let error =
            run(Path::new("/bin/sh"), &["-c", "exec sleep 1000"], Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("no answer"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(100));
    }

    #[test]
    fn a_missing_program_is_an_error() {
        assert!(run(Path::new("/nowhere/criu"), &[], COMMAND_LIMIT).is_err());
    }
}
