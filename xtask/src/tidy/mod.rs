// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask tidy`: the rules of style that neither rustfmt nor clippy checks. Also a test, at the end of
//! this file.
//!
//! * [`rust`]: rules for `.rs` files. [`text`]: rules for every file, documents and manifests.
//! * [`words`]: words that the glossary replaces, and phrases. [`names`]: such words in names of items and
//!   files. [`printed`]: commands that pages print.
//! * [`panics`]: lints against panics at the roots of crates. [`named_tests`]: tests that documents name.

mod named_tests;
mod names;
mod panics;
mod printed;
pub(crate) mod rust;
mod text;
mod words;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::repository;

/// Folders without files of this project, at any depth.
const SKIPPED: [&str; 3] = ["target", ".git", ".rewake"];
/// Files that tidy reads, by extension; scripts and cargo's own settings among them by name.
const EXTENSIONS: [&str; 9] = ["rs", "md", "toml", "proto", "sh", "c", "h", "yml", "yaml"];
const NAMES: [&str; 2] = ["run", "Makefile"];

/// One thing to change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Relative to the root.
    file: String,
    /// The line's number, from 1.
    line: usize,
    rule: &'static str,
    /// What to do.
    advice: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.file, self.line, self.rule, self.advice)
    }
}

/// A file of the repository.
#[derive(Debug)]
struct Document {
    /// Relative to the root, with `/`.
    path: String,
    text: String,
}

impl Document {
    /// A finding at `line` (from 0).
    fn finding(&self, line: usize, rule: &'static str, advice: impl Into<String>) -> Finding {
        Finding { file: self.path.clone(), line: line + 1, rule, advice: advice.into() }
    }
}

/// Prints every finding; an error if there is one.
pub(crate) fn check() -> anyhow::Result<()> {
    let findings = findings(repository::root())?;
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => Ok(()),
        count => bail!("tidy: {count} findings"),
    }
}

fn findings(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let read = |path: PathBuf| {
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let path = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        Ok(Document { path, text: String::from_utf8_lossy(&bytes).into_owned() })
    };
    let documents = files(root)?.into_iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
    let mut findings = Vec::new();
    for document in &documents {
        findings.extend(text::check(root, document));
        findings.extend(words::check(document));
        findings.extend(printed::check(root, document));
        findings.extend(panics::check(document));
        if document.path.ends_with(".rs") {
            findings.extend(rust::check(document));
            findings.extend(names::check(document));
        }
        if document.path.ends_with(".md") && document.path != text::CHANGELOG {
            findings.extend(named_tests::check(document, &documents));
        }
    }
    Ok(findings)
}

/// All files that the rules are about, in order.
pub(crate) fn files(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
            let entry = entry.with_context(|| format!("list {}", folder.display()))?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            let kind = entry.file_type().with_context(|| format!("look at {}", path.display()))?;
            let extension = path.extension().unwrap_or_default().to_string_lossy();
            if kind.is_dir() && !SKIPPED.contains(&name.as_ref()) {
                folders.push(path);
            } else if kind.is_file()
                && (EXTENSIONS.contains(&extension.as_ref()) || NAMES.contains(&name.as_ref()))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_repository_is_tidy() {
        let findings = findings(repository::root()).unwrap();
        let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
        assert!(lines.is_empty(), "\n{}", lines.join("\n"));
    }

    #[test]
    fn a_finding_is_one_line_that_editors_can_jump_to() {
        let document = Document { path: "a/b.rs".to_owned(), text: String::new() };
        assert_eq!(document.finding(6, "spdx", "do this").to_string(), "a/b.rs:7: spdx: do this");
    }

    #[test]
    fn build_folders_are_not_read() {
        let files = files(repository::root()).unwrap();
        assert!(files.iter().any(|path| path.ends_with("xtask/src/tidy/mod.rs")));
        assert!(files.iter().any(|path| path.ends_with(".ci/run")));
        assert!(!files.iter().any(|path| path.components().any(|part| part.as_os_str() == "target")));
    }
}
