// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask stress NAME`: random tests with any number of rounds. The suite runs a few rounds of each.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::everyday;
use crate::suite::programs::{self, Targets};
use crate::{program, setup, vm};

/// Time limit of a campaign: the longest takes a quarter of an hour on a quiet machine.
const LIMIT: Duration = Duration::from_secs(4 * 3600);

/// The one without rounds and seed: a table.
const EVERYDAY: &str = "everyday";

/// Every campaign, one after the other.
const ALL: &str = "all";

/// Where a campaign's test runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Here, with both versions of CRIU.
    Host,
    /// In a machine of the suite, this one by default.
    Machine(&'static str),
}

/// A random test with a name.
#[derive(Debug)]
struct Campaign {
    name: &'static str,
    what: &'static str,
    place: Place,
    /// Its modules of the test program.
    modules: &'static [&'static str],
    /// Which of their tests; none: all.
    test: Option<&'static str>,
    /// The variable with the number of rounds, and its default.
    rounds: Option<(&'static str, u32)>,
    /// The variable of the seed.
    seed: Option<&'static str>,
    /// A variable that is always set.
    always: Option<&'static str>,
}

const CAMPAIGN: Campaign = Campaign {
    name: "",
    what: "",
    place: Place::Machine("6.12-90a"),
    modules: &[],
    test: None,
    rounds: None,
    seed: None,
    always: None,
};

const CAMPAIGNS: [Campaign; 14] = [
    Campaign {
        name: "restore-accessed",
        what: "a program that accesses, maps and forks while its GPU memory is missing",
        modules: &["stress"],
        test: Some("random_orders_to_a_program_with_missing_memory"),
        rounds: Some(("RESTORE_ROUNDS", 200)),
        seed: Some("RESTORE_SEED"),
        ..CAMPAIGN
    },
    Campaign {
        name: "restore-requested",
        what: "a busy server that gets requests while its memory is missing",
        modules: &["stress"],
        test: Some("requests_to_a_server_with_missing_memory"),
        rounds: Some(("RESTORE_ROUNDS", 200)),
        seed: Some("RESTORE_SEED"),
        ..CAMPAIGN
    },
    Campaign {
        name: "kill-streamer",
        what: "workers and supervisor of a streamer are killed, moment after moment of a restore",
        modules: &["killed"],
        test: Some("a_streamer_killed_at_any_moment_leaves_no_paused_queue"),
        rounds: Some(("REWAKE_KILLS", 220)),
        ..CAMPAIGN
    },
    Campaign {
        name: "kill-criu",
        what: "CRIU is killed, moment after moment of a restore with its GPUs",
        modules: &["lazy_faults"],
        test: Some("criu_killed_at_any_moment_leaves_no_paused_queue"),
        rounds: Some(("REWAKE_KILLS", 220)),
        ..CAMPAIGN
    },
    Campaign {
        name: "kill-server",
        what: "the page server's processes are killed at random moments; CPU memory only",
        place: Place::Host,
        modules: &["killed_daemon"],
        rounds: Some(("REWAKE_KILLS", 200)),
        seed: Some("REWAKE_SEED"),
        ..CAMPAIGN
    },
    Campaign {
        name: "kill-fetcher",
        what: "the process that fetches pages from another host is killed at random moments",
        place: Place::Host,
        modules: &["page_server_faults"],
        test: Some("a_fetcher_killed_at_random_moments_costs_no_byte"),
        rounds: Some(("REWAKE_KILLS", 100)),
        seed: Some("REWAKE_SEED"),
        ..CAMPAIGN
    },
    Campaign {
        name: "kill-dump",
        what: "`rewake dump` is killed at random moments, with CRIU and without",
        place: Place::Host,
        modules: &["seal"],
        test: Some("killed_dumps_leave_a_whole_image_and_are_cleaned_up"),
        rounds: Some(("REWAKE_DUMP_KILLS", 100)),
        seed: Some("REWAKE_SEED"),
        ..CAMPAIGN
    },
    Campaign {
        name: "kill-push",
        what: "`rewake push` to a store behind S3 is killed at random moments",
        place: Place::Host,
        modules: &["store_s3"],
        test: Some("killed_pushes_leave_no_broken_image"),
        rounds: Some(("REWAKE_PUSH_KILLS", 100)),
        seed: Some("REWAKE_SEED"),
        ..CAMPAIGN
    },
    Campaign {
        name: "recover",
        what: "all processes of a page server are killed at random moments, and its targets recovered",
        place: Place::Host,
        modules: &["recover"],
        rounds: Some(("REWAKE_RECOVERIES", 200)),
        seed: Some("REWAKE_SEED"),
        ..CAMPAIGN
    },
    Campaign {
        name: "dump-missing",
        what: "dumps at random moments while memory is missing; the dumps are restored and compared",
        place: Place::Host,
        modules: &["hollow"],
        rounds: Some(("REWAKE_DUMPS", 200)),
        seed: Some("REWAKE_SEED"),
        ..CAMPAIGN
    },
    Campaign {
        name: "dump-gpu",
        what: "the same of a server on GPUs, before and after its gate opens",
        modules: &["gated"],
        test: Some("a_dump_at_any_moment_has_all_memory"),
        rounds: Some(("REWAKE_DUMPS", 200)),
        seed: Some("REWAKE_SEED"),
        ..CAMPAIGN
    },
    Campaign {
        name: "failing-calls",
        what: "every driver call of a dump and of a restore fails in turn, or kills its caller",
        modules: &["plugin_faults", "lazy_faults"],
        always: Some("PLUGIN_EVERY_FAULT"),
        ..CAMPAIGN
    },
    Campaign {
        name: "damaged-images",
        what: "images of GPU memory with random damage are restored",
        modules: &["plugin_images"],
        test: Some("random_damage_does_no_harm"),
        rounds: Some(("PLUGIN_DAMAGES", 200)),
        ..CAMPAIGN
    },
    Campaign {
        name: "driver-calls",
        what: "random calls to the software GPU's driver",
        modules: &["fuzz"],
        seed: Some("SOFTGPU_FUZZ_SEED"),
        ..CAMPAIGN
    },
];

