// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words that `docs/glossary.md` replaces, in files whose text was rewritten.

use super::{Document, Finding};

/// Files and folders whose text was rewritten.
const REWRITTEN: [&str; 37] = [
    "README.md",
    "docs/containers.md",
    "docs/decisions/0010-placeholders.md",
    "docs/decisions/0011-registered-memory.md",
    "docs/decisions/0013-a-streamer-for-each-restore.md",
    "docs/decisions/0014-the-same-bytes-once.md",
    "docs/doctor.md",
    "docs/gpu-placement.md",
    "docs/inspect.md",
    "docs/performance.md",
    "docs/proved.md",
    "docs/setup.md",
    "docs/vm.md",
    "page-server/src/criu_args.rs",
    "page-server/src/doctor/",
    "page-server/src/inspect/",
    "page-server/src/logging.rs",
    "page-server/src/sparse.rs",
    "plugin/",
    "proto/",
    "crates/amdgpu-uapi/src/",
    "crates/bo-contents/",
    "crates/criu-images/src/",
    "crates/criu-plugin/",
    "crates/image-io/",
    "crates/ioctl-filter/",
    "crates/pager/",
    "crates/plugin-protocol/src/",
    "crates/plugin-session/",
    "crates/process/",
    "crates/ptrace-inject/",
    "crates/sdma-copy/",
    "crates/streamer/src/cpu/",
    "crates/streamer/src/ledger/",
    "crates/streamer/src/session/",
    "crates/streamer/src/supervise/",
    "crates/uffd/",
];

/// Words, and what to write in their place.
const WORDS: [(&str, &str); 9] = [
    ("told", "the actor and the verb: reports, names, knows"),
    ("whoever", "the actor: the thread, the caller"),
    ("nobody", "`no process`, `no thread`, `no caller`"),
    ("somebody", "the actor: the thread, the caller"),
    ("goes on", "`continues`, `is resumed`"),
    ("go on", "`continue`, `are resumed`"),
    ("comes behind", "`is loaded in the background`"),
    ("is there", "`exists`, `is resident`"),
    ("are there", "`exist`, `are resident`"),
];

pub(super) fn check(document: &Document) -> Vec<Finding> {
    let path = &document.path;
    if !REWRITTEN.iter().any(|rewritten| path.starts_with(rewritten)) {
        return Vec::new();
    }
    let lines = document.text.lines().enumerate();
    let found = lines.flat_map(|(number, line)| {
        let words = WORDS.iter().filter(|(word, _)| has_word(line, word));
        words.map(move |(word, instead)| (number, format!("{word:?}: write {instead} (docs/glossary.md)")))
    });
    found.map(|(number, advice)| document.finding(number, "words", advice)).collect()
}

/// Whether a line has a word, whatever its case. A part of a longer word or name is none.
fn has_word(line: &str, word: &str) -> bool {
    let line = line.to_ascii_lowercase();
    let borders = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let alone = |at: usize| {
        borders(line[..at].chars().next_back()) && borders(line[at + word.len()..].chars().next())
    };
    line.match_indices(word).any(|(at, _)| alone(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<usize> {
        let document = Document { path: path.to_owned(), text: text.to_owned() };
        check(&document).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_replaced_word_is_found_in_a_rewritten_file_only() {
        let text = "//! Whoever waits.\nfn untold() {}\n// It goes on.\n";
        assert_eq!(found("crates/pager/src/plan.rs", text), [1, 3]);
        assert_eq!(found("bench/src/lib.rs", text), [0; 0]);
    }
}
