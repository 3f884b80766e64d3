// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts other programs, with errors that name the program and quote its last output.

use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, bail};

/// Lines that are printed of a failed step.
const LAST_LINES: usize = 15;

/// Runs to the end with this terminal; an exit status other than 0 is an error.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| cannot_start(command))?;
    if !status.success() {
        bail!("`{}` failed: {status}", line(command));
    }
    Ok(())
}

/// Runs to the end in silence and returns standard output; the error quotes the program's error output.
pub(crate) fn capture(command: &mut Command) -> anyhow::Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| cannot_start(command))?;
    if !output.status.success() {
        bail!("`{}` failed: {}: {}", line(command), output.status, complaint(&output));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A failed step: one line that quotes its error output, and its last lines.
#[derive(Debug)]
pub(crate) struct Failed {
    error: String,
    last: Vec<String>,
}

impl Failed {
    /// Prints its last lines, each after `prefix`; returns the error.
    pub(crate) fn shown(&self, prefix: &str) -> anyhow::Error {
        self.last.iter().for_each(|line| eprintln!("{prefix}| {line}"));
        anyhow::anyhow!("{}", self.error)
    }

    /// Whether its last lines contain that text.
    pub(crate) fn says(&self, words: &str) -> bool {
        self.last.iter().any(|line| line.contains(words))
    }
}

/// Runs to the end in silence.
pub(crate) fn step(command: &mut Command) -> Result<(), Failed> {
    let output = match command.stdin(Stdio::null()).output() {
        Ok(output) => output,
        Err(error) => {
            return Err(Failed { error: format!("{}: {error}", cannot_start(command)), last: vec![] });
        }
    };
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout.as_slice(), output.stderr.as_slice()].map(String::from_utf8_lossy).concat();
    let error = format!("`{}` failed: {}: {}", line(command), output.status, complaint(&output));
    Err(Failed { error, last: last_lines(&text).into_iter().map(str::to_owned).collect() })
}

/// The lines at the end of a log that give the reason.
pub(crate) fn last_lines(text: &str) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].to_vec()
}

/// Runs to the end with this terminal for error output, and returns standard output.
pub(crate) fn listen(command: &mut Command) -> anyhow::Result<String> {
    let output = command.stderr(Stdio::inherit()).output().with_context(|| cannot_start(command))?;
    if !output.status.success() {
        bail!("`{}` failed: {}", line(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a program of this name is on the path.
pub(crate) fn on_path(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(name).is_file())
}

/// The command as one would type it, without quoting and without `-o` settings: apt's fill a screen.
fn line(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    let mut arguments = command.get_args();
    while let Some(word) = arguments.next() {
        if word == "-o" {
            arguments.next();
        } else {
            words.push(word.to_string_lossy().into_owned());
        }
    }
    words.join(" ")
}

fn cannot_start(command: &Command) -> String {
    format!("start `{}`", command.get_program().to_string_lossy())
}

/// The first error lines in apt's and CRIU's style, or else the last line.
fn complaint(output: &Output) -> String {
    let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
    if text.trim().is_empty() {
        text = String::from_utf8_lossy(&output.stdout).into_owned();
    }
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let marked =
        |line: &&&str| line.starts_with("E: ") || line.starts_with("Err:") || line.contains("Error (");
    let errors: Vec<&str> = lines.iter().filter(marked).take(3).copied().collect();
    let text = match (errors.is_empty(), lines.last()) {
        (false, _) => errors.join("; "),
        (true, Some(last)) => (*last).to_owned(),
        (true, None) => "it printed nothing".to_owned(),
    };
    text.trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_failure_names_the_program_and_quotes_its_error_lines() {
        let error = capture(&mut shell("echo noise; echo 'E: no such suite' >&2; echo bye >&2; exit 100"));
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("`sh -c ") && error.ends_with(": E: no such suite"), "{error}");
    }

    #[test]
    fn settings_are_left_out_of_the_command_line() {
        let mut command = Command::new("apt-get");
        command.args(["-o", "Dir::State=/x", "update", "-o", "a=b"]);
        assert_eq!(line(&command), "apt-get update");
    }

    #[test]
    fn a_failure_without_error_lines_quotes_the_last_line() {
        let error = capture(&mut shell("echo first >&2; echo last >&2; exit 1")).unwrap_err().to_string();
        assert!(error.ends_with("last"), "{error}");
    }

    #[test]
    fn of_a_long_log_the_last_lines_are_shown() {
        let log: String = (1..=20).map(|number| format!("line {number}  \n\n")).collect();
        let lines = last_lines(&log);
        assert_eq!((lines.len(), lines[0], lines[14]), (LAST_LINES, "line 6", "line 20"));
        assert_eq!(last_lines("one\n"), ["one"]);
    }

    #[test]
    fn a_step_that_fails_is_an_error_with_its_complaint() {
        let failed = step(&mut shell("echo noise; echo 'E: no such package' >&2; exit 100")).unwrap_err();
        assert!(failed.error.ends_with(": E: no such package"), "{failed:?}");
        assert_eq!(failed.last, ["noise", "E: no such package"]);
        step(&mut shell("echo fine")).unwrap();
    }

    #[test]
    fn success_gives_standard_output() {
        assert_eq!(capture(&mut shell("echo out; echo err >&2")).unwrap(), "out\n");
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let error = run(&mut Command::new("no-such-program-here")).unwrap_err();
        assert!(format!("{error:#}").contains("start `no-such-program-here`"));
    }
}