/// The list of campaigns, for users.
pub(crate) fn help() -> String {
    let mut help = "cargo xtask stress NAME [--rounds N] [--seed N] [--machine NAME]\n\n".to_owned();
    for campaign in &CAMPAIGNS {
        let rounds = campaign.rounds.map_or_else(String::new, |(_, rounds)| format!("; {rounds} rounds"));
        let seed = if campaign.seed.is_some() { "; --seed repeats one" } else { "" };
        help += &format!("  {:18} {}{rounds}{seed}\n", campaign.name, campaign.what);
    }
    help += &format!(
        "  {EVERYDAY:18} effects of everyday events: a table of events and outcomes, from tests of the \
         suite\n"
    );
    help += &format!("  {ALL:18} every campaign, one after the other\n");
    help += "\nThose with GPUs run in the suite's machine 6.12-90a, or in the one that --machine names.\n";
    help
}

/// Runs one of them, or all; a failure of one stops none of the others.
pub(crate) fn run(name: &str, words: &[&str]) -> anyhow::Result<()> {
    if name == ALL {
        ensure!(words.is_empty(), "stress {ALL} {}: it has no options", words.join(" "));
        let mut failed = Vec::new();
        for name in CAMPAIGNS.iter().map(|campaign| campaign.name).chain([EVERYDAY]) {
            println!("\n== {name}");
            let start = Instant::now();
            let result = run(name, &[]);
            println!("{name}: {:.0} s", start.elapsed().as_secs_f64());
            failed.extend(result.err().map(|error| format!("{name}: {error:#}")));
        }
        ensure!(failed.is_empty(), "{}", failed.join("; "));
        return Ok(());
    }
    if name == EVERYDAY {
        ensure!(words.is_empty(), "stress {EVERYDAY} {}: it has no options", words.join(" "));
        return everyday::run();
    }
    let campaign = CAMPAIGNS.iter().find(|campaign| campaign.name == name);
    let campaign =
        campaign.with_context(|| format!("no campaign {name:?}; `cargo xtask stress` lists them"))?;
    let options = Options::parse(campaign, words)?;
    match campaign.place {
        Place::Machine(machine) => vm::test(&vm::Wanted {
            filter: campaign.test,
            modules: campaign.modules,
            machine: Some(options.machine.unwrap_or(machine)),
            environment: options.environment,
            limit: Some(LIMIT),
        }),
        Place::Host => on_host(campaign, &options),
    }
}

