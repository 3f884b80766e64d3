// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a run as one Markdown table for each program and state of the page cache.

use std::fmt::Write as _;

use super::Results;
use super::round::{Sample, Way};
use crate::report::{Better, Figure, spread};

/// In the order of a table.
const FIGURES: [Figure<Sample>; 6] = [
    lower("first right answer after", "s", |sample| Some(sample.figures.answered_s)),
    lower("criu restore returns after", "s", |sample| Some(sample.figures.returned_s)),
    lower("all memory resident after", "s", |sample| Some(sample.figures.resident_s)),
    lower("then an answer that reads all takes", "s", |sample| Some(sample.figures.whole_answer_s)),
    lower("server CPU", "s/GB", |sample| sample.figures.server_cpu_s_per_gb),
    lower("page faults until the first answer", "", |sample| Some(sample.figures.faults as f64)),
];

const fn lower(name: &'static str, unit: &'static str, value: fn(&Sample) -> Option<f64>) -> Figure<Sample> {
    Figure { name, unit, better: Some(Better::Lower), value }
}

/// Markdown, for a terminal too.
pub(super) fn text(results: &Results) -> String {
    let setting = &results.setting;
    let mut text = format!(
        "{} MiB filled by each program, {} rounds; {} x {}, Linux {}; {}\n",
        setting.size_mib,
        results.rounds,
        setting.cpus,
        setting.cpu,
        setting.kernel,
        setting.versions.join(" and ")
    );
    text +=
        "Each cell: median (min .. max). The last two columns: how many times better rewake was, by round.\n";
    for image in &results.images {
        for cold in [false, true] {
            let here = |sample: &Sample| sample.program == image.program && sample.cold == cold;
            let samples: Vec<Sample> = results.samples.iter().copied().filter(here).collect();
            let (program, version, mib) = (image.program, &image.version, image.page_bytes >> 20);
            let _ = writeln!(
                text,
                "\n### {program} ({version}), image {}, {mib} MiB of pages\n",
                cache_state(cold)
            );
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
    use super::super::ProgramImage;
    use super::super::program::Program;
    use super::super::round::Figures;
    use super::*;
    use crate::report::Setting;

    fn sample(way: Way, cold: bool, round: u64, answered_s: f64) -> Sample {
        let figures = Figures {
            answered_s,
            returned_s: 0.25,
            resident_s: 4.0,
            whole_answer_s: 0.5,
            server_cpu_s_per_gb: (way != Way::Eager).then_some(0.5),
            faults: if way == Way::Eager { 0 } else { 100 },
        };
        Sample { program: Program::Node, way, cold, round, figures }
    }

    fn results(samples: Vec<Sample>) -> Results {
        let setting =
            Setting::of_this_machine(vec!["Version: 4.2.1".to_owned(), "rewake 0.1".to_owned()], 64);
        let version = "Node v20".to_owned();
        let images = vec![ProgramImage { program: Program::Node, version, page_bytes: 70 << 20 }];
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
        assert!(text.contains("### node (Node v20), image warm, 70 MiB of pages"), "{text}");
        let cold = text.split("image cold").nth(1).expect("a table for the cold rounds");
        assert!(cold.contains("| 10.0 (10.0 .. 10.0) | 10.0 (10.0 .. 10.0) | - |"), "{cold}");
    }

    #[test]
    fn what_a_way_does_not_have_is_a_dash() {
        let text = table(&[sample(Way::Eager, false, 1, 3.0), sample(Way::Rewake, false, 1, 4.0)]);
        let cpu = text.lines().find(|line| line.contains("server CPU")).expect("a row for the server's CPU");
        assert_eq!(cpu, "| server CPU | s/GB | - | - | 0.500 (0.500 .. 0.500) | - | - |");
    }
}
