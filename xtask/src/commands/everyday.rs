// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask stress everyday`: the effect of everyday events on this build. Each row of the table is a
//! test of the suite.

use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::suite::budget::Budget;
use crate::suite::expected::HOST;
use crate::suite::jobs::{self, Job};
use crate::suite::programs::{self, Targets, TestProgram};
use crate::{program, repository, setup};

/// An event and its test.
#[derive(Debug)]
struct Row {
    event: &'static str,
    /// The outcome that the test requires.
    outcome: &'static str,
    /// The module of the end to end tests.
    module: &'static str,
    test: &'static str,
}

const ROWS: [Row; 9] = [
    Row {
        event: "dumped again while memory is missing, CRIU has rewake_plugin.so",
        outcome: "the dump waits; its image is whole",
        module: "hollow",
        test: "a_dump_at_any_moment_waits_for_all_missing_memory",
    },
    Row {
        event: "the same, CRIU has no plugin",
        outcome: "the dump fails; the program continues",
        module: "hollow",
        test: "without_the_plugin_criu_refuses_and_the_program_runs_on",
    },
    Row {
        event: "SIGHUP, SIGUSR1, SIGTERM, SIGINT to the page server's group",
        outcome: "the target is served to its end",
        module: "signals",
        test: "to_rewake_lazy_pages",
    },
    Row {
        event: "SIGKILL to the page server's group",
        outcome: "the target waits; `rewake recover` serves it to its end",
        module: "recover",
        test: "a_target_outlives_every_process_of_its_streamer",
    },
    Row {
        event: "another image in the directory's place, worker killed",
        outcome: "the successor serves the session's own image",
        module: "refused",
        test: "a_successor_serves_with_another_image_at_the_path",
    },
    Row {
        event: "another image in the directory's place, all killed",
        outcome: "`rewake recover` kills the program and says why",
        module: "recover",
        test: "after_a_total_death_another_image_at_the_path_is_not_served",
    },
    Row {
        event: "cgroup.kill, systemctl stop while memory is missing",
        outcome: "served, or waits and is recovered",
        module: "events",
        test: "every_event_to_a_cgroup_while_memory_is_missing",
    },
    Row {
        event: "the same before the restore returns",
        outcome: "served, or the restore fails",
        module: "events",
        test: "every_event_to_a_cgroup_before_the_restore_returns",
    },
    Row {
        event: "the end of a container's first process, streamer inside",
        outcome: "all end; nothing is left",
        module: "events",
        test: "a_streamer_inside_a_container_ends_with_it",
    },
];

/// How a test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Result {
    AsWanted,
    NotRun,
    Failed,
}

/// Runs all and prints the table.
pub(super) fn run() -> anyhow::Result<()> {
    let criu = setup::run()?;
    // Without a second CRIU the rows that need it say that they did not run.
    let other = setup::run_other_than(&criu).ok();
    let environment = super::test::environment(&criu, other.as_ref())?;
    let programs = programs::build(Targets::Integration(&["e2e"]))?;
    let program =
        programs.iter().find(|program| program.name == "e2e").context("cargo built no test program `e2e`")?;
    let results =
        ROWS.iter().map(|row| row.result(program, &environment)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut git = Command::new("git");
    let version =
        program::capture(git.args(["rev-parse", "--short", "HEAD"]).current_dir(repository::root()))?;
    println!("\n{}", table(version.trim(), &results));
    let failed = results.iter().filter(|result| **result == Result::Failed).count();
    ensure!(failed == 0, "{failed} events had another outcome: see the tests' messages above");
    Ok(())
}

impl Row {
    fn result(&self, program: &TestProgram, environment: &[(&str, String)]) -> anyhow::Result<Result> {
        let job = Job {
            name: format!("e2e::{}", self.module),
            program: program.path.clone(),
            folder: program.folder.clone(),
            tests: vec![format!("{}::{}", self.module, self.test)],
        };
        let record = jobs::run(vec![job], 1, &Budget::default(), HOST, environment)?;
        let name = format!("e2e::{}::{}", self.module, self.test);
        ensure!(
            !record.failed_jobs.is_empty() || record.tests.contains_key(&name),
            "{name}: there is no such test"
        );
        Ok(match () {
            () if !record.failed_jobs.is_empty() => Result::Failed,
            () if record.skipped.contains_key(&name) => Result::NotRun,
            () => Result::AsWanted,
        })
    }
}

fn table(version: &str, results: &[Result]) -> String {
    let width = ROWS.iter().map(|row| row.event.len()).max().unwrap_or(0);
    let mut table = format!("commit {version}\n{:width$}  outcome\n", "event");
    for (row, result) in ROWS.iter().zip(results) {
        let outcome = match result {
            Result::AsWanted => row.outcome,
            Result::NotRun => "not run here",
            Result::Failed => "ANOTHER ONE",
        };
        table += &format!("{:width$}  {outcome}\n", row.event);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_names_a_test_of_the_suite() {
        for row in &ROWS {
            let path = repository::root().join(format!("tests/tests/e2e/{}.rs", row.module));
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(&format!("fn {}()", row.test)), "{}::{}", row.module, row.test);
        }
    }

    #[test]
    fn an_event_with_another_outcome_shows_that_outcome() {
        let mut results = [Result::AsWanted; ROWS.len()];
        results[0] = Result::Failed;
        let table = table("abc", &results);
        assert!(!table.contains(ROWS[0].outcome) && table.contains("ANOTHER ONE"), "{table}");
        assert!(table.contains(ROWS[1].outcome), "{table}");
    }
}
