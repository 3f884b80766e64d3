// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line of `criu dump` and `criu restore`, and the errors in a log.

use std::path::Path;
use std::process::Command;

use crate::names::printable;

/// Returns `PROGRAM ACT OPTIONS -D IMAGES -W WORK`, with a log and a folder of plugins if there are. The
/// caller may add other options.
#[must_use]
pub fn command(
    program: &Path,
    act: &str,
    options: &[&str],
    [images, work]: [&Path; 2],
    log: Option<&Path>,
    plugins: Option<&Path>,
) -> Command {
    let mut command = Command::new(program);
    command.arg(act).args(options).arg("-D").arg(images).arg("-W").arg(work);
    if let Some(log) = log {
        command.arg("-o").arg(log);
    }
    if let Some(folder) = plugins {
        command.arg("--libdir").arg(folder);
    }
    command
}

/// Returns the context of an error of starting CRIU.
#[must_use]
pub fn starting(program: &Path) -> String {
    format!("starting {} (name it with --criu)", program.display())
}

/// Returns the last lines, at most `most`, that CRIU or `rewake lazy-pages` marks as errors in a log. A log
/// has names that the dumped program has chosen, so the lines are made printable.
#[must_use]
pub fn error_lines(log: &str, most: usize) -> Vec<String> {
    let is_error = |line: &&str| line.contains("Error (") || line.contains("ERROR");
    last(&log.lines().filter(is_error).collect::<Vec<_>>(), most)
}

/// As [`error_lines`], but of a log without errors the last lines that are not empty.
#[must_use]
pub fn error_or_last_lines(log: &str, most: usize) -> Vec<String> {
    let errors = error_lines(log, most);
    if !errors.is_empty() {
        return errors;
    }
    last(&log.lines().filter(|line| !line.trim().is_empty()).collect::<Vec<_>>(), most)
}

fn last(lines: &[&str], most: usize) -> Vec<String> {
    lines[lines.len().saturating_sub(most)..].iter().map(|line| printable(line.as_bytes())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_shows_its_last_errors_or_else_its_last_lines() {
        assert_eq!(error_lines("a\nError (x): one\nb\nError (y): two\n", 1), ["Error (y): two"]);
        assert_eq!(error_lines("a\n", 4), [""; 0]);
        assert_eq!(error_or_last_lines("a\nError (x): one\nb\n", 4), ["Error (x): one"]);
        assert_eq!(error_or_last_lines("1\n2\n3\n\n4\n5\n", 4), ["2", "3", "4", "5"]);
        assert_eq!(error_or_last_lines("", 4), [""; 0]);
    }

    #[test]
    fn an_error_of_a_log_is_no_command_to_a_terminal() {
        assert_eq!(error_lines("a\nError (x): b\u{1b}[2J\n", 4), ["Error (x): b\\u{1b}[2J"]);
    }
}
