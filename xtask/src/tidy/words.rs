// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words that `docs/glossary.md` replaces, and phrases that hide the subject of a sentence.

use super::{Document, Finding, text};

/// Words, and what to write in their place.
const WORDS: [(&str, &str); 30] = [
    ("told", "the actor and the verb: reports, names, knows"),
    ("tells", "`reports`, `shows`, `names`"),
    ("whoever", "the actor: the thread, the caller"),
    ("nobody", "`no process`, `no thread`, `no caller`"),
    ("somebody", "the actor: the thread, the caller"),
    ("anybody", "the actor: the thread, the caller"),
    ("go on", "`continue`, `are resumed`"),
    ("goes on", "`continues`, `is resumed`"),
    ("went on", "`continued`, `was resumed`"),
    ("is there", "`exists`, `is resident`"),
    ("are there", "`exist`, `are resident`"),
    ("was there", "`existed`, `was resident`"),
    ("there after", "`resident after`"),
    ("comes behind", "`is loaded in the background`"),
    ("memory behind", "`memory loaded in the background`"),
    ("come back", "`are restored`"),
    ("comes back", "`is restored`"),
    ("came back", "`was restored`"),
    ("stand still", "`are stopped`, `are evicted`"),
    ("stands still", "`is stopped`, `is evicted`"),
    ("stood still", "`was stopped`, `was evicted`"),
    ("let go of", "`release`, `close`"),
    ("lets go of", "`releases`, `closes`"),
    ("under way", "`in flight`, `running`"),
    ("as ever", "`as before`, `without a change`"),
    ("what is of", "the noun: `memory of`, `buffers of`"),
    ("memory of cpus", "`CPU memory`"),
    ("memory of gpus", "`GPU memory`"),
    ("cpus' memory", "`CPU memory`"),
    ("gpus' memory", "`GPU memory`"),
];
/// Phrases of prose, and what to write in their place. Code may have them: `None if a => b`.
const PHRASES: [(&str, &str); 4] = [
    ("so many", "the number: `` `count` bytes ``, `this number of pages`"),
    ("none if", "`` or `None` if ``, `an empty list if`"),
    ("those of", "the noun: `the pages of`"),
    ("says so", "what it says: `reports the error`, `logs the reason`"),
];
/// The files that list the replaced words.
const LISTS: [&str; 2] = ["docs/glossary.md", "xtask/src/tidy/words.rs"];

pub(super) fn check(document: &Document) -> Vec<Finding> {
    let path = &document.path;
    if LISTS.contains(&path.as_str()) {
        return Vec::new();
    }
    // Code blocks of documents show what programs print.
    let is_prose = path.ends_with(".md");
    let lines = text::lines(&document.text).filter(|(_, is_code, _)| !(is_prose && *is_code));
    let mut found = Vec::new();
    // The last word of the sentence so far, because a phrase may be wrapped.
    let mut last = "";
    for (number, _, line) in lines {
        let prose = if is_prose { line } else { comment(path, line) }.trim_start();
        let continued = format!("{last} {prose}");
        let words = WORDS.iter().filter(|(word, _)| has_word(line, word));
        for (word, instead) in words.chain(PHRASES.iter().filter(|(word, _)| has_word(&continued, word))) {
            found.push(document.finding(
                number,
                "words",
                format!("{word:?}: write {instead} (docs/glossary.md)"),
            ));
        }
        last = prose.split_whitespace().next_back().unwrap_or_default();
    }
    found
}

/// The text of the comment in a line of code, or an empty one.
fn comment<'a>(path: &str, line: &'a str) -> &'a str {
    let is_c = [".rs", ".c", ".h", ".proto"].iter().any(|end| path.ends_with(end));
    let marks: &[&str] = if is_c { &["//", "/*"] } else { &["#"] };
    // Lines of a C comment may begin with a star.
    let starred = if is_c { line.trim_start().strip_prefix("* ") } else { None };
    let begin = marks.iter().filter_map(|mark| Some(line.find(mark)? + mark.len())).min();
    let text = starred.or_else(|| line.get(begin?..)).unwrap_or_default();
    text.trim_start_matches(['/', '!', '*', '#'])
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
    fn a_replaced_word_is_found_in_every_file_except_the_lists() {
        let text = "//! Whoever waits.\nfn untold() {}\n// It goes on.\n";
        assert_eq!(found("crates/pager/src/plan.rs", text), [1, 3]);
        assert_eq!(found("tests/softgpu/kmod/vm.c", text), [1, 3]);
        for list in LISTS {
            assert_eq!(found(list, text), [0; 0]);
        }
    }

    #[test]
    fn phrases_are_found_in_comments_and_documents_and_not_in_code() {
        let lines = ["Sends so many bytes.", "Returns None if closed.", "Pages, those of A.", "It says so."];
        for line in lines {
            for comment in [format!("//! {line}\n"), format!("    let a = 1; // {line}\n")] {
                assert_eq!(found("crates/a/src/a.rs", &comment), [1], "{comment}");
            }
            assert_eq!(found("docs/a.md", &format!("{line}\n")), [1], "{line}");
            assert_eq!(found("a.c", &format!("/*\n * {line}\n */\n")), [2], "{line}");
            assert_eq!(found("a/Cargo.toml", &format!("# {line}\n")), [1], "{line}");
        }
        assert_eq!(found("crates/a/src/a.rs", "match a {\n    None if b => c,\n}\n"), [0; 0]);
        assert_eq!(found("crates/a/src/a.rs", "/// Returns `None` if closed.\n"), [0; 0]);
    }

    #[test]
    fn a_wrapped_phrase_is_found() {
        assert_eq!(found("crates/a/src/a.rs", "/// Sends so\n/// many bytes.\nfn so() {}\n// many\n"), [2]);
        assert_eq!(found("docs/a.md", "Pages, those\nof A.\n"), [2]);
    }

    #[test]
    fn code_blocks_of_documents_are_not_checked() {
        let text = "It comes back.\n```\nIt goes on.\n```\nIt goes on.\n";
        assert_eq!(found("docs/setup.md", text), [1, 5]);
        assert_eq!(found("crates/pager/src/plan.rs", text), [1, 3, 5]);
    }
}
