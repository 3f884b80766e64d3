// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rules for every file, for documents and for manifests.

use std::path::{Component, Path, PathBuf};

use super::{Document, Finding, SKIPPED};

/// Split, so that this file does not find itself.
const NOTES: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];
/// Folders that exist on one person's machine.
const PRIVATE: [&str; 5] = [
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("/Us", "ers/"),
    concat!("/tmp/pr", "oto"),
];
/// Characters of a line of a document, as many as of a Rust line: `max_width` in `rustfmt.toml`.
const WIDTH: usize = 110;
/// The document whose paths may be paths of an earlier state.
pub(super) const CHANGELOG: &str = "CHANGELOG.md";

pub(super) fn check(root: &Path, document: &Document) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in document.text.lines().enumerate() {
        findings.extend(notes(document, number, line));
        findings.extend(private_paths(document, number, line));
        if document.path.ends_with(".md") {
            findings.extend(links(root, document, number, line));
        }
        if document.path.ends_with(".md") && document.path != CHANGELOG {
            findings.extend(named_files(root, document, number, line));
        }
    }
    if document.path.ends_with(".md") {
        findings.extend(wide_lines(document));
    }
    if document.path.ends_with("Cargo.toml") {
        findings.extend(licence(document));
    }
    findings
}

/// Lines of prose, lists and tables that are too wide. Code blocks hold what programs print, however wide.
fn wide_lines(document: &Document) -> Vec<Finding> {
    let width = |line: &str| line.chars().count();
    let prose = lines(&document.text).filter(|(_, is_code, _)| !is_code);
    let wide = prose.filter(|(_, _, line)| width(line) > WIDTH);
    let advice =
        |line| format!("{} characters, at most {WIDTH}: wrap it, or make the table a list", width(line));
    wide.map(|(number, _, line)| document.finding(number, "width", advice(line))).collect()
}

/// The lines of a document with their numbers, and whether each is in a code block.
pub(super) fn lines(text: &str) -> impl Iterator<Item = (usize, bool, &str)> {
    let mut is_code = false;
    text.lines().enumerate().map(move |(number, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (number, is_code || is_fence, line)
    })
}

fn notes(document: &Document, number: usize, line: &str) -> Option<Finding> {
    let word = NOTES.iter().find(|word| {
        let alone = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        line.match_indices(*word).any(|(at, _)| {
            alone(line[..at].chars().next_back()) && alone(line[at + word.len()..].chars().next())
        })
    })?;
    Some(document.finding(
        number,
        "note",
        format!("{word}: do it now, or open an issue and say nothing here"),
    ))
}

fn private_paths(document: &Document, number: usize, line: &str) -> Option<Finding> {
    // A path with such a part inside, as in `docs/work/`, is no finding.
    let begins = |at: usize| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| c.is_whitespace() || "\"'`(=:<[,".contains(c))
    };
    let path = PRIVATE.iter().find(|path| line.match_indices(*path).any(|(at, _)| begins(at)))?;
    Some(document.finding(
        number,
        "private-path",
        format!("{path} exists on one machine only: use a relative path"),
    ))
}

/// Inline links `[text](target)`, relative to the document.
fn links(root: &Path, document: &Document, number: usize, line: &str) -> Vec<Finding> {
    let folder = Path::new(&document.path).parent().unwrap_or_else(|| Path::new(""));
    let mut findings = Vec::new();
    for (at, _) in line.match_indices("](") {
        let rest = &line[at + 2..];
        let Some(end) = rest.find(')') else { continue };
        let target = rest[..end].split_whitespace().next().unwrap_or_default();
        let target = target.split('#').next().unwrap_or_default();
        if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        if !normal(&root.join(folder).join(target)).exists() {
            findings.push(document.finding(
                number,
                "link",
                format!("{target} does not exist: correct the link"),
            ));
        }
    }
    findings
}

