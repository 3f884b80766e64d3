// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as one Markdown table for each program and state of the page cache.

use std::fmt::Write as _;

use super::Results;
use super::round::{Sample, Way};
use crate::report::{Better, Figure, spread};

/// In the order of a table.
const FIGURES: [Figure<Sample>; 7] = [
    lower("first right answer after", "s", |sample| Some(sample.times.answered_s)),
    lower("criu restore returns after", "s", |sample| Some(sample.times.alive_s)),
    lower("all memory resident after", "s", |sample| Some(sample.times.resident_s)),
    lower("an answer takes then", "s", |sample| Some(sample.times.resident_answer_s)),
    lower("floor: returns, and an answer", "s", |sample| {
        Some(sample.times.alive_s + sample.times.resident_answer_s)
    }),
    lower("server CPU", "s/GB", |sample| sample.times.server_cpu_s_per_gb),
    lower("page faults until the answer", "", |sample| Some(sample.times.faults as f64)),
];

const fn lower(name: &'static str, unit: &'static str, value: fn(&Sample) -> Option<f64>) -> Figure<Sample> {
    Figure { name, unit, better: Some(Better::Lower), value }
}

/// For a terminal and for a page.
pub(super) fn text(results: &Results) -> String {
    let setting = &results.setting;
    let mut text = format!(
        "{} MiB in each program, {} rounds; {} x {}, Linux {}; {}\n",
        setting.size_mib,
        results.rounds,
        setting.cpus,
        setting.cpu,
        setting.kernel,
        setting.versions.join(" and ")
    );
    text += "Each cell: median (min .. max) of the rounds. Times better: of each round's pair.\n";
    for image in &results.images {
        for cold in [false, true] {
            let here = |sample: &Sample| sample.program == image.program && sample.cold == cold;
            let samples: Vec<Sample> = results.samples.iter().copied().filter(here).collect();
            let mib = image.page_bytes >> 20;
            let _ = writeln!(text, "\n### {}, {}, {mib} MiB of pages\n", image.program, cache_state(cold));
            text += &table(&samples);
        }
    }
    text
}

/// As tables and folders name it.
pub(super) fn cache_state(cold: bool) -> &'static str {
    if cold { "cold" } else { "warm" }
}

/// Of the samples of one program in one state of the cache.
fn table(samples: &[Sample]) -> String {
    let mut text = "| figure | unit | eager | stock | rewake | times better than stock | than eager |\n\
                    |---|---|---|---|---|---|---|\n"
        .to_owned();
    for figure in &FIGURES {
        let of = |way| spread(figure.spread(of_way(samples, way)));
        let than = |way| spread(figure.gain(pairs(samples, way)));
        let cells = [of(Way::Eager), of(Way::Stock), of(Way::Rewake), than(Way::Stock), than(Way::Eager)];
        let _ = writeln!(text, "| {} | {} | {} |", figure.name, figure.unit, cells.join(" | "));
    }
    text
}

fn of_way(samples: &[Sample], way: Way) -> impl Iterator<Item = &Sample> {
    samples.iter().filter(move |sample| sample.way == way)
}

/// Of every round the sample of `way` and that of rewake.
fn pairs(samples: &[Sample], way: Way) -> impl Iterator<Item = (&Sample, &Sample)> {
    of_way(samples, way).filter_map(move |first| {
        let mut rewake = of_way(samples, Way::Rewake).filter(|other| other.round == first.round);
        Some((first, rewake.next()?))
    })
}

#[cfg(test)]
mod tests {
    use super::super::ImageSize;
    use super::super::program::Program;
    use super::super::round::Times;
    use super::*;
    use crate::report::Setting;

    fn sample(way: Way, cold: bool, round: u64, answered_s: f64) -> Sample {
        let times = Times {
            answered_s,
            alive_s: 0.25,
            resident_s: 4.0,
            resident_answer_s: 0.5,
            server_cpu_s_per_gb: (way != Way::Eager).then_some(0.5),
            faults: if way == Way::Eager { 0 } else { 100 },
        };
        Sample { program: Program::Node, way, cold, round, times }
    }

    fn results(samples: Vec<Sample>) -> Results {
        let setting =
            Setting::of_this_machine(vec!["Version: 4.2.1".to_owned(), "rewake 0.1".to_owned()], 64);
        let images = vec![ImageSize { program: Program::Node, page_bytes: 70 << 20 }];
        Results { setting, rounds: 2, images, samples }
    }

    #[test]
    fn rewake_is_compared_with_each_other_way_round_by_round() {
        let samples = vec![
            sample(Way::Eager, false, 1, 3.0),
            sample(Way::Stock, false, 1, 8.0),
            sample(Way::Rewake, false, 1, 4.0),
            sample(Way::Stock, false, 2, 6.0),
            sample(Way::Rewake, false, 2, 6.0),
            sample(Way::Stock, true, 1, 100.0),
            sample(Way::Rewake, true, 1, 10.0),
        ];
        let text = text(&results(samples));
        let row = "| first right answer after | s | 3.00 (3.00 .. 3.00) | 7.00 (6.00 .. 8.00) | \
                   5.00 (4.00 .. 6.00) | 1.50 (1.00 .. 2.00) | 0.750 (0.750 .. 0.750) |";
        assert!(text.contains(row), "{text}");
        assert!(text.contains("### node, warm, 70 MiB of pages"), "{text}");
        let cold = text.split("### node, cold").nth(1).expect("a table for the cold rounds");
        assert!(cold.contains("| 10.0 (10.0 .. 10.0) | 10.0 (10.0 .. 10.0) | - |"), "{cold}");
    }

    #[test]
    fn what_a_way_does_not_have_is_a_dash() {
        let text = table(&[sample(Way::Eager, false, 1, 3.0), sample(Way::Rewake, false, 1, 4.0)]);
        let cpu = text.lines().find(|line| line.contains("server CPU")).expect("a row for the server's CPU");
        assert_eq!(cpu, "| server CPU | s/GB | - | - | 0.500 (0.500 .. 0.500) | - | - |");
    }
}
