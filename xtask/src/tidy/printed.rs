// SPDX-License-Identifier: MIT OR Apache-2.0
//! Printed commands: each fenced block of the README and of `docs` says that a test runs it, or why none
//! does.

use std::fs;
use std::path::Path;

use super::{Document, Finding};

const RULE: &str = "printed-commands";
/// Languages of blocks without commands.
const DATA: [&str; 5] = ["text", "json", "yaml", "toml", "nginx"];
/// How commands begin.
const COMMANDS: [&str; 7] = ["rewake ", "criu ", "cargo ", "hostA$ ", "hostB$ ", "runc ", "podman "];
/// What drawings have. Their lines may begin with the name of a command.
const DRAWN: [char; 4] = ['─', '│', '▶', '◀'];

pub(super) fn check(root: &Path, document: &Document) -> Vec<Finding> {
    if document.path != "README.md" && !(document.path.starts_with("docs/") && document.path.ends_with(".md"))
    {
        return Vec::new();
    }
    let lines: Vec<&str> = document.text.lines().collect();
    let (mut findings, mut open) = (Vec::new(), None::<&str>);
    for (number, line) in lines.iter().enumerate() {
        let advice = match (line.trim_start().strip_prefix("```"), open) {
            (Some(info), None) => {
                open = Some(if is_drawing(&lines[number + 1..]) { "a drawing" } else { info });
                classified(root, info).err()
            }
            (Some(_), Some(_)) => {
                open = None;
                None
            }
            (None, Some("text")) if is_command(line) => {
                Some("a command in a block of text: see above".to_owned())
            }
            _ => None,
        };
        findings.extend(advice.map(|advice| document.finding(number, RULE, advice)));
    }
    findings
}

fn is_command(line: &str) -> bool {
    COMMANDS.iter().any(|command| line.starts_with(command))
}

/// Whether the block that these lines begin is a drawing.
fn is_drawing(lines: &[&str]) -> bool {
    lines.iter().take_while(|line| !line.trim_start().starts_with("```")).any(|line| line.contains(DRAWN))
}

/// Checks what is behind a fence.
fn classified(root: &Path, info: &str) -> Result<(), String> {
    let name = info.strip_prefix("sh run=");
    let is_reason = |reason: &str| !reason.trim().is_empty();
    match name {
        Some(name) if is_run(root, name) => Ok(()),
        Some(name) => Err(format!("no test below tests/ has recipe(\"{name}\", ...): write one")),
        None if DATA.contains(&info) || info.strip_prefix("sh not-run:").is_some_and(is_reason) => Ok(()),
        None => Err(format!(
            "```{info}: expected `sh run=NAME` for commands that a test runs, `sh not-run: WHY`, or one of \
             {}",
            DATA.join(", ")
        )),
    }
}

/// Whether a test runs the block of this name.
fn is_run(root: &Path, name: &str) -> bool {
    let call = format!("recipe(\"{name}\"");
    let files = super::files(&root.join("tests")).unwrap_or_default();
    let rust = files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    rust.into_iter().any(|path| fs::read_to_string(path).is_ok_and(|text| text.contains(&call)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repository;

    fn findings(path: &str, text: &str) -> Vec<usize> {
        let document = Document { path: path.to_owned(), text: text.to_owned() };
        let findings = check(repository::root(), &document);
        findings.into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_block_says_what_runs_it_or_why_nothing_does() {
        let right = "```text\nx\n```\n```sh not-run: why\nrewake x\n```\n```sh run=certificates\nx\n```\n";
        assert_eq!(findings("docs/a.md", right), []);
        for wrong in ["", "sh", "bash", "sh not-run:", "sh not-run: ", "sh run=", "sh run=nothing-like-it"] {
            assert_eq!(findings("README.md", &format!("a\n```{wrong}\nrewake x\n```\n")), [2], "{wrong}");
        }
        assert_eq!(findings("tests/README.md", "```\nx\n```\n"), []);
    }

    #[test]
    fn a_command_is_not_called_text() {
        assert_eq!(findings("docs/a.md", "```text\nrewake y ──▶ z\nrewake x\n```\n"), []);
        assert_eq!(findings("docs/a.md", "```text\nrewake x\n rewake\n```\n"), [2]);
    }
}
