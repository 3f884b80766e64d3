// SPDX-License-Identifier: MIT OR Apache-2.0
//! `tests/expected-skips`: which tests do not run on which machine. A test that is skipped and not listed
//! fails the run, and so does a listed one that runs.

use anyhow::{Context as _, bail};

use super::list::List;
use super::record::Record;

/// The machine for tests that run on the host.
pub(crate) const HOST: &str = "host";

const FILE: &str = "tests/expected-skips";

/// How surely a test does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sure {
    /// Never on that machine.
    Always,
    /// Only where the host cannot; for machines that are not made by this repository.
    Maybe,
}

/// The list: machine, then test.
#[derive(Debug)]
pub(crate) struct Expected(List<Sure>);

/// `always PROGRAM::TEST: REASON`
fn entry(line: &str) -> anyhow::Result<(String, Sure)> {
    let (sure, rest) = line.split_once(' ').unwrap_or((line, ""));
    let sure = match sure {
        "always" => Sure::Always,
        "maybe" => Sure::Maybe,
        _ => bail!("{sure:?}; a line begins with `always`, `maybe` or `[`"),
    };
    let (test, _) = rest.split_once(": ").context("expected `PROGRAM::TEST: REASON`")?;
    Ok((test.to_owned(), sure))
}

impl Expected {
    /// The repository's list.
    ///
    /// # Errors
    /// It cannot be read, or a line makes no sense.
    pub(crate) fn read() -> anyhow::Result<Self> {
        List::read(FILE, entry).map(Self)
    }

    /// Machines that the list names.
    pub(crate) fn machines(&self) -> impl Iterator<Item = &str> {
        self.0.machines()
    }

    /// Compares a run on that machine with the list. If all tests of the machine ran, a listed test that does
    /// not exist counts too.
    pub(crate) fn against(&self, machine: &str, record: &Record, whole: bool) -> Vec<String> {
        let is_listed = |test: &str| self.0.get(machine, test).is_some();
        let unlisted = record.skipped.iter().filter(|(test, _)| !is_listed(test));
        let mut against: Vec<String> = unlisted
            .map(|(test, reason)| {
                format!("{test} was skipped ({reason}): make it run, or list it in {FILE} below [{machine}]")
            })
            .collect();
        for (test, sure) in self.0.of(machine) {
            let ran = record.tests.contains_key(test) && !record.skipped.contains_key(test);
            if ran && *sure == Sure::Always {
                against.push(format!("{test} ran: delete its line below [{machine}] in {FILE}"));
            } else if whole && !record.tests.contains_key(test) {
                against.push(format!("no {test} exists: delete its line below [{machine}] in {FILE}"));
            }
        }
        against
    }
}

/// One line for each test that did not run there.
pub(crate) fn print(machine: &str, record: &Record) {
    for (test, reason) in &record.skipped {
        println!("not run on {machine}: {test}: {reason}");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIST: &str = "# a list\n[host]\nmaybe e::cold: tmpfs\n\n[vm]\nalways p::never: no queues\n";

    fn parse(text: &str) -> anyhow::Result<Expected> {
        List::parse(FILE, text, entry).map(Expected)
    }

    fn record(tests: &[&str], skipped: &[&str]) -> Record {
        let mut record = Record::default();
        record.tests.extend(tests.iter().map(|test| ((*test).to_owned(), Duration::ZERO)));
        record.skipped.extend(skipped.iter().map(|test| ((*test).to_owned(), "why".to_owned())));
        record
    }

    fn against(machine: &str, tests: &[&str], skipped: &[&str]) -> Vec<String> {
        parse(LIST).unwrap().against(machine, &record(tests, skipped), true)
    }

    #[test]
    fn a_run_like_the_list_is_fine() {
        assert_eq!(against("host", &["e::cold", "e::x"], &["e::cold"]), Vec::<String>::new());
        assert_eq!(against("host", &["e::cold", "e::x"], &[]), Vec::<String>::new());
        assert_eq!(against("vm", &["p::never"], &["p::never"]), Vec::<String>::new());
    }

    #[test]
    fn a_skip_that_is_not_listed_for_this_machine_is_an_error() {
        let found = against("vm", &["p::never", "e::cold"], &["p::never", "e::cold"]);
        assert_eq!(
            found,
            ["e::cold was skipped (why): make it run, or list it in tests/expected-skips below [vm]"]
        );
    }

    #[test]
    fn a_listed_test_that_ran_or_does_not_exist_is_an_error() {
        let found = against("vm", &["p::never"], &[]);
        assert_eq!(found, ["p::never ran: delete its line below [vm] in tests/expected-skips"]);
        let found = against("vm", &["p::other"], &[]);
        assert_eq!(found, ["no p::never exists: delete its line below [vm] in tests/expected-skips"]);
        let part = parse(LIST).unwrap().against("vm", &record(&["p::other"], &[]), false);
        assert_eq!(part, Vec::<String>::new());
    }

    #[test]
    fn a_line_that_makes_no_sense_is_named() {
        for (text, wanted) in [
            ("[a]\nsometimes b::c: d", "tests/expected-skips:2: \"sometimes\"; a line begins with"),
            ("[a]\nalways b::c", "tests/expected-skips:2: expected `PROGRAM::TEST: REASON`"),
            ("always b::c: d", "tests/expected-skips:1: no `[MACHINE]` before it"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.starts_with(wanted), "{error}");
        }
    }

    #[test]
    fn the_repository_s_list_can_be_read() {
        assert!(Expected::read().unwrap().machines().any(|name| name == HOST));
    }

    #[test]
    fn each_listed_test_exists_on_its_machine() {
        let root = crate::repository::root();
        let files = crate::tidy::files(root).unwrap();
        let sources = files.iter().filter(|path| path.extension().is_some_and(|of| of == "rs"));
        let sources: Vec<String> = sources.map(|path| std::fs::read_to_string(path).unwrap()).collect();
        let list = Expected::read().unwrap();
        for machine in list.machines() {
            for (test, _) in list.0.of(machine) {
                // A macro writes some functions.
                let name = test.rsplit("::").next().unwrap();
                assert!(sources.iter().any(|text| text.contains(name)), "[{machine}] {test}");
                let (_, path) = test.split_once("::").unwrap();
                assert!(machine == HOST || crate::vm::runs(machine, path), "[{machine}] does not run {test}");
            }
        }
    }
}
