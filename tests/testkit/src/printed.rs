// SPDX-License-Identifier: MIT OR Apache-2.0
//! The commands that the README and the pages in `docs` print. The info string of a fenced block is `sh
//! run=NAME` where a test runs the commands as they are printed, `sh not-run: WHY` where none does, and
//! another language, or `text`, where the block has no commands. `cargo xtask tidy` checks that each block
//! has one of these.

use std::fs;
use std::path::{Path, PathBuf};

/// A fenced block of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrintedBlock {
    /// The page, and the number of the block's first line.
    pub place: String,
    /// What is behind the fence.
    pub info: String,
    /// The block.
    pub text: String,
}

/// The pages that a user reads: the README and those in `docs`.
///
/// # Panics
/// They are not in this crate's repository.
#[must_use]
pub fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the repository");
    let docs = fs::read_dir(root.join("docs")).expect("docs").flatten().map(|entry| entry.path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    [root.join("README.md")].into_iter().chain(pages).collect()
}

/// The fenced blocks of all pages.
///
/// # Panics
/// A page cannot be read.
#[must_use]
pub fn blocks() -> Vec<PrintedBlock> {
    pages().iter().flat_map(|page| blocks_of(page, &fs::read_to_string(page).expect("a page"))).collect()
}

fn blocks_of(page: &Path, text: &str) -> Vec<PrintedBlock> {
    let (mut blocks, mut open) = (Vec::new(), None::<PrintedBlock>);
    for (number, line) in text.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), open.take()) {
            (Some(_), Some(block)) => blocks.push(block),
            (Some(info), None) => {
                let place = format!("{}:{}", page.display(), number + 2);
                open = Some(PrintedBlock { place, info: info.to_owned(), text: String::new() });
            }
            (None, Some(mut block)) => {
                block.text += line;
                block.text.push('\n');
                open = Some(block);
            }
            (None, None) => {}
        }
    }
    blocks
}

/// A printed command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrintedCommand {
    /// `hostA` of the prompt `hostA$ `; empty without one.
    pub host: String,
    /// The command, without its comment, and without the `&` that starts it in the background.
    pub line: String,
}

impl PrintedBlock {
    /// The commands of the block, in order. A line that ends with a backslash is continued.
    #[must_use]
    pub fn commands(&self) -> Vec<PrintedCommand> {
        let joined = self.text.replace("\\\n", " ");
        let commands = joined.lines().filter_map(|line| {
            let line = line.split(" #").next().unwrap_or_default().trim();
            let (host, line) = line.split_once("$ ").filter(|(host, _)| is_host(host)).unwrap_or(("", line));
            let line = line.strip_suffix('&').unwrap_or(line).trim();
            let command = PrintedCommand { host: host.to_owned(), line: line.to_owned() };
            (!line.is_empty() && !line.starts_with('#')).then_some(command)
        });
        commands.collect()
    }
}

fn is_host(word: &str) -> bool {
    word.strip_prefix("host").is_some_and(|name| name.len() == 1)
}

/// The block that the test of this name runs, with values in the place of words that stand for them.
///
/// # Panics
/// No block has the name, or the block lacks one of the words.
#[must_use]
pub fn recipe(name: &str, values: &[(&str, &str)]) -> PrintedBlock {
    let info = format!("sh run={name}");
    let mut block = blocks().into_iter().find(|block| block.info == info).unwrap_or_else(|| panic!("{info}"));
    for (word, value) in values {
        assert!(block.text.contains(word), "{}: no {word}", block.place);
        block.text = block.text.replace(word, value);
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_read_as_a_shell_reads_it() {
        let text = "x\n```sh run=y\nhostA$ rewake a \\\n   -b c   # why\n\nrewake d &\n# \
            none\n```\n```text\nz\n```\n";
        let blocks = blocks_of(Path::new("p.md"), text);
        let [block, other] = &blocks[..] else { panic!("{blocks:?}") };
        assert_eq!((&block.place[..], &block.info[..], &other.text[..]), ("p.md:3", "sh run=y", "z\n"));
        let command = |host: &str, line: &str| PrintedCommand { host: host.into(), line: line.into() };
        let commands = block.commands();
        assert_eq!(commands[0].line.split_whitespace().collect::<Vec<_>>(), ["rewake", "a", "-b", "c"]);
        assert_eq!((&commands[0].host[..], &commands[1..]), ("hostA", &[command("", "rewake d")][..]));
    }
}