/// Paths in backquotes that begin with a folder or file of the root, except folders without files of this
/// project.
fn named_files(root: &Path, document: &Document, number: usize, line: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for name in inline_code(line) {
        let pattern = name.contains(|c: char| c.is_whitespace() || "*<>{}$:".contains(c));
        let first = name.split('/').next().unwrap_or_default();
        let is_ours = !first.is_empty() && !SKIPPED.contains(&first) && root.join(first).exists();
        if pattern || !is_ours || !name.contains('/') {
            continue;
        }
        if !root.join(name).exists() {
            let advice = format!("{name} does not exist: say where it went");
            findings.push(document.finding(number, "path", advice));
        }
    }
    findings
}

/// What a line has between backticks.
pub(super) fn inline_code(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Resolves `..` by itself: the file system would need the folder before it to exist.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

/// Packages take their licence from the workspace, unless they are a workspace of their own.
fn licence(document: &Document) -> Option<Finding> {
    let lines: Vec<String> =
        document.text.lines().map(|line| line.chars().filter(|c| !c.is_whitespace()).collect()).collect();
    let package = lines.iter().position(|line| line == "[package]")?;
    let fine = ["license.workspace=true", "license={workspace=true}", "[workspace]"];
    if lines.iter().any(|line| fine.contains(&line.as_str())) {
        return None;
    }
    Some(document.finding(package, "licence", "add `license.workspace = true` to [package]"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repository;

    fn found(path: &str, text: &str) -> Vec<(usize, &'static str)> {
        let document = Document { path: path.to_owned(), text: text.to_owned() };
        check(repository::root(), &document).iter().map(|finding| (finding.line, finding.rule)).collect()
    }

    #[test]
    fn notes_to_oneself_are_found_but_not_words_that_contain_them() {
        for word in NOTES {
            assert_eq!(found("a.rs", &format!("fine\n// {word}: later\n")), [(2, "note")]);
            assert_eq!(found("a.rs", &format!("X{word}X = MAS{word}N\n")), []);
        }
    }

    #[test]
    fn folders_of_one_machine_are_found_but_not_such_parts_of_a_path() {
        for path in PRIVATE {
            assert_eq!(found("a.md", &format!("see `{path}x`\n")), [(1, "private-path")], "{path}");
            assert_eq!(found("a.sh", &format!("cp $base{path}x .\n")), [], "{path}");
        }
    }

    #[test]
    fn wide_lines_of_documents_are_found_but_not_those_of_code_blocks() {
        let (fits, wide) = ("é".repeat(WIDTH), "é".repeat(WIDTH + 1));
        assert_eq!(
            found("docs/a.md", &format!("{fits}\n{wide}\n| {fits} |\n")),
            [(2, "width"), (3, "width")]
        );
        assert_eq!(found("docs/a.md", &format!("* a\n  ```\n{wide}\n  ```\n{wide}\n")), [(5, "width")]);
        assert_eq!(found("a.sh", &format!("{wide}\n")), [], "rustfmt and reviews look at code");
    }

    #[test]
    fn links_to_nothing_are_found() {
        assert_eq!(found("docs/a.md", "[x](../Cargo.toml#top) [y](nowhere.md)\n"), [(1, "link")]);
        assert_eq!(found("docs/a.md", "[x](https://a.test/b) [y](#here) [z](mailto:a@b.test)\n"), []);
        assert_eq!(found("docs/a.rs", "a[0](nowhere)\n"), [], "only documents have links");
    }

    #[test]
    fn files_that_a_document_names_must_exist() {
        let text =
            "`xtask/src/main.rs` `xtask/src/gone.rs` `crates/*/src` `and/or` `Vec<u8>` `target/debug/x`\n";
        assert_eq!(found("docs/other.md", text), [(1, "path")]);
        assert_eq!(found(CHANGELOG, text), []);
    }

    #[test]
    fn packages_without_the_workspace_licence_are_found() {
        assert_eq!(found("x/Cargo.toml", "# c\n[package]\nname = \"x\"\n"), [(2, "licence")]);
        assert_eq!(found("x/Cargo.toml", "[package]\nlicense.workspace = true\n"), []);
        assert_eq!(found("x/Cargo.toml", "[package]\nlicense = { workspace = true }\n"), []);
        assert_eq!(found("x/fuzz/Cargo.toml", "[package]\nlicense = \"MIT\"\n[workspace]\n"), []);
        assert_eq!(found("Cargo.toml", "[workspace]\nmembers = []\n"), []);
    }
}
