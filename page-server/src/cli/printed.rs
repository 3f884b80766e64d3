// SPDX-License-Identifier: MIT OR Apache-2.0
//! Each `rewake` command of the README and of the pages in `docs` is one that the command line takes.

use std::ffi::OsString;

use clap::Parser as _;
use rewake_testkit::printed::blocks;

use super::Cli;
use crate::criu_args;

/// What stands for a number.
const NUMBERS: [&str; 5] = ["PID", "P", "MS", "S", "N"];
/// Words that end a command of a shell.
const ENDS: [&str; 5] = ["|", ">", ">>", "&&", ";"];

/// The arguments of a command. Of a synopsis these are all that it names, and the first of those that exclude
/// each other.
fn arguments(line: &str) -> Vec<String> {
    let (mut words, mut is_other) = (Vec::new(), false);
    for word in line.split_whitespace() {
        match (word, is_other) {
            ("|", _) if line.contains('[') => is_other = true,
            (word, _) if ENDS.contains(&word) => break,
            (_, true) => is_other = !word.ends_with(']'),
            (word, false) => {
                let word = word.trim_matches(['[', ']', '\'', '"']);
                words.push(if NUMBERS.contains(&word) { "1".to_owned() } else { word.to_owned() });
            }
        }
    }
    words
}

#[test]
fn each_printed_command_is_one_that_rewake_takes() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for block in blocks().iter().filter(|block| block.info.starts_with("sh ")) {
        for command in block.commands().iter().filter(|command| command.line.starts_with("rewake ")) {
            let words = arguments(&command.line).into_iter().map(OsString::from);
            let normalised = criu_args::normalise(words).unwrap();
            if let Err(error) = Cli::try_parse_from(normalised) {
                wrong.push(format!("{}: {}\n{error}", block.place, command.line));
            }
            count += 1;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 40, "{count} commands were found");
}

#[test]
fn the_arguments_of_a_synopsis_are_read() {
    for (line, words) in [
        ("rewake status [--socket PATH | -W DIR] [--json]", "rewake status --socket PATH --json"),
        ("rewake dump -t PID [-- CRIU OPTIONS]", "rewake dump -t 1 -- CRIU OPTIONS"),
        ("rewake inspect IMG --json | jq '.x'", "rewake inspect IMG --json"),
    ] {
        assert_eq!(arguments(line).join(" "), words);
    }
}
