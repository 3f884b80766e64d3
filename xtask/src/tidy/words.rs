// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words that `docs/glossary.md` replaces, in files whose text was rewritten.

use super::{Document, Finding, text};

/// Files and folders whose text was rewritten.
const REWRITTEN: [&str; 29] = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/",
    "tests/softgpu/README.md",
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

/// More of them, in documents only.
const PROSE: [(&str, &str); 14] = [
    ("tells", "`reports`, `shows`, `names`"),
    ("come back", "`are restored`"),
    ("comes back", "`is restored`"),
    ("stand still", "`are stopped`, `are evicted`"),
    ("stands still", "`is stopped`, `is evicted`"),
    ("let go of", "`release`, `close`"),
    ("lets go of", "`releases`, `closes`"),
    ("under way", "`in flight`, `running`"),
    ("memory behind", "`memory loaded in the background`"),
    ("there after", "`resident after`"),
    ("what is of", "the noun: `memory of`, `buffers of`"),
    ("memory of cpus", "`CPU memory`"),
    ("memory of gpus", "`GPU memory`"),
    ("gpus' memory", "`GPU memory`"),
];
/// The document that lists the replaced words.
const GLOSSARY: &str = "docs/glossary.md";

pub(super) fn check(document: &Document) -> Vec<Finding> {
    let path = &document.path;
    if path == GLOSSARY || !REWRITTEN.iter().any(|rewritten| path.starts_with(rewritten)) {
        return Vec::new();
    }
    let is_prose = path.ends_with(".md");
    let more: &[_] = if is_prose { &PROSE } else { &[] };
    // Code blocks of documents show what programs print.
    let lines = text::lines(&document.text).filter(|(_, is_code, _)| !(is_prose && *is_code));
    let found = lines.flat_map(|(number, _, line)| {
        let words = WORDS.iter().chain(more).filter(|(word, _)| has_word(line, word));
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

    #[test]
    fn documents_have_more_replaced_words_but_not_in_code_blocks_or_the_glossary() {
        let text = "It comes back.\n```\nIt goes on, memory behind it.\n```\nIt goes on.\n";
        assert_eq!(found("docs/vm.md", text), [1, 5]);
        assert_eq!(found("crates/pager/src/plan.rs", text), [3, 5]);
        assert_eq!(found(GLOSSARY, text), [0; 0]);
    }
}