fn on_host(campaign: &Campaign, options: &Options<'_>) -> anyhow::Result<()> {
    let criu = setup::run()?;
    let mut environment = super::test::environment(&criu, Some(&setup::run_other_than(&criu)?))?;
    environment.extend(setup::seaweedfs()?.map(|program| ("REWAKE_WEED", program.display().to_string())));
    let programs = programs::build(Targets::Integration(&["e2e"]))?;
    let program =
        programs.iter().find(|program| program.name == "e2e").context("cargo built no test program `e2e`")?;
    let mut command = Command::new(&program.path);
    command.current_dir(&program.folder).args(["--nocapture", "--test-threads=1"]);
    match campaign.test {
        Some(test) => command.arg(test),
        None => command.args(campaign.modules.iter().map(|module| format!("{module}::"))),
    };
    program::run(
        command.envs(environment).envs(options.environment.iter().map(|(name, value)| (name, value))),
    )
}

/// Options of a campaign.
#[derive(Debug, PartialEq, Eq)]
struct Options<'a> {
    machine: Option<&'a str>,
    environment: Vec<(&'static str, String)>,
}

impl<'a> Options<'a> {
    fn parse(campaign: &Campaign, words: &[&'a str]) -> anyhow::Result<Self> {
        let (mut machine, mut rounds, mut seed) = (None, None, None);
        let mut words = words.iter();
        while let Some(option) = words.next() {
            let value = *words.next().with_context(|| format!("{option} needs a value"))?;
            let number =
                || value.parse::<u64>().with_context(|| format!("{option} {value}: expected a number"));
            match *option {
                "--machine" => machine = Some(value),
                "--rounds" => rounds = Some(number()?),
                "--seed" => seed = Some(number()?),
                other => bail!("stress {} {other}: expected --rounds, --seed or --machine", campaign.name),
            }
        }
        let on_host = campaign.place == Place::Host;
        ensure!(
            !on_host || machine.is_none(),
            "stress {}: it runs on the host, not in a machine",
            campaign.name
        );
        ensure!(rounds.is_none() || campaign.rounds.is_some(), "stress {} has no rounds", campaign.name);
        ensure!(seed.is_none() || campaign.seed.is_some(), "stress {} has no seed", campaign.name);
        let mut environment: Vec<(&'static str, String)> = Vec::new();
        environment.extend(campaign.always.map(|name| (name, "1".to_owned())));
        environment.extend(
            campaign.rounds.map(|(name, usual)| (name, rounds.unwrap_or_else(|| usual.into()).to_string())),
        );
        environment.extend(campaign.seed.zip(seed).map(|(name, seed)| (name, seed.to_string())));
        Ok(Self { machine, environment })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> &'static Campaign {
        CAMPAIGNS.iter().find(|campaign| campaign.name == name).unwrap()
    }

    #[test]
    fn rounds_and_seed_become_the_variables_that_the_test_reads() {
        let campaign = named("restore-requested");
        let options =
            Options::parse(campaign, &["--seed", "9", "--machine", "7-90a", "--rounds", "30"]).unwrap();
        assert_eq!(options.machine, Some("7-90a"));
        let wanted = [("RESTORE_ROUNDS", "30".to_owned()), ("RESTORE_SEED", "9".to_owned())];
        assert_eq!(options.environment, wanted);
        let usual = Options::parse(campaign, &[]).unwrap();
        assert_eq!(usual.environment, [("RESTORE_ROUNDS", "200".to_owned())]);
    }

    #[test]
    fn an_option_that_a_campaign_does_not_have_is_refused() {
        for (name, words, wanted) in [
            ("failing-calls", ["--rounds", "2"], "stress failing-calls has no rounds"),
            ("kill-streamer", ["--seed", "2"], "stress kill-streamer has no seed"),
            ("kill-server", ["--machine", "7-90a"], "stress kill-server: it runs on the host"),
            ("kill-server", ["--rounds", "many"], "--rounds many: expected a number"),
            ("kill-server", ["--speed", "1"], "stress kill-server --speed: expected --rounds"),
        ] {
            let error = Options::parse(named(name), &words).unwrap_err().to_string();
            assert!(error.starts_with(wanted), "{error}");
        }
        assert!(run("kill-all", &[]).unwrap_err().to_string().contains("no campaign \"kill-all\""));
    }

    #[test]
    fn every_campaign_is_in_the_list() {
        assert!(CAMPAIGNS.iter().all(|campaign| help().contains(&format!("  {} ", campaign.name))));
    }
}
