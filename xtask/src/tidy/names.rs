// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words that identifiers and names of Rust files do not have, because the glossary has another word for the
//! thing.

use super::{Document, Finding};

/// Words of a name, and what to write in their place.
const WORDS: [(&str, &str); 11] = [
    ("touches", "`accesses`, or `page_faults`"),
    ("touched", "`accessed`"),
    ("toucher", "`accessor`"),
    ("twin", "`copy`, or `equal_` and the noun"),
    ("twins", "`equal_` and the noun, or `duplicates`"),
    ("unheld", "the reason: `no_bpf_lsm`"),
    ("shut", "`closed`, `close`"),
    ("tried", "the noun and what happened: `failing_calls`"),
    ("forgotten", "what was left out: `unclosed`, `dropped`"),
    ("scarce", "what is missing: `full_gpu`, `no_space`"),
    ("heir", "`successor`"),
];
/// Items whose names are checked.
const ITEMS: [&str; 8] = ["fn", "struct", "enum", "trait", "type", "mod", "const", "static"];

pub(super) fn check(document: &Document) -> Vec<Finding> {
    let mut findings = Vec::new();
    for name in document.path.split('/') {
        let stem = name.strip_suffix(".rs").unwrap_or(name);
        findings.extend(finding(document, 0, stem));
    }
    for (number, line) in document.text.lines().enumerate() {
        findings.extend(item(line).and_then(|name| finding(document, number, name)));
    }
    findings
}

fn finding(document: &Document, number: usize, name: &str) -> Option<Finding> {
    let parts = parts(name);
    let (word, instead) = WORDS.iter().find(|(word, _)| parts.iter().any(|part| part == word))?;
    let advice = format!("`{name}` has {word:?}: write {instead} (docs/glossary.md)");
    Some(document.finding(number, "name", advice))
}

/// The name of the item that a line declares.
fn item(line: &str) -> Option<&str> {
    // A declaration has only keywords before the item's own: `pub(crate) const unsafe fn`.
    let mut words = line.split_whitespace();
    let mut word = words.next()?;
    loop {
        let next = words.next()?;
        let is_name = next.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        if ITEMS.contains(&word) && is_name && !ITEMS.contains(&next) && !is_modifier(next) {
            return next.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next();
        }
        if !ITEMS.contains(&word) && !is_modifier(word) {
            return None;
        }
        word = next;
    }
}

fn is_modifier(word: &str) -> bool {
    ["async", "const", "extern", "unsafe", "\"C\""].contains(&word) || word.starts_with("pub")
}

/// The words of a name in lower case: `NotShut`, `NOT_SHUT` and `not_shut` have the same.
fn parts(name: &str) -> Vec<String> {
    let mut parts: Vec<String> = vec![String::new()];
    let mut was_lower = false;
    for c in name.chars() {
        if !c.is_ascii_alphanumeric() || (c.is_ascii_uppercase() && was_lower) {
            parts.push(String::new());
        }
        if c.is_ascii_alphanumeric() {
            parts.last_mut().expect("it has one part at least").push(c.to_ascii_lowercase());
        }
        was_lower = c.is_ascii_lowercase();
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<usize> {
        let document = Document { path: path.to_owned(), text: text.to_owned() };
        check(&document).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn replaced_words_are_found_in_every_declaration() {
        let declarations = [
            "    fn a_page_that_is_touched_again() {",
            "pub(crate) const unsafe fn shut(self) {",
            "pub async fn is_shut(&self) -> bool {",
            "struct NotShut;",
            "enum Tried {",
            "mod twins;",
            "pub static SCARCE: u32 = 1;",
            "const TOUCHED: [usize; 2] = [0, 1];",
            "type Toucher<'a> = &'a str;",
        ];
        for declaration in declarations {
            assert_eq!(found("crates/a/src/a.rs", &format!("//! A.\n{declaration}\n")), [2], "{declaration}");
        }
    }

    #[test]
    fn other_words_and_uses_are_not_found() {
        let text = "fn retried() {}\nconst fn accessed() {}\nstruct Shutdown;\nlet touched = shut(twin);\n";
        assert_eq!(found("crates/a/src/a.rs", text), [0; 0]);
    }

    #[test]
    fn names_of_files_and_folders_are_checked() {
        for path in ["tests/gpu/touches.rs", "tests/twins/mod.rs", "tests/page_unheld.rs"] {
            assert_eq!(found(path, ""), [1], "{path}");
        }
        assert_eq!(found("tests/gpu/cpu_access.rs", ""), [0; 0]);
    }
}
